"""`dgr stage` and `dgr up`: what they refuse, with which words and which exit code, before anything is loaded."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.commands import CONTEXT, Result, Stage
from narrow import present

import dgr.cli.stage
import dgr.cli.up
from dgr.artifact.artifact import Artifact
from dgr.cli import main
from dgr.cli.options import add_link_arguments, link_policy_of
from dgr.cli.up import stage_command
from dgr.cluster.connect import LinkPolicy
from dgr.cluster.keeper import Keeper
from dgr.cluster.route_file import read_route_file
from dgr.core.route import LayerRange, StageRef
from dgr.wire.credentials import Credentials

LISTEN = ("--listen", "127.0.0.1:0")


@pytest.fixture(autouse=True)
def nothing_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process commands are only refused; one that is not must not serve forever."""

    async def serve(*_: object) -> None:
        raise AssertionError("it was not refused")

    monkeypatch.setattr(dgr.cli.stage, "_until_told", serve)
    monkeypatch.setattr(Keeper, "_run_once", serve)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "[::]", "stage-a.lan"])
def test_plain_tcp_beyond_loopback_is_refused(host: str, run: Callable[..., Result], small: Path) -> None:
    result = run("stage", small, "--layers", "0:7", "--listen", f"{host}:7701")
    assert result.code == 2
    assert f"{host.strip('[]')} is not a loopback address and no TLS credentials were given" in result.err
    assert "`dgr keys`" in result.err


def test_plain_tcp_beyond_loopback_may_be_allowed(stages: Callable[..., list[Stage]], small: Path) -> None:
    (stage,) = stages((small, "0:7", "--allow-plain"))
    assert stage.address.startswith("127.0.0.1:")


def test_a_stage_may_listen_anywhere_when_told_so(small: Path) -> None:
    """On every address of the host, in the clear: only when asked for explicitly."""
    command = ["stage", str(small), "--layers", "0:7", "--listen", "0.0.0.0:0", "--allow-plain", *CONTEXT, "--json"]
    with _program(command) as process:
        assert json.loads(present(process.stdout).readline())["address"].startswith("0.0.0.0:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def _program(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "dgr", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--layers", "0:7", "--listen", "7701"), "address '7701' is not HOST:PORT"),
        (("--layers", "0:7", "--listen", "127.0.0.1:65536"), "is not HOST:PORT with a port from 0 to 65535"),
        (("--layers", "0:7", "--listen", "a..b:1"), "address 'a..b:1' is not HOST:PORT"),
        (("--layers", "7", *LISTEN), "layer range '7' is not of the form A:B"),
        (("--layers", "3:3", *LISTEN), "layer range 3:3 is empty"),
        (("--layers", "0:8", *LISTEN), "0:8"),
        (("--layers", "0:7", *LISTEN, "--sessions", "0"), "n_seq_max is 0"),
        (("--layers", "0:7", *LISTEN, "--ctx", "0"), "n_ctx is 0"),
        (("--layers", "0:7", *LISTEN, "--ubatch", "9999"), "n_ubatch is 9999"),
        (("--layers", "0:7", *LISTEN, "--type-k", "q9_9"), "q9_9"),
        (("--layers", "0:7", *LISTEN, "--threads", "0"), "threads"),
        (("--layers", "0:7", *LISTEN, "--memory", "lots"), "lots"),
        (("--layers", "0:7", *LISTEN, "--memory", "1KiB"), "budget of 1024 B"),
        (("--layers", "0:7", *LISTEN, "--memory", "9" * 400), f"memory budget '{'9' * 40}' is over 2^63 bytes"),
        (("--layers", "0:7", *LISTEN, "--memory", "9" * 400 + "%"), "is over 2^63 bytes"),
        (("--layers", "0:7", *LISTEN, "--memory", "8388608TiB"), "is over 2^63 bytes"),
        (("--layers", "0:7", *LISTEN, "--memory", "0"), "is less than one byte"),
        (("--layers", "0:7", *LISTEN, "--metrics", "9701"), "address '9701' is not HOST:PORT"),
        (("--layers", "0:7", *LISTEN, "--ttl", "0"), "--ttl is 0"),
        (("--layers", "0:7", *LISTEN, "--ttl", "nan"), "--ttl is nan"),
        (("--layers", "0:7", *LISTEN, "--drain", "nan"), "--drain is nan"),
        (("--layers", "0:7", *LISTEN, "--numerics", "rough"), "invalid choice: 'rough'"),
        (("--layers", "0:7"), "the following arguments are required: --listen"),
        ((*LISTEN,), "the following arguments are required: --layers"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value).replace(" ".join(LISTEN), "…"),
)
def test_flags_that_cannot_be(flags: tuple[str, ...], message: str, run: Callable[..., Result], small: Path) -> None:
    result = run("stage", small, *flags)
    assert result.code == 2
    assert message in result.err
    assert result.out == ""


