"""A client that says what it likes to stages, frame by frame, because no pipeline would say it.

async with open_raw_client(cluster.connect, route) as client:
    await client.begin()
    (reply,) = await client.say(client.work(1, 2, [5, 6]))      # in a test: all that comes until all is at rest
    reply = await client.ask(client.work(1, 3, [7], [5, 6]))    # real stages: the first that comes
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import trio
import trio.testing

from dgr.core.prefix import PrefixDigest
from dgr.core.route import Route, StageRef
from dgr.core.values import Expectation, Key, LogitsWanted, SamplingParams
from dgr.errors import DgrError, SessionLost
from dgr.wire import Link, frames
from dgr.wire.nurseries import open_nursery

__all__ = ["GREEDY", "RawClient", "open_raw_client"]

#: Draw the most likely token.
GREEDY = SamplingParams(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, -1, 0, 0, 0)


class RawClient:
    """Control links to the stages of a route, and the frames that came back on them."""

    def __init__(self, route: Route, links: Mapping[str, Link], lease: bytes) -> None:
        self.route = route
        #: 16 bytes that tell this client from others; a stage keeps epochs and sessions by them.
        self.lease = lease
        self._links = links
        #: What came and was not taken yet, with the address it came from.
        self._replies: list[tuple[str, frames.Frame]] = []
        self._ended: dict[str, DgrError | None] = {}
        self._came = trio.Event()

    @property
    def closed(self) -> bool:
        """Whether a stage closed its link, or broke it."""
        return bool(self._ended)

    async def read(self, address: str) -> None:
        """Keep what a stage sends, until its link ends."""
        end: DgrError | None = None
        try:
            async for received in self._links[address]:
                self._replies.append((address, received.frame))
                self._wake()
        except DgrError as error:
            end = error
        self._ended[address] = end
        self._wake()

    def _wake(self) -> None:
        self._came.set()
        self._came = trio.Event()

    # --- saying ---

    def send(self, *said: frames.Frame, to: str | None = None) -> None:
        """Send frames back to back, to the head unless ``to`` names a stage."""
        for frame in said:
            self._links[to or self.route.stages[0].address].send_nowait(frame)

    async def reply(self, address: str | None = None) -> frames.Frame:
        """The next frame of a stage, or of any; ``Denied("the link is closed")`` when there will be none.

        Raises the :class:`~dgr.errors.DgrError` that broke the link.
        """
        while True:
            for place, (source, frame) in enumerate(self._replies):
                if address in (None, source):
                    del self._replies[place]
                    return frame
            for source, error in self._ended.items():
                if address in (None, source):
                    if error is not None:
                        raise error
                    return frames.Denied("the link is closed")
            await self._came.wait()

    async def say(self, *said: frames.Frame) -> list[frames.Frame]:
        """Send frames to the head; everything that came back from anywhere once all tasks are at rest."""
        self.send(*said)
        await trio.testing.wait_all_tasks_blocked()
        came, self._replies = [frame for _, frame in self._replies], []
        return came

    async def ask(self, frame: frames.Frame) -> frames.Frame:
        """Send a frame to the head; the first reply from anywhere."""
        self.send(frame)
        return await self.reply()

    async def ask_all(self, frame_of: Callable[[int, StageRef], frames.Frame]) -> list[frames.Frame]:
        """Send each stage a frame of its own, then wait for the reply of each."""
        for index, ref in enumerate(self.route.stages):
            self.send(frame_of(index, ref), to=ref.address)
        return [await self.reply(ref.address) for ref in self.route.stages]

    async def begin(self, epoch: int = 1, session: int = 1) -> None:
        """Fence an epoch and open a session on every stage, each answered before the next is asked, as a pipeline does.

        Raises :class:`~dgr.errors.SessionLost` when a stage refuses.
        """
        fenced = await self.ask_all(lambda index, _: self.fence(epoch, index))
        opened = await self.ask_all(lambda _index, _: self.open(session, 1, epoch))
        for frame in (*fenced, *opened):
            if not isinstance(frame, frames.Fenced | frames.Opened):
                raise SessionLost(f"a stage answered the beginning with {frame}")

    # --- what is said ---

    def key(self, session: int, epoch: int = 1) -> Key:
        return Key(self.lease, epoch, session)

    def fence(self, epoch: int, index: int = 0) -> frames.Fence:
        route = self.route
        neighbours = route.predecessor(index), route.successor(index)
        return frames.Fence(self.lease, epoch, route.stages[index].address, *neighbours, ring=route.other_end(index))

    def open(self, session: int, seq: int, epoch: int = 1) -> frames.Open:
        return frames.Open(self.key(session, epoch), seq)

    def fork(
        self, session: int, seq: int, source: int, held: Sequence[int], *, epoch: int = 1, position: int | None = None
    ) -> frames.Fork:
        """A copy of ``source`` that expects it to hold ``held``, at another ``position`` where that is given."""
        expect = Expectation(len(held) if position is None else position, PrefixDigest(held).digest())
        return frames.Fork(self.key(session, epoch), seq, source, expect)

    def close(self, session: int, seq: int, epoch: int = 1) -> frames.Close:
        return frames.Close(self.key(session, epoch), seq)

    def work(
        self,
        session: int,
        seq: int,
        tokens: Sequence[int],
        before: Sequence[int] = (),
        *,
        epoch: int = 1,
        logits: LogitsWanted = LogitsWanted.LAST,
        sampling: SamplingParams | None = GREEDY,
        position: int | None = None,
    ) -> frames.Tokens:
        """Tokens that expect ``before`` to be committed, at another ``position`` where that is given."""
        expect = Expectation(len(before) if position is None else position, PrefixDigest(before).digest())
        return frames.Tokens(self.key(session, epoch), seq, expect, tuple(tokens), logits, sampling)


@asynccontextmanager
async def open_raw_client(
    connect: Callable[[str], AbstractAsyncContextManager[tuple[Link, Any]]], route: Route, lease: bytes | None = None
) -> AsyncIterator[RawClient]:
    """Connect to every stage of a route for the length of the block."""
    async with AsyncExitStack() as stack:
        links = {ref.address: (await stack.enter_async_context(connect(ref.address)))[0] for ref in route.stages}
        client = RawClient(route, links, lease or secrets.token_bytes(16))
        async with open_nursery() as nursery:
            for address in links:
                nursery.start_soon(client.read, address)
            yield client
            nursery.cancel_scope.cancel()
