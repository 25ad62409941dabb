"""Compile programs for GPUs without a GPU, and read them."""
