"""Values of another type or out of range are refused by name, before anything changes."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Awaitable, Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from conversations import reference, take
from pipeline.harness import TWO, open_stages

import dgr
from dgr.client.pipeline import Pipeline, Timeouts
from dgr.cluster.connect import LinkPolicy
from dgr.cluster.local import ShardPolicy
from dgr.core.values import ContextParams, Expectation, Key, LogitsWanted, Numerics, SamplingParams
from dgr.errors import InputError, InvalidLayerRange, InvalidToken
from dgr.protocol.sampling import check_sampling, sampling_problem
from dgr.wire import frames
from dgr.wire.framing import encode_message

PROMPT = list(b"The quick brown fox")
NAN = math.nan


# --- option structs ---

ABSURD: dict[type, dict[str, tuple[object, ...]]] = {
    Timeouts: {"reply": (NAN, -1, "1", None, True), "control": (NAN,), "route": (NAN, -math.inf)},
    ShardPolicy: {
        "idle_timeout": (NAN, -1, "9", None, True),
        "min_idle": (NAN, -0.1, None),
        "memory_budget": (NAN, 0, 1.5, "1GiB", True, math.inf),
    },
    LinkPolicy: {
        "handshake": (NAN, 0, -1, "1", None),
        "heartbeat": (NAN, 0, None),
        "max_links": (0, 1.0, NAN, "64", True),
        "allow_plain": (1, None, "yes"),
        "credentials": ("ca.pem", ("ca.pem", "a.pem", "a.key")),
    },
    ContextParams: {
        **dict.fromkeys(("n_ctx", "n_batch", "n_ubatch", "n_seq_max"), (0, -1, 1.5, NAN, "5", None, True, 2**31)),
        "type_k": (16, None),
        "flash_attn": (1, "on", None),
        "numerics": ("exact", None, 0),
    },
}


@pytest.mark.parametrize(
    ("struct", "name", "value"),
    [(struct, name, value) for struct, names in ABSURD.items() for name, values in names.items() for value in values],
)
def test_an_absurd_option_is_refused_by_name(struct: type, name: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"{name} is .*; give "):
        struct(**{name: value})


def test_sensible_options_are_taken() -> None:
    Timeouts(reply=math.inf, control=0, route=1)
    ShardPolicy(idle_timeout=math.inf, min_idle=0, memory_budget=2**40)
    LinkPolicy(handshake=0.1, heartbeat=1, max_links=1, allow_plain=True)
    ContextParams(n_ctx=2**31 - 1, numerics=Numerics.NATIVE)


_EMPTY: tuple[object, ...] = (0, "", {}, ())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": "1"}, "threads is '1'"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": NAN}, "threads is nan"),
        ({"threads": True}, "threads is True"),
        ({"memory_budget": NAN}, "memory_budget is nan"),
        ({"memory_budget": 1.5}, "memory_budget is 1.5"),
        ({"mmap": 1}, "mmap is 1"),
        ({"mlock": 1}, "mlock is 1"),
        ({"split": ["0:5"]}, "split has '0:5'"),
        ({"split": 5}, "split has 5"),
        ({"split": [None]}, "split has None"),
        ({"chunk": 1.5}, "chunk is 1.5"),
        ({"window": "2"}, "window is '2'"),
        ({"retries": NAN}, "retries is nan"),
        ({"model": 5}, "model is 5"),
        ({"context": {"n_ctx": 5}}, "context is .*; give a ContextParams"),
        ({"policy": 5}, "policy is 5; give a ShardPolicy"),
        ({"timeouts": 5}, "timeouts is 5; give a Timeouts"),
        ({"model": None}, "model is None"),
        ({"model": [5]}, "model is 5"),
        ({"model": b"model.gguf"}, "model is b.model.gguf"),
        ({"model": []}, "no model was given"),
        ({"on_shard": 5}, "on_shard is 5; give a function"),
        *(
            ({name: empty}, f"{name} is .*; give a {kind}")
            for name, kind in (("context", "ContextParams"), ("policy", "ShardPolicy"), ("timeouts", "Timeouts"))
            for empty in _EMPTY
        ),
    ],
)
async def test_an_absurd_argument_of_open_pipeline_is_refused_by_name(
    small: Path, options: dict[str, Any], words: str
) -> None:
    options = {"model": small, "context": ContextParams(n_ctx=256, n_batch=64, n_ubatch=32), **options}
    with pytest.raises(InputError, match=words):
        async with dgr.open_pipeline(**options):
            pass


@pytest.mark.parametrize(
    ("route", "options", "words"),
    [
        (5, {}, "route is 5; give a str or a Path"),
        (None, {}, "route is None"),
        ("route.toml", {"policy": 5}, "policy is 5; give a LinkPolicy"),
    ],
)
async def test_an_absurd_argument_of_open_route_is_refused_by_name(
    tmp_path: Path, route: Any, options: dict[str, Any], words: str
) -> None:
    (tmp_path / "route.toml").write_text('[[stage]]\naddress = "127.0.0.1:1"\nlayers = "0:2"\n')
    given = tmp_path / route if isinstance(route, str) else route
    with pytest.raises(InputError, match=words):
        async with dgr.open_route(given, **options):
            pass


@pytest.mark.parametrize(
    "bounds", [(0.0, 5), (0, 1.5), (NAN, 5), (0, "5"), (None, 5), (True, 5), (np.int64(0), 5), (0, [5])]
)
def test_a_layer_range_has_whole_numbers(bounds: tuple[Any, Any]) -> None:
    with pytest.raises(InvalidLayerRange, match="is not made of two whole numbers"):
        dgr.LayerRange(*bounds)


LAYERS = dgr.LayerRange(0, 5)


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (dgr.StageRef, (5, LAYERS), "address is 5; give a text"),
        (dgr.StageRef, ("a", "0:5"), "layers is '0:5'; give a LayerRange"),
        (dgr.Route, ((),), "the route has no stage"),
        (dgr.Route, ([dgr.StageRef("a", LAYERS)],), "stages is .*; give a tuple"),
        (dgr.Route, (("a",),), "a stage of the route is 'a'; give a StageRef"),
        (dgr.Route, (5,), "stages is 5; give a tuple"),
    ],
)
def test_a_route_is_made_of_stages(kind: Callable[..., object], arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        kind(*arguments)


@pytest.mark.parametrize("value", [5, None, "0:5", (), LAYERS])
async def test_only_a_route_or_a_function_is_taken_for_one(autojump_clock: trio.abc.Clock, value: Any) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        with pytest.raises(InputError, match=r"route is .*; give a Route"):
            await pipeline.change_route(value)
        with pytest.raises(InputError, match=r"rows is .*; give a function"):
            await session.logits(PROMPT, value)
        assert (pipeline.epoch, session.transcript) == (1, [])
        assert await take(session.generate(PROMPT, max_tokens=3), 3) == reference(PROMPT, 3)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_owns_native_memory_is_not_copied(small: Path, how: Callable[[object], object]) -> None:
    engine = dgr.LlamaEngine(small, context=ContextParams(n_ctx=256, n_batch=64, n_ubatch=32))
    with dgr.LlamaVocabulary(small) as vocabulary:
        for owner in (engine, vocabulary):
            with pytest.raises(TypeError, match="owns native memory"):
                how(owner)
    engine.stop()


# --- token ids ---

WRONG_TOKENS = [
    True, np.bool_(True), 1.0, 1.5, NAN, Decimal(1), Fraction(1), np.float32(1), None, "1", "é", b"1", [1], (), -1, 257, 2**70,
]  # fmt: skip
NOT_TOKENS = [None, 5, 1.5, b"abc", bytearray(b"abc"), object()]
INTEGERS = [np.int8, np.uint8, np.int32, np.int64, np.uint64, int]


async def _ways(pipeline: Pipeline, session: dgr.ClientSession, tokens: Any) -> list[Callable[[], Awaitable[None]]]:
    async def prefill() -> None:
        await session.prefill(tokens)

    async def logits() -> None:
        await session.logits(tokens, lambda _position, _values: None)

    async def prompt() -> None:
        session.generate(tokens)

    async def transcript() -> None:
        session.generate(transcript=tokens)

    async def stop() -> None:
        session.generate([1], stop=tokens)

    return [prefill, logits, prompt, transcript, stop]


@pytest.mark.parametrize("wrong", [*([1, wrong] for wrong in WRONG_TOKENS), *NOT_TOKENS], ids=repr)
async def test_what_is_not_a_token_is_refused_before_anything_changes(
    autojump_clock: trio.abc.Clock, wrong: object
) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        await take(session.generate(PROMPT, max_tokens=2))
        before, run = list(session.transcript), stages.tokens_run(TWO)
        for way in await _ways(pipeline, session, wrong):
            if wrong is None and way.__name__ in ("transcript", "stop"):
                continue  # None is their default
            with pytest.raises(InvalidToken):
                await way()
            assert session.transcript == before
        assert stages.tokens_run(TWO) == run
        assert await take(session.generate(max_tokens=3)) == reference(before, 3)


@pytest.mark.parametrize("integer", INTEGERS)
async def test_any_integer_type_is_a_token(autojump_clock: trio.abc.Clock, integer: type) -> None:
    tokens = [integer(token) for token in PROMPT]
    ways: tuple[Any, ...] = (tokens, tuple(tokens), np.array(tokens))
    for given in ways:
        async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
            assert await take(session.generate(given, max_tokens=3, stop=())) == reference(PROMPT, 3)
            assert {type(token) for token in session.transcript} == {int}


@pytest.mark.parametrize("value", [2.5, NAN, -1, True, "3", 1.0, math.inf, [3]])
async def test_an_odd_number_of_tokens_is_refused(autojump_clock: trio.abc.Clock, value: Any) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        with pytest.raises(InputError, match="max_tokens is"):
            session.generate(PROMPT, max_tokens=value)
        assert session.transcript == []


# --- sampling ---

REFUSED = {
    "temperature": (-1, -1e-30, NAN, math.inf, 1e39, "0.7", None, True),
    "top_k": (-1, 1.5, NAN, 2**31, "5", True),
    "top_p": (0, -0.5, 1.5, 1e-46, 1 + 1e-6, NAN),
    "min_p": (-0.1, 1.5, NAN),
    "repeat_penalty": (0, -1, 1e-46, NAN, 1e39),
    "frequency_penalty": (NAN, math.inf, -1e39, "1"),
    "presence_penalty": (NAN, math.inf, None),
    "penalty_last_n": (-2, 1.5, 2**31),
    "seed": (-1, 1.5, 2**63, NAN, "7", True),
    "choice": (-1, 2**32, 0.5),
    "top_logprobs": (-1, 65, 1.5, True),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
async def test_a_sampling_value_is_refused_before_a_token_is_committed(
    autojump_clock: trio.abc.Clock, name: str, value: Any
) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        with pytest.raises(InputError, match=name):
            session.generate(PROMPT, sampling=SamplingParams(**{name: value}))
        assert (session.transcript, stages.tokens_run(TWO)) == ([], [0, 0])


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 1e-46), ("top_p", 1 + 1e-9), ("min_p", -1e-46), ("repeat_penalty", 1e-45), ("min_p", 1 + 1e-9)],
)
def test_a_value_is_checked_as_the_float32_that_it_becomes(name: str, value: Any) -> None:
    assert sampling_problem(check_sampling(SamplingParams(**{name: value}), 257), 257) is None


def test_numbers_of_numpy_are_sampling_values() -> None:
    numbers: dict[str, Any] = {"temperature": np.float32(0.5), "seed": np.int64(7), "top_k": np.uint8(3)}
    params = SamplingParams(**numbers)
    sampling = check_sampling(params, 257)
    assert sampling == check_sampling(SamplingParams(temperature=0.5, seed=7, top_k=3), 257)
    encode_message(frames.Tokens(Key(bytes(16), 1, 1), 1, Expectation(0, bytes(16)), (1,), LogitsWanted.LAST, sampling))


@pytest.mark.parametrize("sampling", [5, "greedy", {"temperature": 0.5}])
async def test_only_sampling_params_are_sampling(autojump_clock: trio.abc.Clock, sampling: Any) -> None:
    async with open_stages(TWO) as stages, stages.pipeline(TWO) as pipeline, pipeline.session() as session:
        with pytest.raises(InputError, match="sampling is"):
            session.generate(PROMPT, sampling=sampling)
