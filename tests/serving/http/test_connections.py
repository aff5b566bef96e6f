"""Keys, limits, hostile clients and the server's end."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import re
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import trio
import trio.testing
import trustme
from cryptography.hazmat.primitives import serialization
from serving.http.chat_model import open_chat_model, vocabulary
from serving.http.http_servers import Stream, chat_body

from dgr.errors import InputError, RequestTimedOut
from dgr.serving.api.prompts import Thinking
from dgr.serving.engine import Job, ServingEngine, open_serving
from dgr.serving.http.app import make_app
from dgr.serving.http.completions import ChatCompletions
from dgr.serving.http.endpoints import Running
from dgr.serving.http.keys import ApiKeys
from dgr.serving.http.server import HttpPolicy, bind, check_reach, run_server, server_config
from dgr.serving.http.service import ServerOptions, Service
from dgr.testing.waits import until
from dgr.wire.tcp import parse_address

KEY, OTHER = "0123456789abcdef", "fedcba9876543210"


# --- keys and reach ---


async def test_a_server_with_keys_answers_nobody_else(serve: Callable[..., Any]) -> None:
    async with serve(keys=ApiKeys([OTHER, KEY])) as server:
        for headers in (
            {},
            {"authorization": "Bearer "},
            {"authorization": f"Basic {KEY}"},
            {"authorization": KEY[:-1]},
        ):
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics", "/nothing"):
                reply = await server.ask("POST", path, chat_body("hi"), **headers)
                assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
                assert reply.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/"):
            assert (await server.ask("GET", path)).status == 200
        with pytest.raises(openai.AuthenticationError):
            await server.client("wrong key").models.list()
        for key in (KEY, OTHER):
            async with server.client(key) as client:
                assert (await client.models.list()).data[0].id == "m"
        assert not server.model.seen


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "does not hold an API key"),
        ("# a comment\n\n", "does not hold an API key"),
        (f"{KEY}\nshort\n", "key 2 is not 16 or more"),
        (f"{KEY} {KEY}\n", "key 1"),
        ("schlüssel-schlüssel\n", "key 1"),
    ],
)
def test_a_file_of_keys_is_checked(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(InputError, match=message):
        ApiKeys.read(path)


def test_keys_that_everyone_can_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(KEY)
    path.chmod(0o644)
    with pytest.raises(InputError, match="lets every user of this host read or replace the API keys"):
        ApiKeys.read(path)
    path.chmod(0o600)
    assert ApiKeys.read(path).admits(KEY)
    with pytest.raises(InputError, match="cannot read API keys"):
        ApiKeys.read(tmp_path / "none")
    with pytest.raises(InputError, match="is not a file of API keys: it has more than"):
        ApiKeys.read(Path("/dev/zero"))


def test_beyond_loopback_a_server_needs_keys_or_a_word() -> None:
    for address in ("0.0.0.0:0", "[::]:0"):
        sockets = bind(address, HttpPolicy())
        try:
            with pytest.raises(InputError, match="--api-key-file FILE, or --allow-anyone"):
                check_reach(sockets, has_keys=False, allow_anyone=False)
            check_reach(sockets, has_keys=True, allow_anyone=False)
            check_reach(sockets, has_keys=False, allow_anyone=True)
        finally:
            for sock in sockets:
                sock.close()


def test_a_port_that_is_taken_is_an_input_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InputError, match="end what listens there"):
        bind(f"127.0.0.1:{taken.getsockname()[1]}", HttpPolicy())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:8000"}, 200),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "127.0.0.1:8000", "origin": "http://evil.example"}, 403),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:9000"}, 403),
        ({"host": "127.0.0.1:8000", "origin": "null"}, 403),
        (
            {"host": "evil.example:8000", "origin": "http://evil.example:8000"},
            403,
        ),  # a name that was turned to loopback
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "[", "origin": "["}, 403),
    ],
)
async def test_without_keys_pages_of_other_sites_are_not_answered(
    serve: Callable[..., Any], headers: dict[str, str], status: int
) -> None:
    async with serve(local_only=True) as server:
        reply = await server.ask("POST", "/v1/chat/completions", chat_body("hi"), **headers)
        assert reply.status == status


# --- what clients may send ---


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(serve: Callable[..., Any]) -> None:
    async with serve(n_ctx=256) as server:
        text = "x" * 100_000
        for path, body in (("/v1/chat/completions", chat_body(text)), ("/v1/completions", {"prompt": text})):
            reply = await server.ask("POST", path, body)
            assert reply.error["code"] == "context_length_exceeded"
            assert "at least" in reply.error["message"]


async def test_long_requests_are_read_beside_the_others(serve: Callable[..., Any]) -> None:
    async with serve(n_ctx=131072) as server:
        reply = await server.chat("x" * 3000, messages=[{"role": "user", "content": "hi"}], padding="y" * 100_000)
        assert reply.json()["choices"][0]["message"]["content"] == "hi"


async def test_a_body_has_a_limit(serve: Callable[..., Any]) -> None:
    options = ServerOptions(model="m", thinking=Thinking.OFF, max_body=2000)
    async with serve(options=options) as server:
        assert (await server.chat("x" * 1000)).status == 200
        reply = await server.chat("x" * 3000)
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")
        stream = await server.connect()  # without a length, so that the server must count
        await stream.sock.send_all(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for _ in range(3):
            await stream.sock.send_all(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        status, _ = await stream.head()
        assert status == 413
        await stream.aclose()


async def test_a_body_that_does_not_come_is_given_up(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgr.serving.http.streams._BODY", 0.05)
    async with serve() as server:
        stream = await server.connect()
        await stream.sock.send_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
        assert (await stream.head())[0] == 408
        await stream.aclose()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"[" * 5000]
    + [b'{"messages": ' + each + b"}" for each in (b"{}", b"[1]", b"[[]]", b'[{"role": "nobody", "content": "x"}]')]
    + [b'{"messages": [{"role": "user"}]}', b'{"messages": [{"role": "user", "content": 1}]}', b'{"seed": 1e999}'],
)  # fmt: skip
async def test_what_is_no_request_is_a_400_in_openais_shape(serve: Callable[..., Any], body: bytes) -> None:
    async with serve() as server:
        for path in ("/v1/chat/completions", "/v1/completions"):
            reply = await server.ask("POST", path, body)
            assert reply.status == 400
            assert set(reply.error) >= {"message", "type", "param", "code"}
        assert (await server.chat("still there")).status == 200


@pytest.mark.parametrize("prompt", ["[]", "[[]]", '[1, "x"]', "[true]", "[-1]", "[99999]", "[[1], 2]", "{}", "null"])
async def test_a_prompt_that_is_none_is_a_400(serve: Callable[..., Any], prompt: str) -> None:
    async with serve() as server:
        reply = await server.ask("POST", "/v1/completions", {"prompt": json.loads(prompt), "max_tokens": 1})
        assert reply.status == 400


async def test_paths_and_methods_that_are_not_there_are_told_in_openais_shape(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        reply = await server.ask("GET", "/v1/nothing")
        assert (reply.status, reply.error["code"]) == (404, "not_found")
        reply = await server.ask("GET", "/v1/chat/completions")
        assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize(
    "garbage", [b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET /" + b"x" * 100_000, b"\x16\x03\x01"]
)
async def test_what_is_not_http_ends_its_own_connection_only(serve: Callable[..., Any], garbage: bytes) -> None:
    async with serve() as server:
        stream = await server.connect()
        await stream.sock.send_all(garbage)
        await stream.sock.send_eof()
        with trio.move_on_after(5):
            while await stream.sock.receive_some():
                continue
        await stream.aclose()
        assert (await server.chat("still there")).status == 200


async def test_a_fault_of_our_own_ends_one_request_with_a_500(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as server:
        monkeypatch.setattr(type(server.engine), "_check", lambda *_: 1 / 0)
        reply = await server.chat("hi")
        assert (reply.status, reply.error["code"]) == (500, "internal_error")
        monkeypatch.undo()
        assert (await server.chat("hi")).status == 200
        assert server.engine.line.running == 0


async def test_several_requests_go_over_one_connection(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        stream = await server.connect()
        for text in ("one", "two", "three"):
            await stream.send("POST", "/v1/chat/completions", chat_body(text))
            _, headers = await stream.head()
            assert json.loads(await stream.rest(headers))["choices"][0]["message"]["content"] == text
        await stream.aclose()


async def test_http_2_is_not_spoken(serve: Callable[..., Any]) -> None:
    """A client that never opens its window would hold its answer, and the server's end, and TCP would not notice."""
    async with serve() as server:
        stream = await server.connect()
        settings = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00" + b"\x00\x04\x00\x00\x00\x00"  # INITIAL_WINDOW_SIZE 0
        request = b"\x00\x00\x04\x01\x05\x00\x00\x00\x01" + b"\x82\x84\x86\x41" + b""
        await stream.sock.send_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + request)
        assert await stream.sock.receive_some(1000)
        server.stop.set()
        with trio.fail_after(10):
            await server.ended.wait()
        await stream.aclose()


