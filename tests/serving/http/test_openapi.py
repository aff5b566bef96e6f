"""``/openapi.json`` says what the server does: every route, what each takes, and what it gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from serving.http.http_servers import Server
from starlette.applications import Starlette
from starlette.routing import Route

from dgr.serving.api.openapi import openapi_json
from dgr.serving.http import app as http_app
from dgr.serving.http.keys import Gate

DOCUMENT: dict[str, Any] = json.loads(openapi_json("m"))
MESSAGES = [{"role": "user", "content": "hi"}]
OFF = {"type": "disabled"}
#: A request for every path that takes one.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "thinking": OFF, "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi", "reasoning": {"effort": "none"}, "max_output_tokens": 3},
    "/v1/messages": {"messages": MESSAGES, "thinking": OFF, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
}


def _routes(app: Starlette) -> set[tuple[str, str]]:
    """Paths and methods of an application, as a description names them."""
    return {
        (route.path.replace(":path", ""), method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }


def _check(kind: str, value: Any) -> None:
    schema = {"$ref": f"#/components/schemas/{kind}", "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


def _kind(answer: dict[str, Any]) -> str:
    return str(answer["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2])


async def test_every_route_is_described_and_nothing_else(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Starlette] = []

    class Seen(Gate):
        def __init__(self, app: Any, *arguments: Any, **options: Any) -> None:
            made.append(app)
            super().__init__(app, *arguments, **options)

    monkeypatch.setattr(http_app, "Gate", Seen)
    async with serve() as server:
        assert (await server.ask("GET", "/openapi.json")).body == openapi_json("m")
    described = {(path, method) for path, item in DOCUMENT["paths"].items() for method in item}
    assert described == _routes(made[0])


def test_the_schemas_are_schemas_and_say_what_is_read() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    chat = DOCUMENT["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["messages"]
    assert {"max_tokens", "min_p", "seed", "n", "stop", "top_logprobs", "messages", "tools"} <= set(chat["properties"])
    with pytest.raises(jsonschema.ValidationError):
        _check("ChatRequest", {"messages": []})
    with pytest.raises(jsonschema.ValidationError):
        _check("ChatRequest", {"messages": MESSAGES, "temperature": -1})


async def test_requests_and_answers_are_as_described(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        for path, item in DOCUMENT["paths"].items():
            for method, told in item.items():
                await _check_answer(server, method, path, told)


async def _check_answer(server: Server, method: str, path: str, told: dict[str, Any]) -> None:
    body = BODIES.get(path)
    if body is not None:
        _check(_kind(told["requestBody"]), body)
    reply = await server.ask(method.upper(), path.replace("{name}", "m"), body)
    assert reply.status == 200, path
    answer = told["responses"]["200"]["content"]
    assert reply.headers["content-type"].partition(";")[0] in answer
    if "$ref" in answer.get("application/json", {}).get("schema", {}):
        _check(_kind(told["responses"]["200"]), reply.json())
    if body is not None:
        refused = await server.ask("POST", path, b"{")
        assert refused.status == 400
        _check(_kind(told["responses"]["4XX"]), refused.json())
        other = await server.ask("DELETE", path)
        assert (other.status, other.headers["allow"]) == (405, "POST")
