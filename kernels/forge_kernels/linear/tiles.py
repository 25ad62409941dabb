"""Sizes of the GPU kernel for a few rows, without importing Pallas."""

MOST_ROWS = 8  # which are columns of the instruction; more sums do not fit the registers
GROUPS = (32, 64, 128)
TILE = 64  # rows of the matrix per CTA, or gates and as many ups
DEPTH = 256  # inputs per copy