# --- clients that do not read, and the end ---


async def test_a_client_that_does_not_read_is_given_up(serve: Callable[..., Any]) -> None:
    """Its answer is larger than all buffers; without TCP_USER_TIMEOUT it would hold its slot for ever."""
    policy = HttpPolicy(grace=0, client_timeout=0.3)
    async with serve(sessions=1, policy=policy) as server:
        server.model.script["go"] = 3000 * "x"
        stream = await server.connect()
        stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = chat_body("go", stream=True, logprobs=True, top_logprobs=20)
        await stream.send("POST", "/v1/chat/completions", body)
        await until(lambda: server.engine.line.running == 1)
        await until(lambda: server.engine.line.running == 0)
        assert server.engine.counters.cancelled == 1
        assert (await server.chat("next")).status == 200
        await stream.aclose()


async def test_a_client_that_does_not_read_does_not_hold_the_end(serve: Callable[..., Any]) -> None:
    """It has half a minute to take what is sent; the server has two seconds."""
    async with serve(sessions=1, policy=HttpPolicy(grace=0)) as server:
        server.model.script["go"] = 3000 * "x"
        stream = await server.connect()
        stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await stream.send("POST", "/v1/chat/completions", chat_body("go", stream=True, logprobs=True, top_logprobs=20))
        await until(lambda: server.engine.line.running == 1)
        await trio.testing.wait_all_tasks_blocked(0.2)
        server.stop.set()
        with trio.fail_after(10):
            await server.ended.wait()
        await stream.aclose()


