"""`dgr serve`: what it refuses, and a small model served by the program itself."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest
import trio
from narrow import present
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from pages.reading import ROOT, blocks_of
from serving.http.programs import CONTEXT, served

import dgr
from dgr.cli import main
from dgr.serving.api.vocabulary import ServingVocabulary

QUESTION = "The quick brown fox"


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``refusal("--listen", "nowhere")``: what `dgr serve` says when it refuses its arguments."""

    def run(*arguments: object) -> str:
        assert main(["serve", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --model GGUF, or --route TOML"),
        (("--model", "x.gguf", "--listen", "8000"), "address '8000' is not HOST:PORT"),
        (("--model", "x.gguf", "--listen", "0.0.0.0:0"), "--api-key-file FILE, or --allow-anyone"),
        (("--model", "x.gguf", "--api-key-file", "none"), "cannot read API keys from none"),
        (("--model", "x.gguf", "--https-cert", "c.pem"), "--https-cert and --https-key go together"),
        (("--model", "x.gguf", "--grace", "-1"), "grace is -1"),
        (("--model", "x.gguf", "--client-timeout", "0"), "timeout of clients is 0"),
        (("--route", "none.toml"), "cannot read none.toml"),
        (("--route", "none.toml", "--split", "0:7"), "give one of them"),
        (("--model", "x.gguf", "--follow"), "--follow follows the file of --route"),
        (("--model", "x.gguf", "--mtp"), "multi-token prediction"),
        (("--model", "x.gguf", "--trace-dir", "nowhere"), "nowhere is no folder"),
    ],
)
def test_what_cannot_be_served_is_refused(
    refusal: Callable[..., Any], arguments: tuple[str, ...], message: str
) -> None:
    assert message in refusal("--listen", "127.0.0.1:0", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--name", "two words"), "the model's name 'two words'"),
        (("--sessions", "0"), "--sessions is 0"),
        (("--prefixes", "-1"), "--prefixes -1"),
        (("--max-queued", "-1"), "cannot be negative"),
        (("--deadline", "0"), "deadline must be above 0"),
        (("--max-body", "0"), "most bytes of a body are 0"),
    ],
)
def test_options_that_cannot_be_are_refused_with_a_model_too(
    refusal: Callable[..., Any], small: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert message in refusal("--listen", "127.0.0.1:0", "--model", small, *CONTEXT, *arguments)


def test_without_the_extra_it_says_what_to_install(
    refusal: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgr.cli.options._lacks", lambda name: name == "starlette")
    assert "needs starlette: install dgr with its extra `http`" in refusal("--model", "x.gguf")
    monkeypatch.setattr("dgr.cli.options._lacks", lambda name: name == "opentelemetry.sdk")
    assert "needs opentelemetry.sdk: install dgr with its extra `otel`" in refusal("--model", "x.gguf", "--otel")


def test_the_library_itself_needs_none_of_it() -> None:
    """A core install has no HTTP library; neither `import dgr` nor any other command may miss them."""
    code = """if True:
        import sys
        for name in ("anycorn", "starlette", "deepseek_recipe", "prometheus_client", "openai", "anthropic"):
            sys.modules[name] = None
        import dgr, dgr.serving.engine, dgr.serving.api.vocabulary
        from dgr.cli import main
        sys.exit(main(["serve", "--help"]))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--api-key-file" in done.stdout


def undisturbed(model: Path) -> list[int]:
    """The whole model's answer to the same prompt."""

    async def run() -> list[int]:
        context = dgr.ContextParams(n_ctx=256, n_batch=64, n_ubatch=64)
        artifact = dgr.Artifact.open(model)
        with dgr.LlamaVocabulary(artifact) as llama:
            words = ServingVocabulary.of_model(llama, artifact)
            names = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "</think>")  # noqa: RUF001 (V4's own marks)
            bos, user, assistant, unthink = (present(words.special(name)) for name in names)
            prompt = [bos, user, *words.encode(QUESTION), assistant, unthink]
        async with dgr.open_pipeline(model, context=context) as pipeline, pipeline.session() as session:
            return [token.id async for token in session.generate(prompt, max_tokens=16, stop=(present(words.eos),))]

    return trio.run(run)


def test_a_split_model_behind_http_gives_the_whole_models_answer(small: Path) -> None:
    """Real engines, the program, OpenAI's client: the text is that of the undivided model; a signal ends it in order."""
    expected = undisturbed(small)
    with dgr.LlamaVocabulary(small) as words:
        text = b"".join(words.piece(token) for token in expected).decode("utf-8", "ignore")
    with served("--model", small, "--split", "0:3,3:7", "--name", "tiny", "--thinking", "off") as (process, line):
        assert line["model"] == "tiny"
        assert [stage["layers"] for stage in line["stages"]] == ["0:3", "3:7"]
        client = openai.OpenAI(base_url=f"{line['url']}/v1", api_key="none", max_retries=0, timeout=30)
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 16, "temperature": 0}
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        whole = client.chat.completions.create(messages=messages, **asked)
        streamed = client.chat.completions.create(messages=messages, stream=True, **asked)
        parts = [chunk.choices[0].delta.content or "" for chunk in streamed]
        assert whole.choices[0].message.content == "".join(parts) == text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And"}]
        second = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=3, **asked)
        assert second.choices[0].logprobs is not None
        assert second.choices[0].logprobs.content is not None
        first = second.choices[0].logprobs.content[0]
        assert first.logprob == max(each.logprob for each in first.top_logprobs)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def _blocks(language: str, begin: str) -> list[str]:
    """The blocks of the pages that ask a server."""
    pages = [ROOT / name for name in ("README.md", "docs/tutorial.md", "docs/serving.md")]
    first = re.compile(rf"^(?:{begin})", re.MULTILINE)
    found = [(block.code, first.search(block.code)) for page in pages for block in blocks_of(page, language)]
    return [code[match.start() :] for code, match in found if match is not None]


