"""Benchmarks of forge-jax and other engines on the CPU: vLLM, llama.cpp and transformers.

    python -m benchmarks.peers.setup vllm llama.cpp transformers    # once; several GB
    python -m benchmarks.peers --shapes S,M --rounds 4

Every engine runs as its own HTTP server on the same random weights. The same streaming client
measures each with the same prompts. See README.md in the folder above.
"""
