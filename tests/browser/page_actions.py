"""Actions on the page that several tests share."""

from __future__ import annotations

import json
import math
from typing import Any

from playwright.sync_api import Page, Route, expect


def show_panel(page: Page, name: str) -> None:
    """Show the panel "settings" or "engine"."""
    if not page.locator(f"#{name}").is_visible():
        page.locator(f"[data-shows={name}]").click()
    expect(page.locator(f"#{name}")).to_be_visible()


def set_options(page: Page, **values: str) -> None:
    show_panel(page, "settings")
    for name, value in values.items():
        page.locator(f"#{name}").fill(value)


def bodies(page: Page) -> list[dict[str, Any]]:
    """Record the bodies of the chats that the page requests from now on."""
    found: list[dict[str, Any]] = []
    page.on("request", lambda r: found.append(r.post_data_json) if r.method == "POST" else None)
    return found


def events(*deltas: dict[str, Any]) -> str:
    """Return an event stream that no model would send."""
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    each = [json.dumps({"id": "chatcmpl-x", "choices": [choice]}) for choice in choices]
    return "".join(f"data: {event}\n\n" for event in each) + "data: [DONE]\n\n"


def answer_with(page: Page, body: str, status: int = 200) -> None:
    kind = "text/event-stream" if status == 200 else "application/json"

    def answer(route: Route) -> None:
        route.fulfill(status=status, content_type=kind, body=body)

    page.route("**/v1/chat/completions", answer)


def entry(token: str, probability: float = 0.5) -> dict[str, Any]:
    of = {"token": token, "logprob": math.log(probability), "bytes": list(token.encode())}
    return {**of, "top_logprobs": [of]}
