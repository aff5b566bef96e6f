"""What strangers do to an HTTP port: requests that are none, lies about bodies, floods, and ends in the middle. Seeded."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

import psutil
import trio
import trio.testing

from dgr.errors import DeadlineExceeded
from dgr.testing.waits import until
from dgr.wire.tcp import parse_address

#: Seconds for one stranger; nobody waits for it.
PATIENCE = 20.0
#: Seconds for which an answer is waited for.
_ANSWER = 0.3
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
#: What a client may be told of its own act, and of a server that has no room. 501 and 505: ways of HTTP that are not spoken.
FINE = {*range(100, 102), 200, *range(400, 500), 501, 503, 505}

Bytes = Callable[[random.Random, str], bytes]


def _post(path: str, body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"host: localhost", b"content-type: application/json", *headers]
    lines.append(b"content-length: %d" % (len(body) if length is None else length))
    return b"\r\n".join([*lines, b"", b""]) + body


def _get(path: str, *headers: bytes, version: bytes = b"HTTP/1.1", host: bytes = b"host: localhost") -> bytes:
    return b"\r\n".join([b"GET %s %s" % (path.encode("latin-1"), version), host, *headers, b"", b""])


def _chunked(path: str, *chunks: bytes) -> bytes:
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n" % path.encode()
    return head + b"".join(chunks)


def _noise(rng: random.Random, _: str) -> bytes:
    return rng.randbytes(rng.randrange(1, 2000))


def _flipped(rng: random.Random, path: str) -> bytes:
    """A request that was right, with some bytes changed."""
    data = bytearray(_post(path, good_body(path), b"accept: */*"))
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice(b"\0\r\n :;,\x7f\xff")
            case 2:
                del data[at : at + rng.randint(1, 20)]
            case _:
                data[at:at] = rng.randbytes(rng.randint(1, 20))
    return bytes(data)


def good_body(path: str) -> bytes:
    """A short request that every path of the API can answer."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "m", "messages": messages, "input": "hi", "prompt": "hi", "max_tokens": 3, "temperature": 0}
    return json.dumps({**body, "thinking": {"type": "disabled"}, "reasoning_effort": "none"}).encode()


def _values() -> list[bytes]:
    """JSON values that readers break on."""
    deep = [b"[" * n + b"]" * n for n in (100, 1000, 20_000)] + [b'{"a":' * n + b"1" + b"}" * n for n in (100, 20_000)]
    numbers = [
        b"1e999",
        b"-1e999",
        b"NaN",
        b"-Infinity",
        b"1" + b"0" * 400,
        b"-0.0",
        b"0" * 50,
        b"1E+",
        b"18446744073709551616",
    ]
    texts = [
        b'"\\ud800"',
        b'"\\udfff\\ud800"',
        b'"\xff\xfe"',
        b'"\xed\xa0\x80"',
        b'"\\u0000"',
        b'"' + b"x" * 100_000 + b'"',
    ]
    return [*deep, *numbers, *texts, b'""', b"[]", b"{}", b"null", b"true", b'"\\', b'{"a":1,"a":2}']


_VALUES = _values()
_FIELDS = (
    "messages", "prompt", "input", "max_tokens", "temperature", "seed", "n", "stop", "tools", "model", "stream",
    "stream_options", "logprobs", "top_logprobs", "system", "thinking", "metadata", "reasoning", "text", "include",
    "stop_token_ids", "tool_choice", "response_format", "instructions", "output_config",
)  # fmt: skip


def _odd_value(rng: random.Random, path: str) -> bytes:
    """One field of a good body, odd; now and then it stands there twice."""
    field = rng.choice(_FIELDS).encode()
    body = good_body(path)[:-1] + b', "%s": %s}' % (field, rng.choice(_VALUES))
    return _post(path, body)


def _odd_message(rng: random.Random, path: str) -> bytes:
    field = rng.choice([b"role", b"content", b"tool_calls", b"name", b"prefix", b"reasoning_content"])
    message = b'{"role": "user", "content": "hi", "%s": %s}' % (field, rng.choice(_VALUES))
    name = rng.choice([b"messages", b"input"])
    return _post(path, good_body(path)[:-1] + b', "%s": [%s]}' % (name, message))


def _odd_body(rng: random.Random, path: str) -> bytes:
    good = good_body(path)
    bodies = [
        *_VALUES,
        b"",
        b"\xef\xbb\xbf" + good,
        good.decode().encode("utf-16"),
        good[:-1],
        good + good,
        b" " * 70_000 + good,
    ]
    return _post(path, rng.choice(bodies))


