"""The page at ``/``: one document that asks nobody but its own server, and what its table is filled from."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from dgr.serving.http import service
from dgr.serving.http.keys import ApiKeys
from dgr.testing.waits import until


class Parsed(HTMLParser):
    """Elements, their attributes, and the text of ``<script>`` and ``<style>``."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.code = {"script": "", "style": ""}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in self.code:
            self.code[self._open[-1]] += data


async def test_the_page_holds_all_that_it_needs(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        reply = await server.ask("GET", "/")
        parsed, text = Parsed(reply.body.decode()), reply.body.decode()
        assert not re.search(r"@[A-Z]+@", text)
        assert not re.search(r"(?i)https?:|[\"'(]//|@import|url\(|\bimport\b", text)
        for tag, attributes in parsed.elements:
            assert tag not in ("link", "img", "iframe", "object", "embed", "base")
            assert not {"src", "href", "style", "action"} & attributes.keys()
            assert not any(name.startswith("on") for name in attributes)
        ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
        used = set(re.findall(r'by\("(\w+)"\)', parsed.code["script"]))
        assert len(ids) == len(set(ids))
        assert used
        assert used <= set(ids)
        labelled = [a for tag, a in parsed.elements if tag in ("textarea", "input", "select")]
        assert labelled
        assert all(attributes.get("aria-label") for attributes in labelled)
        for kind, code in parsed.code.items():  # the browser runs nothing whose hash is another
            digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
            assert f"{kind}-src 'sha256-{digest}'" in reply.headers["content-security-policy"]
        for path in re.findall(r'fetch\("([^"]+)"', parsed.code["script"]):
            assert (await server.ask("GET", f"/{path}")).status != 404


async def test_the_route_is_told_stage_by_stage(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_FRESH", 0.0)
    async with serve(sessions=2) as server:
        server.model.hold()
        stream = await server.stream({"messages": [{"role": "user", "content": "hi"}], "stream": True})
        await until(lambda: server.model.is_waiting)
        told = (await server.ask("GET", "/status")).json()
        assert (told["route"], told["epoch"], told["ready"]) == ("live", 1, True)
        assert (told["load"]["slots"], told["load"]["running"], told["load"]["waiting"]) == (2, 1, 0)
        assert told["load"]["in_flight"] == 1
        stages = [(stage["address"], stage["layers"], stage["devices"], stage["lost"]) for stage in told["stages"]]
        assert stages == [(f"stage-{n}", f"{n}:{n + 1}", ["fake"], None) for n in range(3)]
        for name, stage in zip(server.model.offline.cluster.shards, told["stages"], strict=True):
            load, shard = stage["load"], server.model.offline.cluster.shards[name]
            assert (load["slots"], load["slots_leased"], load["ready"]) == (2, 1, True)
            assert load["state_leased_bytes"] == shard.ledger.leased_bytes
            assert load["weights_bytes"] == shard.ledger.memory.weights
        # What the head has not begun nobody behind it has seen.
        assert [stage["load"]["running_seconds"] > 0 for stage in told["stages"]] == [True, False, False]
        server.model.release()
        await stream.aclose()
        server.model.offline.cluster.stop("stage-1")
        await until(lambda: not server.engine.is_ready)
        told = (await server.ask("GET", "/status")).json()
        assert not told["ready"]
        assert [stage["lost"] is None for stage in told["stages"]] == [True, False, True]
        assert "stage-1" in told["stages"][1]["lost"]
        told = (await server.ask("GET", "/status")).json()
        assert [stage["load"] is None for stage in told["stages"]] == [False, True, False]


async def test_the_status_needs_a_key_where_there_are_any(serve: Callable[..., Any]) -> None:
    async with serve(keys=ApiKeys(["0123456789abcdef-key"])) as server:
        assert (await server.ask("GET", "/")).status == 200
        assert (await server.ask("GET", "/status")).status == 401
        headers = {"authorization": "Bearer 0123456789abcdef-key"}
        assert (await server.ask("GET", "/status", **headers)).status == 200


async def test_the_page_reads_what_the_status_tells(serve: Callable[..., Any]) -> None:
    """Every field of a load that the script asks for is there."""
    async with serve() as server:
        code = Parsed((await server.ask("GET", "/")).body.decode()).code["script"]
        load = (await server.ask("GET", "/status")).json()["stages"][0]["load"]
    used = set(re.findall(r'\bgrew\("(\w+)"\)', code)) | set(re.findall(r"\bload\.(\w+)", code))
    assert len(used) > 6
    of_the_server = {"running", "waiting", "tokens"}
    assert used <= set(load) | of_the_server
