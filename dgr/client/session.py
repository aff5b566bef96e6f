"""A session as its client sees it: the transcript, what the stages have committed of it, and generation.

There is one way forward: :meth:`ClientSession._commit` brings every stage from what is committed to the end of the
transcript and returns the reply to the last chunk. A first prefill, the next turn, a decode step and a re-prefill after
any loss are the same call; only the number of tokens differs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import trio

from dgr.client.claims import checked_reports
from dgr.client.events import OVERRUN, GenerationCancelled, Prefilled, PrefillProgress, RePrefilled, StateLost
from dgr.client.generation import MOST_AHEAD, Generation, Turn, Vocabulary, encode_prompt, ending_of
from dgr.client.replies import control_error
from dgr.client.work import KeptTokens, SessionRoute, SessionWork, WorkRequest, can_go_on, held_of, loss_of
from dgr.core.arguments import check_callable, check_whole, token_ids
from dgr.core.state_machine import StateMachine
from dgr.core.values import DecodeRun, SamplingParams
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
from dgr.protocol.sampling import check_sampling
from dgr.protocol.states import CLIENT_SESSION, ClientEvent, ClientState
from dgr.wire import frames
from dgr.wire.nurseries import cancelled_first

__all__ = ["ClientSession"]


class ClientSession:
    """One conversation: its transcript, and what every stage has committed of it.

    Made by :meth:`dgr.client.pipeline.Pipeline.session`. One call at a time: a second one while an answer is drawn raises
    :class:`~dgr.errors.SessionBusy`, and any after the session's block :class:`~dgr.errors.SessionError`.
    """

    def __init__(
        self,
        route: SessionRoute,
        number: int,
        *,
        vocabulary: Vocabulary | None = None,
        retries: int = 2,
        ahead: int = 0,
    ) -> None:
        self.id = number
        #: Every token of the conversation, prompt and answers.
        self.transcript: list[int] = []
        #: Grows with every change of the transcript by its owner.
        self.turn = 0
        #: Opens a copy of it; its pipeline's.
        self.copier: Callable[[ClientSession], AbstractAsyncContextManager[ClientSession]] | None = None
        self._route = route
        self._vocabulary = vocabulary
        self._retries = retries
        self._ahead = ahead
        self._machine = StateMachine(CLIENT_SESSION)
        self._in_use = False
        self._work = self.traced = SessionWork(route, number)  # a trace follows it: see RequestTrace.follow
        #: The epoch in which stages may hold something of it; -1 when none does.
        self._epoch = -1
        self._kept: KeptTokens | None = None
        #: In DIVERGING: the transcript before it was rewritten.
        self._before: list[int] = []
        #: Why the next prefill is a re-prefill; None when it is not one.
        self._loss: str | None = None

    @property
    def state(self) -> ClientState:
        return self._machine.state

    @property
    def in_flight(self) -> int:
        """Work frames sent whose reply has not come."""
        return self._work.in_flight

    @property
    def committed(self) -> int:
        """Tokens that every stage has committed."""
        return self._work.committed

    @property
    def sent_in_all(self) -> int:
        """Tokens sent from here over the session's life, those of re-prefills included."""
        return self._work.sent_in_all

    @property
    def n_ctx(self) -> int:
        """Tokens the session can hold."""
        return self._route.limits.n_ctx

    # --- for callers ---

    def generate(
        self,
        prompt: str | Sequence[int] = (),
        *,
        transcript: Sequence[int] | None = None,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop: Sequence[int] | None = None,
        ahead: int | None = None,
    ) -> Generation:
        """Take a turn: append ``prompt`` and iterate over the answer's tokens.

        With ``transcript`` (the whole conversation, as a stateless API sends it) only what is new is prefilled; one
        that diverges from what is committed is re-prefilled from token 0. ``max_tokens``: tokens of the answer (default:
        until a stop token, or a full context). ``stop``: token ids that end the answer (default: the vocabulary's
        end-of-text). ``ahead``: tokens that stages may draw before they are asked for (default: the pipeline's); an answer
        that is left earlier has the session re-prefilled, unless it is gone on with. Nothing is sent before the first token
        is asked for. Raises :class:`ContextLimitExceeded`,
        :class:`InvalidToken`, :class:`InputError`, :class:`SessionBusy`, :class:`SessionError`; nothing was changed then.
        """
        self._check_free()
        if max_tokens is not None:
            check_whole("max_tokens", max_tokens, 0)
        if ahead is not None:
            check_whole("ahead", ahead, 0, MOST_AHEAD)
        n_vocab = self._route.limits.n_vocab
        drawn_with = check_sampling(SamplingParams() if sampling is None else sampling, n_vocab)
        ending = ending_of(stop, self._vocabulary, n_vocab)
        if isinstance(prompt, str):
            begins = not self.transcript and transcript is None
            prompt = encode_prompt(prompt, self._vocabulary, begins=begins, follows=bool(self.transcript or transcript))
        before = self.transcript if transcript is None else token_ids("transcript", transcript, n_vocab)
        whole = [*before, *token_ids("prompt", prompt, n_vocab, len(before))]
        if not whole:
            raise InputError("there is nothing to go on from: give a prompt of at least one token")
        self._rewrite(whole)
        turn = Turn(self, self._draw, self.turn, drawn_with, ending, self._ahead if ahead is None else ahead)
        return Generation(turn, self._vocabulary, max_tokens)

    async def logits(self, tokens: Sequence[int], rows: Callable[[int, memoryview], None]) -> None:
        """Append ``tokens`` and hand each chunk's rows of logits to ``rows(position, values)``.

        ``values`` are little-endian float32, ``n_vocab`` a row, the first row being that of ``position``. After a loss
        midway rows may come again, with the same bits. Raises what :meth:`generate` and
        :class:`~dgr.client.generation.Generation` raise.
        """
        self._check_free()
        check_callable("rows", rows)
        rows_from = len(self.transcript)
        new = token_ids("tokens", tokens, self._route.limits.n_vocab, rows_from)
        self._rewrite([*self.transcript, *new])
        if new:
            await self._commit(WorkRequest(rows_from=rows_from, rows=rows))

    async def prefill(self, tokens: Sequence[int]) -> None:
        """Append ``tokens`` and commit them on every stage, without an answer. Raises what :meth:`logits` raises."""
        self._check_free()
        new = token_ids("tokens", tokens, self._route.limits.n_vocab, len(self.transcript))
        self._rewrite([*self.transcript, *new])
        if self.committed < len(self.transcript):
            await self._commit(WorkRequest())

    def fork(self) -> AbstractAsyncContextManager[ClientSession]:
        """Another session with this one's transcript and, on every stage, a copy of what this one has committed.

        Each goes on by itself; the other one's state is dropped when the block ends. Where a stage has lost this one's state
        the other begins without any, and prefills at first use. Raises :class:`Overloaded` when a stage has no slot for it,
        :class:`SessionBusy`, :class:`SessionError`, :class:`DeadlineExceeded`.
        """
        self._check_free()
        if self.copier is None:
            raise SessionError(f"session {self.id} was made without a pipeline, which makes the copies")
        return self.copier(self)

    async def state_summaries(self) -> dict[str, frames.StateReport]:
        """Return where the session stands on every stage: address -> counts and digests per component.

        Raises :class:`CacheMissed`, :class:`PeerRefused` when a stage holds no such session or cannot tell.
        """
        async with self._use():
            await self._route.wait_live()
            await self._ensure_ready()
            replies = await self._ask(frames.QueryState)
        return checked_reports(replies, self._work.sent, self._work.digest)

    # --- transcript ---

    def _rewrite(self, transcript: list[int]) -> None:
        """Set the transcript; refuse what the context does not hold, before anything is changed."""
        n_ctx = self.n_ctx
        if len(transcript) > n_ctx:
            raise ContextLimitExceeded(
                f"the prompt and its history are {len(transcript)} tokens (n_prompt), the context holds {n_ctx} (n_ctx);"
                " shorten the prompt or load the stages with a larger n_ctx"
            )
        if self.state is ClientState.AHEAD:
            self._cancel_in_flight()
        if self.state in (ClientState.DRAINING, ClientState.DIVERGING):
            if transcript != self.transcript:
                self._machine.fire(ClientEvent.DIVERGE)
                self._before = self._before or self.transcript  # how much of it counts is known once it has drained
        elif not can_go_on(transcript, held := self._held, self._kept):
            self.lose(loss_of(transcript, self.transcript, held))
        self.transcript = transcript
        self.turn += 1

    @property
    def _held(self) -> list[int]:
        """What every stage holds, where nothing is in flight."""
        return held_of(self.transcript, self._kept, self._work.sent)

    def _check_open(self) -> None:
        if self.state is ClientState.CLOSED:
            raise SessionError(f"session {self.id} is closed; open another one")

    def _check_free(self) -> None:
        self._check_open()
        if self._in_use:
            raise SessionBusy(f"session {self.id} is answering already; finish or drop that generation first")

    @asynccontextmanager
    async def _use(self) -> AsyncIterator[None]:
        """Hold the session for one call; another call meanwhile is refused. It begins without a checkpoint."""
        self._check_free()
        self._in_use = True
        try:
            async with cancelled_first():
                yield
        finally:
            self._in_use = False

    # --- the one way forward ---

    async def _draw(self, sampling: SamplingParams, run: DecodeRun | None) -> frames.Token:
        """See :data:`dgr.client.generation.Draw`."""
        token = await self._commit(WorkRequest(sampling=sampling, run=run))
        assert token is not None
        self.transcript.append(token.token)
        return token

    async def _commit(self, request: WorkRequest) -> frames.Token | None:
        """Bring every stage to the end of the transcript; re-prefill after a loss, a bounded number of times.

        Returns the token that was drawn; None when none was wanted.
        """
        async with self._use():
            tries = 0
            while True:
                await self._route.wait_live()
                try:
                    if (drawn := await self._ensure_ready(request)) is not None:
                        return drawn
                    return await self._run(request)
                except Overloaded:
                    raise
                except (SessionLost, WireError) as error:
                    self._check_open()
                    self.lose(str(error))
                    tries += 1
                    if tries > self._retries:
                        raise PrefillFailed(
                            f"session {self.id} was lost {tries} times while {len(self.transcript)} tokens were being"
                            f" committed; the last time: {error}"
                        ) from error
                except DgrError as error:
                    self.lose(str(error))
                    raise

    async def _ensure_ready(self, request: WorkRequest | None = None) -> frames.Token | None:
        """Reach READY: drain what was cancelled, drop what was lost, open what is not open.

        Returns the token that the request wants when it was drawn already, for a caller who gave up too early.
        """
        self._check_open()
        position, sampling = len(self.transcript), None if request is None else request.sampling
        if self.state is ClientState.AHEAD and self._work.awaits(position, sampling):
            self._machine.fire(ClientEvent.CLAIM)
            return None
        await self._settle()
        if request is not None and request.wants_output and self.committed >= position:
            kept = self._kept if self.state is ClientState.DRAWN else None
            if kept is not None and kept.sampling == sampling and (token := kept.at(position)) is not None:
                await trio.lowlevel.checkpoint()
                if token is kept.tokens[-1]:
                    self._kept = None
                    self._machine.fire(ClientEvent.CLAIM)
                return token
            if self.state in (ClientState.READY, ClientState.DRAWN):
                # Every token is committed and nobody kept the logits of the last one.
                self.lose("the logits of the last token are gone" if self.committed == position else OVERRUN)
        if self.state is ClientState.LOST:
            await self._drop()
        if self.state is ClientState.COLD:
            await self._open()
        self._check_open()
        return None

    async def _run(self, request: WorkRequest) -> frames.Token | None:
        """Send the chunks back to back, so that all stages work at once; take the replies in order."""
        work, window, pace, began = self._work, self._route.limits.window, self._route.pace, trio.current_time()
        first, sent = work.committed, work.sent
        end, before = len(self.transcript), began
        several = end - first > pace.tokens
        token: frames.Token | None = None
        try:
            while sent < end or work.untaken:
                while sent < end and work.untaken < window:
                    until, logits = request.chunk(sent, end, pace.tokens)
                    work.send(self.transcript[sent:until], logits, request)
                    sent = until
                    self._kept = None
                    self._machine.fire(ClientEvent.SEND)
                chunk, received = await work.next_reply()
                match received.frame:
                    case frames.Token():
                        token = received.frame
                    case frames.Logits() as rows if request.rows is not None and received.payload is not None:
                        request.rows(rows.position - rows.n_rows, received.payload)
                if several:
                    now = trio.current_time()
                    if before > began:
                        pace.passed(chunk.tokens, now - before)
                    before = now
                    self._route.emit(PrefillProgress(self.id, chunk.end - first, end - first, now - began))
                if chunk.end == end:
                    break
        except BaseException:
            self._cancel_in_flight()
            raise
        if self.state is ClientState.WORKING:
            self._machine.fire(ClientEvent.GO_ON if work.untaken else ClientEvent.REPLIED)
        if first < end:
            self._report(end - first, trio.current_time() - began)
        return token

    def _report(self, tokens: int, seconds: float) -> None:
        if self._loss is not None:
            self._route.emit(RePrefilled(self.id, self._loss, tokens, seconds))
            self._loss = None
        elif tokens > 1:
            self._route.emit(Prefilled(self.id, tokens, seconds))

    # --- cancelling and losing ---

    def _cancel_in_flight(self) -> None:
        """The caller is gone, or does something else, or a reply was unusable: start nothing new; what is in flight drains."""
        if self.state not in (ClientState.WORKING, ClientState.AHEAD):
            return  # nothing was sent, or the session was lost or closed meanwhile
        if not self._work.untaken:
            self._machine.fire(ClientEvent.REPLIED)
            return
        try:
            self._work.cancel()
        except WireError as error:
            self.lose(str(error))
        else:
            self._machine.fire(ClientEvent.CANCEL)

    async def _settle(self) -> None:
        """End a decode run that nobody waits for, and let drain what was cancelled."""
        if self.state is ClientState.AHEAD:
            self._cancel_in_flight()
        if self.state in (ClientState.DRAINING, ClientState.DIVERGING):
            await self._drain()

    async def _drain(self) -> None:
        """Take the replies to cancelled work; the session then stands where the last committed chunk ended."""
        try:
            while self._work.untaken:
                chunk, received = await self._work.next_reply(cancelled=True)
                if isinstance(received.frame, frames.Token) and chunk.sampling is not None:
                    earlier = () if self._kept is None else self._kept.tokens
                    self._kept = KeptTokens(chunk.sampling, (*earlier, received.frame))
        except DgrError as error:
            self.lose(str(error))
            return
        before, self._before = self._before or self.transcript, []
        kept = self._kept
        self._machine.fire(ClientEvent.REPLIED if kept is None else ClientEvent.KEPT)
        self._route.emit(GenerationCancelled(self.id, self.committed))
        held = held_of(before, kept, self.committed)
        if can_go_on(self.transcript, held, kept):
            self._work.stand_at(held)
        else:
            self.lose(loss_of(self.transcript, before, held))

    def lose(self, reason: str) -> None:
        """State is lost on at least one stage: forget what is committed; the next use re-prefills."""
        if self.state in (ClientState.CLOSED, ClientState.LOST, ClientState.COLD):  # cold: no stage holds anything
            return
        self._machine.fire(ClientEvent.LOSE)
        if self._loss is None:
            self._loss = reason
        self._before = []
        self._kept = None
        self._work.forget(SessionLost(reason))
        self._route.emit(StateLost(self.id, reason))

    async def _ask(
        self, request: type[frames.Open | frames.Close | frames.QueryState]
    ) -> list[tuple[str, frames.Frame]]:
        return await self._route.ask_all(request(self._route.key(self.id), self._work.next_seq()))

    async def _drop(self) -> None:
        """Drop what any stage still holds; a route change has done so already."""
        if self._epoch == self._route.epoch:
            try:
                await self._ask(frames.Close)
            except SessionLost:
                if self._epoch == self._route.epoch:
                    raise
        if self.state is ClientState.LOST:
            self._epoch = -1
            self._machine.fire(ClientEvent.DROPPED)

    async def _open(self) -> None:
        """Lease a slot on every stage."""
        self._epoch = self._route.epoch
        try:
            for address, frame in await self._ask(frames.Open):
                if not isinstance(frame, frames.Opened):
                    raise control_error(address, frame)
            if self._epoch != self._route.epoch:
                raise SessionLost("the route changed while the session was being opened")
            self._check_open()
        except BaseException:
            # Some stages may have leased a slot: they are told to drop it before the next try.
            if self.state is ClientState.COLD:
                self._machine.fire(ClientEvent.LOSE)
            raise
        self._machine.fire(ClientEvent.OPENED)

    async def aclose(self) -> None:
        """Drop the session's state on every stage."""
        if self.state is ClientState.CLOSED:
            return
        self._machine.fire(ClientEvent.CLOSE)
        self._work.forget(SessionLost("the session was closed"))
        if self._epoch == self._route.epoch:
            try:
                await self._ask(frames.Close)
            except (WireError, SessionLost):
                # A stage that cannot be reached drops the session when its control link ends, or when it is fenced.
                return