def _lengths(rng: random.Random, path: str) -> bytes:
    """Content-Length that is not the body's, or is there twice."""
    body = good_body(path)
    wrong = rng.choice(
        [b"-1", b"1e3", b"0x10", b"99999999999999999999", b"", b" ", b"%d, %d" % (len(body), len(body)), b"+5", b"1_0"]
    )
    lines = rng.choice([[b"content-length: " + wrong], [b"content-length: %d" % len(body), b"content-length: 5"],
                        [b"content-length: %d" % len(body)] * 2, [b"transfer-encoding: chunked"], [b"transfer-encoding: gzip"],
                        [b"transfer-encoding: chunked, chunked"], [b"transfer-encoding: \x0bchunked"]])  # fmt: skip
    return b"\r\n".join([b"POST %s HTTP/1.1" % path.encode(), b"host: localhost", *lines, b"", b""]) + body


def _chunk_lies(rng: random.Random, path: str) -> bytes:
    body = good_body(path)
    good = b"%x\r\n%s\r\n" % (len(body), body)
    sizes = [b"-5", b"ffffffffffffffff", b"f" * 40, b"0x5", b"5;" + b"x" * 5000, b"zz", b"", b"5\n", b" 5"]
    lies = [
        good,
        b"%s\r\n%s\r\n" % (rng.choice(sizes), body),
        b"3\r\nabcdef\r\n",
        b"5\r\nab",
        b"0\r\n" + b"t: v\r\n" * 500,
    ]
    return _chunked(path, *(rng.choice(lies) for _ in range(rng.randint(1, 4))), rng.choice([b"0\r\n\r\n", b""]))


