"""The HTTP server on forge-jax: OpenAI's protocol, streaming, metrics and the command line."""
