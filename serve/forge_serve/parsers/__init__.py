"""What a model's text says beside content: calls of tools, and reasoning. One file per family."""
