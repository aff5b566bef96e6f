"""The contract as values: tables against the model's own, messages against the wire's, bytes against upstream's formula."""

from __future__ import annotations

import re
import tomllib
import typing
from pathlib import Path
from types import ModuleType, UnionType
from typing import Annotated, Any

import msgspec
import pytest
from scripts import loaded

from dgr.core import values
from dgr.core.mtp import CAPABILITY, CONTRACT, DOCUMENT, RESERVED
from dgr.core.route import LayerRange
from dgr.errors import InputError
from dgr.testing.mtp_contract import messages as mtp_messages
from dgr.testing.mtp_contract.golden import sample_messages
from dgr.testing.mtp_contract.messages import (
    HEADER_BYTES,
    ID_BYTES,
    TAGS,
    TO_PIPELINE,
    TO_STAGE,
    DraftInput,
    DraftOutput,
    MtpWork,
    RowShape,
    encode_message,
)
from dgr.testing.mtp_contract.ownership import (
    CROSSINGS,
    DUTIES,
    STATE,
    Origin,
    Owner,
    mtp_bytes,
    mtp_tensors,
    plane_bytes,
    with_mtp,
)
from dgr.v4.hyper_parameters import V4_FLASH
from dgr.v4.state_map import ContextShape, state_map
from dgr.v4.tensors import block_tensors, range_tensors
from dgr.wire import frames

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / DOCUMENT
MESSAGES = (*TO_STAGE, *TO_PIPELINE)


# --- messages --------------------------------------------------------------------------------------------------------


def test_values_are_those_of_the_wire() -> None:
    """A key, an expectation and a way of sampling are the very classes that frames have."""
    for name in ("Key", "Expectation", "SamplingParams"):
        assert getattr(mtp_messages, name) is getattr(values, name)


def test_work_is_a_frame_with_two_fields_more() -> None:
    for frame in (frames.Tokens, frames.Boundary):
        common = [name for name in frame.__struct_fields__ if name not in ("logits", "run", "trace")]
        assert [name for name in MtpWork.__struct_fields__ if name in common] == common
    assert set(MtpWork.__struct_fields__) - set(frames.Boundary.__struct_fields__) == {"want", "candidates", "draft"}


def test_no_frame_has_a_tag_of_the_contract() -> None:
    used = {kind.__struct_config__.tag for kind in typing.get_args(frames.Frame)}
    ours: list[Any] = [kind.__struct_config__.tag for kind in MESSAGES]
    assert not used.intersection(TAGS)
    assert sorted(ours) == ours
    assert set(ours) <= set(TAGS)
    assert set(typing.get_args(mtp_messages.Message)) == set(MESSAGES)


def _leaves(kind: Any) -> list[Any]:
    if typing.get_origin(kind) is Annotated:
        base, *notes = typing.get_args(kind)
        return [(base, notes)] if base is bytes else _leaves(base)
    if isinstance(kind, UnionType) or typing.get_origin(kind) in (tuple, typing.Union):
        return [leaf for part in typing.get_args(kind) for leaf in _leaves(part)]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [leaf for part in typing.get_type_hints(kind, include_extras=True).values() for leaf in _leaves(part)]
    return [(kind, [])]


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_no_field_could_carry_state(kind: type[msgspec.Struct]) -> None:
    """Numbers, token ids, and bytes of exactly 16: a route session or a digest."""
    for base, notes in _leaves(kind):
        if base is bytes:
            assert [(note.min_length, note.max_length) for note in notes] == [(16, 16)]
        else:
            assert base in (int, float, type(None), Ellipsis) or issubclass(base, int), base


