"""A minimal server for benchmarks: `fake_server.py --port PORT [--short]`.

Each token is " a". One token is missing if --short is given.
"""

import argparse
import json

from aiohttp import web


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--short", action="store_true")
    args = parser.parse_args()

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["stream"] and isinstance(body["prompt"], list)
        if body["model"] != "fake":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(body["max_tokens"] - args.short):
            event = {"choices": [{"index": 0, "text": " a"}]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/v1/completions", completions)
    web.run_app(app, host="127.0.0.1", port=args.port, print=None)


if __name__ == "__main__":
    main()
