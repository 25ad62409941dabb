"""Checkpoints: where they are (hub), what is in them (safetensors), and how they become leaves."""
