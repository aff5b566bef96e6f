"""A stage of another kind joins a live route: one line says what differs, and three sessions decode on as if nothing were.

A table has a case for every field of an identity, by introspection; a stage comes as the one before, as the one behind, and
as one that a client's route names.
"""

from __future__ import annotations

import logging
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import field, frozen
from cluster.remote_stages import (
    CONTEXT,
    HANDSHAKE,
    PROMPT,
    Host,
    Hosts,
    connected,
    denied,
    failure,
    greeted,
    open_hosts,
    read_to_end,
    reference,
)
from conversations import seen, take
from msgspec.structs import fields, replace

from dgr.cli.children import python_module
from dgr.client.events import RePrefilled, RouteDown
from dgr.client.pipeline import Pipeline, open_pipeline_on
from dgr.cluster.connect import LinkPolicy
from dgr.core.route import LayerRange, Route, StageRef
from dgr.core.values import ContextParams, Numerics, StageIdentity, Wire
from dgr.errors import DgrError, InvalidRoute, MtpNotExecutable, SchemaMismatch
from dgr.protocol import identity as identities
from dgr.protocol.identity import check_alike, check_neighbours
from dgr.testing.engines.fake import FakeEngine, FakeModel
from dgr.testing.network.processes import open_command, write_route
from dgr.testing.waits import until
from dgr.wire.frames import SCHEMA_HASH, SCHEMA_VERSION, Fence, Hello, Refusal, Refused, Role, Welcome

#: dgr, llama.cpp's pin, the digest of our patches.
RUNTIME = "0.1.0 llama.cpp 0c1e57098+d5786b98"
SPLIT = "0:1", "1:4", "4:6"
#: Tokens of an answer: with the prompt they fill a context.
ANSWER = CONTEXT.n_ctx - len(PROMPT)


class Stage(FakeEngine):
    """It says of itself what it is told to."""

    def __init__(self, owned: str, /, **changes: Any) -> None:
        super().__init__(LayerRange.parse(owned), CONTEXT)
        self._description = replace(self._description, **{"runtime": RUNTIME, **changes})


@frozen
class Case:
    """A stage that differs from those of the live route."""

    changes: Mapping[str, Any]
    #: What the refusal says: what differs and both values, from whichever side it is seen.
    words: Sequence[str]
    #: How it may come: as the stage ``before``, the one ``behind``, or one of a client's ``route``.
    ways: Sequence[str] = ("before", "behind", "route")


def shared(name: str, theirs: object, words: str = "") -> Case:
    ours = getattr(Stage("1:4").describe(), name)
    return Case({name: theirs}, (words, str(theirs), str(ours), " is not "))


def of_context(name: str, theirs: object, **more: object) -> Case:
    context = replace(CONTEXT, **{name: theirs}, **more)
    return Case({"context": context}, ("context parameters", f"{name} ", str(theirs), str(getattr(CONTEXT, name))))