def test_a_message_keeps_its_bound_with_the_largest_values() -> None:
    key = mtp_messages.Key(bytes(16), 2**63 - 1, 2**63 - 1)
    at = mtp_messages.Expectation(2**32 - 1, bytes(16))
    sampling = values.SamplingParams(
        3.4e38, 2**31 - 1, 3.4e38, 3.4e38, 3.4e38, 3.4e38, 3.4e38, 2**31 - 1, 2**63 - 1, 2**32 - 1, 64
    )
    for n in (1, 1000):
        tokens = (2**31 - 1,) * n
        work = MtpWork(key, 2**63 - 1, at, tokens, mtp_messages.Want.TOKEN, n, n, sampling, 2**63 - 1)
        assert len(encode_message(work)) <= HEADER_BYTES + ID_BYTES * n
        proposal = mtp_messages.Proposal(key, 2**63 - 1, 2**32 - 1, n, 2**31 - 1, tokens)
        assert len(encode_message(proposal)) <= HEADER_BYTES + ID_BYTES * n


def test_rows_have_the_shapes_of_the_model() -> None:
    shape = RowShape.of(V4_FLASH)
    assert (shape.row_bytes, shape.logits_bytes) == (65536, 517120)
    shape.check_input(DraftInput(129279, 7, bytes(65536)))
    shape.check_output(DraftOutput(7, bytes(517120), bytes(65536)))
    for wrong in (DraftInput(5, 7, bytes(16384)), DraftInput(129280, 7, bytes(65536))):
        with pytest.raises(InputError):
            shape.check_input(wrong)
    for answer in (DraftOutput(7, bytes(517120), b""), DraftOutput(7, bytes(4), bytes(65536))):
        with pytest.raises(InputError):
            shape.check_output(answer)
    work = sample_messages()["work-between-stages"]
    assert isinstance(work, MtpWork)
    assert RowShape(2, 4, 4).payload_bytes(work) == work.payload


# --- ownership -------------------------------------------------------------------------------------------------------


def test_every_tensor_of_the_block_has_an_owner() -> None:
    full, known = with_mtp(V4_FLASH), mtp_tensors(V4_FLASH)
    by_name = {one.name: one for one in known}
    assert len(by_name) == len(known)
    block = block_tensors(full, 43)
    assert {spec.name: (spec.ne, spec.required) for spec in block} == {
        one.name: (one.ne, one.required) for one in known if one.origin in (Origin.BLOCK, Origin.NEXTN)
    }
    assert sum(one.origin is Origin.BLOCK and one.required for one in known) == 24
    nextn = {one.name.partition(".nextn.")[2]: one for one in known if one.origin is Origin.NEXTN}
    assert {name: (one.ne, one.required) for name, one in nextn.items()} == {
        "eh_proj.weight": ((8192, 4096), True),
        "enorm.weight": ((4096,), True),
        "hnorm.weight": ((4096,), True),
        "embed_tokens.weight": ((4096, 129280), False),
        "shared_head_head.weight": ((4096, 129280), False),
        "shared_head_norm.weight": ((4096,), False),
    }
    for one in nextn.values():
        assert (one.fallback is None) == one.required
        assert one.fallback is None or by_name[one.fallback].origin is Origin.SHARED
    own = {one.name for one in known if one.origin is Origin.OWN_HEAD}
    assert own == {"output_hc_fn.weight", "output_hc_base.weight", "output_hc_scale.weight"}
    # Under these very names the trunk's tail has its own, other ones: why a merged file cannot be right.
    assert own <= {spec.name for spec in range_tensors(V4_FLASH, LayerRange(42, 43))}


def test_no_stage_of_main_layers_loads_anything_of_the_block() -> None:
    full = with_mtp(V4_FLASH)
    for layers in (full.whole, LayerRange(0, 11), LayerRange(11, 33), LayerRange(33, 43)):
        names = {spec.name for spec in range_tensors(full, layers)}
        assert not any(name.startswith("blk.43.") or ".nextn." in name for name in names)
    assert with_mtp(full) is full