async def test_a_client_that_reads_slowly_holds_no_slot_beyond_the_deadline() -> None:
    """TCP takes one that reads a byte now and then for alive; nothing it is given would ever be taken here."""
    async with open_chat_model() as model, open_serving(model.offline.pipeline) as engine:
        service = Service.of(engine, vocabulary(), ServerOptions(model="m", thinking=Thinking.OFF))
        endpoint = ChatCompletions(service)
        plan = endpoint.plan(chat_body("some words"))
        async with engine.admit(Job(plan.prompts[0], 100), deadline=0.2) as answer:
            with pytest.raises(RequestTimedOut, match="in phase decode with 1 tokens drawn"):
                await endpoint._run(Running(answer, plan.replies(0), []), _never)
            assert engine.line.running == 0


async def _never(_: object) -> None:
    await trio.sleep_forever()


async def test_the_end_lets_answers_end_and_admits_nobody(serve: Callable[..., Any]) -> None:
    async with serve(policy=HttpPolicy(grace=20)) as server:
        server.model.hold(after=4)
        stream = await server.stream(chat_body("some words", stream=True))
        await until(lambda: server.model.is_waiting)
        other = await server.connect()
        await other.send("GET", "/ready")
        assert (await other.head())[0] == 200
        await other.aclose()
        server.stop.set()
        await until(lambda: not server.engine.is_ready)
        reply = await server.chat("too late")
        assert (reply.status, reply.error["code"]) == (503, "service_unavailable")
        assert int(reply.headers["retry-after"]) >= 1
        assert (await server.ask("GET", "/ready")).status == 503
        assert (await server.ask("GET", "/health")).status == 200
        server.model.release()
        assert [event async for event in stream.events()][-1] == "data: [DONE]"
        await stream.aclose()
        await server.ended.wait()


