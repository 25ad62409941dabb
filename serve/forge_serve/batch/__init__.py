"""Files of requests, answered without a server: `forge-jax batch`."""
