"""Every kind of file that dgr reads, with all of its readers; those of ``dgr-bench`` are beside its tests."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from dgr.artifact import digests
from dgr.artifact.artifact import Artifact
from dgr.artifact.slicing import write_slice
from dgr.artifact.speeds import FORMAT, HostSpeed, Timing, read_speed, stage_seconds
from dgr.cli.command_line import main
from dgr.cli.keys import make_keys
from dgr.cli.logits import read_tokens
from dgr.cli.top import read_key
from dgr.cluster.route_file import format_route_file, read_route_file
from dgr.core.route import LayerRange
from dgr.core.values import ContextParams
from dgr.engine.base import Work
from dgr.engine.llama import LlamaEngine, estimate_memory
from dgr.engine.native import kernel_fingerprint
from dgr.engine.numerics import ExactnessRecord, check_exact_types, load_exactness_record
from dgr.engine.vocab import LlamaVocabulary
from dgr.errors import DgrError, InputError
from dgr.gguf import reader
from dgr.gguf.reader import MetaArray, MetaValue
from dgr.testing.hostile_files.gguf import damage as gguf_damage
from dgr.testing.hostile_files.kind import Door, FileKind, Mutation
from dgr.testing.hostile_files.places import misplaced
from dgr.testing.hostile_files.text_damage import damaged_bytes, damaged_json, damaged_lines, rewritten
from dgr.v4 import metadata
from dgr.wire.credentials import Credentials, expiry_of

__all__ = ["KINDS", "ROUTE", "command", "misplaced_name"]

_CONTEXT = ContextParams(n_ctx=256)

# --- models -----------------------------------------------------------------------------------------------------------


def _speak(path: Path) -> None:
    with LlamaVocabulary(Artifact.open(path)) as vocabulary:
        tokens = vocabulary.encode("The 漢字 <think>\n\n 12345 é\u0301", add_special=True, parse_special=True)
        for token in (*tokens, *range(vocabulary.n_vocab)):
            vocabulary.piece(token)


def _run(path: Path) -> None:
    engine = LlamaEngine(Artifact.open(path), None, _CONTEXT, certified_only=False)
    try:
        about = engine.describe()
        residual = bytes(4 * about.width_in * 3) if about.width_in else None
        engine.run([Work(slot=0, position=0, tokens=[1, 2, 3], residual=residual)])
    finally:
        engine.stop()


def _slice(path: Path) -> None:
    artifact = Artifact.open(path)
    with tempfile.TemporaryDirectory() as folder:
        write_slice(artifact, LayerRange(artifact.layers.begin, artifact.layers.begin + 1), Path(folder) / "s.gguf")


def _weigh(path: Path) -> None:
    artifact = Artifact.open(path)
    artifact.verify_weights(artifact.layers)


def command(*words: str) -> None:
    """A command of dgr's in this process. Raises :class:`~dgr.errors.DgrError` for one that ends with an error line."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(words)
    if "no more memory" in said.getvalue():
        raise MemoryError(said.getvalue())
    if code:
        raise DgrError(said.getvalue())


#: Every way from a model's file into native code, into another file, or onto a screen.
_MODEL_DOORS: Mapping[str, Door] = {
    "estimate": lambda path: estimate_memory(Artifact.open(path), None, _CONTEXT),
    "estimate a part": lambda path: estimate_memory(Artifact.open(path), LayerRange(1, 3), _CONTEXT),
    "vocabulary": _speak,
    "engine": _run,
    "slice": _slice,
    "weigh": _weigh,
    "inspect": lambda path: command("inspect", str(path)),
}


def _hand_over() -> None:
    """Files come to native code as they are."""

    def count(stored: Mapping[str, MetaValue]) -> int:
        tokens = stored["tokenizer.ggml.tokens"].value
        return len(tokens) if isinstance(tokens, MetaArray) else 0

    setattr(metadata, "vocabulary_size", count)  # noqa: B010 (a function of a module)
    setattr(Artifact, "check_forms", lambda *_: None)  # noqa: B010 (a method of a class)


