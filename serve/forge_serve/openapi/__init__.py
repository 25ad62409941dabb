"""The OpenAPI document at `/openapi.json`."""
