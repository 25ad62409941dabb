"""What a GPU shows that a CPU cannot: one command, a few minutes, one report."""
