"""A conversation in the terminal: its messages, its commands, its prompt, and how answers appear.

`prompt` imports prompt_toolkit and `markdown` imports Rich. They are imported only for a terminal.
"""
