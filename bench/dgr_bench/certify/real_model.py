"""``dgr-bench real``: the certificate on the real model, with everything that its evidence must record.

    DGR_MODEL=/mnt/models/V4-Flash-00001-of-00004.gguf dgr-bench real --route route.toml

Opt-in: it takes the model from the environment variable ``DGR_MODEL`` alone. Before anything is loaded it checks the files,
hashes artifact and split, reaches every stage and measures the links to them; ``--check`` stops there. The result is one
JSON file, as of ``dgr-bench certify``; its subject has these facts besides.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import trio
from attrs import evolve

from dgr import LinkPolicy
from dgr.cli.options import add_link_arguments
from dgr.cli.progress import progress_bar
from dgr.cluster.doctor import examine
from dgr.cluster.route_file import RouteFile
from dgr.errors import InputError, InvalidRoute
from dgr_bench.benchmark import benchmark_command, execute
from dgr_bench.certify.run import CertifyJob, asked_profile, open_job
from dgr_bench.environment import environment

#: Environment variable that names the model.
VARIABLE = "DGR_MODEL"
#: Where model artifacts never live.
_FORBIDDEN = Path("/home")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", metavar="P", help="as of certify (default: v4-flash)")
    parser.add_argument("--split", metavar="A:B,...", help="layer ranges of stages in this process")
    parser.add_argument("--route", metavar="TOML", help="stages in other processes, instead of --split")
    parser.add_argument("--check", action="store_true", help="do everything up to loading, print the facts, and stop")
    parser.add_argument(
        "--fact",
        action="append",
        default=[],
        metavar="NAME=TEXT",
        help="something to record that no program can see, such as the hosts or the cable (may be repeated)",
    )
    add_link_arguments(parser)


def _run(args: argparse.Namespace) -> int:
    job = _real(args)
    if args.check:
        print(msgspec.json.format(msgspec.json.encode(job.subject())).decode())
        return 0
    return execute(job, args)


def _real(args: argparse.Namespace) -> CertifyJob:
    job = _job(args)
    return evolve(job, facts=facts_of(job, _given(args.fact)))


def _job(args: argparse.Namespace) -> CertifyJob:
    model = os.environ.get(VARIABLE)
    if not model:
        raise InputError(
            f"{VARIABLE} is not set: it names the real model, and nothing else does, so that no run begins by mistake;"
            f" {VARIABLE}=/mnt/... dgr-bench real --route route.toml"
        )
    check_not_home([Path(model)])
    if args.split is None and args.route is None:
        raise InputError(
            "give --route TOML, the stages of the model, or --split A:B,... to load them all in this process"
        )
    args.model = model
    job = open_job(args, asked_profile(args, "v4-flash"))
    check_not_home(_files(job))
    return job


def _files(job: CertifyJob) -> list[Path]:
    """Every model file that this process or its route names."""
    named = [file.path for file in job.artifact.parts.present]
    if job.route is not None:
        named += [path for path in (job.route.model, *job.route.stage_models.values()) if path is not None]
    return named


def check_not_home(files: Sequence[Path]) -> None:
    """Refuse model files under /home, through links too."""
    for file in files:
        real = file.resolve()
        if real.is_relative_to(_FORBIDDEN):
            raise InputError(
                f"{file} is {real}, under {_FORBIDDEN}: keep model files on mounted storage, and name it there"
            )


def _given(facts: Sequence[str]) -> dict[str, str]:
    pairs = [fact.partition("=") for fact in facts]
    for fact, (name, sign, _) in zip(facts, pairs, strict=True):
        if not (name and sign):
            raise InputError(f"--fact {fact!r} is not of the form NAME=TEXT")
    return {name: text for name, _, text in pairs}


# --- the facts --------------------------------------------------------------------------------------------------------


def facts_of(job: CertifyJob, given: Mapping[str, str]) -> dict[str, Any]:
    """What a real run records beside its certificate; reads all weights the first time, to hash them."""
    with progress_bar("hashing the model") as progress:
        manifest = job.artifact.manifest(progress)
    return {
        "lane": "real",
        "files": [_file(path) for path in _files(job)],
        "manifest_digest": manifest.digest,
        "metadata_digest": manifest.metadata,
        "split_bytes": {str(layers): job.artifact.weight_bytes(layers) for layers in job.ranges},
        "pins": environment().build,
        "drivers": _drivers(),
        "network": "none: every stage is in this process" if job.route is None else _network(job.route, job.policy),
        "given": dict(given),
    }


def _file(path: Path) -> dict[str, Any]:
    """Size of a file, and the storage it lies on."""
    real = path.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    mount = max(mounts, key=lambda part: len(part.mountpoint), default=None)
    return {
        "file": path.name,
        "bytes": real.stat().st_size,
        "mount": None if mount is None else mount.mountpoint,
        "file_system": None if mount is None else mount.fstype,
    }


def _drivers() -> list[str]:
    """Accelerators and their drivers, where the vendor's tool is here to tell."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return answer.stdout.strip().splitlines() if answer.returncode == 0 else [f"nvidia-smi: {answer.stderr.strip()}"]


def _network(route: RouteFile, policy: LinkPolicy | None) -> list[dict[str, Any]]:
    """What `dgr doctor` finds of every stage and the link to it. Raises :class:`InvalidRoute` when the route is not well."""
    report = trio.run(examine, route, policy or LinkPolicy())
    if report.problems:
        first = report.problems[0]
        raise InvalidRoute(f"{first.where}: {first.what}; {first.next_step}")
    return [
        {
            "address": stage.address,
            "layers": stage.layers,
            "round_trip_s": stage.round_trip,
            "bytes_per_s": stage.bandwidth,
            "devices": list(stage.identity.devices) if stage.identity is not None else [],
            "runtime": stage.identity.runtime if stage.identity is not None else "",
            "kernel_fingerprint": stage.identity.kernel_fingerprint if stage.identity is not None else "",
        }
        for stage in report.stages
    ]


COMMAND = benchmark_command(
    "real",
    f"the certificate of the real model, which {VARIABLE} names",
    f"Certify the model that the environment variable {VARIABLE} names, and record what evidence of a real run must have:"
    " artifact and split hashes, pins, devices and drivers, hardware, storage, network, commands, raw measurements. Model files"
    " under /home are refused.",
    _add_arguments,
    _real,
    _run,
)
