"""Generations of any protocol: their prompts as token ids, and their progress in the engine."""
