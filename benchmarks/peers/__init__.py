"""forge-jax beside its peers on the CPU: vLLM, llama.cpp and transformers.

    python -m benchmarks.peers.setup vllm llama.cpp transformers    # once; several GB
    python -m benchmarks.peers --shapes S,M --rounds 4

Every engine runs as the HTTP server that it ships, on the same random weights, and is measured by
the same streaming client with the same prompts. See README.md in the folder above.
"""
