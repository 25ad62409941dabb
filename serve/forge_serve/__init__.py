"""The HTTP server of forge-jax: OpenAI's and Anthropic's protocols, metrics, and command line."""
