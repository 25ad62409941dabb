"""HTTP below the protocols: API keys, TLS, CORS, connections, content coding and event streams."""
