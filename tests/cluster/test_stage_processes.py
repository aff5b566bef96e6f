"""Stages as processes: killed, frozen, cut off. The text goes on as if nothing had been, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve, field, frozen
from cluster.remote_stages import answer_of, next_event
from conversations import seen, take
from fixture_types import Prompt

import dgr
from dgr.cli.keys import make_keys
from dgr.client.events import RePrefilled, RouteDown
from dgr.client.generation import AHEAD
from dgr.client.pipeline import Pipeline, Timeouts, open_pipeline_on
from dgr.cluster.connect import LinkPolicy, RemoteConnector
from dgr.cluster.doctor import examine
from dgr.cluster.route_file import format_route_file
from dgr.core.route import LayerRange, Route, StageRef
from dgr.errors import DeadlineExceeded, StageDraining
from dgr.testing.network.processes import START, Program, free_ports, is_gone, open_program, open_up, write_route
from dgr.testing.network.proxy import open_proxies
from dgr.testing.waits import until
from dgr.wire.credentials import Credentials

SPLIT = "0:2", "2:5", "5:7"
CONTEXT: dict[str, Any] = {"n_ctx": 512, "n_batch": 32, "n_ubatch": 32}
#: Tokens of a prompt that takes many chunks.
LONG = 256
#: Tokens of an answer, and the one at which things happen: "token n".
ANSWER, LATE = 12, 7
#: Seconds of a link's heartbeat; three are the time within which silence is noticed.
BEAT = 0.25
POLICY = LinkPolicy(heartbeat=BEAT)
ON_LINUX = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="unix: addresses are there on Linux alone"),
]
#: Seconds beside three heartbeats that a busy machine may take to tell of a loss.
SLACK = 2.0
#: Seconds for a stage to be started and fenced again, and for a prompt to be prefilled again.
RECOVERED = 12.0


#: What the whole model answers to a prompt of n tokens.
Expected = Callable[[int], list[int]]
#: What happens to a route in mid-answer; some of it is waited for.
Act = Callable[[], Awaitable[object] | None]


@frozen
class Loss:
    """What became of a route, in figures."""

    #: From the act to the pipeline's event.
    detected: float
    #: From the act to the next token.
    recovered: float
    #: Tokens run again on every stage.
    again: int
    #: Why, as the pipeline tells it.
    why: str = field(repr=False)


@pytest.fixture(scope="session")
def expected(small: Path, prompt: Prompt) -> Expected:
    """What the whole model, undisturbed and in this process, answers to a prompt of n tokens."""
    known: dict[int, list[int]] = {}

    async def ask(n_tokens: int) -> None:
        context = dgr.ContextParams(n_ctx=512, n_batch=32, n_ubatch=32)
        async with dgr.open_pipeline(small, context=context) as pipeline:
            known[n_tokens] = await answer_of(pipeline, prompt(n_tokens), ANSWER)

    def answer(n_tokens: int) -> list[int]:
        return known[n_tokens]

    for n_tokens in (LONG, 16):
        trio.run(ask, n_tokens)
    return answer


def open_remote(route: Route, /, **timeouts: float) -> AbstractAsyncContextManager[Pipeline]:
    return open_pipeline_on(
        RemoteConnector(POLICY), route, chunk=16, timeouts=evolve(Timeouts(reply=30.0, control=30.0), **timeouts)
    )


async def disturb(
    pipeline: Pipeline, tokens: list[int], moment: int | None, act: Act, then: Act
) -> tuple[list[int], Loss]:
    """Generate; at token ``moment``, or in the middle of the prefill (None), something happens, and ``then`` follows
    when the pipeline has noticed. Gives the text and what it cost."""
    async with pipeline.session() as session:
        events = pipeline.events()
        generation = session.generate(tokens, max_tokens=ANSWER)
        text = [] if moment is None else await take(generation, moment)
        seen(events)
        acted = 0.0
        noticed: list[tuple[RouteDown, float]] = []

        async def act_and_follow() -> None:
            nonlocal acted
            if moment is None:
                await until(lambda: session.committed > 0)
                assert session.committed < len(tokens) - 32, "the prefill was over before anything could happen"
            acted = trio.current_time()
            result = act()
            if result is not None:
                await result
            noticed.append((await next_event(events, RouteDown), trio.current_time()))
            result = then()
            if result is not None:
                await result

        async with trio.open_nursery() as nursery:
            nursery.start_soon(act_and_follow)
            text += await take(generation, 1)  # it is asked for while that happens
            came = trio.current_time()
        text += await take(generation)
        again = [event for event in seen(events) if isinstance(event, RePrefilled)]
        ((down, at),) = noticed
        return text, Loss(at - acted, came - acted, again[-1].tokens, down.why)


MOMENTS = {"prefill": None, "first token": 1, "token n": LATE}


async def check_losses(
    pipeline: Pipeline,
    tokens: list[int],
    right: list[int],
    limit: float,
    act: Act,
    then: Act,
    record: Callable[[str, object], None],
    moments: tuple[str, ...] = tuple(MOMENTS),
) -> None:
    for name in moments:
        moment = MOMENTS[name]
        text, loss = await disturb(pipeline, tokens, moment, act, then)
        assert text == right, name
        assert loss.detected < limit, (name, loss)
        assert loss.recovered < RECOVERED, (name, loss)
        # Tokens of a run may have come that the caller has not asked for yet.
        assert 0 <= loss.again - len(tokens) - (moment or 0) <= (AHEAD if moment else 0), (name, loss)
        record(name, loss)
        print(f"{name}: {loss}; {loss.why}")


def kill(up: Program, address: str) -> Callable[[], None]:
    """Ends the present process of a stage as running out of memory would."""

    def act() -> None:
        os.kill(up.events(address, "ready")[-1]["pid"], signal.SIGKILL)

    return act


def nothing() -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2], ids=["head", "middle", "tail"])
async def test_a_killed_stage(
    stage: int,
    small: Path,
    prompt: Prompt,
    expected: Expected,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    file = write_route(tmp_path / "route.toml", small, SPLIT, **CONTEXT)
    async with open_up(file, "--heartbeat", str(BEAT)) as up, open_remote(file.route) as pipeline:
        address = file.route.stages[stage].address
        await check_losses(pipeline, prompt(LONG), expected(LONG), 1.0, kill(up, address), nothing, record_property)
        assert len(up.events(address, "ready")) == 4
        assert [event["code"] for event in up.events(address, "ended")] == [-9] * 3
        for ref in file.route.stages:
            if ref.address != address:
                assert len(up.events(ref.address, "ready")) == 1  # nobody else was touched


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2], ids=["head", "middle", "tail"])
async def test_a_frozen_stage(
    stage: int,
    small: Path,
    prompt: Prompt,
    expected: Expected,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    file = write_route(tmp_path / "route.toml", small, SPLIT, **CONTEXT)
    async with open_up(file, "--heartbeat", str(BEAT)) as up, open_remote(file.route) as pipeline:
        address = file.route.stages[stage].address
        pid = await up.ready(address)
        await check_losses(
            pipeline,
            prompt(LONG),
            expected(LONG),
            3 * BEAT + SLACK,
            lambda: os.kill(pid, signal.SIGSTOP),
            lambda: os.kill(pid, signal.SIGCONT),
            record_property,
        )
        # One that does not thaw is killed by whoever watches it, and starts again.
        freezing = partial(os.kill, pid, signal.SIGSTOP)
        text, loss = await disturb(pipeline, prompt(LONG), LATE, freezing, kill(up, address))
        assert text == expected(LONG)
        record_property("frozen, then killed", loss)
        await up.ready(address, 2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2], ids=["head", "middle", "tail"])
async def test_a_stage_cut_off(
    stage: int,
    small: Path,
    prompt: Prompt,
    expected: Expected,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    file = write_route(tmp_path / "route.toml", small, SPLIT, **CONTEXT)
    async with (
        open_up(file, "--heartbeat", str(BEAT)) as up,
        open_proxies(file.route) as (route, proxies),
        open_remote(route) as pipeline,
    ):
        await check_losses(pipeline, prompt(LONG), expected(LONG), 1.0, proxies[stage].cut, nothing, record_property)
        # A proxy that carries nothing any more, while both its ends believe in it.
        text, loss = await disturb(pipeline, prompt(LONG), LATE, proxies[stage].stall, nothing)
        assert text == expected(LONG)
        assert loss.detected < 3 * BEAT + SLACK
        record_property("silent", loss)
        assert all(len(up.events(ref.address, "ready")) == 1 for ref in file.route.stages)


@pytest.mark.parametrize(
    ("kind", "wire"),
    [
        ("tcp", "f32"),
        pytest.param("tcp", "f32+zstd", marks=pytest.mark.slow),
        pytest.param("unix", "f32", marks=ON_LINUX),
    ],
)
async def test_a_stage_killed_in_mid_answer_is_started_again_and_the_text_goes_on(
    kind: str, wire: str, small: Path, prompt: Prompt, expected: Expected, tmp_path: Path
) -> None:
    """The grid above in small: it is what a user sees first."""
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    addresses = [f"unix:{sockets}/{index}" for index in range(3)] if kind == "unix" else None
    file = write_route(tmp_path / "route.toml", small, SPLIT, addresses, wire=wire, **CONTEXT)
    async with open_up(file, "--heartbeat", str(BEAT)) as up:
        first_pids = [await up.ready(ref.address) for ref in file.route.stages]
        async with open_remote(file.route) as pipeline:
            address = file.route.stages[1].address
            await check_losses(
                pipeline, prompt(16), expected(16), 1.0, kill(up, address), nothing, lambda *_: None, ("token n",)
            )
            assert await up.ready(address, 2) != first_pids[1]
    assert all(map(is_gone, first_pids))
    assert up.process.returncode == 0
    assert not list(sockets.iterdir())


@pytest.mark.slow
async def test_a_stage_that_does_not_come_back_fails_its_own_requests_only(
    small: Path, prompt: Prompt, expected: Expected
) -> None:
    """Within the stated time, and with the stage named; who does not need it does not notice."""
    async with (
        open_stage(small, "0:4") as head,
        open_stage(small, "4:7") as tail,
        open_stage(small, "0:7") as whole,
    ):
        both = Route((await ref_of(head), await ref_of(tail)))
        alone = Route((await ref_of(whole),))
        async with (
            open_remote(both, route=1.0) as pipeline,
            open_remote(alone) as other,
            pipeline.session() as session,
            other.session() as beside,
        ):
            generation = session.generate(prompt(16), max_tokens=ANSWER)
            theirs = beside.generate(prompt(16), max_tokens=ANSWER)
            assert await take(generation, 4) == await take(theirs, 4) == expected(16)[:4]
            os.kill(tail.pid, signal.SIGKILL)
            began = trio.current_time()
            with pytest.raises(DeadlineExceeded, match=r"not live within 1 s") as caught:
                await anext(generation)
            assert trio.current_time() - began < 1.0 + SLACK
            assert both.stages[1].address in str(caught.value)
            assert await take(theirs) == expected(16)[4:]
        assert await tail.wait() == -signal.SIGKILL


@asynccontextmanager
async def open_stage(model: Path, layers: str, *options: str) -> AsyncIterator[Program]:
    """`dgr stage`; :meth:`Program.first_line` tells when it is ready."""
    flags = "--ctx", "512", "--batch", "32", "--ubatch", "32", "--json", *options
    async with open_program("stage", str(model), "--layers", layers, "--listen", "127.0.0.1:0", *flags) as program:
        yield program


async def ref_of(program: Program) -> StageRef:
    line = await program.first_line()
    return StageRef(line["address"], LayerRange.parse(line["layers"]))


async def test_sigint_ends_a_stage_that_serves_in_good_order(small: Path, prompt: Prompt, expected: Expected) -> None:
    async with open_stage(small, "0:7") as whole:
        route = Route((await ref_of(whole),))
        async with open_remote(route, route=0.2, control=0.2) as pipeline, pipeline.session() as session:
            assert await take(session.generate(prompt(16), max_tokens=4)) == expected(16)[:4]
            events = pipeline.events()
            whole.process.send_signal(signal.SIGINT)
            assert await whole.wait() == 0
            await next_event(events, RouteDown)
        assert "Traceback" not in whole.errors


async def test_stages_with_certificates_of_dgr_keys_serve_a_route(
    small: Path, prompt: Prompt, expected: Expected, tmp_path: Path
) -> None:
    """What a first cluster does: keys, up, doctor, generate."""
    make_keys(tmp_path / "keys", ["127.0.0.1", "client"], 1)
    file = write_route(tmp_path / "route.toml", small, ("0:3", "3:7"), **CONTEXT)
    keys = tmp_path / "keys"
    credentials = {
        name: (keys / "ca.pem", keys / f"{name}.pem", keys / f"{name}.key") for name in ("127.0.0.1", "client")
    }
    file = evolve(file, tls=credentials["127.0.0.1"])
    file.path.write_text(format_route_file(file))
    async with open_up(file, "--heartbeat", str(BEAT)):
        policy = evolve(POLICY, credentials=Credentials(*credentials["client"]))
        report = await examine(file, policy)
        assert report.problems == ()
        async with dgr.open_route(evolve(file, model=None), policy=policy) as pipeline:
            assert await answer_of(pipeline, prompt(16), ANSWER) == expected(16)
        (problem, *_) = (await examine(file, POLICY)).problems
        assert problem.where == f"stage {file.route.stages[0].address}"


@pytest.mark.parametrize(
    "how",
    [signal.SIGKILL, *(pytest.param(how, marks=pytest.mark.slow) for how in (signal.SIGTERM, signal.SIGINT))],
    ids=lambda how: how.name,
)
async def test_up_leaves_no_stage_behind(how: signal.Signals, small: Path, prompt: Prompt, tmp_path: Path) -> None:
    file = write_route(tmp_path / "route.toml", small, ("0:3", "3:7"), **CONTEXT)
    async with open_up(file) as up:
        pids = [await up.ready(ref.address) for ref in file.route.stages]
        async with open_remote(file.route) as pipeline:
            await answer_of(pipeline, prompt(16), 2)  # they are at work for somebody
            up.process.send_signal(how)
            assert await up.wait() == (-how if how is signal.SIGKILL else 0)
            await until(lambda: all(map(is_gone, pids)))
    assert "Traceback" not in up.errors


@pytest.mark.slow
async def test_up_ends_frozen_stages_too(small: Path, tmp_path: Path) -> None:
    """A frozen process does not hear that it is to end; it is killed after its time of grace."""
    file = write_route(tmp_path / "route.toml", small, ("0:7",), **CONTEXT)
    async with open_up(file) as up:
        pid = await up.ready(file.route.stages[0].address)
        os.kill(pid, signal.SIGSTOP)
        up.process.terminate()
        assert await up.wait() == 0
        assert is_gone(pid)


@pytest.mark.slow
async def test_up_starts_only_what_it_is_told_to(small: Path, tmp_path: Path) -> None:
    file = write_route(tmp_path / "route.toml", small, ("0:3", "3:7"), **CONTEXT)
    head, tail = (ref.address for ref in file.route.stages)
    async with open_program("up", str(file.path), "--json", "--only", tail) as up:
        await up.ready(tail)
        assert up.events(head, "ready") == []


@pytest.mark.slow
async def test_up_does_not_insist_when_a_stage_refuses_its_arguments(small: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        addresses = [f"127.0.0.1:{taken.getsockname()[1]}", f"127.0.0.1:{free_ports(1)[0]}"]
        file = write_route(tmp_path / "route.toml", small, ("0:3", "3:7"), addresses, **CONTEXT)
        async with open_program("up", str(file.path), "--json") as up:
            assert await up.wait(START) == 2
    assert f"cannot listen on {addresses[0]}" in up.errors
    assert f"stage {addresses[0]} (0:3) refuses its arguments" in up.errors
    assert "Traceback" not in up.errors
    pids = [line["pid"] for line in up.lines if line["event"] == "ready"]
    assert all(map(is_gone, pids))


async def test_a_stage_ends_with_its_parents_end_of_input(small: Path) -> None:
    async with open_program(
        "stage", str(small), "--layers", "0:7", "--listen", "127.0.0.1:0", "--json", "--until-stdin-closes",
        stdin=subprocess.PIPE,
    ) as whole:  # fmt: skip
        await whole.first_line()
        assert whole.process.stdin is not None
        await whole.process.stdin.aclose()
        assert await whole.wait() == 0


async def test_a_stage_told_to_drain_ends_when_its_answers_have(
    small: Path, prompt: Prompt, expected: Expected
) -> None:
    """Nobody new is taken meanwhile; and it ends by itself once the last session is gone."""
    async with open_stage(small, "0:7", "--drain", "30") as whole:
        route = Route((await ref_of(whole),))
        async with open_remote(route) as pipeline:
            async with pipeline.session() as session:
                generation = session.generate(prompt(16), max_tokens=ANSWER)
                text = await take(generation, 3)
                whole.process.terminate()
                await until(lambda: "the stage is being drained" in whole.errors)
                with pytest.raises(StageDraining):
                    async with open_remote(route):
                        pytest.fail("a new pipeline was taken")
                text += await take(generation)
                assert text == expected(16)
                assert whole.process.returncode is None
            assert await whole.wait() == 0
