"""The page's files and headers, and `/engine_state`: its content and its access control."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from forge_jax.config import EngineConfig
from forge_jax.engine.thread import Engine
from forge_serve.config import ServerConfig
from forge_serve.http.page_files import FILES, FOLDER, PAGE_PATHS, TYPES, page_file
from forge_serve.server.service import Service
from forge_serve.telemetry import engine_view
from tests.serve.conftest import Server

KEY_A, KEY_B = "sk-alpha-0123456789", "sk-beta-0123456789"
SECRET = "the dog sleeps under a green table"
VENDOR = Path(__file__).parents[2] / "serve" / "vendor"
SCRIPTS = sorted(path for path in PAGE_PATHS if path.endswith(".js") and "/vendor/" not in path)
MAX_KB = 400


# ---- the page ----------------------------------------------------------------------------------


async def test_page_and_its_files_are_served_without_a_key(start):
    server = await start(Engine.fake(), ServerConfig(api_key=(KEY_A,)))
    for path in PAGE_PATHS:
        async with server.http.get(server.url + path) as response:
            assert response.status == 200
            assert response.content_type == TYPES[FILES[path].suffix]
            assert response.charset == ("utf-8" if page_file(path).is_text else None)
            assert await response.read() == FILES[path].read_bytes()
    for path in (
        *("/static/", "/static/../app.py", "/static/nothing.js", "/index.html"),
        "/static/vendor/katex/LICENSE",
    ):
        async with server.http.get(server.url + path) as response:
            assert response.status == 401  # as for every other path, existing or not


async def test_text_files_are_compressed_for_clients_that_accept_gzip(server):
    for path in PAGE_PATHS:
        for accepted, expected in (("gzip, br", page_file(path).is_text), ("identity", False)):
            headers = {"Accept-Encoding": accepted}
            async with server.http.get(server.url + path, headers=headers) as response:
                assert (response.headers.get("Content-Encoding") == "gzip") == expected
                assert response.headers["Vary"] == "Accept-Encoding"
                assert await response.read() == FILES[path].read_bytes()  # the client decompresses


def test_page_is_small():
    """Count all text files, also those that few answers need. Fonts load one by one on demand."""
    kilobytes = sum(len(gzip.compress(FILES[path].read_bytes())) for path in _text_paths()) / 1000
    assert kilobytes < MAX_KB
    formula = ("Main-Regular", "Math-Italic", "Size1-Regular", "Size2-Regular")  # in most formulas
    fonts = [FILES[f"/static/vendor/katex/fonts/KaTeX_{name}.woff2"] for name in formula]
    assert kilobytes + sum(file.stat().st_size for file in fonts) / 1000 < MAX_KB


def _text_paths() -> list[str]:
    return [path for path in PAGE_PATHS if page_file(path).is_text]


def test_copied_libraries_are_pinned_unchanged_and_licensed():
    pins = json.loads((VENDOR / "package.json").read_text())["dependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in pins.values())
    expected = json.loads((VENDOR / "files.json").read_text())
    folder = FOLDER / "vendor"
    found = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert found == expected.keys()
    for name, entry in expected.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == entry["sha256"], name
        assert entry["version"] in pins.values()
    assert {f"{Path(name).parts[0]}/LICENSE" for name in found} <= found


def test_folder_has_only_served_files_and_licenses():
    others = {file for file in FOLDER.rglob("*") if file.is_file()} - set(FILES.values())
    assert {file.name for file in others} == {"LICENSE"}


async def test_page_is_served_before_the_model_is_loaded(listening):
    async with listening(Service(ServerConfig())) as url, aiohttp.ClientSession() as http:
        async with http.get(url + "/") as response:
            assert response.status == 200
        async with http.get(url + "/engine_state") as response:
            assert response.status == 503


async def test_unchanged_file_returns_not_modified(server):
    for path in PAGE_PATHS:
        async with server.http.get(server.url + path) as response:
            etag = response.headers["ETag"]
            assert response.headers["Cache-Control"] == "no-cache"
        for known, status in ((etag, 304), (f'"x", {etag}', 304), ("*", 304), ('"x"', 200)):
            headers = {"If-None-Match": known}
            async with server.http.get(server.url + path, headers=headers) as response:
                assert response.status == status and response.headers["ETag"] == etag
                assert bool(await response.read()) == (status == 200)
        async with server.http.head(server.url + path) as response:
            assert response.status == 200 and response.headers["ETag"] == etag


async def test_browser_runs_only_the_pages_own_scripts(server):
    for path in PAGE_PATHS:
        async with server.http.get(server.url + path) as response:
            directives = response.headers["Content-Security-Policy"].split("; ")
            policy = dict(directive.split(" ", 1) for directive in directives)
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Referrer-Policy"] == "no-referrer"
        assert policy["default-src"] == "'none'"
        for kind in ("script", "style", "img", "font", "connect"):
            assert policy[f"{kind}-src"] == "'self'"
        for name in ("base-uri", "form-action", "frame-ancestors", "trusted-types"):
            assert policy[name] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"


class _Markup(HTMLParser):
    """A parser that gathers the markup's ids, references, labels, and forbidden parts."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.labeled: set[str] = set()
        self.controls: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.ids += [named["id"]] if "id" in named else []
        if tag != "use":
            self.references += [named[name] for name in ("src", "href") if name in named]
        self.labeled |= {named["for"]} if tag == "label" else set()
        self.controls += [named["id"]] if tag in ("input", "select", "textarea") else []
        self.wrong += [name for name in named if name.startswith("on") or name == "style"]
        self.references += [named["href"].partition("#")[0]] if tag == "use" else []
        self.wrong += ["script"] if tag == "script" and "src" not in named else []
        self.wrong += ["style"] if tag == "style" else []