def _trust_counts() -> None:
    """A reader that makes room for what a header announces, before it looks whether it is there."""
    right = reader._Reader.need

    def need(self: reader._Reader, n_bytes: int, what: str) -> int:
        bytearray(n_bytes)
        return right(self, n_bytes, what)

    setattr(reader._Reader, "need", need)  # noqa: B010 (a method of a class)


_MODEL_MUTANTS: Mapping[str, Callable[[], None]] = {"hands over": _hand_over, "trusts counts": _trust_counts}


def _model(write: Callable[[Path], None], damages: Mapping[str, Mutation], **more: Mapping[str, Mutation]) -> FileKind:
    return FileKind(write=write, damages=damages, doors=_MODEL_DOORS, mutants=_MODEL_MUTANTS, **more)


# --- text that is named on a command line -----------------------------------------------------------------------------


#: What stands for all that has no end.
_ENDLESS = "zeros without end"


def misplaced_name(name: str, place: str | None = None) -> Mutation:
    """Something else in the place of ``name``, all other files being there; ``place``: one of :data:`.places.PLACES`."""

    def copy(base: Path, folder: Path) -> Path:
        shutil.copytree(base, folder, dirs_exist_ok=True)
        return folder / name

    return misplaced(copy, place)


def _text(
    name: str, whole: bytes, damage: Callable[[random.Random, bytes], bytes], **doors: Callable[[Path], object]
) -> FileKind:
    def write(base: Path) -> None:
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole)
        path.chmod(0o600)

    damages = {"text": rewritten(name, damage), "bytes": rewritten(name, damaged_bytes), "place": misplaced_name(name)}
    endless = {_ENDLESS: misplaced_name(name, _ENDLESS)}
    return FileKind(write=write, damages=damages, doors=doors, directed=endless, mutants={"reads all": _read_all})


def _read_all() -> None:
    """A reader that takes whatever a name leads to, to its end."""

    def read(path: str | Path, most: int, what: str) -> bytes:  # noqa: ARG001 (as the right one's)
        return Path(path).read_bytes()

    for module in (
        "dgr.artifact.digests",
        "dgr.artifact.speeds",
        "dgr.cluster.route_file",
        "dgr.cli.logits",
        "dgr.engine.numerics",
    ):
        vars(importlib.import_module(module))["read_whole"] = read


ROUTE = b"""artifact = "b5c9"
model = "model.gguf"

[context]
n_ctx = 8192
flash_attn = true
type_k = "f16"
numerics = "exact"

[tls]
ca = "keys/ca.pem"
certificate = "keys/client.pem"
key = "keys/client.key"

[[stage]]
address = "10.0.0.1:7701"
layers = "0:22"
model = "slice-0-22.gguf"
metrics = "10.0.0.1:9701"

[[stage]]
address = "10.0.0.2:7701"
layers = "22:43"
device = "CUDA0,CUDA1"
gpu_layers = 20

[[stage]]
address = "[::1]:7701"
layers = "22:43"
"""
_ROUTE_LINES = (
    "[[stage]]", "[stage]", "[[context]]", "[tls]", 'address = "\\u0000"', "address = 7",
    'layers = "99999999999999999999:1"', "x.y.z = 1", 'layers = "0:43"', 'model = "\\ud800"', 'model = "../../x"',
    "n_ctx = -1", "n_ctx = 1e400", "mtp = true", '"" = 1', "= 1", "gpu_layers = 9223372036854775808",
    'address = "' + "a" * 70_000 + ':1"', "stage = " + "[" * 3000, "a = {" * 2000, "n_ctx = nan",
    "a." * 3000 + "b = 1", "n_ctx = 1979-05-27T07:32:00Z", "stage = []", "stage = [[]]", '"""', "'''", "\ud800",
    "\x00", "#" * 99_999,
)  # fmt: skip


def _route_again(path: Path) -> None:
    """A file that was read is written as what reads the same."""
    file = read_route_file(path)
    text = format_route_file(file)
    again = path.with_name("again.toml")
    again.write_text(text, encoding="utf-8")
    found = read_route_file(again)
    assert (found.stages, found.context) == (file.stages, file.context), "it reads as another route"


