"""GGUF: llama.cpp's file format, of weights, configuration and tokenizer in one file."""

from forge_jax.checkpoint.gguf.reader import GGUFFile, read_gguf

__all__ = ["GGUFFile", "read_gguf"]
