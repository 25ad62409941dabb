"""The server process: the aiohttp application, its routes, the page and startup."""