async def test_what_is_refused_for_a_drained_stage_is_refused_before_a_stream_begins(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        draining = server.model.offline.cluster.shards["stage-2"].draining
        draining.begin(60)
        await until(lambda: not server.engine.is_ready)
        for stream in (False, True):
            reply = await server.ask("POST", "/v1/chat/completions", chat_body("some words", stream=stream))
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            assert "stage stage-2 (layers 2:3) is being drained, and it has no spare" in reply.error["message"]
        ready = await server.ask("GET", "/ready")
        assert (ready.status, ready.json()["route"]) == (503, "live")
        assert "stage-2" in ready.json()["reason"]
        told = (await server.ask("GET", "/status")).json()
        assert (told["ready"], [stage["load"]["ready"] for stage in told["stages"]]) == (False, [True, True, False])


async def test_answers_that_take_longer_than_the_grace_are_told(serve: Callable[..., Any]) -> None:
    async with serve(policy=HttpPolicy(grace=0)) as server:
        server.model.hold(after=4)
        stream = await server.stream(chat_body("some words", stream=True))
        whole = await server.connect()
        await whole.send("POST", "/v1/chat/completions", chat_body("some other words"))
        await until(lambda: server.engine.line.running == 2)
        server.stop.set()
        events = [event async for event in stream.events()]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "service_unavailable"
        status, headers = await whole.head()
        assert (status, json.loads(await whole.rest(headers))["error"]["code"]) == (503, "service_unavailable")
        server.model.release()
        await stream.aclose()
        await whole.aclose()
        await server.ended.wait()


async def test_cancelled_a_server_ends_its_answers_at_once_and_in_order() -> None:
    """As at a second signal: no grace, and yet no stream that breaks off without a word."""
    async with open_chat_model() as model, open_serving(model.offline.pipeline) as engine:
        service = Service.of(engine, vocabulary(), ServerOptions(model="m", thinking=Thinking.OFF))
        policy = HttpPolicy(grace=1000)
        sockets = bind("127.0.0.1:0", policy)
        port = sockets[0].getsockname()[1]
        async with trio.open_nursery() as nursery:
            scope = await nursery.start(_run_in_scope, make_app(service), engine, sockets, policy)
            model.hold(after=4)
            stream = Stream(await trio.open_tcp_stream("127.0.0.1", port))
            await stream.send("POST", "/v1/chat/completions", chat_body("some words", stream=True))
            await stream.head()
            await until(lambda: model.is_waiting)
            scope.cancel()
            events = [event async for event in stream.events()]
            assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "service_unavailable"
            await stream.aclose()
            model.release()


async def _run_in_scope(
    app: Any,
    engine: ServingEngine,
    sockets: list[socket.socket],
    policy: HttpPolicy,
    *,
    task_status: trio.TaskStatus[trio.CancelScope],
) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(lambda **ready: run_server(app, engine, sockets, policy, stop=trio.Event(), **ready))
            task_status.started(scope)


async def test_without_a_route_requests_are_told_to_come_again(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        server.model.offline.cluster.stop("stage-1")
        await until(lambda: not server.engine.is_ready)
        reply = await server.chat("hi")
        assert (reply.status, reply.error["code"]) == (503, "service_unavailable")
        assert "retry-after" in reply.headers
        assert (await server.ask("GET", "/ready")).status == 503


async def test_an_answer_under_way_outlives_a_lost_stage(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        server.model.hold(after=6)
        stream = await server.stream(chat_body("some words", stream=True))
        await until(lambda: server.model.is_waiting)
        server.model.release()
        await server.model.offline.restart("stage-1")
        server.model.attach()
        chunks = [event.removeprefix("data: ") async for event in stream.events() if event.startswith("data: ")]
        text = "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
        assert text == "some words"
        assert chunks[-1] == "[DONE]"
        await stream.aclose()


def test_idle_connections_are_kept_longer_than_proxies_keep_theirs() -> None:
    """A proxy sends its next request on a connection that it believes to be open; most give theirs up after 60 to 75 s."""
    assert server_config().keep_alive_timeout >= 75


# --- TLS ---


async def test_tls_files_make_it_https(serve: Callable[..., Any], tmp_path: Path) -> None:
    ca = trustme.CA()
    issued = ca.issue_cert("127.0.0.1")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    key.chmod(0o600)
    async with serve(policy=HttpPolicy(tls=(certificate, key), grace=0)) as server:
        context = ssl.create_default_context()
        ca.configure_trust(context)
        host, port = server.address.rsplit(":", 1)
        context.set_alpn_protocols(["h2", "http/1.1"])
        stream = await trio.open_ssl_over_tcp_stream(host, int(port), ssl_context=context)
        for requests in (1, 3, 1):  # what is asked for before its turn is heard in between
            await stream.send_all(requests * b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            told = b""
            while told.count(b'"ok"') < requests:
                told += await stream.receive_some(1000)
            assert told.count(b"HTTP/1.1 200") == requests
        assert stream.selected_alpn_protocol() == "http/1.1"
        await trio.aclose_forcefully(stream)


async def test_a_newer_certificate_is_shown_without_a_restart(serve: Callable[..., Any], tmp_path: Path) -> None:
    """To clients that name a server in their greeting, and to those that do not."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def issue(days: int) -> trustme.CA:
        ca = trustme.CA()
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        issued = ca.issue_cert("127.0.0.1", "localhost", not_after=end)
        certificate.write_bytes(issued.cert_chain_pems[0].bytes())
        key.write_bytes(issued.private_key_pem.bytes())
        key.chmod(0o600)
        return ca

    async def asks(server: Any, ca: trustme.CA, name: str | None) -> None:
        context = ssl.create_default_context()
        ca.configure_trust(context)
        context.check_hostname = name is not None
        plain = await trio.open_tcp_stream(*parse_address(server.address))
        stream = trio.SSLStream(plain, context, server_hostname=name, https_compatible=True)
        await stream.send_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await stream.receive_some(1000)).startswith(b"HTTP/1.1 200")
        await trio.aclose_forcefully(stream)

    first = issue(10)
    policy = HttpPolicy(tls=(certificate, key), grace=0)
    assert policy.https is not None
    async with serve(policy=policy) as server:
        for name in ("localhost", None):
            await asks(server, first, name)
        before = policy.https.expiries()["https"]
        second = issue(20)
        for name in ("localhost", None):
            await asks(server, second, name)
        assert policy.https.expiries()["https"] == pytest.approx(before + 10 * 86400, abs=60)
        key.write_bytes(b"")
        await asks(server, second, None)
        assert "cannot load TLS files" in str(policy.https.problem)
        assert policy.https.expiries()["https"] > before


async def test_a_tls_key_with_a_pass_phrase_is_refused_and_nobody_is_asked_for_it(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    issued = trustme.CA().issue_cert("127.0.0.1")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_bytes(issued.cert_chain_pems[0].bytes())
    private = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key.write_bytes(private.private_bytes(*form, locked))
    key.chmod(0o600)
    with pytest.raises(InputError, match="cannot load TLS files"):
        async with serve(policy=HttpPolicy(tls=(certificate, key))):
            pytest.fail("it served")


async def test_tls_files_that_cannot_be_used_are_refused(serve: Callable[..., Any], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no PEM")
    wrong.chmod(0o600)
    with pytest.raises(InputError, match="cannot load TLS files"):
        async with serve(policy=HttpPolicy(tls=(wrong, wrong))):
            pytest.fail("it served")


# --- the page ---


async def test_the_page_is_one_document_whose_parts_its_policy_allows(serve: Callable[..., Any]) -> None:
    async with serve() as server:
        reply = await server.ask("GET", "/")
        assert reply.headers["content-type"].startswith("text/html")
        text, policy = reply.body.decode(), reply.headers["content-security-policy"]
        assert "<h1>m</h1>" in text
        assert "@" not in text.replace("@media", "")
        for element in ("script", "style"):
            (content,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert f"{element}-src 'sha256-{digest}'" in policy
        assert not re.findall(r"(?:src|href)=", text)
        assert " style=" not in text
        assert " on" not in " ".join(re.findall(r"<[a-z][^>]*>", text.split("<script>")[0])).replace(
            "conversations", ""
        )
        assert "innerHTML" not in text
