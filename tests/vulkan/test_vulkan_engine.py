"""An engine whose weights, state and buffers lie on a Vulkan device keeps the contract, and its sequences apart."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from fixture_types import Prompt
from msgspec.structs import replace
from vulkan.lane import NATIVE

from dgr.core.route import LayerRange
from dgr.core.values import ContextParams, LogitsWanted, Numerics
from dgr.engine.base import ShardEngine, Work
from dgr.engine.devices import Placement
from dgr.engine.llama import LlamaEngine
from dgr.engine.native import kernel_fingerprint
from dgr.errors import EngineError
from dgr.selftest.chain import Chain
from dgr.selftest.llama_chain import open_chain
from dgr.testing.engines.contract import EngineContract
from dgr.testing.state_inspector import InspectedEngine
from dgr.v4.state_map import Component

pytestmark = pytest.mark.vulkan


class TestOnTheDevice(EngineContract):
    """With prompts of a few tokens: a software device takes seconds for 32. Longer ones are below."""

    context = replace(EngineContract.context, n_ctx=256, n_batch=32, numerics=Numerics.NATIVE)
    length = 9
    decoded = 1

    @pytest.fixture(autouse=True)
    def _model(self, five: Path) -> None:
        self.path = five

    def make(self, layers: LayerRange | None, context: ContextParams) -> ShardEngine:
        engine = LlamaEngine(self.path, layers, context)
        assert engine.describe().devices[0].startswith("Vulkan0 ")
        return engine

    def cuts(self, n_layers: int) -> Sequence[int]:
        return (3,)


def converse(chain: Chain, tokens: Sequence[int], chunk: int) -> bytes:
    """Rows of logits of a prompt in chunks, and of a few greedy tokens after it."""
    rows = chain.feed(tokens, chunk=chunk)
    return rows + chain.decode(tokens[-1], len(tokens), 1)[1]


@pytest.mark.parametrize("split", ["0:3,3:5", "0:1,1:2,2:4,4:5"])
def test_a_split_in_equal_chunks_has_the_bits_of_the_whole(five: Path, prompt: Prompt, split: str) -> None:
    tokens = prompt(132, seed=1)
    with open_chain(five, None, NATIVE) as whole:
        expected = converse(whole, tokens, 44)
    with open_chain(five, split, NATIVE) as chain:
        assert converse(chain, tokens, 44) == expected


@pytest.fixture
def engine(five: Path) -> Iterator[InspectedEngine]:
    engine = InspectedEngine(five, None, NATIVE)
    yield engine
    engine.stop()


def test_what_one_slot_does_leaves_the_other(engine: InspectedEngine, prompt: Prompt) -> None:
    """Every byte of device memory that a slot has, its frontier and its logits: run beside, cleared beside, forked."""
    chain = Chain([engine])
    never_used = engine.state_summary(1)
    first = chain.feed(prompt(100, seed=1), chunk=50)
    image, frontier = engine.image(0), engine.state_summary(0)
    assert frontier.position == 100
    chain.feed(prompt(50, seed=2), chunk=50, slot=1)
    assert engine.image(0) == image
    engine.close(1)
    assert engine.image(0) == image
    assert not any(any(engine.image(1)[key]) for key in engine.owned())
    assert engine.state_summary(1) == never_used
    engine.fork(0, 1)
    assert engine.state_summary(1) == frontier == engine.state_summary(0)
    token = prompt(1, seed=3)
    after = [chain.feed(token, chunk=1, slot=slot, begin=100) for slot in (0, 1)]
    assert after[0] == after[1]
    engine.close(1)
    assert chain.feed(prompt(100, seed=1), chunk=50, slot=1) == first
    assert engine.state_summary(1) == frontier


@pytest.mark.parametrize("layer", [0, 3])
def test_nan_stays_in_its_sequence(engine: InspectedEngine, prompt: Prompt, layer: int) -> None:
    """Also through the indexer's top-k and the experts' of later layers, whose indices must stay within their rows."""
    chain = Chain([engine])
    expected = [chain.feed(prompt(100, seed=slot), chunk=50, slot=slot) for slot in (0, 1)]
    neighbour = engine.image(1)
    row = engine.rows(Component.RAW_SWA, layer, 0, 0, 1)[0]
    engine.poke(Component.RAW_SWA, layer, 90, b"\x00\x7e" * (len(row) // 2))
    outputs = engine.run([Work(0, 100, prompt(3, seed=4), logits=LogitsWanted.LAST)])
    assert not outputs[0].finite
    assert engine.image(1) == neighbour
    sound = engine.run([Work(1, 100, prompt(3, seed=4), logits=LogitsWanted.LAST)])
    assert sound[0].finite
    engine.close(0)
    assert chain.feed(prompt(100, seed=0), chunk=50) == expected[0]


def test_an_aborted_run_fails_though_the_device_does_not_ask(five: Path, prompt: Prompt) -> None:
    """A run that is wholly on the device comes to its end; the slot is lost all the same, and clears."""
    engine = LlamaEngine(five, LayerRange(0, 2), NATIVE)
    try:
        engine.run([Work(0, 0, prompt(64))])
        thread = threading.Timer(0.02, engine.abort)
        thread.start()
        with pytest.raises(EngineError, match=r"running 64 tokens failed .*aborted.*clear every slot"):
            engine.run([Work(0, 64, prompt(64))])
        thread.join()
        engine.close(0)
        assert engine.position(0) == 0
    finally:
        engine.stop()


def test_exact_numerics_of_this_build_are_those_of_the_cpu(five: Path, prompt: Prompt) -> None:
    """The same bits and the same fingerprint as of a build without devices: recorded under it, they run at once."""
    exact = replace(NATIVE, numerics=Numerics.EXACT)
    with open_chain(five, None, exact, certified_only=False) as chain:
        assert [device.split()[0] for device in chain.tail.describe().devices] == ["CPU"]
        assert chain.tail.memory().devices == {}
        assert chain.tail.describe().kernel_fingerprint == kernel_fingerprint()
        expected = converse(chain, prompt(60), 32)
    with open_chain(five, "0:3,3:5", exact, certified_only=False) as chain:
        assert converse(chain, prompt(60), 7) == expected


def test_the_device_agrees_with_the_cpu(five: Path, prompt: Prompt) -> None:
    """To f16's rounding in the median row; single rows may route to another expert."""
    tokens = prompt(20, seed=2)
    rows = []
    for devices in (None, ("CPU",)):
        engine = LlamaEngine(five, None, NATIVE, placement=Placement(devices))
        try:
            rows.append(np.frombuffer(Chain([engine]).feed(tokens, chunk=1), np.float32).reshape(20, -1))
        finally:
            engine.stop()
    apart = np.abs(rows[0] - rows[1]).max(axis=1)
    assert 0 < np.median(apart) < 0.1
    assert (rows[0].argmax(axis=1) == rows[1].argmax(axis=1)).sum() >= 18
