"""The systemd units: systemd itself reads them, finds them tight, and runs one where it can be had."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dgr.cli.command_line import _parser
from dgr.testing.network.processes import free_ports

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
SERVICES = sorted(path.name for path in UNITS.glob("*.service"))
#: Most of systemd's exposure, of 10: "OK" ends at 4.9; ours were 1.2 when they were written.
MOST_EXPOSED = 2.0
#: Seconds for systemd to do what a test asks.
PATIENCE = 120

needs_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def _installed(folder: Path, change: dict[str, str] | None = None) -> Path:
    """The units in a folder, running the dgr of this environment."""
    for name in SERVICES:
        text = (UNITS / name).read_text().replace("/opt/dgr/bin/dgr", str(Path(sys.executable).with_name("dgr")))
        for old, new in (change or {}).items():
            assert old in text
            text = text.replace(old, new)
        (folder / name).write_text(text)
    return folder


def _verified(unit: Path) -> str:
    instance = str(unit).replace("@.", "@x.")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", instance],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    own = [line for line in done.stderr.splitlines() if "dgr-" in line]
    return "\n".join(own) + (f"\nexit code {done.returncode}" if done.returncode else "")


@needs_analyze
def test_systemd_understands_every_unit(tmp_path: Path) -> None:
    _installed(tmp_path)
    assert {name: _verified(tmp_path / name) for name in SERVICES} == dict.fromkeys(SERVICES, "")


@needs_analyze
@pytest.mark.parametrize(
    "mistake",
    [("Type=notify", "Type=notfy"), ("WatchdogSec=30", "WatchdogSecs=30"), ("@system-service", "@no-such-set")],
)
def test_it_would_say_what_it_does_not_understand(mistake: tuple[str, str], tmp_path: Path) -> None:
    _installed(tmp_path, dict([mistake]))
    assert _verified(tmp_path / SERVICES[0])


@needs_analyze
def test_units_are_tight(tmp_path: Path) -> None:
    _installed(tmp_path)
    threshold = f"--threshold={int(10 * MOST_EXPOSED)}"
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", threshold]
    done = subprocess.run(
        [*command, *(str(tmp_path / name) for name in SERVICES)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot judge a file: --offline came with 250")
    scores = re.findall(r"exposure level for (dgr-\w+@\S*): ([\d.]+)", done.stdout)
    assert len(scores) == len(SERVICES), done.stdout + done.stderr
    assert done.returncode == 0, scores


@pytest.mark.parametrize("name", SERVICES)
def test_units_call_commands_with_flags_that_they_have(name: str) -> None:
    """The examples' settings too: everything is parsed as the command would."""
    text = (UNITS / name).read_text()
    (line,) = re.findall(r"^ExecStart=\S+ (.*)$", text, re.MULTILINE)
    kind = name.split("@")[0].removeprefix("dgr-")
    example = UNITS / f"{kind}-example.env"
    settings = dict(re.findall(r"^(DGR_\w+)=(.*)$", example.read_text(), re.MULTILINE)) if example.exists() else {}
    words = line.replace("%i", "x").split()
    expanded: list[str] = []
    for word in words:
        found = re.sub(r"\$\{(\w+)\}", lambda match: settings[match[1]], word)
        expanded += settings.get(found[1:], "").split() if found.startswith("$") else [found]
    args = _parser().parse_args(expanded)
    assert args.run is not None
    assert "Type=notify" in text
    assert "NotifyAccess=main" in text


# --- a manager of our own --------------------------------------------------------------------------------------------

SYSTEMD = Path("/lib/systemd/systemd")

#: A machine within this one: its own processes, mounts and control groups, and no units but ours.
_BOOT = """\
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/cache
mount -t tmpfs tmpfs /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
exec env -i PATH="$PATH" container=other SYSTEMD_UNIT_PATH="$1" {systemd} --system --unit=default.target
"""

#: Control groups that it leaves behind.
_SWEEP = """\
mount -t tmpfs tmpfs /mnt && mkdir /mnt/groups && mount -t cgroup2 cgroup2 /mnt/groups
cd /mnt/groups && for _ in $(seq 50); do find init.scope system.slice -depth -type d -exec rmdir {} + && break; sleep 0.1; done
"""