def test_markup_has_no_code_no_external_urls_and_labels_every_control():
    markup = _Markup()
    markup.feed(FILES["/"].read_text())
    assert not markup.wrong
    assert len(set(markup.ids)) == len(markup.ids)
    assert markup.controls and set(markup.controls) <= markup.labeled
    for reference in markup.references:  # relative, because the page may be below a proxy's prefix
        assert reference.startswith("#") or f"/{reference}" in PAGE_PATHS


@pytest.mark.parametrize("path", SCRIPTS)
def test_scripts_insert_text_as_text_and_call_only_their_server(path):
    source = FILES[path].read_text()
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc"
    assert not re.search(sinks, source)
    code = re.sub(r"(?m)^\s*// .*", "", source)
    code = code.replace("http://www.w3.org/2000/svg", "")  # a namespace
    assert not re.search(r"https?://\w|//[a-z]+\.", code)
    name = Path(path).stem
    assert "localStorage" not in source or name in ("settings", "theme")
    assert ("sessionStorage" in source) == (name == "api")  # the key is kept for one tab
    for imported in re.findall(r'(?:from |import\()"\./([\w/]+\.js)"', source):
        assert f"/static/{imported}" in PAGE_PATHS


# ---- the engine's state ------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every look a new one."""
    monkeypatch.setattr(engine_view, "LEAST_S", 0.0)
    monkeypatch.setattr(engine_view, "PART", math.inf)


