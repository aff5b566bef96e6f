"""A session as its pipeline sees it: the transcript, what the stages have committed of it, and generation.

There is one way forward: :meth:`ClientSession._commit` brings every stage from what is committed to the end of the
transcript and returns the answer to the last chunk. A first prefill, the next turn, a decode step and a re-prefill after
any loss are the same call; only the number of tokens differs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio

from dgr.client.claims import Asked, check_frontier
from dgr.client.events import Cancelled, Prefilled, PrefillProgress, RePrefilled, StateLost
from dgr.client.generation import Generation
from dgr.client.goals import Goal
from dgr.client.replies import refused_request, refused_work
from dgr.core.arguments import check_whole, token_ids
from dgr.core.prefix import PrefixDigest
from dgr.core.state_machine import Machine
from dgr.engine.base import LogitsWanted, SamplingParams
from dgr.errors import (
    ContextLimitExceeded,
    DgrError,
    InputError,
    Overloaded,
    PrefillFailed,
    SessionBusy,
    SessionError,
    SessionLost,
    WireError,
)
from dgr.protocol.sampling import to_wire
from dgr.protocol.states import CLIENT, ClientEvent, ClientState
from dgr.wire import frames
from dgr.wire.framing import Received
from dgr.wire.nurseries import cancelled_first

if TYPE_CHECKING:
    from dgr.client.pipeline import Pipeline

__all__ = ["ClientSession"]


class ClientSession:
    """One conversation. Made by :meth:`Pipeline.session`."""

    def __init__(self, pipeline: Pipeline, session_id: int) -> None:
        self.id = session_id
        #: Every token of the conversation, prompt and answers.
        self.transcript: list[int] = []
        #: Tokens that every stage has committed.
        self.committed = 0
        self._pipeline = pipeline
        self._machine = Machine(CLIENT)
        self._in_use = trio.Lock()
        self._prefix = PrefixDigest()
        self._outstanding: dict[int, Asked] = {}
        self._next_seq = 1
        #: The epoch in which stages may hold something of it; -1 when none does.
        self._epoch = -1
        #: What the last token asked for was to be drawn with, and the answer when it came after its caller had gone.
        self._drawing: frames.Sampling | None = None
        self._unclaimed: Received | None = None
        #: What was sent, if the transcript was rewritten while that drains.
        self._sent_before_rewrite: list[int] = []
        self.turn = 0  # grows with every change of the transcript by its owner
        #: Why the next prefill starts from token 0 again; None when it does not.
        self._lost_because: str | None = None

    @property
    def state(self) -> ClientState:
        return self._machine.state

    @property
    def in_flight(self) -> int:
        """Work frames sent and not answered yet."""
        return len(self._outstanding)

    # --- what people call ---

    def generate(
        self,
        prompt: str | Sequence[int] = (),
        *,
        transcript: Sequence[int] | None = None,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop: Sequence[int] | None = None,
    ) -> Generation:
        """Take a turn: append ``prompt`` and iterate over the answer's tokens.

        With ``transcript`` (the whole conversation, as a stateless API sends it) only what is new is prefilled; one
        that diverges from what is committed is re-prefilled from token 0. ``stop``: token ids that end the answer
        (default: the vocabulary's end-of-text). Raises :class:`ContextLimitExceeded`, :class:`InvalidToken`,
        :class:`InputError`; nothing was changed then.
        """
        self._refuse_if_busy()
        if max_tokens is not None:
            check_whole("max_tokens", max_tokens, 0)
        sampling, n_vocab = sampling or SamplingParams(), self._pipeline.n_vocab
        to_wire(sampling, n_vocab)
        vocabulary = self._pipeline.vocabulary
        ending = None if stop is None else frozenset(token_ids("stop", stop, n_vocab))
        if isinstance(prompt, str):
            if vocabulary is None:
                raise InputError("a text prompt needs a vocabulary; give token ids, or open the pipeline with one")
            if not (prompt or self.transcript or transcript):  # the begin-of-text token alone is not a question
                raise InputError("the prompt is empty, and there is nothing before it: give at least one character")
            prompt = vocabulary.encode(prompt, add_special=not self.transcript and transcript is None)
        before = self.transcript if transcript is None else token_ids("transcript", transcript, n_vocab)
        whole = [*before, *token_ids("prompt", prompt, n_vocab, len(before))]
        if not whole:
            raise InputError("there is nothing to go on from: give a prompt of at least one token")
        self._rewrite(whole)
        if ending is None:
            ending = frozenset(() if vocabulary is None or vocabulary.eos is None else (vocabulary.eos,))
        return Generation(self, sampling, max_tokens, ending)

    async def logits(self, tokens: Sequence[int], rows: Callable[[int, memoryview], None]) -> None:
        """Append ``tokens`` and hand each chunk's rows of logits to ``rows(position, values)``.

        ``values`` are little-endian float32, ``n_vocab`` a row, the first row being that of ``position``. After a loss
        in mid-way rows may come again, with the same bits.
        """
        self._refuse_if_busy()
        rows_from, new = len(self.transcript), token_ids("tokens", tokens, self._pipeline.n_vocab, len(self.transcript))
        self._rewrite([*self.transcript, *new])
        if new:
            await self._commit(Goal(rows_from=rows_from, rows=rows))

    async def prefill(self, tokens: Sequence[int]) -> None:
        """Append ``tokens`` and commit them on every stage, without an answer."""
        self._refuse_if_busy()
        new = token_ids("tokens", tokens, self._pipeline.n_vocab, len(self.transcript))
        self._rewrite([*self.transcript, *new])
        if self.committed < len(self.transcript):
            await self._commit(Goal())

    async def frontier(self) -> dict[str, frames.Frontier]:
        """Where the session stands on every stage: address -> counts and digests per component."""
        async with cancelled_first(), self._use():
            await self._pipeline.wait_live()
            await self._settle()
            answers, prefix = await self._ask(frames.Probe), PrefixDigest(self.transcript[: self.committed])
        result = {}
        for address, frame in answers:
            if not isinstance(frame, frames.Frontier):
                raise refused_request(address, frame)
            check_frontier(address, frame, prefix)
            result[address] = frame
        return result

    # --- transcript ---

    def _rewrite(self, transcript: list[int]) -> None:
        """Set the transcript; refuse what the context does not hold, before anything is changed."""
        n_ctx = self._pipeline.context.n_ctx
        if len(transcript) > n_ctx:
            raise ContextLimitExceeded(
                f"the prompt and its history are {len(transcript)} tokens (n_prompt), the context holds {n_ctx} (n_ctx);"
                " shorten the prompt or load the stages with a larger n_ctx"
            )
        sent = self._sent_before_rewrite or self.transcript[: self._prefix.position]
        if transcript[: len(sent)] != sent:
            if self.state is ClientState.DRAINING:
                self._sent_before_rewrite = sent  # how much of it counts is known once it has drained
            else:
                self.lose("diverged")
        self.transcript = transcript
        self.turn += 1

    def _refuse_if_closed(self) -> None:
        if self.state is ClientState.CLOSED:
            raise SessionError(f"session {self.id} is closed; open another one")

    def _refuse_if_busy(self) -> None:
        self._refuse_if_closed()
        if self._in_use.locked():
            raise SessionBusy(f"session {self.id} is answering already; finish or drop that generation first")

    # --- the one way forward ---

    async def next_token(self, params: SamplingParams) -> frames.Token:
        """Commit the transcript and draw the token after it; the transcript grows by it."""
        self._refuse_if_busy()
        received = await self._commit(Goal(sampling=to_wire(params, self._pipeline.n_vocab)))
        assert received is not None
        assert isinstance(received.frame, frames.Token)
        self.transcript.append(received.frame.token)
        return received.frame

    async def _commit(self, goal: Goal) -> Received | None:
        """Bring every stage to the end of the transcript; re-prefill after a loss, a bounded number of times.

        Gives the answer to the last chunk; None when there was nothing to run and no answer is wanted.
        """
        async with cancelled_first(), self._use():
            tries = 0
            while True:
                await self._pipeline.wait_live()
                try:
                    if (drawn := await self._settle(goal)) is not None:
                        return drawn
                    return await self._run(goal)
                except Overloaded:
                    raise
                except (SessionLost, WireError) as error:
                    self._refuse_if_closed()
                    self.lose(str(error))
                    tries += 1
                    if tries > self._pipeline.retries:
                        raise PrefillFailed(
                            f"session {self.id} was lost {tries} times while {len(self.transcript)} tokens were being"
                            f" committed; the last time: {error}"
                        ) from error
                except DgrError as error:
                    self.lose(str(error))
                    raise

    def _use(self) -> trio.Lock:
        self._refuse_if_busy()
        return self._in_use

    async def _settle(self, goal: Goal | None = None) -> Received | None:
        """Reach READY: drain what was cancelled, drop what was lost, open what is not open.

        Gives the token that the goal wants when it was drawn already, for a caller who gave up too early.
        """
        self._refuse_if_closed()
        if self.state is ClientState.DRAINING:
            await self._drain()
        if (
            goal is not None
            and goal.wants_answer
            and self.committed == len(self.transcript)
            and self.state is ClientState.READY
        ):
            if self._unclaimed is not None and goal.sampling is not None and goal.sampling == self._drawing:
                drawn, self._unclaimed = self._unclaimed, None
                return drawn
            # Every token is committed and nobody kept the logits of the last one.
            self.lose("the logits of the last token are gone")
        if self.state is ClientState.LOST:
            await self._drop()
        if self.state is ClientState.COLD:
            await self._open()
        self._refuse_if_closed()
        return None

    async def _run(self, goal: Goal) -> Received | None:
        """Send the chunks back to back, so that all stages work at once; take the answers in order."""
        pipeline, began = self._pipeline, trio.current_time()
        first, end = self.committed, len(self.transcript)
        if self._prefix.position != first:
            self._prefix = PrefixDigest(self.transcript[:first])
        chunks = deque(goal.chunks(first, end, pipeline.chunk))
        several = len(chunks) > 1
        received: Received | None = None
        try:
            while chunks or self._outstanding:
                while chunks and len(self._outstanding) < pipeline.window:
                    self._send(*chunks.popleft(), goal)
                received = await self._next_answer("work frame")
                position = self._accept(received, goal)
                if several:
                    seconds = trio.current_time() - began
                    pipeline.emit(PrefillProgress(self.id, position - first, end - first, seconds))
        except BaseException:
            self._give_up()
            raise
        if received is not None:
            self._machine.fire(ClientEvent.ANSWERED)
            self._report(end - first, trio.current_time() - began)
        return received

    async def _next_answer(self, what: str) -> Received:
        """The answer to the oldest work in flight."""
        seq, asked = next(iter(self._outstanding.items()))
        received = await asked.answer.wait(self._pipeline.timeouts.reply, f"{what} {seq} of session {self.id}")
        if self._outstanding.pop(seq, None) is None:
            # It came, and before this task ran the session was lost or closed: the answer counts no more.
            raise SessionLost(self._lost_because or "the session was closed")
        return received

    def _send(self, begin: int, end: int, logits: LogitsWanted, goal: Goal) -> None:
        tokens = tuple(self.transcript[begin:end])
        seq = self._next_seq
        frame = frames.Tokens(
            key=self._pipeline.key(self.id),
            seq=seq,
            expect=frames.Expectation(begin, self._prefix.digest()),
            tokens=tokens,
            logits=logits.value,
            sampling=goal.sampling if logits is LogitsWanted.LAST else None,
        )
        self._pipeline.head.send_nowait(frame)
        self._next_seq += 1
        self._outstanding[seq] = Asked(frame)
        self._drawing, self._unclaimed = frame.sampling, None
        self._prefix.extend(tokens)
        self._machine.fire(ClientEvent.SEND)

    def _accept(self, received: Received, goal: Goal) -> int:
        """Take the answer to a chunk; gives the position it brought every stage to."""
        match received.frame:
            case frames.Advanced(position=position) | frames.Token(position=position):
                return position
            case frames.Logits() as frame if goal.rows is not None and received.payload is not None:
                goal.rows(frame.position - frame.n_rows, received.payload)
                return frame.position
            case frame:
                raise refused_work(frame)

    def _report(self, tokens: int, seconds: float) -> None:
        if self._lost_because is not None:
            self._pipeline.emit(RePrefilled(self.id, self._lost_because, tokens, seconds))
            self._lost_because = None
        elif tokens > 1:
            self._pipeline.emit(Prefilled(self.id, tokens, seconds))

    def on_answer(self, address: str, seq: int, received: Received) -> None:
        """From the reader of a control link. Raises :class:`WireError` for what is not an answer to the request."""
        asked = self._outstanding.get(seq)
        if asked is None:
            return
        stages = self._pipeline.route.stages
        head, tail = address == stages[0].address, address == stages[-1].address
        asked.check(received.frame, head=head, tail=tail, n_vocab=self._pipeline.n_vocab)
        if isinstance(received.frame, frames.Advanced | frames.Token | frames.Logits):
            self.committed = max(self.committed, received.frame.position)
        asked.answer.set(received)

    # --- cancelling and losing ---

    def _give_up(self) -> None:
        """The caller is gone, or an answer was no good: start nothing new; what is in flight drains."""
        if self.state is not ClientState.WORKING:
            return  # nothing was sent, or the session was lost or closed meanwhile
        if not self._outstanding:
            self._machine.fire(ClientEvent.ANSWERED)
            return
        try:
            self._pipeline.head.send_nowait(frames.Cancel(self._pipeline.key(self.id), self._next_seq - 1))
        except WireError as error:
            self.lose(str(error))
        else:
            self._machine.fire(ClientEvent.CANCEL)

    async def _drain(self) -> None:
        """Take the answers to cancelled work; the session then stands where the last committed chunk ended."""
        try:
            while self._outstanding:
                received = await self._next_answer("cancelled work frame")
                if not isinstance(received.frame, frames.Cancelled | frames.Advanced | frames.Token | frames.Logits):
                    raise refused_work(received.frame)
                if isinstance(received.frame, frames.Token):
                    self._unclaimed = received
        except DgrError as error:
            self.lose(str(error))
            return
        sent, self._sent_before_rewrite = self._sent_before_rewrite or self.transcript, []
        self._machine.fire(ClientEvent.ANSWERED)
        self._pipeline.emit(Cancelled(self.id, self.committed))
        if self.transcript[: self.committed] == sent[: self.committed]:
            self._prefix = PrefixDigest(self.transcript[: self.committed])
        else:
            self.lose("diverged")

    def lose(self, reason: str) -> None:
        """State is lost on at least one stage: forget what is committed; the next use re-prefills."""
        if self.state in (ClientState.CLOSED, ClientState.LOST, ClientState.COLD):  # cold: no stage holds anything
            return
        self._machine.fire(ClientEvent.LOSE)
        if self._lost_because is None:
            self._lost_because = reason
        self.committed = 0
        self._sent_before_rewrite = []
        self._unclaimed = None
        self._prefix = PrefixDigest()
        for asked in self._outstanding.values():
            asked.answer.set(SessionLost(reason))
        self._outstanding = {}
        self._pipeline.emit(StateLost(self.id, reason))

    async def _ask(self, request: type[frames.Open | frames.Close | frames.Probe]) -> list[tuple[str, frames.Frame]]:
        seq = self._next_seq
        self._next_seq += 1
        return await self._pipeline.ask_all(request(self._pipeline.key(self.id), seq))

    async def _drop(self) -> None:
        """Drop what any stage still holds; a route change has done so already."""
        if self._epoch == self._pipeline.epoch:
            try:
                await self._ask(frames.Close)
            except SessionLost:
                if self._epoch == self._pipeline.epoch:
                    raise
        if self.state is ClientState.LOST:
            self._epoch = -1
            self._machine.fire(ClientEvent.DROPPED)

    async def _open(self) -> None:
        """Lease a slot on every stage."""
        self._epoch = self._pipeline.epoch
        try:
            for address, frame in await self._ask(frames.Open):
                if not isinstance(frame, frames.Opened):
                    raise refused_request(address, frame)
            if self._epoch != self._pipeline.epoch:
                raise SessionLost("the route changed while the session was being opened")
            self._refuse_if_closed()
        except BaseException:
            # Some stages may have leased a slot: they are told to drop it before the next try.
            if self._machine.can(ClientEvent.LOSE):
                self._machine.fire(ClientEvent.LOSE)
            raise
        self._machine.fire(ClientEvent.OPENED)

    async def aclose(self) -> None:
        """Drop the session's state on every stage."""
        if self.state is ClientState.CLOSED:
            return
        self._machine.fire(ClientEvent.CLOSE)
        for asked in self._outstanding.values():
            asked.answer.set(SessionLost("the session was closed"))
        self._outstanding = {}
        if self._epoch == self._pipeline.epoch:
            try:
                await self._ask(frames.Close)
            except (WireError, SessionLost):
                # A stage that cannot be reached drops the session when its control link ends, or when it is fenced.
                return