def _use_speed(path: Path) -> None:
    speed = read_speed(path)
    for sequences, tokens in ((1, 1), (3, 1), (2**20, 1), (1, 7), (1, 2**20)):
        stage_seconds(speed, ["CSA MXFP4", "HCA Q8_0"], LayerRange(0, 2), sequences=sequences, tokens=tokens)


def _timing(size: int) -> Timing:
    layers = {"CSA MXFP4": 0.01 * size, "HCA Q8_0": 0.02 * size}
    return Timing(sequences=size, tokens=size, call=0.001, layers=layers, head=0.1, tail=0.2)


_SPEED = msgspec.json.encode(
    HostSpeed(
        format=FORMAT,
        host="a",
        model="m",
        threads=1,
        numerics="exact",
        n_ubatch=512,
        depth=64,
        decode=(_timing(1), _timing(2), _timing(8)),
        prefill=(_timing(32), _timing(512)),
    )
)

# --- what is kept in the cache folder ---------------------------------------------------------------------------------

_FINGERPRINT = kernel_fingerprint()
_RECORD = msgspec.json.encode(
    ExactnessRecord(
        _FINGERPRINT, ("f32", "q8_0", "mxfp4"), ("f16", "f32"), {"weights q4_K": "batch"}, {"weights iq1_m": "none"}
    )
)
_RECORD_NAME = f"numerics/{_FINGERPRINT}.json"


