"""Checkpoints: where they are (hub), what is in them (folder), how they become leaves (load)."""