def test_the_examples_of_the_documentation_run(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, programs = _blocks("sh", "curl"), _blocks("python", "import (?:openai|anthropic)")
    assert (len(asked), len(programs)) == (5, 4)
    with served("--model", small, "--name", "tiny") as (_, line):
        for code in asked:
            script = code.replace("http://127.0.0.1:8000", line["url"])
            done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            assert len(done.stdout) > 10
            assert '"error":{' not in done.stdout
        for code in programs:
            exec(compile(code.replace("http://127.0.0.1:8000", line["url"]), "a block", "exec"), {})
            assert len(capsys.readouterr().out) > 10


def test_every_flag_is_documented(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # argparse breaks lines at hyphens
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out)) - {"--help", "--mtp"}
    text = (ROOT / "docs/serving.md").read_text("utf-8")
    assert not {flag for flag in flags if f"`{flag}" not in text}


def test_stages_elsewhere_are_served_with_as_many_slots_as_they_have(small: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dgr", "stage", str(small), "--layers", "0:7", "--listen", "127.0.0.1:0", *CONTEXT]
    command += ["--sessions", "3", "--json", "--until-stdin-closes"]
    stage = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert stage.stdout is not None
        address = json.loads(stage.stdout.readline())["address"]
        route = tmp_path / "route.toml"
        route.write_text(f'model = {json.dumps(os.fspath(small))}\n[[stage]]\naddress = "{address}"\nlayers = "0:7"\n')
        with served("--route", route) as (process, line):
            assert (line["sessions"], line["n_ctx"]) == (3, 256)
            client = openai.OpenAI(base_url=f"{line['url']}/v1", api_key="none", max_retries=0, timeout=30)
            done = client.completions.create(model=line["model"], prompt=QUESTION, max_tokens=4, temperature=0)
            assert done.usage is not None
            assert done.usage.completion_tokens == 4
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
    finally:
        stage.kill()
        stage.communicate()


class Collector(BaseHTTPRequestHandler):
    """Takes what is exported to it over OTLP."""

    taken: ClassVar[list[ExportTraceServiceRequest]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.taken.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing to say."""


def test_a_collector_gets_the_spans_of_a_request_and_of_its_stages(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program, OTLP over a socket, the standard environment; what is under way when the server ends is still sent."""
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_address[1]}")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "a-server")
        with served("--model", small, "--split", "0:3,3:7", "--otel", "--name", "tiny") as (process, line):
            client = openai.OpenAI(base_url=f"{line['url']}/v1", api_key="none", max_retries=0, timeout=30)
            client.completions.create(model="tiny", prompt=QUESTION, max_tokens=4, temperature=0)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""
    finally:
        collector.shutdown()
        collector.server_close()
        thread.join()
    found: dict[str, list[str]] = {}
    for resource in (one for request in Collector.taken for one in request.resource_spans):
        facts = {fact.key: fact.value.string_value for fact in resource.resource.attributes}
        name = facts["service.name"]
        who = f"{name} {facts['service.instance.id']}" if name == "dgr-stage" else name
        found.setdefault(who, []).extend(span.name for scope in resource.scope_spans for span in scope.spans)
    frames = found["a-server"].count("work frame")
    assert frames >= 4
    assert {name: len(spans) for name, spans in found.items()} == {
        "a-server": frames + 4, "dgr-stage stage-0": frames, "dgr-stage stage-1": frames,
    }  # fmt: skip
    assert {"POST /v1/completions", "queue", "prefill", "decode"} < set(found["a-server"])
