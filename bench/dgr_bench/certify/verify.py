"""``dgr-bench verify``: a certificate's metrics and verdicts computed again from its raw units, and a few lengths run again."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio
from attrs import evolve

from dgr.cli.options import add_link_arguments
from dgr.errors import InputError
from dgr_bench.certify.checks import verdicts
from dgr_bench.certify.command import CertifyJob, certify, open_job
from dgr_bench.certify.metrics import metrics_of
from dgr_bench.certify.profiles import PROFILES, Profile
from dgr_bench.options import add_subject_arguments
from dgr_bench.results import Check, Result, read_result

__all__ = ["recompute", "register", "rerun"]


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "verify",
        help="recompute a certificate from its raw metrics, and run a few of its lengths again",
        description="Compute every figure and every verdict of a certificate again from its raw JSON, then run a few of its"
        " lengths again on the same model and compare tokens, logits and the digest of every component of the state."
        " Exit code 1 when anything differs.",
    )
    parser.add_argument("result", type=Path, metavar="RESULT", help="result.json of a certificate, or its folder")
    add_subject_arguments(parser)
    add_link_arguments(parser)
    parser.add_argument("--no-rerun", action="store_true", help="only recompute; needs no model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    result = read_result(args.result)
    folder = args.result if args.result.is_dir() else args.result.parent
    profile = profile_in(result)
    checks = recompute(result, profile, folder)
    if not args.no_rerun:
        if args.split not in (None, result.subject["split"]):
            raise InputError(f"the certificate is of the split {result.subject['split']}, not of {args.split}")
        args.split = result.subject["split"] if args.route is None else None
        checks += rerun(result, profile, open_job(args, profile), args.command_line)
    passed = result.passed and all(check.passed for check in checks)
    if args.json:
        answer = {"passed": passed, "certificate_passed": result.passed, "checks": checks}
        print(msgspec.json.encode(answer).decode())
    else:
        for check in checks:
            print(f"{'pass' if check.passed else 'FAIL'}  {check.name} ({check.cases} cases): {check.detail}")
        if not result.passed:
            print("The certificate itself is " + ("not passed." if result.complete else "not complete."))
        if args.no_rerun:
            print("Not looked at without a second run: whether artifact, kernels and machine are what the result says.")
        print("VERIFIED" if passed else "NOT VERIFIED")
    return 0 if passed else 1


def profile_in(result: Result) -> Profile:
    """The profile that a certificate was made with. Raises :class:`~dgr.errors.InputError` for another result."""
    if result.kind != "certify":
        raise InputError(f"this is a result of `dgr-bench {result.kind}`; verify takes one of `dgr-bench certify`")
    try:
        return msgspec.convert(result.plan, Profile)
    except msgspec.ValidationError as error:
        raise InputError(f"the plan of this certificate is no profile of this dgr-bench: {error}") from error


def recompute(result: Result, profile: Profile, folder: Path) -> list[Check]:
    """The metrics and verdicts of a result against the same from its raw units."""
    known = PROFILES.get(profile.name)
    locked = known is None or known == profile
    units, subject = result.units, result.subject
    checks = [
        Check(
            name="profile",
            passed=locked,
            cases=1,
            detail=f"{profile.name} {result.plan_digest}"
            if locked
            else f"is called {profile.name}, but is not the {profile.name} of this dgr-bench",
        )
    ]
    try:
        metrics = msgspec.json.decode(msgspec.json.encode(metrics_of(profile, subject, units, folder)))
        judged = verdicts(profile, subject, units)
    except (msgspec.ValidationError, KeyError, ValueError, ArithmeticError) as error:
        detail = f"the raw units cannot be read: {type(error).__name__}: {error}"
        return [*checks, Check(name="raw units", passed=False, cases=1, detail=detail)]
    wrong = sorted(_different("", result.metrics, metrics))
    checks.append(_check("metrics", len(_leaves("", metrics)), wrong))
    claimed = {check.name: check for check in result.checks}
    wrong = [
        f"{name}: claimed {_said(claimed.get(name))}, recomputed {_said(again.get(name))}"
        for again in [{check.name: check for check in judged}]
        for name in {**claimed, **again}
        if claimed.get(name) != again.get(name)
    ]
    checks.append(_check("verdicts", len(judged), wrong))
    return checks


def rerun(result: Result, profile: Profile, job: CertifyJob, command: str) -> list[Check]:
    """A few lengths measured again: tokens, logits and component digests must be those of the result."""
    if job.artifact.identity != result.subject["artifact"]:
        raise InputError(
            f"{job.artifact.file.path} is artifact {job.artifact.identity}; the certificate is of"
            f" {result.subject['artifact']}; give --model with that one"
        )
    short = evolve(job, profile=_shortened(profile))
    with tempfile.TemporaryDirectory() as folder:
        again = trio.run(partial(certify, short, Path(folder), command))
    same_kernels = again.environment.kernel_fingerprint == result.environment.kernel_fingerprint
    wrong: list[str] = []
    cases = 0
    for name, unit in again.units.items():
        before = result.units.get(name)
        if "variant" not in unit:
            continue
        cases += 1
        if before is None:
            wrong.append(f"{name} is not in the certificate")
        elif unit["error"]:
            wrong.append(f"{name}: {unit['error']}")
        else:
            wrong += [f"{name}: {key}" for key in _COMPARED if unit[key] != before[key]]
    hint = (
        "" if same_kernels else " (the kernels differ from the certificate's: only equal fingerprints give equal bits)"
    )
    check = _check(f"lengths {', '.join(map(str, profile.rerun))} run again", cases, [one + hint for one in wrong])
    return [check]


#: What must be the same in every run of a length.
_COMPARED = ("tokens", "rows_digest", "at_prompt", "at_end", "prefix_at_prompt", "prefix_at_end")


def _shortened(profile: Profile) -> Profile:
    """The same profile with the lengths that are run again, at the same context size, and nothing else."""
    return msgspec.structs.replace(
        profile, lengths=profile.rerun, reserve=profile.n_ctx, cancels=0, refusals=0, threads=(), rerun=()
    )


def _check(name: str, cases: int, wrong: list[str]) -> Check:
    detail = (
        "the same again"
        if not wrong
        else f"{len(wrong)} differ: {'; '.join(wrong[:3])}{'; and more' * (len(wrong) > 3)}"
    )
    return Check(name=name, passed=not wrong and cases > 0, cases=cases, detail=detail)


def _said(check: Check | None) -> str:
    return "nothing" if check is None else f"{'pass' if check.passed else 'FAIL'} ({check.cases} cases, {check.detail})"


def _leaves(path: str, value: Any) -> dict[str, Any]:
    """Every scalar under its path."""
    if isinstance(value, Mapping):
        return {key: leaf for name, item in value.items() for key, leaf in _leaves(f"{path}/{name}", item).items()}
    if isinstance(value, list):
        return {key: leaf for i, item in enumerate(value) for key, leaf in _leaves(f"{path}/{i}", item).items()}
    return {path: value}


def _different(path: str, claimed: Any, again: Any) -> list[str]:
    ours, theirs = _leaves(path, again), _leaves(path, claimed)
    return [
        f"{name} is {theirs.get(name)}, recomputed {ours.get(name)}"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]