#: By field of a stage's identity, for those that a route's stages share or that neighbours must fit in.
CASES: Mapping[str, Sequence[Case]] = {
    "adapter": (shared("adapter", "fake/2", "adapter"), shared("adapter", "", "adapter")),
    "architecture": (shared("architecture", "deepseek5", "architecture"),),
    "artifact": (shared("artifact", FakeModel(seed=1).identity, "artifact identity"),),
    "layers": (
        Case({"layers": LayerRange(0, 2)}, ("0:2 cannot be followed by 1:4",), ("before",)),
        Case({"layers": LayerRange(2, 4)}, ("0:1 cannot be followed by 2:4",), ("behind",)),
        Case({"layers": LayerRange(2, 4)}, ("owns layers 2:4; the route says 1:4",), ("route",)),
    ),
    "n_layers": (shared("n_layers", 7, "number of main layers"),),
    "n_vocab": (shared("n_vocab", 258, "vocabulary size"),),
    "width_in": (Case({"width_in": 4}, ("send 3 floats a token", "take 4"), ("behind", "route")),),
    "width_out": (
        Case({"width_out": 4}, ("send 4 floats a token", "take 3"), ("before",)),
        Case({"width_out": 4}, ("send 4 floats a token", "take 3"), ("route",)),
    ),
    "token_sideband": (shared("token_sideband", True, "token-id sideband"),),
    "kernel_fingerprint": (
        Case({"kernel_fingerprint": "another"}, ("has kernel fingerprint", "another", "not ", "exact numerics need equal")),
    ),
    "capabilities": (
        Case({"capabilities": {"decode": "executable", "mtp": "executable"}}, ("mtp",)),
        Case({"capabilities": {"decode": "executable", "mtp-contract/1": "executable"}}, ("mtp",)),
    ),
    "runtime": (
        shared("runtime", "0.2.0 llama.cpp 0c1e57098+d5786b98", "runtime (dgr version, llama.cpp pin and patches)"),
        shared("runtime", "0.1.0 llama.cpp 1c1e57098+d5786b98", "runtime (dgr version, llama.cpp pin and patches)"),
        shared("runtime", "0.1.0 llama.cpp 0c1e57098+e5786b98", "runtime (dgr version, llama.cpp pin and patches)"),
        shared("runtime", "", "runtime"),
    ),
}  # fmt: skip
#: By field of the context.
OF_CONTEXT: Mapping[str, Sequence[Case]] = {
    "n_ctx": (of_context("n_ctx", 128),),
    "n_batch": (of_context("n_batch", 8),),
    "n_ubatch": (of_context("n_ubatch", 4),),
    "n_seq_max": (of_context("n_seq_max", 2),),
    "type_k": (of_context("type_k", "f32"),),
    "flash_attn": (of_context("flash_attn", False),),
    "numerics": tuple(of_context("numerics", one) for one in Numerics if one is not CONTEXT.numerics),
    "wire": tuple(of_context("wire", one, numerics=Numerics.SAME_CUTS) for one in Wire if one is not CONTEXT.wire),
}
ALL = [case for cases in (*CASES.values(), *OF_CONTEXT.values()) for case in cases]
#: What may differ: it follows from the layers, is told and not used, or is asked for one by one.
FREE: Mapping[str, Mapping[str, Any]] = {
    "components": {"components": ("tape",)},
    "devices": {"devices": ("CUDA0 NVIDIA H200",)},
    "capabilities": {"capabilities": {"decode": "executable"}},  # no forks: then the route has none
}


def test_every_field_of_an_identity_has_a_case() -> None:
    known = {*CASES, *FREE, "context"}
    assert known == {one.name for one in fields(StageIdentity)}, "a new field needs a case: may it differ?"
    assert set(OF_CONTEXT) == {one.name for one in fields(ContextParams)}


@pytest.mark.parametrize("forgotten", [*identities._SHARED, "kernel_fingerprint", "capabilities"])
def test_a_check_that_forgets_a_field_is_caught_by_its_case(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in ALL if forgotten in case.changes]
    ours = Stage("1:4").describe()
    assert all(_is_refused(replace(ours, **case.changes), ours) for case in cases)
    match forgotten:
        case "kernel_fingerprint":
            monkeypatch.setattr(Numerics, "exact_kernels", property(lambda _: False))
        case "capabilities":
            monkeypatch.setattr(identities, "refuse_capabilities", lambda *_: None)
        case _:
            shared = {name: words for name, words in identities._SHARED.items() if name != forgotten}
            monkeypatch.setattr(identities, "_SHARED", shared)
    assert not any(_is_refused(replace(ours, **case.changes), ours) for case in cases)


def _is_refused(theirs: StageIdentity, ours: StageIdentity) -> bool:
    try:
        check_alike("a stage", theirs, ours)
    except DgrError:
        return True
    return False


def test_a_check_of_neighbours_that_forgets_is_caught() -> None:
    before, after = Stage("0:1").describe(), Stage("1:4").describe()
    check_neighbours(before, after)
    for one, other in (
        (replace(before, layers=LayerRange(0, 2)), after),
        (before, replace(after, layers=LayerRange(2, 4))),
        (replace(before, width_out=4), after),
        (before, replace(after, width_in=4)),
    ):
        with pytest.raises(InvalidRoute):
            check_neighbours(one, other)