def test_head_and_middle_have_no_duty_of_the_block() -> None:
    assert {duty.owner for duty in DUTIES} == set(Owner)
    assert {item.owner for item in STATE} == {Owner.EVERY_STAGE, Owner.TAIL_MTP}
    for crossing in CROSSINGS:
        for field in re.findall(r"(\w+)\.(\w+)", crossing.field):
            kind = getattr(mtp_messages, field[0], None) or getattr(mtp_messages, f"Mtp{field[0]}")
            assert field[1] in kind.__struct_fields__


@pytest.mark.parametrize("planes", [1, 3, 8])
@pytest.mark.parametrize("n_seq_max", [1, 4])
@pytest.mark.parametrize("layers", ["0:43", "0:2", "0:11", "33:43", "2:3", "3:4"])
def test_planes_weigh_what_upstream_allocates(layers: str, planes: int, n_seq_max: int) -> None:
    """``n_stream * (1 + n_rs_seq)`` planes of f32 (dsv4:964-966), with V4 Flash's widths."""
    owned = LayerRange.parse(layers)
    n_csa = sum(V4_FLASH.ratio(layer) == 4 for layer in owned.layers)
    n_hca = sum(V4_FLASH.ratio(layer) == 128 for layer in owned.layers)
    csa, lid, hca = 2 * 1024 * 8 * 4, 2 * 256 * 8 * 4, 2 * 512 * 128 * 4
    expected = planes * n_seq_max * (n_csa * (csa + lid) + n_hca * hca)
    assert plane_bytes(V4_FLASH, owned, planes, n_seq_max) == expected


def test_the_bytes_of_v4_flash() -> None:
    assert plane_bytes(V4_FLASH, V4_FLASH.whole, 1) == 12206080 == int(11.640625 * 2**20)
    found = mtp_bytes(V4_FLASH, ContextShape(32768), 3)
    assert (found.planes, found.own_cache, found.rows, found.batch_rows) == (36618240, 1572864, 262144, 33554432)
    assert found.total == 72007680
    # Planes do not depend on the context, and sum over a split to those of the whole.
    split = (LayerRange(0, 15), LayerRange(15, 29), LayerRange(29, 43))
    assert sum(plane_bytes(V4_FLASH, layers, 3) for layers in split) == found.planes
    assert mtp_bytes(V4_FLASH, ContextShape(1048576), 3).planes == found.planes
    assert state_map(V4_FLASH, V4_FLASH.whole, ContextShape(32768)).total_bytes == 271466496  # without any plane


# --- the document ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    return loaded(REPOSITORY / "docs/draw_mtp.py")


def test_the_document_is_what_the_model_says(drawing: ModuleType) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == drawing.drawn(text), "run: python docs/draw_mtp.py"
    assert set(re.findall(r"<!-- drawn: (\w+) -->", text)) == set(drawing.BLOCKS)
    assert text.startswith(f"# {CONTRACT}")
    for word in (CAPABILITY, RESERVED, "MtpNotExecutable"):
        assert f"`{word}`" in text


def test_every_statement_has_a_place_and_every_place_a_statement() -> None:
    listed = tomllib.loads((REPOSITORY / "vendor" / "llama.cpp" / "mtp_anchors.toml").read_text(encoding="utf-8"))
    anchors = {one["id"] for one in listed["anchor"]}
    prose = re.sub(r"<!-- drawn: anchors -->.*?<!-- end -->", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    named = set(re.findall(r"`([a-z]+(?:-[a-z0-9]+)*)`", prose)) & anchors
    used = {anchor for table in (DUTIES, STATE, mtp_tensors(V4_FLASH)) for one in table for anchor in one.anchors}
    assert used <= anchors
    assert named == anchors, "a place that no statement names"


def test_the_document_names_every_reason_and_message() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for reason in mtp_messages.Reason:
        assert f"| {reason.value} | `{reason.name}` |" in text
    for kind in MESSAGES:
        assert f"| {kind.__struct_config__.tag} | `{mtp_messages.message_name(kind)}` |" in text