async def state_of(server: Server, query: str = "", key: str = "") -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{server.url}/engine_state{query}"
    async with server.http.get(url, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Cache-Control"] == "no-store"
        return await response.json()


async def begin(server: Server, path: str = "/v1/completions", key: str = "", **body: Any) -> Any:
    asked = {"prompt": SECRET, "max_tokens": 900, "ignore_eos": True, "stream": True, **body}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = await server.http.post(server.url + path, json=asked, headers=headers)
    assert response.status == 200
    await response.content.readline()
    return response


def slow_engine(**options: Any) -> Engine:
    return Engine.fake(step_time_s=0.005, config=EngineConfig.from_options(**options))


async def test_state_has_requests_blocks_and_steps_but_no_text(start, fresh):
    server = await start(slow_engine(num_blocks=200, block_size=16))
    await state_of(server)
    response = await begin(server, request_id="my-request", n=2)
    state = await state_of(server)
    assert {(s["request_id"], s["sample"], s["status"]) for s in state["sequences"]} == {
        ("cmpl-my-request", 0, "running"), ("cmpl-my-request", 1, "running")
    }  # fmt: skip
    blocks = state["blocks"]
    kinds = ("num_free", "num_cached", "num_shared", "num_owned")
    assert sum(blocks[kind] for kind in kinds) == blocks["num_blocks"] == 200
    assert sum(cells for cells, _ in blocks["runs"]) == 200 and blocks["num_shared"]
    assert {0, 1, "shared", "free"} == {what for _, what in blocks["runs"]}
    await asyncio.sleep(0.05)
    state = await state_of(server)
    seen = [step["step"] for step in state["steps"]]
    assert len(seen) > 3
    newer = await state_of(server, f"?after_step={seen[-2]}")
    assert newer["steps"] and newer["steps"][0]["step"] == seen[-1]
    text = str(state)
    assert not any(word in text for word in SECRET.split() if len(word) > 3)
    response.close()
    await server.idle()
    after = await state_of(server)
    assert not after["sequences"] and not after["blocks"]["num_owned"]


async def test_tenant_does_not_see_owners_of_other_requests(start, fresh):
    server = await start(slow_engine(), ServerConfig(api_key=(KEY_A, KEY_B)))
    mine = await begin(server, key=KEY_A, request_id="of-alpha", cache_salt="pepper")
    theirs = await begin(server, key=KEY_B, request_id="of-beta")
    for key, own in ((KEY_A, "cmpl-of-alpha"), (KEY_B, "cmpl-of-beta")):
        state = await state_of(server, key=key)
        assert [own, None] == sorted(
            (seq["request_id"] for seq in state["sequences"]), key=lambda name: name is None
        )
        assert "pepper" not in str(state)
    async with server.http.get(server.url + "/engine_state") as response:
        assert response.status == 401
    mine.close()
    theirs.close()
    await server.idle()
    finished = (await state_of(server, key=KEY_A))["finished"]
    assert {seq["request_id"] for seq in finished} == {"cmpl-of-alpha", None}


async def test_spans_are_sent_once_and_while_they_grow(start, fresh):
    server = await start(slow_engine(num_blocks=200, block_size=16))
    await state_of(server)
    response = await begin(server, request_id="my-request")
    first = await state_of(server)
    (seq,) = first["sequences"]
    assert [span[0] for span in seq["spans"]] in (
        ["queued", "prefill"], ["queued", "prefill", "decode"]
    )  # fmt: skip
    assert seq["spans"][0][1] == 0 and seq["spans"][0][2] == pytest.approx(seq["queue_s"], abs=0.01)
    assert 0.004 < seq["ttft_s"] < 5 and seq["arrival_s"] < first["time_s"]
    await asyncio.sleep(0.15)
    step = (await state_of(server))["steps"][-1]["step"]
    await asyncio.sleep(0.15)
    newer = await state_of(server, f"?after_step={step}")
    (again,) = newer["sequences"]
    assert again["arrival_s"] == seq["arrival_s"]
    assert "queue_s" not in again and "ttft_s" not in again
    ((kind, begin_s, seconds, steps, tokens, *drafts),) = again["spans"]
    assert kind == "decode" and steps == tokens > 10 and drafts == [0, 0]
    assert begin_s + seconds == pytest.approx(
        newer["steps"][-1]["end_s"] - seq["arrival_s"], abs=1e-3
    )
    response.close()
    await server.idle()
    step = newer["steps"][-1]["step"]
    ended = (await state_of(server, f"?after_step={step}"))["finished"]
    assert [(s["status"], s["finish_reason"], s["spans"][-1][0]) for s in ended] == [
        ("finished", "abort", "decode")
    ]  # fmt: skip


async def test_stored_response_ids_are_not_revealed(start):
    server = await start(slow_engine())
    body = {"input": SECRET, "max_output_tokens": 900, "ignore_eos": True, "background": True}
    status, answer = await server.post("/v1/responses", body)
    assert status == 200
    [seq] = (await state_of(server))["sequences"]
    assert answer["id"].startswith(seq["request_id"]) and len(seq["request_id"]) == 13
    assert answer["id"] not in str(seq)
    await server.post(f"/v1/responses/{answer['id']}/cancel", {})


@pytest.mark.parametrize("wrong", ["-1", "x", "1.5", "9" * 30, ""])
async def test_non_numeric_step_is_rejected_by_name(server, wrong):
    status, answer = await server.get(f"/engine_state?after_step={wrong}")
    assert status == 400 and answer["error"]["param"] == "after_step"


async def test_concurrent_watchers_share_one_look(start, monkeypatch):
    server = await start(slow_engine())
    looks, look = [], server.engine.look

    async def counted():
        looks.append(1)
        return await look()

    monkeypatch.setattr(server.engine, "look", counted)
    monkeypatch.setattr(engine_view, "LEAST_S", 1000.0)
    found = await asyncio.gather(*(state_of(server) for _ in range(20)))
    assert len(looks) == 1 and len({state["time_s"] for state in found}) == 1


async def test_expensive_looks_are_rate_limited(start, fresh, monkeypatch):
    server = await start(slow_engine())
    first = await state_of(server)
    assert (await state_of(server))["time_s"] > first["time_s"]
    monkeypatch.setattr(engine_view, "PART", 1e-9)
    await state_of(server)
    dear = await state_of(server)
    assert (await state_of(server))["time_s"] == dear["time_s"]


async def test_hanging_step_is_reported_and_holds_only_one_look(start, monkeypatch):
    server = await start(slow_engine())
    gate, looks, look = asyncio.Event(), [], server.engine.look

    async def stuck():
        looks.append(1)
        await gate.wait()
        return await look()

    monkeypatch.setattr(server.engine, "look", stuck)
    monkeypatch.setattr(engine_view, "LONGEST_S", 0.05)
    for _ in range(3):
        status, answer = await server.get("/engine_state")
        assert status == 503 and "step" in answer["error"]["message"]
    assert len(looks) == 1
    gate.set()
    await state_of(server)