def _heads(rng: random.Random, path: str) -> bytes:
    """Request lines and headers that are not quite those of HTTP."""
    version = rng.choice([b"HTTP/0.9", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.1 ", b"HTTP/11", b"", b"ICY"])
    method = rng.choice(
        [
            b"GET",
            b"get",
            b"",
            b"TRACE",
            b"OPTIONS",
            b"CONNECT",
            b"HEAD",
            b"PRI",
            b"X" * 300,
            b"G\0T",
            b"DELETE",
            b"PATCH",
        ]
    )
    targets = [
        path.encode(), b"*", b"/%", b"/%zz", b"/%00", b"/%ff%fe", b"/../../etc/passwd",
        b"http://localhost" + path.encode(), b"/" + b"a" * 60_000, b"/" + b"%41" * 5000, b"\xff\xfe", b"", b"//",
        b"/v1/models/" + b"%2e%2e/" * 50, b"localhost:80",
    ]  # fmt: skip
    headers = [
        b"host: localhost", b"host:", b"host: a\r\nhost: b", b"no colon", b" folded: x", b"x : y", b"x: \0",
        b"x: \xff\xfe", b"authorization: Bearer \xff", b"x-api-key: " + b"k" * 5000, b"origin: null",
        b"expect: 100-continue", b"expect: \x01", b"connection: close, keep-alive", b"connection: \xff",
        b"content-length: 0", b"traceparent: 00-zz-zz-zz", b"traceparent: \xff", b"accept-encoding: \xff",
        b"content-type: \xff/\xff", b"cookie: " + b"c=1; " * 2000,
    ]  # fmt: skip
    line = b" ".join([method, rng.choice(targets), version]) if version else b" ".join([method, rng.choice(targets)])
    chosen = [rng.choice(headers) for _ in range(rng.randint(0, 4))]
    end = rng.choice([b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"])
    return end.join([line, *chosen, b"", b""])


def _flood(rng: random.Random, path: str) -> bytes:
    count = rng.choice([200, 3000, 20_000])
    return b"GET %s HTTP/1.1\r\nhost: localhost\r\n" % path.encode() + b"x: y\r\n" * count + rng.choice([b"\r\n", b""])


def _upgrades(rng: random.Random, path: str) -> bytes:
    """Offers of other protocols, which are not spoken."""
    settings = rng.choice([b"\xff\xfe", b"AAMAAABkAARAAAAAAAIAAAAA", b"!!!", b"", b"A" * 5000])
    h2c = _get(path, b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: " + settings)
    key = rng.choice([b"dGhlIHNhbXBsZSBub25jZQ==", b"\xff", b""])
    socket_ = [
        b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-key: " + key, b"sec-websocket-version: 13",
        b"sec-websocket-extensions: \xff", b"sec-websocket-protocol: \xff,,",
    ]  # fmt: skip
    web = _get(path, *socket_[: rng.randint(3, len(socket_))]) + rng.randbytes(rng.randrange(100))
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    frames = b"\0\0\6\4\0\0\0\0\0" + b"\0\4\0\0\0\0" + rng.randbytes(rng.randrange(200))
    return rng.choice(
        [h2c, h2c + preface + frames, web, preface + frames, preface, b"\x16\x03\x01\x02\x00\x01" + rng.randbytes(60)]
    )


def _pipeline(rng: random.Random, path: str) -> bytes:
    one = rng.choice([_get("/health"), _get(path), _post(path, good_body(path)), _post(path, b"{")])
    return one * rng.choice([2, 20, 200]) + rng.choice([b"", one[: len(one) // 2], b"\0\0"])


def _more_than_said(rng: random.Random, path: str) -> bytes:
    """A body that is larger than any that is read: said so, or not."""
    big = b'{"a": "' + b"x" * 70_000 + b'"}'
    return rng.choice(
        [_post(path, big, length=10**15), _post(path, big), _chunked(path, b"%x\r\n%s\r\n" % (len(big), big))]
    )


def _right(_: random.Random, path: str) -> bytes:
    return _post(path, good_body(path)) if path.startswith("/v1") else _get(path)


#: Kinds of bytes.
WORDS: Mapping[str, Bytes] = {
    "noise": _noise, "flipped": _flipped, "odd value": _odd_value, "odd message": _odd_message, "odd body": _odd_body,
    "lengths": _lengths, "chunks": _chunk_lies, "heads": _heads, "flood": _flood, "upgrades": _upgrades,
    "pipelining": _pipeline, "more than said": _more_than_said, "right": _right,
}  # fmt: skip

#: How they are said.
WAYS = ("at once", "in pieces", "cut", "half closed", "unread", "reset")


async def strike(address: str, path: str, kind: str, way: str, rng: random.Random) -> list[int]:
    """One connection; the statuses that came back. Hangs up when the other side is silent."""
    data, came = WORDS[kind](rng, path), bytearray()
    stream = await trio.open_tcp_stream(*parse_address(address))

    answered = trio.Event()

    async def read() -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while part := await stream.receive_some(65536):
                came.extend(part)
                answered.set()
        answered.set()

    async with trio.open_nursery() as nursery:
        if way != "unread":
            nursery.start_soon(read)
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(2):
            if way == "cut":
                data = data[: rng.randrange(len(data) + 1)]
            step = rng.randint(1, 97) if way == "in pieces" else max(1, len(data))
            for begin in range(0, min(len(data), 100 * step), step):
                await stream.send_all(data[begin : begin + step])
            if way == "half closed":
                await stream.send_eof()
        if way in ("at once", "in pieces", "half closed"):
            with trio.move_on_after(_ANSWER):  # some requests have no end, and no answer
                await answered.wait()
            await trio.sleep(0.01)
        if way == "reset":
            with suppress(OSError):
                stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await trio.aclose_forcefully(stream)
    return [int(status) for status in _STATUS.findall(bytes(came))]


async def storm(address: str, paths: list[str], seed: int, count: int, workers: int = 16) -> Counter[int]:
    """So many connections, every kind in every way in turn; what they were told, by status."""
    rng, told = random.Random(seed), Counter[int]()
    left = iter(range(count))

    async def work() -> None:
        for index in left:
            kind, way = [*WORDS][index % len(WORDS)], WAYS[index // len(WORDS) % len(WAYS)]
            case = random.Random(f"{seed}:{index}")
            with trio.fail_after(PATIENCE):
                found = await strike(address, rng.choice(paths), kind, way, case)
            wrong = [status for status in found if status not in FINE]
            assert not wrong, f"seed {seed}, case {index} ({kind}, {way}): status {wrong}"
            told.update(found)

    async with trio.open_nursery() as nursery:
        for _ in range(workers):
            nursery.start_soon(work)
    return told


#: Tasks of sessions that a server keeps for the next turn of whoever asked.
_KEPT = "SessionActor.run"


def _tasks() -> Counter[str]:
    """All tasks by name, without those of kept sessions."""
    found = Counter[str]()
    left = [trio.lowlevel.current_root_task()]
    while left:
        task = left.pop()
        if task is not None:
            found[task.name] += not task.name.endswith(_KEPT)
            left += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return found


class Idle:
    """What this process holds when nobody is served: to be compared with what it holds later."""

    @classmethod
    async def now(cls) -> Idle:
        await trio.testing.wait_all_tasks_blocked()
        return cls()

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._tasks, self._descriptors = _tasks(), self._process.num_fds()

    def more(self) -> dict[str, int]:
        """What there is now and was not then."""
        found = dict(_tasks() - self._tasks)
        descriptors = self._process.num_fds() - self._descriptors
        return {**found, "descriptors": descriptors} if descriptors > 0 else found

    async def again(self, seconds: float = 20.0) -> None:
        """Until there is no more than there was. Raises :class:`AssertionError` naming it."""
        with suppress(DeadlineExceeded):
            await until(lambda: not self.more(), seconds)
        if more := self.more():
            raise AssertionError(f"there is more than there was: {more}")