@contextlib.contextmanager
def _cache(folder: Path) -> Iterator[None]:
    before = os.environ.get("DGR_CACHE_DIR")
    os.environ["DGR_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("DGR_CACHE_DIR")
        if before is not None:
            os.environ["DGR_CACHE_DIR"] = before


def _load_record(path: Path) -> None:
    with _cache(path.parent.parent):
        found = load_exactness_record(_FINGERPRINT)
        assert found is None or found.fingerprint == _FINGERPRINT


def _check_types(path: Path) -> None:
    with _cache(path.parent.parent):
        check_exact_types(["f32", "q8_0"], "f16")


def _write_digested(base: Path) -> None:
    """A model, and the record of its digests in a cache folder beside it."""
    gguf_damage.write_model(base)
    found = {tensor.name: "0" * 64 for tensor in reader.read_gguf(base / "model.gguf").tensors.values()}
    (base / "record.json").write_bytes(msgspec.json.encode(found))


def _in_cache(damage: Mutation) -> Mutation:
    """The record in its place, under the name of the model that is beside it."""

    def change(drawn: random.Random, base: Path, folder: Path) -> Path:
        record = damage(drawn, base, folder)
        model = folder / "model.gguf"
        if not model.exists():
            shutil.copy(base / "model.gguf", model)
        place = folder / "digests" / f"{digests._key(model.stat())}.json"
        place.parent.mkdir()
        if os.path.lexists(record):
            record.rename(place)
        if drawn.random() < 0.2:
            place.with_suffix(".lock").mkdir()
        return model

    return change


def _digest(path: Path) -> None:
    with _cache(path.parent):
        artifact = Artifact.open(path)
        artifact.read_manifest()


# --- keys -------------------------------------------------------------------------------------------------------------

_PEM = ("ca.pem", "host.pem", "host.key", "ca.key")


def _write_pem(base: Path) -> None:
    make_keys(base, ["host"], 30)


def _damage_pem(drawn: random.Random, base: Path, folder: Path) -> Path:
    """One of three files: its text, or another's."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    path = folder / drawn.choice(_PEM)
    text = (base / drawn.choice((path.name, path.name, *_PEM))).read_bytes()
    change = damaged_lines(
        "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----", "A" * 64, "Proc-Type: 4,ENCRYPTED", "\0"
    )
    path.write_bytes(change(drawn, text))
    return folder / _PEM[0]


def _misplace_pem(drawn: random.Random, base: Path, folder: Path) -> Path:
    misplaced_name(drawn.choice(_PEM))(drawn, base, folder)
    return folder / _PEM[0]


def _credentials(path: Path) -> Credentials:
    return Credentials(*(path.parent / name for name in _PEM[:3]))


def _expiry(path: Path) -> None:
    expiry_of(path.parent / _PEM[1], path.parent / _PEM[2])


def _api_keys(path: Path) -> None:
    from dgr.serving.http.keys import ApiKeys

    ApiKeys.read(path).admits("0123456789abcdef")


def _view(path: Path) -> None:
    """What ``dgr top`` makes of what a server answers."""
    from dgr.serving.monitor.readings import Reading, view

    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        raise InputError("no text") from None  # as dgr top tells of it
    view([Reading(text, 0.0), Reading(text, 2.0)])


_METRICS = b"""# HELP dgr_stage_ready 1 while the stage takes pipelines and sessions.
# TYPE dgr_stage_ready gauge
dgr_stage_ready 1.0
dgr_stage_draining 0.0
dgr_stage_info{layers="0:2",artifact="a"} 1.0
dgr_stage_route_epoch{route="00ff"} 3.0
dgr_stage_sessions 2.0
dgr_stage_slots 4.0
dgr_stage_slots_leased 2.0
dgr_stage_batch_tokens_sum{kind="decode"} 100.0
dgr_stage_batch_tokens_count{kind="decode"} 50.0
dgr_stage_state_leased_bytes 1.048576e+06
process_resident_memory_bytes 1.0e+08
"""
_METRICS_LINES = (
    "dgr_stage_sessions NaN", "dgr_stage_slots +Inf", "dgr_stage_slots -Inf", "dgr_num_slots NaN",
    "dgr_stage_slots 1e999", 'dgr_stage_info{layers="\\', 'x{a="b"', "{} 1", "x 1 2 3", "# TYPE x y", "# HELP",
    'x{=""} 1', "dgr_num_slots 1", 'dgr_stage_route_epoch{route="z"} NaN', "a" * 70_000 + " 1",
    "process_resident_memory_bytes 1e400", "x" + "{" * 3000,
)  # fmt: skip

_KEYS = b"# keys of two clients\n0123456789abcdef\n\nfedcba9876543210fedcba\n"

#: By name.
KINDS: Mapping[str, FileKind] = {
    "model": _model(gguf_damage.write_model, gguf_damage.MODEL_DAMAGES, directed=gguf_damage.DIRECTED),
    "parts": _model(gguf_damage.write_parts, gguf_damage.PARTS_DAMAGES),
    "slice": _model(gguf_damage.write_a_slice, gguf_damage.SLICE_DAMAGES),
    "manifest": _model(gguf_damage.write_with_manifest, gguf_damage.MANIFEST_DAMAGES),
    "mtp": _model(gguf_damage.write_with_mtp, gguf_damage.MTP_DAMAGES),
    "route": _text("route.toml", ROUTE, damaged_lines(*_ROUTE_LINES), read=read_route_file, again=_route_again),
    "speeds": _text("speeds.json", _SPEED, damaged_json, use=_use_speed),
    "tokens": _text("tokens.i32", struct.pack("<8i", *range(8)), damaged_bytes, read=read_tokens),
    "api keys": _text(
        "keys", _KEYS, damaged_lines("#", "k" * 20, "\xff", "a b" * 9, "\x00" * 20), read=_api_keys, top=read_key
    ),
    "metrics": FileKind(
        write=lambda base: (base / "metrics").write_bytes(_METRICS),
        damages={
            "text": rewritten("metrics", damaged_lines(*_METRICS_LINES)),
            "bytes": rewritten("metrics", damaged_bytes),
        },
        doors={"view": _view},
    ),
    "numerics": _text(_RECORD_NAME, _RECORD, damaged_json, load=_load_record, check=_check_types),
    "digests": FileKind(
        write=_write_digested,
        damages={
            "text": _in_cache(rewritten("record.json", damaged_json)),
            "place": _in_cache(misplaced_name("record.json")),
        },
        doors={"weigh": _digest},
        mutants={"reads all": _read_all},
    ),
    "certificates": FileKind(
        write=_write_pem,
        damages={"text": _damage_pem, "place": _misplace_pem},
        doors={
            "context": lambda path: _credentials(path).context(server=True),
            "dates": lambda path: _credentials(path).expiries(),
            "expiry": _expiry,
            "another host": lambda path: make_keys(path.parent, ["other"], 30),
        },
    ),
}
