"""`dgr top`: one look at a server and its stages, and what it says of those that cannot be read."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import trio
from cluster.remote_stages import CONTEXT, PROMPT, TWO, open_hosts
from conversations import take
from serving.http.http_servers import Server
from serving.monitor.scrapes import get, watched

from dgr.cli import main
from dgr.cli.top import _targets, _watch
from dgr.core.log_fields import short_route
from dgr.errors import InputError
from dgr.serving.http.keys import ApiKeys
from dgr.serving.monitor.readings import Reading, ServerView, StageView, view

KEY = "a key of sixteen or more"


async def seen(capsys: pytest.CaptureFixture[str], *where: str, key: str | None = None) -> dict[str, Any]:
    """What one look says, as JSON; and as text, which must go as well."""
    args = argparse.Namespace(every=0.1, once=True, json=True)
    capsys.readouterr()
    await _watch(_targets(where, key), args)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    args.json = False
    code = await _watch(_targets(where, key), args)
    assert code == (1 if found["unreachable"] else 0)
    text = capsys.readouterr().out
    assert all(url.removeprefix("http://").partition("/")[0] in text for url in where)
    return found


async def test_a_look_at_a_server_and_one_that_is_away(
    serve: Callable[..., AbstractAsyncContextManager[Server]], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    async with serve(keys=ApiKeys([KEY.replace(" ", "-")])) as server:
        url = f"http://{server.address}"
        found = await seen(capsys, url, nobody, key=KEY.replace(" ", "-"))
        (one,) = found["servers"]
        assert (one["url"], one["ready"], one["route_state"], one["epoch"]) == (f"{url}/metrics", True, "live", 1)
        assert (one["running"], one["waiting"], one["slots"], one["cache_hit_ratio"]) == (0, 0, 2, None)
        assert one["route"] == short_route(server.engine.pipeline.route_id)
        (away,) = found["unreachable"]
        assert away["url"] == f"{nobody}/metrics"
        assert "refused" in away["why"]
        assert "give --api-key-file" in (await seen(capsys, url))["unreachable"][0]["why"]


async def test_a_look_at_the_stages_of_a_route_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    async with open_hosts() as hosts:
        head, tail = await hosts.start_all(TWO)
        async with (
            watched(head) as (_, at_head),
            watched(tail) as (monitor, at_tail),
            hosts.pipeline([head, tail]) as pipeline,
        ):
            path = tmp_path / "route.toml"
            path.write_text(
                "".join(
                    f'[[stage]]\naddress = "{host.address}"\nlayers = "{host.layers}"\nmetrics = "{where}"\n'
                    for host, where in ((head, at_head), (tail, at_tail))
                )
            )
            monitor.ending()
            async with pipeline.session() as session:
                await take(session.generate(PROMPT, max_tokens=4))
                args = argparse.Namespace(every=0.1, once=True, json=True)
                await _watch(_targets([str(path)], None), args)
            found = json.loads(capsys.readouterr().out)
            assert [(one["layers"], one["ready"]) for one in found["stages"]] == [("0:2", True), ("2:6", False)]
            for one in found["stages"]:
                assert one["routes"] == {short_route(pipeline.route_id): 1}
                assert (one["sessions"], one["slots_leased"], one["slots"]) == (1, 1, CONTEXT.n_seq_max)
                assert one["state_leased_bytes"] > 0


async def test_rates_are_those_between_the_readings() -> None:
    async with open_hosts() as hosts:
        whole = await hosts.start("0:6")
        async with watched(whole) as (_, address), hosts.pipeline([whole]) as pipeline, pipeline.session() as session:
            readings: list[Reading] = []
            for count, prompt in ((1, PROMPT), (5, list(b" And"))):
                await take(session.generate(prompt, max_tokens=count))
                readings.append(Reading((await get(address, "/metrics"))[1], float(len(readings) * 2)))
            one = view(readings)
            assert isinstance(one, StageView)
            # The last token drawn is run with the next turn's: 1 + 4 tokens of prefill, and 4 decode steps in 2 seconds.
            assert (one.prefill_tokens_per_second, one.decode_tokens_per_second) == (2.5, 2.0)
            assert one.decode_batch == 1
            assert one.bytes_per_second > 0
            again = view([readings[1], Reading((await get(address, "/metrics"))[1], 4.0)])
            assert isinstance(again, StageView)
            assert (again.decode_tokens_per_second, again.decode_batch) == (0, None)


def test_a_counter_that_began_anew_is_no_negative_rate() -> None:
    text = "dgr_num_slots 2\n# TYPE dgr_tokens_predicted counter\ndgr_tokens_predicted_total {}\n"
    one = view([Reading(text.format(90), 0), Reading(text.format(10), 2)])
    assert isinstance(one, ServerView)
    assert one.tokens_per_second == 5


@pytest.mark.parametrize("text", ["<html>", "up{", "a 1 2 3 4", '{"status": "ok"}'])
def test_what_is_no_exposition_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        view([Reading(text, 0)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ftp://a:1",), "'ftp://a:1' is not a URL like"),
        (("http://",), "is not a URL like"),
        (("127.0.0.1:18000",), "neither a URL nor a route file: give http://127.0.0.1:18000"),
        (("http://a:70000",), "is not a URL like"),
        (("none.toml",), "none.toml"),
        (("ROUTE",), "no [[stage]] of "),
        (("http://a:1", "--every", "0"), "--every is 0 seconds"),
        (("http://a:1", "--api-key-file", "ROUTE"), "API key"),
    ],
)  # fmt: skip
def test_what_it_refuses(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "route.toml"
    path.write_text('# é\n[[stage]]\naddress = "127.0.0.1:7701"\nlayers = "0:7"\n')
    given = [str(path) if one == "ROUTE" else one for one in arguments]
    if "--api-key-file" in arguments:
        path.write_text("# nothing but this\n")
    assert main(["top", *given]) == 2
    assert message in capsys.readouterr().err


async def test_a_server_that_hangs_does_not_hold_up_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgr.cli.top._PATIENCE", 0.2)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")  # takes connections, and never answers
    url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
    assert "timed out" in (await seen(capsys, url))["unreachable"][0]["why"]
    await listeners[0].aclose()
