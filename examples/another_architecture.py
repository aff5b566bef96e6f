"""Another architecture behind the seam: an engine of its own, held to the contract, and a pipeline over two stages of it.

python examples/another_architecture.py        # docs/adding-an-architecture.md walks through it
"""

import hashlib
import math
import struct
from collections.abc import Sequence

import trio

from dgr import ContextParams, LayerRange, Route, SamplingParams, StageRef, open_cluster, open_pipeline_on
from dgr.core.values import ComponentSummary, LogitsWanted, StageIdentity, StateSummary, TopLogprob
from dgr.engine.base import MemoryReport, Output, Work
from dgr.errors import ContextLimitExceeded, EngineError, InputError, InvalidLayerRange, NonFinite
from dgr.testing import EngineContract, FakeEngine, FakeVocabulary

N_LAYERS, N_VOCAB, WIDTH = 4, FakeVocabulary.n_vocab, 1
#: Below 2**24: every residue is an exact float32, so the bits cannot depend on how the work is batched.
PRIME = 16_777_213


class SumsEngine:
    """A made-up architecture: each layer keeps one running sum of all that went through it, and adds it to the stream."""

    inline = True  # calls return at once; an engine that computes for milliseconds says False and gets a thread

    def __init__(self, layers: LayerRange | None, context: ContextParams) -> None:
        layers = layers or LayerRange(0, N_LAYERS)
        if layers.end > N_LAYERS:
            raise InvalidLayerRange(f"layers {layers} end beyond the last main layer; the model has {N_LAYERS}")
        self._layers, self._context = layers, context
        self._positions = [0] * context.n_seq_max
        self._sums = [dict.fromkeys(layers.layers, 0) for _ in range(context.n_seq_max)]
        self._ended = ""
        self._sampler = FakeEngine()  # how tokens are drawn is no matter of the architecture
        self._about = StageIdentity(
            adapter="sums/1",
            architecture="sums",
            artifact=hashlib.blake2b(b"sums", digest_size=16).hexdigest(),
            layers=layers,
            n_layers=N_LAYERS,
            n_vocab=N_VOCAB,
            width_in=0 if layers.begin == 0 else WIDTH,
            width_out=0 if layers.end == N_LAYERS else WIDTH,
            token_sideband=False,  # a stage behind the head needs the stream alone
            context=context,
            kernel_fingerprint="integers",
            components=("sums",),
            capabilities={"decode": "executable"},  # not `fork`: its checks are skipped
            devices=("CPU",),
        )

    # --- what it says of itself ---

    def describe(self) -> StageIdentity:
        return self._about

    def memory(self) -> MemoryReport:
        n_layers = len(self._layers.layers)
        return MemoryReport(weights=4 * n_layers, compute=0, state={"sums": 8 * n_layers * self._context.n_seq_max})

    # --- the work ---

    def run(self, batch: Sequence[Work]) -> list[Output]:
        self._check(batch)  # all of it, before anything changes
        return [self._run(work) for work in batch]

    def _run(self, work: Work) -> Output:
        sums = self._sums[work.slot]
        given = [3 * token + 1 for token in work.tokens] if work.residual is None else map(int, _floats(work.residual))
        streams = []
        for position, value in enumerate(given, work.position):
            stream = value
            for layer in sums:
                sums[layer] = 1 + (5 * sums[layer] + stream + layer + position) % (PRIME - 1)
                stream = (stream + sums[layer]) % PRIME
            streams.append(stream)
        self._positions[work.slot] += len(work.tokens)
        if self._about.width_out:
            return Output(work.slot, residual=struct.pack(f"<{len(streams)}f", *streams))
        wanted = {LogitsWanted.NONE: [], LogitsWanted.LAST: streams[-1:], LogitsWanted.ALL: streams}[work.logits]
        rows = [(stream * (7 * token + 3)) % PRIME % 251 / 8 for stream in wanted for token in range(N_VOCAB)]
        return Output(work.slot, logits=struct.pack(f"<{len(rows)}f", *rows) if wanted else None)

    def sample(
        self, logits: memoryview | bytes, history: Sequence[int], params: SamplingParams
    ) -> tuple[int, tuple[TopLogprob, ...]]:
        return self._sampler.sample(logits, history, params)

    # --- slots ---

    def position(self, slot: int) -> int:
        return self._positions[self._slot(slot)]

    def close(self, slot: int) -> None:
        self._positions[self._slot(slot)] = 0
        self._sums[slot] = dict.fromkeys(self._sums[slot], 0)

    def fork(self, source: int, target: int) -> None:
        raise InputError(
            f"slot {source} cannot be copied to {target}: this engine does not describe the capability fork"
        )

    def state_summary(self, slot: int) -> StateSummary:
        sums, position = self._sums[self._slot(slot)], self.position(slot)
        digest = hashlib.blake2b(repr(sums).encode(), digest_size=16).hexdigest()
        rows = min(1, position)
        return StateSummary(position, (ComponentSummary("sums", len(sums), 1, rows, rows, digest),))

    # --- its end ---

    def abort(self) -> None:
        self._ended = self._ended or "aborted"

    def stop(self) -> None:
        self._ended = "stopped"

    # --- guards: what is refused, with what error, and that nothing has changed then, is in the contract ---

    def _slot(self, slot: int) -> int:
        if self._ended == "stopped":
            raise EngineError("the stage was stopped; open another one")
        if not 0 <= slot < len(self._positions):
            raise InputError(f"slot is {slot}, must be in 0..{len(self._positions) - 1}")
        return slot

    def _check(self, batch: Sequence[Work]) -> None:
        if self._ended:
            raise EngineError(f"the stage was {self._ended}; open another one")
        n_tokens, most = sum(len(work.tokens) for work in batch), self._context.n_batch
        if not 0 < n_tokens <= most or not all(work.tokens for work in batch):
            raise InputError(f"n_tokens is {n_tokens}, must be in 1..n_batch ({most}), and none empty")
        if sorted({work.slot for work in batch}) != [work.slot for work in batch]:
            raise InputError("give each slot one run, in ascending order")
        for work in batch:
            held, given = self.position(work.slot), memoryview(work.residual or b"").nbytes
            if work.position != held:
                raise InputError(f"position is {work.position}, slot {work.slot} continues at {held}")
            if wrong := [token for token in work.tokens if not 0 <= token < N_VOCAB]:
                raise InputError(f"token id {wrong[0]} is outside the vocabulary 0..{N_VOCAB - 1}")
            if held + len(work.tokens) > self._context.n_ctx:
                raise ContextLimitExceeded(f"slot {work.slot} holds {held} of n_ctx {self._context.n_ctx} tokens")
            if given != 4 * self._about.width_in * len(work.tokens):
                raise InputError(f"a residual of {given} bytes does not belong to {len(work.tokens)} tokens here")
            if not all(map(math.isfinite, _floats(work.residual or b""))):
                raise NonFinite(f"the residual of slot {work.slot} holds NaN or Inf")


