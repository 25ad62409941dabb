"""Parsers for tool calls and reasoning in a model's output, one file per model family."""
