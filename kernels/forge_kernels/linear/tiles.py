"""Sizes of the GPU kernel for a few rows, without importing Pallas."""

MOST_ROWS = 8  # which are columns of the instruction; more sums do not fit the registers
TILE = 64  # rows of the matrix per CTA, or gates and as many ups
DEPTH = {"int4": 256, "int8": 128}  # inputs per copy
GROUPS = {"int4": (32, 64, 128), "int8": (16, 32, 64, 128)}
