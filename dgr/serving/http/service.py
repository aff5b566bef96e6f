"""What every endpoint knows: the engine, the vocabulary, the server's options and its counters."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Mapping

import trio
from attrs import define, field, frozen
from deepseek_recipe import Tokenizer

from dgr.core.load import StageLoad
from dgr.errors import InputError
from dgr.serving.api.prompts import Ladder, Thinking
from dgr.serving.api.vocabulary import ServingVocabulary
from dgr.serving.connections.bodies import Bodies
from dgr.serving.engine import ServingEngine
from dgr.serving.http.metrics import Metrics
from dgr.serving.metrics.stages import SeenStage
from dgr.serving.tracing.server import ServerTracing

__all__ = ["ServerOptions", "Service"]

#: Seconds for which what stages told is told again, and in which a stage must answer.
_FRESH, _PATIENCE = 0.5, 2.0
#: Bodies of the largest size whose bytes are held at once.
_BODIES = 16
#: What a name in a JSON body, a metric's label and a page can hold without surprises.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


@frozen
class ServerOptions:
    """How a server answers."""

    #: The model's name in requests and answers.
    model: str = "dgr"
    #: Effort of thinking where a request says nothing of it.
    thinking: Thinking = Thinking.LOW
    ladder: Ladder = Ladder.PREVIEW
    #: Most bytes of a request's body.
    max_body: int = 8 << 20
    #: Seconds without an event after which a stream shows a sign of life; infinity: never, also not at once.
    keep_alive: float = 10.0
    #: Whether ``/metrics`` tells of the stages: those of other processes have a ``/metrics`` of their own.
    stage_metrics: bool = False

    def __attrs_post_init__(self) -> None:
        if not _NAME.fullmatch(self.model):
            raise InputError(
                f"the model's name {self.model!r} is not 1 to 128 letters, digits, and . _ : / - in between; give --name"
            )
        if not (
            0 < self.keep_alive <= 15 or self.keep_alive == math.inf
        ):  # some give up streams that are silent for longer
            raise InputError(f"keep-alive is {self.keep_alive:g} s; give up to 15, or 0 for none")
        if self.max_body < 1:
            raise InputError(f"the most bytes of a body are {self.max_body}; give 1 or more")


@define
class Service:
    """Shared by all endpoints of one server."""

    engine: ServingEngine
    vocabulary: ServingVocabulary
    options: ServerOptions
    metrics: Metrics
    tokenizer: Tokenizer
    #: None: nothing is traced.
    tracing: ServerTracing | None = None
    #: One long text at a time: tokenising takes up to 130 bytes of memory for each of its own.
    reading: trio.Lock = field(factory=trio.Lock)
    #: What has come of bodies that are not understood yet.
    bodies: Bodies = field(init=False)
    #: Unix time at which the server began.
    created: int = field(factory=lambda: int(time.time()))
    _asking: trio.Lock = field(factory=trio.Lock)
    #: When the stages told their loads last, and what.
    _loads: tuple[float, Mapping[str, StageLoad | None]] | None = None

    def __attrs_post_init__(self) -> None:
        self.bodies = Bodies(_BODIES * self.options.max_body)

    @classmethod
    def of(cls, engine: ServingEngine, vocabulary: ServingVocabulary, options: ServerOptions) -> Service:
        """A service over an engine; takes half a second for V4's vocabulary."""
        tokenizer = Tokenizer.from_str(vocabulary.decoder_json)
        return cls(engine, vocabulary, options, Metrics(engine), tokenizer)

    async def loads(self) -> Mapping[str, StageLoad | None]:
        """What the stages have to do, by address; asked for at most twice a second, however many want to know."""
        async with self._asking:
            if self._loads is None or trio.current_time() >= self._loads[0] + _FRESH:
                loads = await self.engine.pipeline.load(_PATIENCE)
                self._loads = trio.current_time(), loads
            return self._loads[1]

    async def seen_stages(self) -> list[SeenStage]:
        """The stages that ``/metrics`` tells of."""
        if not self.options.stage_metrics:
            return []
        loads, pipeline = await self.loads(), self.engine.pipeline
        described = zip(pipeline.route.stages, pipeline.descriptions, strict=True)
        return [
            SeenStage(about, load, ref.address)
            for ref, about in described
            if (load := loads.get(ref.address)) is not None
        ]

    @property
    def fingerprint(self) -> str:
        """``system_fingerprint``: with equal ones and equal seeds, answers are equal. Model, kernels and context decide it."""
        stages = self.engine.pipeline.descriptions
        text = f"{stages[0].artifact} {[stage.kernel_fingerprint for stage in stages]} {stages[0].context}"
        return f"dgr-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"

    @property
    def n_ctx(self) -> int:
        return self.engine.pipeline.context.n_ctx
