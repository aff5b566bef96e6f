"""What the APIs are asked and say, for the tests of all of them."""

# ruff: noqa: RUF001 (V4's own marks)

from __future__ import annotations

import json
from typing import Any

from serving.http.http_servers import Server

from dgr.serving.api.prompts import Thinking
from dgr.serving.http.service import ServerOptions

LONG = "tell me all of it, please: " + 25 * "abcdefghij klmnop "
CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">x "y"</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)
QUICK = ServerOptions(model="m", thinking=Thinking.OFF, keep_alive=0.02)

#: Of the two newer APIs, path and body of one question without thinking.
PATHS = {"responses": "/v1/responses", "messages": "/v1/messages"}


def body_of(api: str, question: str, /, **fields: Any) -> dict[str, Any]:
    if api == "responses":
        return {"input": question, "reasoning": {"effort": "none"}, "temperature": 0, **fields}
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "thinking": {"type": "disabled"}, "temperature": 0, "max_tokens": 500, **fields}


async def events_of(server: Server, api: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and data of a streamed answer's events, comments left out."""
    stream = await server.stream({**body, "stream": True}, PATHS[api])
    try:
        blocks = [block async for block in stream.events() if not block.startswith(":")]
    finally:
        await stream.aclose()
    events = []
    for block in blocks:
        name, _, data = block.partition("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        assert "\n" not in data
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(data["type"] == name for name, data in events)
    return events
