"""A server on loopback over a model that says what it is told to, and clients for it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import anthropic
import openai
import trio
from attrs import define
from serving.http.chat_model import ChatModel, open_chat_model, vocabulary

from dgr.client.pipeline import Pipeline
from dgr.serving.api.prompts import Thinking
from dgr.serving.engine import ServingEngine, ServingLimits, open_serving
from dgr.serving.http.app import make_app
from dgr.serving.http.keys import ApiKeys
from dgr.serving.http.server import HttpPolicy, address_of, bind, run_server
from dgr.serving.http.service import ServerOptions, Service
from dgr.serving.tracing.otel import OtelSpans
from dgr.serving.tracing.server import ServerTracing, open_tracing
from dgr.wire.nurseries import open_nursery

#: A guard against hangs; nothing waits for it.
HANG = 30


@define
class Reply:
    """A response, read by hand."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json()["error"]
        return error


class Stream:
    """A response that is read as it comes, over a socket of its own."""

    def __init__(self, sock: trio.SocketStream) -> None:
        self.sock = sock
        self._data = b""

    async def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> None:
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", f"content-length: {len(raw)}"]
        lines += [f"{name}: {value}" for name, value in {"host": "x", **(headers or {})}.items()]
        await self.sock.send_all("\r\n".join([*lines, "", ""]).encode() + raw)

    async def until(self, mark: bytes) -> bytes:
        """Read up to and with ``mark``."""
        while mark not in self._data:
            part = await self.sock.receive_some(65536)
            if not part:
                raise EOFError(self._data)
            self._data += part
        at = self._data.index(mark) + len(mark)
        found, self._data = self._data[:at], self._data[at:]
        return found

    async def read(self, size: int) -> bytes:
        while len(self._data) < size:
            part = await self.sock.receive_some(65536)
            if not part:
                raise EOFError(self._data)
            self._data += part
        found, self._data = self._data[:size], self._data[size:]
        return found

    async def head(self) -> tuple[int, dict[str, str]]:
        first, *lines = (await self.until(b"\r\n\r\n")).decode().strip().split("\r\n")
        pairs = [line.partition(": ") for line in lines]
        return int(first.split()[1]), {name.lower(): value for name, _, value in pairs}

    async def rest(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.read(int(headers["content-length"]))
        return b"".join([part async for part in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        """Parts of a chunked body, as the server sent them."""
        while True:
            size = int((await self.until(b"\r\n")).strip(), 16)
            part = await self.read(size + 2)
            if not size:
                return
            yield part[:-2]

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events and comments, one by one."""
        data = b""
        async for part in self.chunks():
            data += part
            while b"\n\n" in data:
                event, _, data = data.partition(b"\n\n")
                yield event.decode()
        assert not data, "the stream ends in mid-event"

    async def aclose(self) -> None:
        await trio.aclose_forcefully(self.sock)


@define
class Server:
    """A server, its engine and its model."""

    model: ChatModel
    engine: ServingEngine
    address: str
    stop: trio.Event
    ended: trio.Event
    service: Service

    def client(self, key: str = "no key", **options: Any) -> openai.AsyncOpenAI:
        options = {"max_retries": 0, "timeout": HANG, **options}
        return openai.AsyncOpenAI(base_url=f"http://{self.address}/v1", api_key=key, **options)

    def anthropic(self, key: str = "no key", **options: Any) -> anthropic.AsyncAnthropic:
        options = {"max_retries": 0, "timeout": HANG, **options}
        return anthropic.AsyncAnthropic(base_url=f"http://{self.address}", api_key=key, **options)

    async def connect(self) -> Stream:
        host, port = self.address.rsplit(":", 1)
        return Stream(await trio.open_tcp_stream(host, int(port)))

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """One request over a connection of its own."""
        stream = await self.connect()
        try:
            await stream.send(method, path, body, headers)
            status, found = await stream.head()
            return Reply(status, found, await stream.rest(found))
        finally:
            await stream.aclose()

    async def chat(self, text: str, **fields: Any) -> Reply:
        """A chat of one message, without thinking."""
        return await self.ask("POST", "/v1/chat/completions", chat_body(text, **fields))

    async def stream(self, body: Any, path: str = "/v1/chat/completions") -> Stream:
        """A streamed answer that has begun."""
        stream = await self.connect()
        await stream.send("POST", path, body)
        status, _ = await stream.head()
        assert status == 200
        return stream

    async def data(self, body: Any, path: str = "/v1/chat/completions") -> list[Any]:
        """The data of all events of a streamed answer, comments left out; the last is ``[DONE]``."""
        stream = await self.stream({**body, "stream": True}, path)
        try:
            events = [event async for event in stream.events()]
        finally:
            await stream.aclose()
        data = [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
        assert all(event.startswith(("data: ", ": ")) for event in events)
        return [one if one == "[DONE]" else json.loads(one) for one in data]


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "thinking": {"type": "disabled"}, "temperature": 0}
    return {**body, **fields}


def _tracing(
    pipeline: Pipeline, folder: Path | None, spans: OtelSpans | None
) -> AbstractAsyncContextManager[ServerTracing | None]:
    return nullcontext() if folder is None and spans is None else open_tracing(pipeline, folder, spans)


@asynccontextmanager
async def open_server(
    *,
    n_ctx: int = 4096,
    sessions: int = 2,
    limits: ServingLimits | None = None,
    options: ServerOptions | None = None,
    policy: HttpPolicy | None = None,
    keys: ApiKeys | None = None,
    local_only: bool = False,
    trace_folder: Path | None = None,
    spans: OtelSpans | None = None,
    **pipeline: Any,
) -> AsyncIterator[Server]:
    policy = policy or HttpPolicy(grace=0)
    with trio.fail_after(HANG):
        async with (
            open_chat_model(n_ctx, sessions, **pipeline) as model,
            open_serving(model.offline.pipeline, limits) as engine,
            _tracing(model.offline.pipeline, trace_folder, spans) as tracing,
            open_nursery() as nursery,
        ):
            service = Service.of(engine, vocabulary(), options or ServerOptions(model="m", thinking=Thinking.OFF))
            service.tracing = tracing
            sockets = bind("127.0.0.1:0", policy)
            address, stop, ended = address_of(sockets[0]), trio.Event(), trio.Event()

            async def run(*, task_status: trio.TaskStatus[None]) -> None:
                await run_server(
                    make_app(service, keys, local_only=local_only),
                    engine,
                    sockets,
                    policy,
                    stop=stop,
                    task_status=task_status,
                )
                ended.set()

            await nursery.start(run)
            try:
                yield Server(model, engine, address, stop, ended, service)
            finally:
                model.release()
                stop.set()
                engine.end_all()
