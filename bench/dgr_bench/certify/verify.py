"""``dgr-bench verify``: a certificate's metrics and verdicts computed again from its raw units, and a few lengths run again."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio
from attrs import evolve
from msgspec import UNSET

from dgr.cli.options import add_link_arguments
from dgr.cli.progress import progress_bar
from dgr.errors import InputError
from dgr_bench.benchmark import Command, Scratch, measure
from dgr_bench.certify.checks import verdicts
from dgr_bench.certify.metrics import metrics_of
from dgr_bench.certify.profiles import PROFILES, Profile
from dgr_bench.certify.run import CertifyJob, add_subject_arguments, open_job
from dgr_bench.environment import environment
from dgr_bench.reports import verdict_line
from dgr_bench.results import SCHEMA, Result, read_result
from dgr_bench.verdicts import Check, Tally, judge

#: What must be the same in every run of a length.
_COMPARED = ("tokens", "rows_digest", "at_prompt", "at_end", "prefix_at_prompt", "prefix_at_end")
#: Relative difference at which two computations of one number are the same: sums may be taken in another order.
_SAME = 1e-9


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("result", type=Path, metavar="RESULT", help="result.json of a certificate, or its folder")
    add_subject_arguments(parser)
    add_link_arguments(parser)
    parser.add_argument("--no-rerun", action="store_true", help="only recompute; needs no model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _verify(args: argparse.Namespace) -> int:
    result = read_result(args.result)
    folder = args.result if args.result.is_dir() else args.result.parent
    profile = profile_in(result)
    with progress_bar("computing metrics and verdicts again"):
        checks = recompute(result, profile, folder)
    if not args.no_rerun:
        if args.split not in (None, result.subject["split"]):
            raise InputError(f"the certificate is of the split {result.subject['split']}, not of {args.split}")
        args.split = result.subject["split"] if args.route is None else None
        checks.append(rerun(result, profile, open_job(args, profile)))
    passed = result.passed and all(check.passed for check in checks)
    if args.json:
        answer = {"passed": passed, "certificate_passed": result.passed, "checks": checks}
        print(msgspec.json.encode(answer).decode())
        return 0 if passed else 1
    print(*map(verdict_line, checks), sep="\n")
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
        raise InputError(f"the plan of this certificate is not a profile of this dgr-bench: {error}") from error


def recompute(result: Result, profile: Profile, folder: Path) -> list[Check]:
    """The metrics and verdicts of a result against the same from its raw units."""
    known = PROFILES.get(profile.name, profile)
    fault = "" if known == profile else f"is not the {profile.name} of this dgr-bench"
    checks = [judge("profile", f"{profile.name} {result.plan_digest}", [(f"a profile called {profile.name}", fault)])]
    units, subject = result.units, result.subject
    try:
        metrics = msgspec.json.decode(msgspec.json.encode(metrics_of(profile, subject, units, folder)))
        judged = {check.name: check for check in verdicts(profile, subject, units)}
    except (msgspec.ValidationError, KeyError, ValueError, ArithmeticError) as error:
        fault = f"cannot be read: {type(error).__name__}: {error}"
        return [*checks, judge("raw units", "", [("the raw units", fault)])]
    tally = Tally("metrics", "the same again")
    claimed, again = _leaves("", result.metrics), _leaves("", metrics)
    for name in {**claimed, **again}:
        has, wants = claimed.get(name), again.get(name)
        tally.hold(_alike(has, wants), f"{name} is {has}, recomputed {wants}")
    checks.append(tally.check())
    tally = Tally("verdicts", "the same again")
    said = {check.name: check for check in result.checks}
    older = (
        ""
        if result.schema == SCHEMA
        else f" (made by {result.schema}; docs/certificates.md: what {SCHEMA} judges otherwise)"
    )
    for name in {**said, **judged}:
        words = f"claimed {_words(said.get(name))}, recomputed {_words(judged.get(name))}"
        tally.hold(said.get(name) == judged.get(name), f"{name}: {words}{older}")
    return [*checks, tally.check()]


def rerun(result: Result, profile: Profile, job: CertifyJob) -> Check:
    """A few lengths measured again: tokens, logits and component digests must be those of the result."""
    if job.artifact.identity != result.subject["artifact"]:
        raise InputError(
            f"{job.artifact.file.path} is artifact {job.artifact.identity}; the certificate is of"
            f" {result.subject['artifact']}; give --model with that one"
        )
    short = msgspec.structs.replace(
        profile,
        lengths=profile.rerun,
        reserve=profile.n_ctx,
        cancels=0,
        refusals=0,
        threads=(),
        rerun=(),
        several=UNSET,
        distance=UNSET,
    )
    store = Scratch()
    trio.run(partial(measure, "verify"), evolve(job, plan=short).units(store), store)
    same_kernels = environment().kernel_fingerprint == result.environment.kernel_fingerprint
    hint = "" if same_kernels else " (the kernels differ: only equal fingerprints give equal bits)"
    tally = Tally(f"lengths {', '.join(map(str, profile.rerun))} run again", "the same again")
    for name, unit in store.units.items():
        if "variant" in unit:
            before = result.units.get(name, {})
            wrong = unit["error"] or ", ".join(key for key in _COMPARED if unit[key] != before.get(key))
            tally.hold(not wrong, f"{name}: {wrong if before else 'not in the certificate'}{hint}")
    return tally.check()


def _words(check: Check | None) -> str:
    return "nothing" if check is None else f"{'pass' if check.passed else 'FAIL'} ({check.cases} cases, {check.detail})"


def _alike(has: Any, wants: Any) -> bool:
    if isinstance(has, float) and isinstance(wants, float):
        return math.isclose(has, wants, rel_tol=_SAME)
    return bool(has == wants)


def _leaves(path: str, value: Any) -> dict[str, Any]:
    """Every scalar under its path."""
    if isinstance(value, Mapping):
        return {key: leaf for name, item in value.items() for key, leaf in _leaves(f"{path}/{name}", item).items()}
    if isinstance(value, list):
        return {key: leaf for i, item in enumerate(value) for key, leaf in _leaves(f"{path}/{i}", item).items()}
    return {path: value}


COMMAND = Command(
    "verify",
    "recompute a certificate from its raw units, and run a few of its lengths again",
    "Compute every metric and every verdict of a certificate again from its raw JSON, then run a few of its lengths again on"
    " the same model and compare tokens, logits and the digest of every component of the state. Exit code 1 when anything"
    " differs.",
    _add_arguments,
    _verify,
)
