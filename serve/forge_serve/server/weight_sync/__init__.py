"""Endpoints for trainers: pauses, sleep and new weights, in vLLM's protocol."""
