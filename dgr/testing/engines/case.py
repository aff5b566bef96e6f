"""What the checks of the engine contract share: engines and chains to try, token ids, and assertions that say what failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from unittest import SkipTest

from attrs import field, frozen

from dgr.core.route import LayerRange
from dgr.core.values import ContextParams
from dgr.engine.base import ShardEngine
from dgr.errors import DgrError
from dgr.selftest.chain import Chain

__all__ = ["ContractCase", "ContractReport", "as_bytes", "check", "check_equal", "refused"]


@frozen
class ContractReport:
    """What became of the checks, by their names."""

    passed: list[str] = field(factory=list)
    #: With the error of each.
    failed: dict[str, Exception] = field(factory=dict)
    #: With the reason: the engine does not promise what the check is about.
    skipped: dict[str, str] = field(factory=dict)


class ContractCase:
    """An engine under test. Define :meth:`make`; override the attributes where an engine needs other sizes."""

    #: What engines are made with; they may round it up, and the checks go by what they describe.
    context = ContextParams(n_ctx=256, n_batch=48, n_ubatch=32, n_seq_max=3)
    #: Tokens of the longest prompt; at most n_ctx - 16. Long enough for every component to hold rows.
    length = 140
    #: Tokens decoded after it.
    decoded = 4

    def make(self, layers: LayerRange | None, context: ContextParams) -> ShardEngine:
        """A new engine of the range; of the whole model when ``layers`` is None."""
        raise NotImplementedError

    def cuts(self, n_layers: int) -> Sequence[int]:
        """Layers at which the model may be cut in two; none when it cannot be cut."""
        return sorted({1, n_layers // 2, n_layers - 1} - {0, n_layers})

    @classmethod
    def report(cls, *, first_only: bool = False) -> ContractReport:
        """Run every check without pytest, which reports the same; ``first_only`` ends with the first that fails."""
        found = ContractReport()
        for name in sorted(dir(cls)):
            if not name.startswith("test_") or (first_only and found.failed):
                continue
            try:
                getattr(cls(), name)()
            except (AssertionError, DgrError) as error:
                found.failed[name] = error
            except SkipTest as reason:
                found.skipped[name] = str(reason)
            else:
                found.passed.append(name)
        return found

    @classmethod
    def failures(cls, *, first_only: bool = False) -> dict[str, Exception]:
        """The checks that fail (:meth:`report`), with their errors."""
        return cls.report(first_only=first_only).failed

    @contextmanager
    def engine(self, layers: LayerRange | None = None) -> Iterator[ShardEngine]:
        """An engine for the length of the block."""
        engine = self.make(layers, self.context)
        try:
            yield engine
        finally:
            engine.stop()

    @contextmanager
    def chain(self, *cuts: int) -> Iterator[Chain]:
        """The model cut at ``cuts``."""
        if not cuts:
            with self.engine() as engine:
                yield Chain([engine])
            return
        with ExitStack() as stack:
            first = stack.enter_context(self.engine(LayerRange(0, cuts[0])))
            bounds = [*cuts, first.describe().n_layers]
            rest = [stack.enter_context(self.engine(LayerRange(*pair))) for pair in pairwise(bounds)]
            yield Chain([first, *rest])

    @contextmanager
    def cut_in_two(self) -> Iterator[Chain]:
        """The model cut once, somewhere in the middle."""
        with self.engine() as whole:
            cuts = self.cuts_of(whole)
        with self.chain(cuts[len(cuts) // 2]) as chain:
            yield chain

    # --- what a check needs of the engine; without it, the check is skipped: pytest reads unittest's exception too ---

    def cuts_of(self, engine: ShardEngine) -> Sequence[int]:
        """Layers at which to cut; skips the check when there are none."""
        n_layers = engine.describe().n_layers
        if not (cuts := self.cuts(n_layers)):
            raise SkipTest(f"a model of {n_layers} layers that is cut nowhere")
        return cuts

    def needs_exact_numerics(self, engine: ShardEngine) -> None:
        """Skip the check unless the engine promises equal bits over other chunks and companions."""
        if not (numerics := engine.describe().context.numerics).exact_kernels:
            raise SkipTest(
                f"numerics = {numerics.value}: equal bits over other batches are promised by exact ones only"
            )

    def needs_slots(self, engine: ShardEngine, count: int) -> None:
        """Skip the check unless the engine has so many sequence slots."""
        if (n_seq_max := engine.describe().context.n_seq_max) < count:
            raise SkipTest(f"n_seq_max = {n_seq_max}: the check needs {count} sequence slots")

    def needs_no_sideband(self, engine: ShardEngine) -> None:
        """Skip the check unless the engine computes from the residual alone."""
        if engine.describe().token_sideband:
            raise SkipTest("token_sideband: the engine says that it needs the ids beside the residual")

    def prompt(self, engine: ShardEngine, length: int | None = None, kind: int = 0) -> list[int]:
        """Token ids that depend on ``kind``, within the engine's vocabulary and context."""
        about = engine.describe()
        length = min(length or self.length, about.context.n_ctx - 16)
        return [(7 + 11 * kind + i * (13 + kind) + i * i // 3) % about.n_vocab for i in range(length)]


def as_bytes(data: memoryview | bytes | None) -> bytes:
    """An output that may be absent, as bytes to compare."""
    return b"" if data is None else bytes(data)


def check(truth: object, what: str) -> None:
    """``what`` is so."""
    if not truth:
        raise AssertionError(f"not so: {what}")


def check_equal(seen: object, expected: object, what: str) -> None:
    """``what`` is as expected."""
    if seen != expected:
        raise AssertionError(f"{what}: {_short(seen)} is not {_short(expected)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"


@contextmanager
def refused(error: type[DgrError], what: str) -> Iterator[None]:
    """The block ends with ``error``, because ``what`` is not allowed."""
    try:
        yield
    except error:
        return
    except DgrError as other:
        raise AssertionError(f"{what}: raised {type(other).__name__} ({other}), should be {error.__name__}") from other
    raise AssertionError(f"{what} was not refused; {error.__name__} is due")
