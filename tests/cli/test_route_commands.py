"""Commands over a route of stages in processes of their own: `dgr generate --route`, `dgr trace` and `dgr doctor`, and what
they say when something is wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen
from cli.commands import Result, Stage
from fixture_types import Model
from serving.tracing.perfetto_files import faults, processes

from dgr.artifact.artifact import Artifact
from dgr.cli import generate
from dgr.core.route import LayerRange, StageRef
from dgr.testing.network.processes import free_ports

PROMPT = ("--prompt", "The quick brown fox", "-n", "8")
CONTEXT = {"n_ctx": 256, "n_batch": 32, "n_ubatch": 32, "n_seq_max": 4}


@frozen
class Cluster:
    """Two stages that fit together, and some that do not fit in."""

    model: Path
    head: Stage
    tail: Stage
    #: A tail with another context, and one of another model.
    other_context: Stage
    other_model: Stage

    @property
    def refs(self) -> list[StageRef]:
        return [self.head.ref, self.tail.ref]


@pytest.fixture(scope="module")
def cluster(small: Path, model: Model, stages: Callable[..., list[Stage]]) -> Cluster:
    other = model("f32", layers=7, seed=1)
    return Cluster(small, *stages((small, "0:3"), (small, "3:7"), (small, "3:7", "--ctx", "512"), (other, "3:7")))


def healthy(run: Callable[..., Result], path: Path) -> Result:
    result = run("doctor", "--route", path, "--json")
    assert result.code == 0, result.out
    return result


# --- generate ---


def test_generate_over_a_route_says_what_one_machine_says(
    run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path]
) -> None:
    path = route_file(cluster.refs, model=cluster.model, context=CONTEXT)
    whole = run("generate", "--model", cluster.model, "--ctx", 256, "--batch", 32, "--ubatch", 32, *PROMPT, "--json")
    result = run("generate", "--route", path, *PROMPT, "--json", "--verify")
    assert result.code == 0
    answer = result.json()
    assert answer["tokens"] == whole.json()["tokens"]
    assert answer["text"] == whole.json()["text"]
    assert set(answer) == {
        "prompt_tokens", "tokens", "text", "finish_reason", "stages", "seconds", "events", "verified",
    }  # fmt: skip
    assert answer["stages"] == [{"name": ref.address, "layers": str(ref.layers)} for ref in cluster.refs]
    assert set(answer["seconds"]) == {"to_first_token", "decode"}
    assert answer["finish_reason"] == "length"
    assert [event["event"] for event in answer["events"]] == ["Prefilled"]
    verified = answer["verified"]
    assert verified["equal"] is True
    assert verified["rows"] == len(answer["prompt_tokens"]) + 8


def test_generate_prints_tokens_and_figures(
    run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path]
) -> None:
    path = route_file(cluster.refs, model=cluster.model)
    result = run("generate", "--route", path, *PROMPT, "--chunk", 4)
    assert result.code == 0
    assert f"stage {cluster.head.address} layers 0:3" in result.out
    assert "8 tokens" in result.out
    assert "ended by length" in result.out


# --- trace ---

SECRET = "xyzzy plugh: a word for every token"


def accounted(result: Result, n_tokens: int) -> dict[str, Any]:
    """What `dgr trace --json` tells, whose parts must be the whole."""
    assert result.code == 0, result.err
    told = result.json()
    decode = told["decode"]
    assert (decode["frames"], decode["incomplete"], told["prefill"]["incomplete"]) == (n_tokens - 1, 0, 0)
    parts = sum(sum(one.values()) for one in decode["parts"].values())
    assert parts == pytest.approx(decode["measured"], rel=1e-6)
    assert abs(decode["unexplained"]) < 1e-6
    assert all(clock["problem"] is None and 0 < clock["error"] < 1 for clock in told["clocks"])
    return told


def test_trace_accounts_for_every_moment_over_stages_with_clocks_of_their_own(
    run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path], tmp_path: Path
) -> None:
    path, out = route_file(cluster.refs, model=cluster.model), tmp_path / "trace.json"
    words = ("trace", "--route", path, "--prompt", SECRET, "-n", 9, "--ignore-eos", "--chunk", 8)
    told = accounted(run(*words, "--json", "-o", out), 9)
    assert told["out"] == str(out)
    assert list(told["decode"]["parts"]) == [cluster.head.address, cluster.tail.address, "client"]
    for stage in (cluster.head, cluster.tail):
        parts = told["decode"]["parts"][stage.address]
        assert parts["compute"] > 0
        assert set(parts) == {"wire", "queue", "wait", "compute", "result"}
    # Clocks begin anywhere: these processes and this one.
    offsets = [clock["offset"] for clock in told["clocks"]]
    assert all(abs(one) > 1 for one in offsets)
    assert abs(offsets[0] - offsets[1]) > 1
    file = json.loads(out.read_bytes())
    assert faults(file) == []
    assert len(processes(file)) == 3
    assert SECRET not in out.read_text()
    assert told["trace"] == file["otherData"]["trace"]


def test_trace_prints_tables(run: Callable[..., Result], cluster: Cluster) -> None:
    result = run("trace", "--model", cluster.model, "--split", "0:3,3:7", *PROMPT, "--ctx", 256, "--ignore-eos")
    assert result.code == 0, result.err
    heads = [line.split() for line in result.out.splitlines() if line.startswith("WHERE")]
    assert heads == 2 * [["WHERE", "LAYERS", "WIRE", "QUEUE", "WAIT", "COMPUTE", "RESULT", "CLIENT", "SUM", "SHARE"]]
    shares = [line.split()[-1] for line in result.out.splitlines() if line.startswith("all")]
    assert shares == ["100.0%", "100.0%"]
    assert "unexplained: 0.000 ms a token (0.0%)" in result.out
    assert "its clock is" in result.out


def test_trace_refuses_a_route_beside_a_split(
    run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path]
) -> None:
    result = run("trace", "--route", route_file(cluster.refs), "--split", "0:7", *PROMPT)
    assert (result.code, "give one of them" in result.err) == (2, True)
    result = run("trace", *PROMPT)
    assert (result.code, "give --model GGUF, or --route TOML" in result.err) == (2, True)


# --- generate, once more ---


def test_generate_takes_the_vocabulary_from_the_flag(
    run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path]
) -> None:
    path = route_file(cluster.refs)
    result = run("generate", "--route", path, *PROMPT, "--json")
    assert result.code == 2
    assert "text needs a vocabulary: give --model GGUF, or `model` in the route file" in result.err
    assert run("generate", "--route", path, "--model", cluster.model, *PROMPT, "--json").code == 0


def test_generate_refuses_a_route_beside_a_split(
    run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path]
) -> None:
    path = route_file(cluster.refs, model=cluster.model)
    result = run("generate", "--route", path, "--split", "0:7", *PROMPT)
    assert result.code == 2
    assert "give one of them" in result.err


def test_generate_over_stages_that_are_not_there(
    run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path]
) -> None:
    gone = StageRef("127.0.0.1:1", LayerRange(3, 7))
    result = run("generate", "--route", route_file([cluster.head.ref, gone], model=cluster.model), *PROMPT)
    assert result.code == 1
    said, step = result.err.splitlines()
    assert "cannot connect to 127.0.0.1:1: " in said
    assert "dgr doctor --route" in step


@pytest.mark.slow
def test_generate_waits_for_stages_that_are_not_up_yet(
    run: Callable[..., Result], cluster: Cluster, stages: Callable[..., list[Stage]], route_file: Callable[..., Path]
) -> None:
    (port,) = free_ports(1)
    tail = StageRef(f"127.0.0.1:{port}", LayerRange(3, 7))
    path = route_file([cluster.head.ref, tail], model=cluster.model)
    assert run("generate", "--route", path, *PROMPT).code == 1, "nobody is there yet, and nobody was told to wait"
    late = threading.Thread(target=stages, args=((cluster.model, "3:7", "--listen", tail.address),))
    late.start()
    try:
        result = run("generate", "--route", path, *PROMPT, "--wait", "60", "--json")
    finally:
        late.join()
    assert result.code == 0, result.err
    assert len(result.json()["tokens"]) == 8


@pytest.mark.slow
def test_generate_waits_for_a_lost_stage_as_long_as_it_is_told(
    run: Callable[..., Result],
    cluster: Cluster,
    stages: Callable[..., list[Stage]],
    route_file: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tail,) = stages((cluster.model, "3:7"))
    path = route_file([cluster.head.ref, tail.ref], model=cluster.model)

    def kill_at_the_first_token(*text: object, **options: object) -> None:
        if "end" in options:
            tail.process.kill()
            tail.process.wait()

    monkeypatch.setattr(generate, "say_above", kill_at_the_first_token)
    result = run("generate", "--route", path, *PROMPT, "--wait", "0.3")
    assert result.code == 1
    assert "the route is down and was not live within 0.3 s" in result.err
    assert f"cannot connect to {tail.address}" in result.err


@pytest.mark.parametrize("command", [("generate", *PROMPT), ("serve",)])
def test_commands_wait_for_a_route_only(command: tuple[str, ...], run: Callable[..., Result], small: Path) -> None:
    result = run(*command, "--model", small, "--wait", "5")
    assert result.code == 2
    assert "--wait is for stages elsewhere: give --route with it" in result.err


# --- doctor ---


def test_doctor_finds_a_healthy_route_healthy(
    run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path]
) -> None:
    path = route_file(cluster.refs, context=CONTEXT, artifact=Artifact.open(cluster.model).identity)
    report = healthy(run, path).json()
    assert report["healthy"] is True
    assert report["problems"] == []
    assert report["fence_seconds"] > 0
    for stage, ref in zip(report["stages"], cluster.refs, strict=True):
        assert (stage["address"], stage["layers"]) == (ref.address, str(ref.layers))
        assert 0 < stage["round_trip"] < 1
        assert stage["bandwidth"] > 2**20
        assert stage["identity"]["artifact"] == Artifact.open(cluster.model).identity
        assert stage["identity"]["context"]["n_ctx"] == 256
    shown = run("doctor", "--route", path)
    assert shown.code == 0
    assert "healthy: every stage fenced an epoch within" in shown.out
    assert shown.out.count("round trip") == 2


def test_doctor_takes_a_context_that_upstream_rounds(
    run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path]
) -> None:
    healthy(run, route_file(cluster.refs, context={"n_ctx": 200}))


def problem(run: Callable[..., Result], path: Path, *flags: object) -> dict[str, Any]:
    """The one problem of a route; what people read tells it too."""
    result = run("doctor", "--route", path, "--json", *flags)
    assert result.code == 1
    report = result.json()
    assert report["healthy"] is False
    assert report["fence_seconds"] is None
    found: dict[str, Any]
    (found,) = report["problems"]
    shown = run("doctor", "--route", path, *flags)
    assert shown.code == 1
    assert f"{found['where']}: {found['what']}\n  next: {found['next_step']}" in shown.out
    assert "healthy" not in shown.out
    return found


def test_doctor_on_a_stage_that_does_not_run(
    run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path]
) -> None:
    gone = StageRef("127.0.0.1:1", LayerRange(3, 7))
    found = problem(run, route_file([cluster.head.ref, gone]))
    assert found["where"] == "stage 127.0.0.1:1"
    assert "cannot connect to 127.0.0.1:1" in found["what"]
    assert "start the stage there (dgr stage)" in found["next_step"]


def test_doctor_on_a_stage_with_another_context(
    run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path]
) -> None:
    refs = [cluster.head.ref, cluster.other_context.ref]
    found = problem(run, route_file(refs))
    assert found["where"] == f"stage {cluster.other_context.address}"
    assert "context parameters" in found["what"]
    assert "n_ctx 512 is not 256" in found["what"]
    assert found["next_step"] == "make the stages alike, or correct the route file"
    found = problem(run, route_file(refs, context={"n_ctx": 256}))
    assert f"stage {cluster.other_context.address} runs with n_ctx = 512; the route is for 256" in found["what"]


def test_doctor_on_a_stage_of_another_model(
    run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path]
) -> None:
    refs = [cluster.head.ref, cluster.other_model.ref]
    found = problem(run, route_file(refs))
    assert "artifact identity" in found["what"]
    identities = {cluster.head.line["artifact"], cluster.other_model.line["artifact"]}
    assert len(identities) == 2
    assert all(identity in found["what"] for identity in identities)
    found = problem(run, route_file(refs, artifact=cluster.head.line["artifact"]))
    assert found["where"] == f"stage {cluster.other_model.address}"


def test_doctor_on_other_layers(run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path]) -> None:
    refs = [cluster.head.ref, evolve(cluster.tail.ref, layers=LayerRange(3, 6))]
    found = problem(run, route_file(refs))
    assert found["what"] == "it owns layers 3:7; the route says 3:6"
    assert "correct the route file" in found["next_step"]


def test_doctor_on_a_route_that_is_not_the_whole_model(
    run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path]
) -> None:
    found = problem(run, route_file([cluster.head.ref]))
    assert found["where"] == "the route as a whole"
    assert "the split ends at layer 3, but the model has 7" in found["what"]


def test_doctor_names_every_stage_that_is_wrong(
    run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path]
) -> None:
    refs = [StageRef(f"127.0.0.1:{port}", LayerRange(port, port + 1)) for port in (1, 2, 3)]
    result = run("doctor", "--route", route_file(refs), "--json")
    assert result.code == 1
    assert [one["where"] for one in result.json()["problems"]] == [f"stage {ref.address}" for ref in refs]


def test_doctor_beyond_loopback_without_certificates(
    run: Callable[..., Result], route_file: Callable[..., Path]
) -> None:
    found = problem(run, route_file([StageRef("192.0.2.1:7701", LayerRange(0, 7))]))
    assert "192.0.2.1 is not a loopback address and no TLS credentials were given" in found["what"]


def test_doctor_speaking_plainly_to_a_tls_stage(
    run: Callable[..., Result],
    stages: Callable[..., list[Stage]],
    small: Path,
    tmp_path: Path,
    route_file: Callable[..., Path],
) -> None:
    assert run("keys", "127.0.0.1", "client", "--out", tmp_path / "keys").code == 0
    files = [tmp_path / "keys" / name for name in ("ca.pem", "127.0.0.1.pem", "127.0.0.1.key")]
    flags = [part for pair in zip(("--tls-ca", "--tls-cert", "--tls-key"), files, strict=True) for part in pair]
    (stage,) = stages((small, "0:7", *flags))
    found = problem(run, route_file([stage.ref]))
    assert found["where"] == f"stage {stage.address}"
    assert "something listens there and ended the link: it may want TLS" in found["next_step"]
    plain = run("drain", stage.address)
    assert (plain.code, "it may want TLS" in plain.err, "--route TOML takes" in plain.err) == (1, True, True)
    client = tuple(tmp_path / "keys" / name for name in ("ca.pem", "client.pem", "client.key"))
    path = route_file([stage.ref], tls=client, model=small)
    healthy(run, path)
    answer = run("generate", "--route", path, *PROMPT, "--json")
    assert answer.code == 0
    assert len(answer.json()["tokens"]) == 8
    # Another CA's certificates, on the command line, take the place of the route file's.
    assert run("keys", "client", "--out", tmp_path / "others").code == 0
    others = [tmp_path / "others" / name for name in ("ca.pem", "client.pem", "client.key")]
    flags = [part for pair in zip(("--tls-ca", "--tls-cert", "--tls-key"), others, strict=True) for part in pair]
    found = problem(run, path, *flags)
    assert "certificate verify failed" in found["what"]
    assert "it is not of this host's CA: give all hosts certificates of one CA" in found["next_step"]


# --- flags ---


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--heartbeat", "0"), "--heartbeat is 0 seconds; give 0.05 to 3600"),
        (("--heartbeat", "nan"), "--heartbeat is nan seconds; give 0.05 to 3600"),
        (("--wait", "0"), "--wait is 0 seconds; give a number above 0"),
        (("--wait", "nan"), "--wait is nan seconds; give a number above 0"),
        (("--wait", "inf"), "--wait is inf seconds; give a number above 0"),
        (("--tls-ca", "ca.pem"), "--tls-ca, --tls-cert and --tls-key go together"),
        (("--tls-cert", "a.pem", "--tls-key", "a.key"), "--tls-ca, --tls-cert and --tls-key go together"),
        (("--tls-ca", "no", "--tls-cert", "no", "--tls-key", "no"), "cannot load TLS credentials no, no, no"),
    ],
)
def test_link_flags_that_cannot_be(
    flags: tuple[str, ...], message: str, run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path]
) -> None:
    path = route_file(cluster.refs, model=cluster.model)
    result = run("generate", "--route", path, *PROMPT, *flags)
    assert result.code == 2
    assert message in result.err


def test_a_route_file_that_is_wrong_is_bad_input_everywhere(run: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "route.toml"
    path.write_text("nodel = 'x'")
    for command in (("doctor", "--route", path), ("generate", "--route", path, *PROMPT), ("up", path)):
        result = run(*command)
        assert result.code == 2
        said, step = result.err.splitlines()
        assert said == f"dgr: error: {path}: unknown key 'nodel'; known are artifact, model, context, tls, stage"
        assert step.startswith("dgr: next: ")


def test_json_is_one_line(run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path]) -> None:
    result = healthy(run, route_file(cluster.refs))
    assert len(result.out.splitlines()) == 1
    assert json.loads(result.out)["healthy"] is True


# --- draining ---


def test_drain_empties_a_stage_and_takes_it_back(
    run: Callable[..., Result], cluster: Cluster, route_file: Callable[..., Path]
) -> None:
    address = cluster.head.ref.address
    result = run("drain", address)
    assert (result.code, result.out) == (0, f"stage {address} is drained: no session is left\n")
    try:
        found = problem(run, route_file(cluster.refs))
        assert "it is being drained" in found["what"]
    finally:
        result = run("drain", address, "--undo", "--json")
    assert (result.code, json.loads(result.out)) == (
        0,
        {"stage": address, "draining": False, "routes": 0, "sessions": 0},
    )
    healthy(run, route_file(cluster.refs))


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("127.0.0.1:9",), 1, "cannot connect to 127.0.0.1:9"),
        (("127.0.0.1:9", "--timeout", "nan"), 2, "--timeout is nan seconds"),
        (("127.0.0.1:9", "--idle", "-1"), 2, "--idle is -1 seconds"),
        (("10.0.0.1",), 2, "is not HOST:PORT"),
        (("10.0.0.1:7701",), 2, "not a loopback address and no TLS credentials"),
    ],
)
def test_what_drain_refuses(flags: tuple[str, ...], code: int, said: str, run: Callable[..., Result]) -> None:
    result = run("drain", *flags)
    assert (result.code, said in result.err) == (code, True)