# --- a live route ---


class Live:
    """A route of three stages, and three sessions that decode over it all the while."""

    def __init__(self, hosts: Hosts, stages: Sequence[Host], pipeline: Pipeline) -> None:
        self.hosts = hosts
        self.stages = stages
        self.pipeline = pipeline
        self.events = pipeline.events()
        #: By session: right tokens so far.
        self.drawn = [0, 0, 0]

    async def decode(self, index: int) -> None:
        """Answer after answer, each of them right to the last token."""
        prompt = [*PROMPT[:-1], index]
        right = reference(prompt, ANSWER)
        while True:
            async with self.pipeline.session() as session:
                generation = session.generate(prompt, max_tokens=ANSWER, stop=())
                for token in right:
                    assert await take(generation, 1) == [token]
                    self.drawn[index] += 1

    async def go_on(self) -> None:
        """Every session has drawn more since now."""
        before = list(self.drawn)
        await until(lambda: all(now > then for now, then in zip(self.drawn, before, strict=True)), what="more tokens")

    async def assert_undisturbed(self) -> None:
        await self.go_on()
        told = seen(self.events)
        assert not [event for event in told if isinstance(event, RouteDown)]
        again = [event for event in told if isinstance(event, RePrefilled)]
        assert not again, again


@asynccontextmanager
async def live_route(policy: LinkPolicy | None = None) -> AsyncIterator[Live]:
    async with open_hosts(policy) as hosts:
        stages = [await hosts.start("", engine=Stage(layers)) for layers in SPLIT]
        async with hosts.pipeline(stages) as pipeline:
            live = Live(hosts, stages, pipeline)
            async with trio.open_nursery() as nursery:
                for index in range(3):
                    nursery.start_soon(live.decode, index)
                await live.go_on()
                yield live
                await live.assert_undisturbed()
                nursery.cancel_scope.cancel()


async def refused_before(live: Live, changes: Mapping[str, Any]) -> str:
    """It opens a link to the middle stage, as the one before it."""
    about = replace(Stage("0:1").describe(), **changes)
    return await denied(live.stages[1].address, Hello(Role.STAGE, "127.0.0.1:7701", about))


async def refused_behind(live: Live, changes: Mapping[str, Any]) -> str:
    """A client has the head push to it."""
    alien = await live.hosts.start("", engine=Stage("1:4", **changes))
    try:
        return await fenced_onto(live, alien.address)
    finally:
        await alien.kill()


async def fenced_onto(live: Live, address: str) -> str:
    head = live.stages[0].address
    async with live.hosts.connector()(head) as (link, _):
        link.send_nowait(Fence(b"r" * 16, 1, head, "", address))
        answer = (await anext(link)).frame
        assert isinstance(answer, Refused), answer
        assert answer.code is Refusal.SUCCESSOR
        assert f"cannot reach the next stage {address}" in answer.message
        return answer.message


async def refused_in_a_route(live: Live, changes: Mapping[str, Any]) -> str:
    """Another client's route has it between two stages of the live one."""
    alien = await live.hosts.start("", engine=Stage("1:4", **changes))
    try:
        error = await opened_over(live, alien.address)
        assert isinstance(error, InvalidRoute | MtpNotExecutable), error
        assert alien.address in str(error) or "layers" in str(error)
        return str(error)
    finally:
        await alien.kill()


async def opened_over(live: Live, middle: str) -> DgrError:
    """Why another client does not get a route whose middle stage is at that address."""
    head, _, tail = (StageRef(host.address, host.layers) for host in live.stages)

    async def open_it() -> None:
        async with open_pipeline_on(live.hosts.connector(), Route((head, StageRef(middle, LayerRange(1, 4)), tail))):
            pass

    return await failure(open_it)


