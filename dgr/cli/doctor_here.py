"""``dgr doctor`` without a route: what this machine and this installation can do, and what to do about the rest."""

from __future__ import annotations

import argparse
import os
from typing import Any

from attrs import asdict, frozen

from dgr.cli.progress import progress_bar
from dgr.cli.streams import print_json
from dgr.cli.tables import render_table
from dgr.cli.versions import versions
from dgr.core.cache_dir import cache_dir
from dgr.core.host import available_cpus, available_memory, usable_memory
from dgr.core.units import human_bytes
from dgr.engine.devices import find_devices
from dgr.engine.native import default_native
from dgr.engine.numerics import ExactnessRecord, load_exactness_record
from dgr.selftest.cases import ESSENTIAL, select

__all__ = ["examine_here"]


@frozen
class Finding:
    """Something to know of this machine, and what to do about it."""

    what: str
    next_step: str
    #: Whether something does not work, rather than as well as it could.
    problem: bool = False


def examine_here(args: argparse.Namespace) -> int:
    """Print what is found; returns 1 when something does not work."""
    with progress_bar("examining this machine"):
        known = versions()
        record = load_exactness_record()
        devices = [device.name for device in find_devices(default_native())]
    findings = _findings(known, record)
    tested = [case.name for case in select() if record is not None and record.knows(case.kind, case.label)]
    if args.json:
        print_json(
            {
                "healthy": not any(finding.problem for finding in findings),
                "versions": known,
                "cpus": available_cpus(),
                "usable_memory_bytes": usable_memory(),
                "available_memory_bytes": available_memory(),
                "devices": devices,
                "cache": str(cache_dir()),
                "tested_types": tested,
                "findings": [asdict(finding) for finding in findings],
            }
        )
    else:
        _print(known, record, devices, findings)
    return 1 if any(finding.problem for finding in findings) else 0


def _findings(known: dict[str, Any], record: ExactnessRecord | None) -> list[Finding]:
    found = []
    if unused := known["kernels"]["unused"]:
        found.append(
            Finding(
                f"this build has no kernels for {', '.join(unused)}, which this CPU has: it computes the same, slower",
                "build dgr on this machine (make build in a checkout, or pip install its sdist); docs/wheels.md says what the"
                " portable kernels cost",
            )
        )
    if record is None:
        found.append(
            Finding(
                "exact numerics have not been tested on these kernels, so they are refused",
                "dgr selftest numerics, about half a minute; with --model MODEL only what that model needs",
            )
        )
    else:
        names = [case.name for case in select() if (case.kind, case.label) in ESSENTIAL]
        if broken := [name for name in names if name in record.failures]:
            found.append(
                Finding(
                    f"{' and '.join(broken)} are not exact here, which they must be", "report it, with --json", True
                )
            )
        if untested := [case for case in select() if not record.knows(case.kind, case.label)]:
            found.append(
                Finding(
                    f"{len(untested)} of {len(select())} types have not been tested: exact numerics refuse them",
                    "dgr selftest numerics --if-missing",
                )
            )
    folder = cache_dir()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        found.append(
            Finding(
                f"the cache folder {folder} cannot be written: no verdict is kept, and exact numerics are refused",
                "name another folder in DGR_CACHE_DIR",
                True,
            )
        )
    return found


def _print(known: dict[str, Any], record: ExactnessRecord | None, devices: list[str], findings: list[Finding]) -> None:
    kernels, python, system = known["kernels"], known["python"], known["system"]
    exact = "not tested" if record is None else ", ".join(record.weight_types) or "none"
    rows = [
        ("dgr", known["runtime"]),
        ("wire schema", f"{known['wire']['schema_version']} ({known['wire']['schema_hash']})"),
        (
            "kernels",
            f"{'portable' if kernels['portable'] else 'of the machine of the build'}, {kernels['fingerprint']}",
        ),
        ("instruction sets", " ".join(kernels["instruction_sets"])),
        ("exact weights", exact),
        ("exact K caches", "not tested" if record is None else ", ".join(record.k_types) or "none"),
        ("machine", f"{system['cpu']}, {available_cpus()} CPUs, {human_bytes(usable_memory())}"),
        ("devices", ", ".join(devices) or "the CPU alone"),
        ("software", f"Python {python['version']}, {system['name']} {system['machine']}, {system['libc']}"),
        ("cache folder", str(cache_dir())),
    ]
    print(render_table(rows))
    for finding in findings:
        print(f"\n{'problem' if finding.problem else 'note'}: {finding.what}\n  next: {finding.next_step}")
    if not findings:
        print("\nhealthy: nothing to do")
