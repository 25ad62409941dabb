"""GGUF: llama.cpp's file format, with weights, configuration and tokenizer in one file."""

from forge_jax.checkpoint.gguf.config import config_of
from forge_jax.checkpoint.gguf.reader import GGUFFile, is_gguf
from forge_jax.checkpoint.gguf.split import read_gguf
from forge_jax.checkpoint.gguf.tensors import open_gguf

__all__ = ["GGUFFile", "config_of", "is_gguf", "open_gguf", "read_gguf"]