WAYS: Mapping[str, Callable[[Live, Mapping[str, Any]], Awaitable[str]]] = {
    "before": refused_before,
    "behind": refused_behind,
    "route": refused_in_a_route,
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_stage_that_differs_in_a_field_is_refused_in_one_line(way: str) -> None:
    async with live_route() as live:
        for case in (case for case in ALL if way in case.ways):
            message = await WAYS[way](live, case.changes)
            assert all(words in message for words in case.words), (case, message)
            assert message.isprintable(), message
            await live.go_on()


@pytest.mark.parametrize("changes", FREE.values(), ids=FREE)
async def test_what_may_differ_is_taken(changes: Mapping[str, Any]) -> None:
    async with live_route() as live:
        about = replace(Stage("0:1").describe(), **changes)
        async with greeted(live.stages[1].address, Hello(Role.STAGE, "127.0.0.1:7701", about)) as (_, answer):
            assert isinstance(answer, Welcome)
        alien = await live.hosts.start("", engine=Stage("1:4", **changes))
        middle = StageRef(alien.address, alien.layers)
        head, _, tail = (StageRef(host.address, host.layers) for host in live.stages)
        async with open_pipeline_on(live.hosts.connector(), Route((head, middle, tail))):
            pass


# --- another schema ---


@frozen
class Schema:
    version: int
    hash: str = SCHEMA_HASH
    #: Who is the older one, as this side says it: %s stands for the other side.
    older: str = field(kw_only=True)

    @property
    def preamble(self) -> bytes:
        return struct.pack("<6sH16s", b"dgr\r\n\0", self.version, bytes.fromhex(self.hash))

    def assert_told(self, message: str, who: str) -> None:
        """One line with both versions, and what to do."""
        assert f"{who} speaks schema {self.version} ({self.hash}), this one {SCHEMA_VERSION} ({SCHEMA_HASH})" in message
        assert f": {self.older % who if '%s' in self.older else self.older}; install the same dgr on both" in message
        assert message.isprintable(), message


OTHER = "00112233445566778899aabbccddeeff"
SCHEMAS = {
    "one older": Schema(SCHEMA_VERSION - 1, OTHER, older="%s is the older one"),
    "one newer": Schema(SCHEMA_VERSION + 1, OTHER, older="this side is the older one"),
    "another hash": Schema(SCHEMA_VERSION, OTHER, older="neither is older, they were built of different sources"),
    "another version alone": Schema(SCHEMA_VERSION - 1, older="%s is the older one"),
}


@asynccontextmanager
async def speaks(schema: Schema) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Where a dgr of another schema listens; and what it heard of each that came, to the end."""
    heard: list[bytes] = []

    async def talk(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(schema.preamble)
            heard.append(await read_to_end(stream))

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, talk, [listener])
        yield f"127.0.0.1:{listener.socket.getsockname()[1]}", heard
        nursery.cancel_scope.cancel()


OURS = struct.pack("<6sH16s", b"dgr\r\n\0", SCHEMA_VERSION, bytes.fromhex(SCHEMA_HASH))


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
async def test_another_schema_is_refused_in_one_line_on_the_side_that_listens(
    schema: Schema, caplog: pytest.LogCaptureFixture
) -> None:
    async with live_route() as live:
        with caplog.at_level(logging.WARNING, "dgr.links"):
            async with connected(live.stages[1].address) as stream:
                await stream.send_all(schema.preamble)
                assert await read_to_end(stream) == OURS  # with which the other side can say it, too
            await until(lambda: caplog.records, what="the line")
        (record,) = caplog.records
        schema.assert_told(record.getMessage(), "the other side")


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
async def test_another_schema_is_refused_in_one_line_on_the_side_that_asks(schema: Schema) -> None:
    async with live_route() as live, speaks(schema) as (address, heard):
        message = await fenced_onto(live, address)
        schema.assert_told(message, f"stage {address}")
        error = await opened_over(live, address)
        assert isinstance(error, SchemaMismatch)
        schema.assert_told(str(error), f"stage {address}")
        await until(lambda: len(heard) == 2, what="the ends of both links")
        assert heard == [OURS, OURS]


async def test_a_preamble_of_the_last_schemas_form_is_read_by_this_one() -> None:
    """What both sides say first may never change, or the older one could not tell why."""
    assert len(OURS) == 24
    assert OURS[:6] == b"dgr\r\n\0"
    assert SCHEMAS["one older"].preamble[:6] + struct.pack("<H", SCHEMA_VERSION) + bytes.fromhex(SCHEMA_HASH) == OURS


# --- another one comes back in a stage's place ---


@pytest.mark.parametrize(
    "changes",
    [{"runtime": "0.2.0 llama.cpp 0c1e57098+d5786b98"}, {"artifact": FakeModel(seed=1).identity}],
    ids=lambda changes: next(iter(changes)),
)
async def test_a_stage_that_comes_back_as_another_one_is_not_taken_and_the_right_one_is(
    changes: Mapping[str, Any],
) -> None:
    """An upgrade of one host alone: answers wait, the route says what differs, and go on when it is undone."""
    async with open_hosts(LinkPolicy(handshake=HANDSHAKE)) as hosts:
        stages = [await hosts.start("", engine=Stage(layers)) for layers in SPLIT]
        async with hosts.pipeline(stages) as pipeline, pipeline.session() as session:
            generation = session.generate(PROMPT, max_tokens=12, stop=())
            text = await take(generation, 4)
            await stages[1].kill()
            alien = await hosts.start("", address=stages[1].address, engine=Stage("1:4", **changes))
            client = pipeline._client

            def told() -> bool:
                return any(str(value) in (client.last_recovery_error or "") for value in changes.values())

            async with trio.open_nursery() as nursery:
                rest: list[int] = []

                async def go_on() -> None:
                    rest.extend(await take(generation))

                nursery.start_soon(go_on)
                await until(told, what="why the route is down")
                assert not rest
                assert alien.engine.tokens_run == 0
                await alien.kill()
                await hosts.start("", address=stages[1].address, engine=Stage("1:4"))
            assert text + rest == reference(count=12)


async def test_a_pipeline_does_not_move_to_stages_of_another_dgr_even_to_all_of_them_at_once() -> None:
    """Other kernels or patches may give other bits: what began an answer ends it."""
    newer = {"runtime": "0.2.0 llama.cpp 1c1e57098+e5786b98"}
    async with live_route() as live:
        others = [await live.hosts.start("", engine=Stage(layers, **newer)) for layers in ("0:2", "2:6")]
        error = await failure(lambda: live.pipeline.change_route(live.hosts.route(others)))
        assert isinstance(error, InvalidRoute)
        assert newer["runtime"] in str(error)
        assert RUNTIME in str(error)


@pytest.mark.slow
async def test_a_stage_process_one_schema_older_and_a_client_say_so_in_one_line_each(
    small: Path, tmp_path: Path
) -> None:
    script = "import dgr.wire.handshake as h; h.SCHEMA_VERSION -= 1; from dgr.cli import main; raise SystemExit(main())"
    flags = ("--layers=0:7", "--listen=127.0.0.1:0", "--ctx=512", "--json")
    async with open_command(sys.executable, "-P", "-c", script, "stage", str(small), *flags) as stage:
        address = (await stage.first_line())["address"]
        route = write_route(tmp_path / "route.toml", small, ("0:7",), [address])
        command = python_module("dgr", "generate", "--route", str(route.path), "--prompt", "x")
        done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
        theirs, ours = f"schema {SCHEMA_VERSION - 1} (", f"schema {SCHEMA_VERSION} ("
        line, step = done.stderr.decode().splitlines()
        assert line.startswith(f"dgr: error: stage {address} speaks {theirs}")
        assert f"this one {SCHEMA_VERSION} (" in line
        assert line.endswith(f"stage {address} is the older one; install the same dgr on both")
        assert step.startswith("dgr: next: ")
        assert step.endswith(" [SchemaMismatch]")
        await until(lambda: "schema" in stage.errors, what="the stage's own line")
        (line,) = stage.errors.splitlines()
        assert f"the other side speaks {ours}" in line
        assert f"this one {SCHEMA_VERSION - 1} (" in line
        assert line.endswith("this side is the older one; install the same dgr on both")