def _floats(data: memoryview | bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{memoryview(data).nbytes // 4}f", data)


class SumsContract(EngineContract):
    """Under pytest, name it ``Test...`` and nothing else is needed."""

    def make(self, layers: LayerRange | None, context: ContextParams) -> SumsEngine:
        return SumsEngine(layers, context)


async def main() -> None:
    report = SumsContract.report()
    for name, error in report.failed.items():
        print(f"FAILED {name}: {error}")
    print(f"contract: {len(report.passed)} checks passed, {len(report.failed)} failed, {len(report.skipped)} skipped")
    answers = []
    for split in ("0:4", "0:1,1:4"):
        stages = [StageRef(f"stage-{at}", LayerRange.parse(layers)) for at, layers in enumerate(split.split(","))]
        async with open_cluster() as cluster:
            for ref in stages:
                await cluster.start(ref.address, SumsEngine(ref.layers, ContextParams(n_ctx=256, n_seq_max=2)))
            route = Route(tuple(stages))
            vocabulary = FakeVocabulary()
            async with (
                open_pipeline_on(cluster.connect, route, vocabulary=vocabulary) as pipeline,
                pipeline.session() as session,
            ):
                answer = session.generate("Once", max_tokens=8, stop=())
                answers.append([token.id async for token in answer])
        print(f"{split}: {answers[-1]}")
    print("the same tokens" if answers[0] == answers[1] else "NOT the same tokens")


if __name__ == "__main__":
    trio.run(main)
