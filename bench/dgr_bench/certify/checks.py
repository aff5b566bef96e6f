"""From the raw units of a certificate to verdicts: pure functions, which `dgr-bench verify` runs again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from dgr import LayerRange, Numerics
from dgr.core.route import parse_split
from dgr.v4.hyper_parameters import HyperParameters
from dgr.v4.state_map import ContextShape, expected_state, state_map
from dgr_bench.benchmark import Units
from dgr_bench.certify.measurements import Cancellation, CleanUp, LengthRun, MemoryAt, Together
from dgr_bench.certify.profiles import Profile
from dgr_bench.certify.refusals import EXPECTED, Refusal
from dgr_bench.distance.report import reference_check
from dgr_bench.subjects import StageState
from dgr_bench.verdicts import Check, Tally

#: Bytes that a boundary frame of one token may take beyond its payload, and what each further token id adds.
FRAME_OVERHEAD = 320
_ID = 5


class Raw:
    """The units of a certificate, typed."""

    def __init__(self, profile: Profile, subject: Mapping[str, Any], units: Units) -> None:
        self.profile = profile
        self.hp = msgspec.convert(subject["hyper_parameters"], HyperParameters)
        self.ranges = parse_split(subject["split"], self.hp.n_layers)
        self.units = units
        #: By (variant, length).
        self.runs: dict[tuple[str, int], LengthRun] = {}
        #: Whether the stages ran in the process that measured.
        self.in_process = bool(subject["in_process"])
        for unit in units.values():
            if "variant" in unit:
                run = msgspec.convert(unit, LengthRun)
                self.runs[run.variant, run.length] = run
        for unit in self._measured("together/"):
            self.runs |= {(run.variant, run.length): run for run in msgspec.convert(unit, Together).runs}

    def of(self, variant: str) -> Iterator[LengthRun]:
        return (run for (name, _), run in self.runs.items() if name == variant)

    def variants(self, prefix: str) -> list[str]:
        return sorted({variant for variant, _ in self.runs if variant.startswith(prefix)})

    @property
    def expected_runs(self) -> Iterator[tuple[str, int]]:
        """Every (variant, length) that the profile asks for."""
        profile = self.profile
        for length in profile.lengths:
            if profile.whole:
                yield "whole", length
                yield from ((f"threads-{threads}", length) for threads in profile.threads)
            yield "split", length
            yield from ((f"chunk-{one.chunk}", length) for one in profile.chunkings if length <= one.up_to)
            if length <= profile.reprefill_up_to:
                yield "re-prefilled", length
        yield from (("forked", length) for length in profile.forked)
        for sessions in profile.together if self.in_process else ():
            for index, length in enumerate(profile.lengths_together(sessions)):
                yield f"together-{sessions}.{index}", length

    def cancellations(self, during: str) -> list[Cancellation]:
        return msgspec.convert(self.units.get(f"cancel/{during}", {}).get("cancellations", []), list[Cancellation])

    def clean_up(self) -> CleanUp | None:
        return next((msgspec.convert(unit, CleanUp) for unit in self._measured("clean-up")), None)

    def memory(self) -> list[MemoryAt]:
        return sorted(
            (msgspec.convert(unit, MemoryAt) for unit in self._measured("memory/")), key=lambda one: one.n_ctx
        )

    def refusals(self) -> list[list[Refusal]]:
        return [msgspec.convert(unit["refusals"], list[Refusal]) for unit in self._measured("refusals/")]

    def _measured(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        """Units whose names begin so, but for those that ended in an error."""
        return (unit for name, unit in self.units.items() if name.startswith(prefix) and not unit.get("error"))

    def shape(self, n_ctx: int | None = None) -> ContextShape:
        profile = self.profile
        return ContextShape(n_ctx or profile.n_ctx, min(profile.n_batch, profile.n_ubatch), 1, profile.type_k)


def verdicts(profile: Profile, subject: Mapping[str, Any], units: Units) -> list[Check]:
    """Judge a certificate."""
    raw = Raw(profile, subject, units)
    checks = [_finished(raw)]
    if profile.whole:
        checks.append(_split_equals_whole(raw))
    if profile.numerics is Numerics.EXACT:
        if profile.chunkings:
            checks.append(_alike(raw, "chunkings agree", raw.variants("chunk-"), "split"))
        if profile.reprefill_up_to:
            checks.append(_alike(raw, "re-prefilled equals cold", ["re-prefilled"], "split"))
        if profile.forked:
            checks.append(_alike(raw, "forked equals cold", ["forked"], "split"))
        if raw.in_process and profile.together:
            checks.append(_alike(raw, "batched equals alone", raw.variants("together-"), "split"))
        if profile.whole and profile.threads:
            checks.append(_alike(raw, "threads agree", raw.variants("threads-"), "whole"))
    checks += [_closed_forms(raw), _stages_agree(raw), _finite(raw)]
    if profile.cancels:
        checks.append(_cancelled(raw))
    if raw.in_process:
        checks += [_memory(raw), _wire(raw), _nothing_left(raw)]
    if raw.in_process and profile.refusals:
        checks.append(_refused(raw))
    if raw.in_process and profile.distance is not UNSET:
        checks.append(reference_check(units))
    return checks


def not_certified(profile: Profile, in_process: bool) -> list[str]:
    """What the checks of a profile leave open."""
    missing = []
    if not profile.whole:
        missing.append("split equals whole, threads agree: the profile does not run the whole model")
    if profile.numerics is not Numerics.EXACT:
        missing.append(
            "chunkings, threads and re-prefill are measured as distances: native numerics do not promise equality"
        )
    if profile.several is not UNSET and not profile.together:  # profiles without it are older than the check
        missing.append("batched equals alone: the profile runs no sessions together")
    if not profile.refusals:
        missing.append("what must fail: the profile does not try it")
    if not profile.cancels:
        missing.append("cancellation: the profile does not try it")
    if profile.together and not in_process:
        missing.append("batched equals alone: seen only where the stages run in the measuring process")
    if not in_process:
        missing.append("memory, wire, clean-up and refusals: seen only where the stages run in the measuring process")
    return missing


# --- the runs against each other --------------------------------------------------------------------------------------


def _finished(raw: Raw) -> Check:
    tally = Tally("every run finished", "no error, and no session lost its state but where it was made to")
    for variant, length in raw.expected_runs:
        run = raw.runs.get((variant, length))
        if run is None:
            tally.hold(False, f"{variant}/{length} is missing")
            continue
        tally.hold(not run.error, f"{variant}/{length}: {run.error}")
        if variant == "re-prefilled":
            wants = length + raw.profile.decode // 2
            has = run.reprefill.tokens if run.reprefill is not None else 0
            tally.same(f"{variant}/{length}, tokens re-prefilled", has, wants)
            tally.same(f"{variant}/{length}, losses", len(run.lost), 1)
        else:
            tally.hold(not run.lost, f"{variant}/{length} lost its state: {', '.join(run.lost)}")
    for name, unit in raw.units.items():
        if "variant" not in unit:
            tally.hold(not unit.get("error"), f"{name}: {unit.get('error')}")
    return tally.check()


def _split_equals_whole(raw: Raw) -> Check:
    tally = Tally("split equals whole", "drawn tokens, and rows of logits byte for byte")
    for run in raw.of("split"):
        whole = raw.runs.get(("whole", run.length))
        if whole is not None:
            tally.same(f"{run.length} tokens, answer", run.tokens, whole.tokens)
            tally.same(f"{run.length} tokens, rows of logits", run.rows_digest, whole.rows_digest)
    return tally.check()


def _alike(raw: Raw, name: str, variants: list[str], reference: str) -> Check:
    tally = Tally(name, "drawn tokens, rows of logits, and every component of the state byte for byte")
    for variant in variants:
        for run in raw.of(variant):
            other = raw.runs.get((reference, run.length))
            if other is None:
                continue
            where = f"{variant}/{run.length}"
            tally.same(f"{where}, answer", run.tokens, other.tokens)
            tally.same(f"{where}, rows of logits", run.rows_digest, other.rows_digest)
            for moment, states, others in (
                ("at the end of the prompt", run.at_prompt, other.at_prompt),
                ("at the end", run.at_end, other.at_end),
            ):
                tally.same(f"{where}, stages {moment}", len(states), len(others))
                for state, other_state in zip(states, others, strict=False):
                    for part, other_part in zip(state.components, other_state.components, strict=False):
                        tally.same(f"{where}, {part.name} of stage {state.layers} {moment}", part, other_part)
    return tally.check()


# --- the runs against what must be ------------------------------------------------------------------------------------


def _moments(raw: Raw) -> Iterator[tuple[str, LengthRun, list[StageState], int, str]]:
    for (variant, length), run in raw.runs.items():
        if not run.error:
            yield f"{variant}/{length} at the prompt's end", run, run.at_prompt, length, run.prefix_at_prompt
            last = length + raw.profile.decode - 1
            yield f"{variant}/{length} at the end", run, run.at_end, last, run.prefix_at_end


def _closed_forms(raw: Raw) -> Check:
    tally = Tally(
        "states stand where the closed forms say", "rows that hold data, read from the tensors, in every component"
    )
    for where, _run, states, position, _prefix in _moments(raw):
        for state in states:
            layers = LayerRange.parse(state.layers)
            owned = state_map(raw.hp, layers, raw.shape()).owned
            expected = expected_state(raw.hp, layers, raw.shape(), position)
            tally.same(f"{where}, components of stage {state.layers}", len(state.components), len(expected))
            for part, want, map_ in zip(state.components, expected, owned, strict=False):
                has = (part.name, part.n_layers, part.capacity, part.rows_min, part.rows_max)
                wants = (want.component.value, len(map_.layers), want.capacity, want.rows, want.rows)
                tally.same(f"{where}, stage {state.layers}, (name, layers, capacity, rows, rows)", has, wants)
    return tally.check()


def _stages_agree(raw: Raw) -> Check:
    tally = Tally(
        "stages agree", "every stage holds the same number of tokens, and exactly those tokens, by their digest"
    )
    for where, run, states, position, prefix in _moments(raw):
        n_stages = 1 if run.variant == "whole" or run.variant.startswith("threads-") else len(raw.ranges)
        tally.same(f"{where}, stages", len(states), n_stages)
        for state in states:
            tally.same(f"{where}, stage {state.layers}", (state.position, state.prefix), (position, prefix))
    return tally.check()


def _finite(raw: Raw) -> Check:
    tally = Tally("all logits are finite", "rows of logits of the given tokens")
    for (variant, length), run in raw.runs.items():
        tally.same(f"{variant}/{length}, NaN or Inf", run.rows_not_finite, 0)
    return tally.check()


def _cancelled(raw: Raw) -> Check:
    tally = Tally("cancelled answers go on", "stages agree on a position, and the answer taken up again is the same")
    for during in ("prefill", "decode"):
        found = raw.cancellations(during)
        tally.same(f"cancellations in {during}", len(found), raw.profile.cancels)
        for one in found:
            case = f"cancelled {one.after_s:.3f} s into {during}"
            tally.hold(len(set(one.positions)) == 1, f"{case}: stages stand at {one.positions}")
            tally.hold(one.same_answer, f"{case}: another answer")
    return tally.check()


def _memory(raw: Raw) -> Check:
    tally = Tally("memory equals the formula", "bytes of state by component and stage, as the native allocator counts")
    for one in raw.memory():
        for layers in raw.ranges:
            for state in state_map(raw.hp, layers, raw.shape(one.n_ctx)).components:
                has = one.state.get(str(layers), {}).get(state.component.value, 0)
                tally.same(f"n_ctx {one.n_ctx}, {state.component} of stage {layers}", has, state.n_bytes)
    return tally.check()


def _wire(raw: Raw) -> Check:
    tally = Tally(
        "wire carries the boundary",
        f"bytes of a frame: its payload, {FRAME_OVERHEAD} and {_ID} for each further token id",
    )
    hops = len(raw.ranges) - 1  # one stage sends nothing to another, which is counted too
    width = 4 * raw.hp.hc_streams * raw.hp.n_embd
    for run in raw.of("split"):
        for what, traffic, tokens, n_frames in (
            ("prompt", run.prompt_traffic, run.length, -(-run.length // raw.profile.chunk)),
            ("drawn tokens", run.decode_traffic, raw.profile.decode - 1, raw.profile.decode - 1),
        ):
            if traffic is None or run.error:
                continue
            tally.same(f"{run.length}, frames of the {what}", traffic.frames, hops * n_frames)
            most = hops * (tokens * (width + _ID) + n_frames * FRAME_OVERHEAD)
            tally.hold(traffic.bytes <= most, f"{run.length}, bytes of the {what}: {traffic.bytes}, more than {most}")
    return tally.check()


def _nothing_left(raw: Raw) -> Check:
    tally = Tally("nothing is left", "leased bytes, and rows of state, when a session has ended")
    found = raw.clean_up()
    if found is not None:
        wants = sum(state_map(raw.hp, layers, raw.shape()).total_bytes for layers in raw.ranges)
        tally.same("leased while it lived", found.leased_bytes, wants)
        tally.same("leased afterwards", found.left_bytes, 0)
        tally.same("rows afterwards", found.left_rows, 0)
    return tally.check()


def _refused(raw: Raw) -> Check:
    tally = Tally("what must fail fails, always alike", "the answer, its words, and the state afterwards")
    tries = raw.refusals()
    tally.same("tries", len(tries), raw.profile.refusals)
    for index, tried in enumerate(tries):
        tally.same(f"try {index}", [one.case for one in tried], [one.case for one in tries[0]])
        for one, first in zip(tried, tries[0], strict=False):
            case = f"try {index}, {one.case}"
            tally.same(f"{case}, answer", one.answer, EXPECTED.get(one.case))
            tally.same(f"{case}, words", one.message, first.message)
            tally.hold(one.state_kept, f"{case}: the state afterwards is another")
    for case in EXPECTED.keys() - {one.case for tried in tries for one in tried}:
        tally.hold(False, f"{case} was not tried")
    return tally.check()