#: What an operator would do, and see.
_ACTS = """\
show() { systemctl show --property="$1" --value dgr-stage@seven; }
until_is() { for _ in $(seq 400); do [ "$(show "$1")" = "$2" ] && return; sleep 0.1; done; }
systemctl start dgr-stage@seven || { systemctl status --full dgr-stage@seven; echo end; exit; }
echo "started: $(show ActiveState), $(show StatusText)"
first=$(show MainPID)
kill -STOP "$first"
until_is NRestarts 1
until_is ActiveState active
echo "frozen: $(show NRestarts) restart, $(show ActiveState), $(show StatusText)"
[ "$(show MainPID)" != "$first" ] && echo "another process"
kill -KILL "$(show MainPID)"
until_is NRestarts 2
until_is ActiveState active
echo "killed: $(show NRestarts) restarts, $(show ActiveState)"
systemctl stop dgr-stage@seven
echo "stopped: $(show ActiveState), $(show Result)"
echo end
"""


def _why_not() -> str:
    if not SYSTEMD.exists():
        return "systemd is not installed"
    if Path("/run/systemd/system").exists():
        return "this machine is run by systemd, whose control groups a second one would take"
    if os.geteuid() != 0 or subprocess.run(["unshare", "-fpmC", "true"], check=False, capture_output=True).returncode:
        return "no namespaces can be made here"
    return ""


@pytest.mark.slow
def test_a_unit_is_run_watched_and_ended(small: Path, tmp_path: Path) -> None:
    """systemd waits for readiness, ends what stands still, starts it again, and stops it in good order."""
    if reason := _why_not():
        pytest.skip(reason)
    units = tmp_path / "units"
    units.mkdir()
    _installed(units, {"WatchdogSec=30": "WatchdogSec=2", "RestartSec=2": "RestartSec=0.1"})
    for name in ("basic", "sysinit"):
        (units / f"{name}.target").write_text("[Unit]\n")  # an empty file would be a masked unit
    (units / "default.target").write_text("[Unit]\nWants=acts.service\n")
    told = tmp_path / "told"
    (tmp_path / "acts").write_text(_ACTS)
    (units / "acts.service").write_text(
        "[Unit]\nDefaultDependencies=no\n[Service]\nType=oneshot\nTimeoutStartSec=infinity\n"
        f"ExecStart=/bin/bash {tmp_path}/acts\nStandardOutput=file:{told}\nStandardError=file:{told}.errors\n"
    )
    (tmp_path / "seven.env").write_text(
        f"DGR_MODEL={small}\nDGR_LAYERS=0:7\nDGR_LISTEN=127.0.0.1:{free_ports(1)[0]}\nDGR_OPTIONS=--ctx 256 --log info\n"
    )
    # The environment of these tests lies in a home folder and in /tmp; all else is as it is delivered.
    drop_in = units / "dgr-stage@.service.d"
    drop_in.mkdir()
    (drop_in / "here.conf").write_text(
        "[Service]\nUser=root\nGroup=root\nProtectHome=no\nPrivateTmp=no\nEnvironmentFile=\n"
        f"EnvironmentFile={tmp_path}/seven.env\nEnvironment=DGR_CACHE_DIR={os.environ.get('DGR_CACHE_DIR', '')} HOME=/root\n"
        f"StandardError=file:{tmp_path}/stage.errors\n"
    )
    boot = tmp_path / "boot"
    boot.write_text(_BOOT.format(systemd=SYSTEMD))
    machine = subprocess.Popen(
        ["unshare", "-fpmC", "--mount-proc", "--kill-child", "bash", str(boot), str(units)],
        stdin=subprocess.DEVNULL, stdout=(tmp_path / "systemd.log").open("wb"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        for _ in range(PATIENCE * 10):
            if "end\n" in (told.read_text() if told.exists() else ""):
                break
            with pytest.raises(subprocess.TimeoutExpired):
                machine.wait(0.1)
    finally:
        machine.kill()
        machine.wait()
        subprocess.run(["unshare", "-mC", "bash", "-c", _SWEEP], check=False, capture_output=True, timeout=PATIENCE)
    assert told.read_text().splitlines() == [
        "started: active, serves layers 0:7",
        "frozen: 1 restart, active, serves layers 0:7",
        "another process",
        "killed: 2 restarts, active",
        "stopped: inactive, success",
        "end",
    ]
