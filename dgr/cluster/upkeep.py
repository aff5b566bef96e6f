"""When a stage's process is started again, and when one that runs is taken for dead: decisions alone, with given times."""

from __future__ import annotations

from attrs import define, field, frozen

__all__ = ["Patience", "RestartPolicy", "Vitals"]


@define
class RestartPolicy:
    """Pauses between starts of a process that keeps ending, and the one end that is final."""

    #: Seconds between two starts: at first, and at most.
    first_pause: float = 0.2
    last_pause: float = 10.0
    #: A process that was ready for this long starts again with the first pause.
    settled: float = 30.0
    #: The exit code of arguments that are refused.
    refused: int = 2
    _pause: float = field(init=False, default=0.0)
    _starts: int = field(init=False, default=0)

    def ended(self, code: int, ready_seconds: float | None, *, wanted: bool = False) -> float | None:
        """Seconds until the next start; None: never.

        ``ready_seconds``: for how long it was ready, None if it never was. ``wanted``: it was told to end, to be started anew.
        Refused arguments are final at the first start alone. Later they are a state of the machine: a port is taken for a
        moment, a file that is being replaced is not there.
        """
        self._starts += 1
        if code == self.refused and self._starts == 1 and ready_seconds is None:
            return None
        if wanted:
            self._pause = 0.0
            return 0.0
        if ready_seconds is not None and ready_seconds >= self.settled:
            self._pause = 0.0
        self._pause = min(max(2 * self._pause, self.first_pause), self.last_pause)
        return self._pause


@frozen
class Patience:
    """How long nothing may be heard of a stage."""

    #: Seconds without an answer of a stage that is ready: it is frozen.
    silence: float = 30.0
    #: Seconds in which a stage that is loading uses neither processor nor disk.
    loading: float = 300.0
    #: A native batch hangs when it has been computed for this many times as long as the longest before it, ...
    times_longest: float = 20.0
    #: ... and for at least these seconds; with none before it, for these.
    batch: float = 120.0
    first_batch: float = 900.0


@define
class Vitals:
    """What is known of one run of a process. Times are seconds of one clock."""

    patience: Patience
    _looked: float
    _heard: float = field(init=False)
    _work: object = field(init=False, default=None)
    _ready: bool = field(init=False, default=False)
    _running: float = field(init=False, default=0.0)
    _longest: float = field(init=False, default=0.0)

    def __attrs_post_init__(self) -> None:
        self._heard = self._looked

    def ready(self, now: float) -> None:
        """It takes links from now on."""
        self._ready, self._heard = True, now

    def worked(self, work: object, now: float) -> None:
        """``work``: processor seconds, bytes read and the like; whatever changes as long as it loads."""
        if work != self._work:
            self._work = work
            if not self._ready:
                self._heard = now

    def heard(self, now: float, running: float | None = None, longest: float = 0.0) -> None:
        """It answered. ``running``: seconds of the native batch under way, where it said; ``longest``: of those before."""
        self._heard = now
        if running is not None:
            self._running, self._longest = running, longest

    def verdict(self, now: float, every: float) -> str | None:
        """Why it is to be killed and started again; None as long as it lives. To be asked every ``every`` seconds.

        Asked later than that, whoever asks was stopped itself: that time does not count.
        """
        late = now - self._looked - every
        self._looked = now
        if late > every:
            self._heard += late
        silent = now - self._heard
        if not self._ready:
            if silent > self.patience.loading:
                return f"it has loaded nothing and computed nothing for {silent:.0f} s"
            return None
        if silent > self.patience.silence:
            return f"it has not answered for {silent:.0f} s"
        if self._running > self._most():
            seen = f"the longest before took {self._longest:.1f} s" if self._longest else "there was none before"
            return f"its native batch has been computed for {self._running:.0f} s; {seen}"
        return None

    def _most(self) -> float:
        if not self._longest:
            return self.patience.first_batch
        return max(self.patience.batch, self.patience.times_longest * self._longest)
