"""Traces of a server's requests: which are traced, and what becomes of them. A request never waits for its trace.

When a request has ended, the stages are asked for their part, and the whole goes to a folder, as files for Perfetto, and
to OpenTelemetry. What nobody can take in time is dropped, and logged.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from attrs import define

from dgr.client.pipeline import Pipeline
from dgr.client.tracing import RequestTrace, Trace
from dgr.core.files.outputs import write_file
from dgr.errors import DgrError, InputError
from dgr.serving.tracing.context import trace_parent
from dgr.serving.tracing.perfetto import perfetto_json
from dgr.wire.nurseries import open_nursery

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from dgr.serving.tracing.otel import OtelSpans

__all__ = ["ServedTrace", "ServerTracing", "check_folder", "open_tracing"]

_log = logging.getLogger("dgr.trace")

#: Requests that are traced at once, and that wait for their trace to be put together.
_OPEN, _WAITING = 64, 64
#: Seconds between two looks for what stages have noted of requests that go on, so that they need not keep it.
_LOOK = 5.0
#: Files in the folder; the oldest make room.
_FILES = 1000
#: Seconds for what is under way when the server ends.
_LAST = 5.0


@define
class ServedTrace:
    """A request that is traced."""

    request: RequestTrace
    name: str
    #: Nanoseconds since 1970 at trio's second 0.
    offset: int
    span: Span | None = None
    status: int = 0

    @property
    def id(self) -> str:
        return self.request.id.hex()


class ServerTracing:
    """Made by :func:`open_tracing`."""

    def __init__(self, pipeline: Pipeline, folder: Path | None, spans: OtelSpans | None) -> None:
        self._tracer = pipeline.tracer
        self._folder = folder
        self._spans = spans
        self._open: set[int] = set()
        self._send, self._receive = trio.open_memory_channel[ServedTrace](_WAITING)

    def begin(self, name: str, headers: Iterable[tuple[bytes, bytes]]) -> ServedTrace | None:
        """Trace a request that has come; None for one that is not to be traced.

        A request with a trace context goes on with that trace, and is traced if whoever asks records it. Of others
        OpenTelemetry's sampler chooses (``OTEL_TRACES_SAMPLER``); without it all are traced.
        """
        if len(self._open) >= _OPEN:
            return None
        parent, offset = trace_parent(headers), time.time_ns() - round(trio.current_time() * 1e9)
        span = None
        if self._spans is not None:
            span = self._spans.begin(name, parent, offset + round(trio.current_time() * 1e9))
            if not span.is_recording():
                return None
            trace_id: bytes | None = span.get_span_context().trace_id.to_bytes(16)
        elif parent is not None and not parent.sampled:
            return None
        else:
            trace_id = None if parent is None else parent.trace_id
        served = ServedTrace(self._tracer.begin(trace_id), name, offset, span)
        self._open.add(id(served))
        return served

    def end(self, served: ServedTrace, status: int) -> None:
        """The request has been answered, with this HTTP status."""
        served.status = status
        try:
            self._send.send_nowait(served)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            self._forget(served)
            _log.warning("a trace is dropped: %d others wait to be written", _WAITING, extra={"trace": served.id})

    def _forget(self, served: ServedTrace) -> None:
        self._open.discard(id(served))
        self._tracer.drop(served.request)

    async def run(self) -> None:
        """Put traces together until :meth:`close`."""
        async with open_nursery() as nursery:
            nursery.start_soon(self._look)
            async for served in self._receive:
                try:
                    await self._put_away(served)
                except (DgrError, OSError) as error:
                    _log.warning("a trace is lost: %s", error, extra={"trace": served.id})
                except Exception:
                    _log.exception("a trace is lost by a defect; please report this", extra={"trace": served.id})
                finally:
                    self._forget(served)
            nursery.cancel_scope.cancel()

    def close(self) -> None:
        """What has ended by now is still put together."""
        self._send.close()

    async def _look(self) -> None:
        while True:
            await trio.sleep(_LOOK)
            if self._open:
                try:
                    await self._tracer.collect()
                except DgrError as error:
                    _log.info("stages cannot be asked for what they noted: %s", error)

    async def _put_away(self, served: ServedTrace) -> None:
        trace = await self._tracer.finish(served.request)
        if self._folder is not None:
            write = partial(_write, self._folder, served, trace)
            await trio.to_thread.run_sync(write, abandon_on_cancel=True)
        if self._spans is not None and served.span is not None:
            about: dict[str, str | int] = {
                "http.response.status_code": served.status,
                "url.path": served.name.split()[-1],
            }
            self._spans.end(served.span, trace, served.offset, about, failed=served.status >= 500)
            spans = self._spans.take()
            if not await trio.to_thread.run_sync(self._spans.export, spans, abandon_on_cancel=True):
                _log.warning("%d spans were not taken by the collector", len(spans), extra={"trace": served.id})


def _write(folder: Path, served: ServedTrace, trace: Trace) -> None:
    """One file for each request, named by when it came and by its trace; beyond :data:`_FILES` the oldest go."""
    came = served.offset + round(trace.began * 1e9)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(came / 1e9))
    write_file(folder / f"trace-{stamp}.{came // 1000 % 1_000_000:06}-{served.id}.json", perfetto_json(trace))
    for old in sorted(folder.glob("trace-*.json"))[:-_FILES]:
        old.unlink(missing_ok=True)


def check_folder(folder: Path) -> None:
    """Raises :class:`~dgr.errors.InputError` for what is no folder that can be written into."""
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{folder} is no folder that can be written into; traces are files in it, one a request")


@asynccontextmanager
async def open_tracing(
    pipeline: Pipeline, folder: Path | None = None, spans: OtelSpans | None = None
) -> AsyncIterator[ServerTracing]:
    """Trace requests for the length of the block: into a folder, or as spans, or both. See :func:`check_folder`."""
    tracing = ServerTracing(pipeline, folder, spans)
    async with open_nursery() as nursery:
        nursery.start_soon(tracing.run)
        try:
            yield tracing
        finally:
            tracing.close()
            nursery.cancel_scope.deadline = trio.current_time() + _LAST
    if spans is not None:
        # Where there is no thread, what was not sent by now is lost.
        with suppress(RuntimeError), trio.CancelScope(shield=True, deadline=trio.current_time() + _LAST):
            await trio.to_thread.run_sync(spans.close, abandon_on_cancel=True)
