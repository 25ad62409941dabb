"""One generation of any protocol: prompts as token ids, and its life in the engine."""
