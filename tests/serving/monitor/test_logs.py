"""What the log of a whole run tells, and what it never tells."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from cluster.remote_stages import TWO, open_hosts
from conversations import take
from serving.http.http_servers import Server

from dgr.cli.logs import _Json
from dgr.core.log_fields import short_route
from dgr.errors import InputError, NonFinite
from dgr.serving.http.keys import ApiKeys
from dgr.testing.engines.fake import Fault, FaultKind

SECRET = "xyzzy plugh"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Every record of dgr's, as it would be written."""
    made = [_Json().format(one) for one in caplog.records if one.name.startswith("dgr")]
    assert all("\n" not in line for line in made)
    return [json.loads(line) for line in made]


def leaks(said: Sequence[dict[str, Any]], *conversations: Sequence[int]) -> list[dict[str, Any]]:
    """Records with text or ids of a conversation, whole or the better part of it."""
    found = []
    for line in said:
        text = json.dumps(line)
        for tokens in conversations:
            start = list(tokens[:4])
            forms = [bytes(start).decode("latin-1"), str(start), ", ".join(map(str, start)), bytes(start).hex()]
            if any(json.dumps(form)[1:-1] in text for form in forms):
                found.append(line)
    return found


async def test_a_run_over_stages_tells_whose_state_and_no_token(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    prompt = list(SECRET.encode())
    async with open_hosts() as hosts:
        head, tail = await hosts.start_all(TWO)
        async with hosts.pipeline([head, tail]) as pipeline, pipeline.session() as session:
            route = short_route(pipeline.route_id)
            answer = await take(session.generate(prompt, max_tokens=12))
            await pipeline.change_route(hosts.route([head, tail]))
            again = await take(session.generate(prompt, max_tokens=1))
            id_ = session.id
    said = lines(caplog)
    assert leaks(said, prompt, answer, [*prompt, *again]) == []
    admitted = [(line["logger"], line["epoch"]) for line in said if "admits the epoch" in line["message"]]
    assert admitted == [("dgr.shard", 1), ("dgr.shard", 1), ("dgr.shard", 2), ("dgr.shard", 2)]
    assert {line["route"] for line in said if "route" in line} == {route}
    assert next(line["message"] for line in said if line.get("session") == id_) == "state lost: route change"


async def test_failures_tell_no_token_either(caplog: pytest.LogCaptureFixture) -> None:
    """A batch that fails, numbers that are not finite, ids and prompts that are refused, a stage that is lost."""
    caplog.set_level(logging.DEBUG)
    prompt = list(SECRET.encode())
    async with open_hosts() as hosts:
        head, tail = await hosts.start_all(TWO)
        head.engine.faults.append(Fault(FaultKind.ERROR, position=4))
        tail.engine.faults.append(Fault(FaultKind.NON_FINITE, position=len(prompt) + 6))
        async with hosts.pipeline([head, tail]) as pipeline, pipeline.session() as session:
            answer = await take(session.generate(prompt, max_tokens=6))
            for wrong in ([*prompt, 999_999], prompt * 20):
                with pytest.raises(InputError):
                    await take(session.generate(wrong, max_tokens=1))
            with pytest.raises(NonFinite):
                await take(session.generate([*prompt, *answer, *prompt], max_tokens=1))
            generation = session.generate(prompt, max_tokens=6)
            first = await take(generation, 2)
            tail = await hosts.restart(tail)
            rest = await take(generation)
    said = lines(caplog)
    assert leaks(said, prompt, answer, [*prompt, *answer], [*first, *rest]) == []
    assert any("the route is down" in line["message"] for line in said)
    assert {line["message"].split(":")[0] for line in said} >= {"state lost"}


async def test_no_key_is_told(
    serve: Callable[..., AbstractAsyncContextManager[Server]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    right, wrong = "the-right-key-of-this-server", "the-wrong-key-of-somebody"
    async with serve(keys=ApiKeys([right])) as server:
        statuses = [
            (await server.ask("GET", "/v1/models", **{name: value % key})).status
            for key in (right, wrong)
            for name, value in (("authorization", "Bearer %s"), ("x-api-key", "%s"))
        ]
    assert statuses == [200, 200, 401, 401]
    told = [record.getMessage() for record in caplog.records]  # of libraries, too
    assert told
    assert not [line for line in told if right in line or wrong in line]


async def test_a_server_logs_requests_without_what_they_say(
    serve: Callable[..., AbstractAsyncContextManager[Server]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serve() as server:
        assert (await server.chat(SECRET)).status == 200
        assert (await server.chat(SECRET, model="other")).status == 404
        assert (await server.chat(SECRET, temperature="hot " + SECRET)).status == 400
        route = short_route(server.engine.pipeline.route_id)
    said = lines(caplog)
    assert leaks(said, SECRET.encode()) == []
    requests = [line for line in said if line["logger"] == "dgr.serve" and "after" in line["message"]]
    assert [line["message"].split(" after")[0] for line in requests] == [f"chat: {n}" for n in (200, 404, 400)]
    assert all((line["route"], line["epoch"]) == (route, 1) for line in requests)


@pytest.mark.parametrize(
    "message",
    [f"prompt {SECRET!r}", f"tokens {list(SECRET.encode())}", f"payload {SECRET.encode().hex()}"],
    ids=["text", "ids", "bytes"],
)
def test_a_leak_would_be_seen(message: str, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("dgr.shard").warning("%s", message)
    assert len(leaks(lines(caplog), SECRET.encode())) == 1