def test_a_model_that_is_not_there_is_refused(run: Callable[..., Result], tmp_path: Path) -> None:
    result = run("stage", tmp_path / "none.gguf", "--layers", "0:7", *LISTEN)
    assert result.code == 2
    assert "none.gguf" in result.err
    assert len(result.err.splitlines()) == 2


def test_a_port_that_is_taken_is_told_before_the_model_is_read(run: Callable[..., Result], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run("stage", tmp_path / "none.gguf", "--layers", "0:7", "--listen", address)
    assert result.code == 2
    assert f"cannot listen on {address}: Address already in use; end what listens there" in result.err


def test_a_ready_stage_says_what_it_is(stages: Callable[..., list[Stage]], small: Path) -> None:
    (stage,) = stages((small, "0:3"))
    assert isinstance(stage, Stage)
    assert set(stage.line) == {
        "address", "layers", "artifact", "kernel_fingerprint", "devices", "weights_bytes", "state_bytes", "compute_bytes",
        "device_bytes", "graph_splits",
    }  # fmt: skip
    assert stage.line["artifact"] == Artifact.open(small).identity
    assert all(device.startswith("CPU") for device in stage.line["devices"])  # exact numerics, the default
    assert stage.ref.layers == LayerRange(0, 3)
    assert min(stage.line[name] for name in ("weights_bytes", "state_bytes", "compute_bytes")) > 0


def test_a_stage_with_metrics_says_where_they_are(stages: Callable[..., list[Stage]], small: Path) -> None:
    (stage,) = stages((small, "0:3", "--metrics", "127.0.0.1:0"))
    (url,) = stage.line["metrics"]
    with urllib.request.urlopen(url) as answer:
        text = answer.read().decode()
    (found,) = re.findall(r"^dgr_stage_weights_bytes (\S+)$", text, re.MULTILINE)
    assert float(found) == stage.line["weights_bytes"]
    with urllib.request.urlopen(url.replace("/metrics", "/ready")) as answer:
        assert json.load(answer) == {"status": "ready"}


def test_metrics_without_their_extra_name_it(
    run: Callable[..., Result], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgr.cli.options._lacks", lambda name: name == "anycorn")
    result = run("stage", small, "--layers", "0:7", *LISTEN, "--metrics", "127.0.0.1:0")
    assert result.code == 2
    assert "dgr stage --metrics needs anycorn: install dgr with its extra `metrics`" in result.err


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=lambda how: how.name)
def test_a_signal_ends_a_stage_in_good_order(how: signal.Signals, small: Path) -> None:
    with _program(["stage", str(small), "--layers", "0:3", *LISTEN, *CONTEXT]) as process:
        line = present(process.stdout).readline().decode()
        assert line.startswith("stage 0:3 listens on 127.0.0.1:")
        os.kill(process.pid, how)
        assert process.wait(20) == 0
        assert present(process.stderr).read() == b""


# --- up ---


def _route(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "route.toml"
    path.write_text(text)
    return path


STAGE = '[[stage]]\naddress = "127.0.0.1:7701"\nlayers = "0:7"\n'
FAR = '[[stage]]\naddress = "192.0.2.1:7701"\nlayers = "0:7"\n'


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (STAGE, (), "give --model GGUF, or `model` in the route file"),
        (STAGE, ("--model", "none.gguf"), "none.gguf"),
        (FAR, ("--model", "SMALL"), "no stage of the route has a loopback address"),
        (STAGE, ("--model", "SMALL", "--only", "127.0.0.1:1"), "the route has no stage 127.0.0.1:1"),
        (f'artifact = "00ff"\n{STAGE}', ("--model", "SMALL"), "the route is for 00ff"),
        (STAGE.replace("0:7", "0:6"), ("--model", "SMALL"), "the split ends at layer 6, but the model has 7"),
        (STAGE.replace("127.0.0.1:7701", "here"), ("--model", "SMALL"), "address 'here' is not HOST:PORT"),
        (STAGE, ("--model", "SMALL", "--heartbeat", "0"), "--heartbeat is 0 seconds"),
        (STAGE, ("--model", "SMALL", "--tls-ca", "x"), "--tls-ca, --tls-cert and --tls-key go together"),
        (STAGE, ("--model", "SMALL", "--threads", "0"), "--threads is 0"),
        (STAGE, ("--model", "SMALL", "--frozen-after", "0"), "--frozen-after is 0 seconds"),
        (STAGE, ("--model", "SMALL", "--settle", "nan"), "--settle is nan seconds"),
        (STAGE, ("--model", "SMALL", "--out", "live.toml"), "--out goes with --ray"),
        (f'{STAGE}metrics = "9701"', ("--model", "SMALL"), "metrics: address '9701' is not HOST:PORT"),
        (f'{STAGE}metrics = "127.0.0.1:0"', ("--model", "SMALL"), "give a port that a scraper can be told of, not 0"),
    ],
)
def test_what_up_refuses(
    text: str, flags: tuple[str, ...], message: str, run: Callable[..., Result], small: Path, tmp_path: Path
) -> None:
    result = run("up", _route(tmp_path, text), *(str(small) if flag == "SMALL" else flag for flag in flags))
    assert result.code == 2
    assert message in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--only", "127.0.0.1:7701", "--out", "live.toml"),
            "--only names stages of this host, --ray places all of them",
        ),
        ((), "--ray needs --out ROUTE.toml"),
        (("--out", "live.toml"), "install dgr with its extra `ray` (pip install '.[ray]' in its checkout)"),
    ],
)
def test_what_up_refuses_of_ray(
    flags: tuple[str, ...], message: str, run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = "install" not in message
    monkeypatch.setattr("dgr.cli.options._lacks", lambda name: not present)
    result = run("up", _route(tmp_path, STAGE), "--ray", "127.0.0.1:1", *flags)
    assert result.code == 2
    assert message in result.err


def test_up_gives_every_stage_what_the_route_says(small: Path, tmp_path: Path) -> None:
    path = _route(
        tmp_path,
        '[context]\nn_ctx = 512\nn_batch = 64\nn_ubatch = 32\nn_seq_max = 2\ntype_k = "f32"\nflash_attn = false\n'
        f'numerics = "native"\n{STAGE}metrics = "127.0.0.1:9701"\ndevice = "CUDA0,CUDA1"\ngpu_layers = 5\n',
    )
    file = read_route_file(path)
    credentials = Credentials(Path("ca.pem"), Path("a.pem"), Path("a.key"))
    policy = LinkPolicy(credentials=credentials, allow_plain=True, heartbeat=0.5)
    command = stage_command(file, StageRef("127.0.0.1:7701", LayerRange(0, 7)), small, 3, 4, policy, "debug", "json")
    here = Path.cwd()
    flags = " ".join(command[command.index("stage") :])
    assert flags == (
        f"stage {small} --layers=0:7 --listen=127.0.0.1:7701 --threads=3 --sessions=2 --ctx=512 --batch=64 --ubatch=32"
        f" --type-k=f32 --numerics=native --flash-attn=off --tls-ca={here}/ca.pem --tls-cert={here}/a.pem"
        f" --tls-key={here}/a.key --heartbeat=0.5 --log=debug --log-format=json"
        " --metrics=127.0.0.1:9701 --device=CUDA0,CUDA1 --gpu-layers=5 --allow-plain --json --until-stdin-closes"
    )


def test_flags_override_the_credentials_of_the_route_file() -> None:
    parser = argparse.ArgumentParser()
    add_link_arguments(parser)
    of_file = (Path("f.ca"), Path("f.pem"), Path("f.key"))
    assert link_policy_of(parser.parse_args([]), of_file).credentials == Credentials(*of_file)
    assert link_policy_of(parser.parse_args([])).credentials is None
    given = parser.parse_args(["--tls-ca", "c", "--tls-cert", "p", "--tls-key", "k"])
    assert link_policy_of(given, of_file).credentials == Credentials(Path("c"), Path("p"), Path("k"))


def test_commands_name_themselves_in_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("stage", "up", "doctor", "keys"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"usage: dgr {command}" in capsys.readouterr().out
