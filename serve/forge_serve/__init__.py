"""HTTP server of forge-jax: OpenAI's protocol, streaming, metrics and the command line."""
