"""The schema at `/openapi.json`."""
