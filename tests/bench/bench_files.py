"""The kinds of files that dgr-bench reads, and their readers, for :mod:`dgr.testing.file_fuzz`."""

from __future__ import annotations

import lzma
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dgr.testing.hostile_files.kind import FileKind, Mutation
from dgr.testing.hostile_files.kinds import misplaced_name
from dgr.testing.hostile_files.text_damage import damaged_bytes, damaged_json, rewritten
from dgr_bench import results
from dgr_bench.certify import profiles
from dgr_bench.certify.mutants import PROFILE
from dgr_bench.certify.verify import profile_in, recompute
from dgr_bench.compare import compare
from dgr_bench.results import Journal, read_result
from dgr_bench.verdicts import Check

#: A certificate that a test made, if one did; else a result of two units.
CERTIFICATE = "DGR_TEST_CERTIFICATE"
_SUBJECT = {"artifact": "a" * 32, "split": "0:2,2:5"}
_PROFILE = msgspec.structs.replace(PROFILE, name="one-of-mine", rerun=PROFILE.lengths[:1])


def _write_result(base: Path) -> None:
    made = os.environ.get(CERTIFICATE)
    if made is not None:
        shutil.copy(Path(made) / "result.json", base)
        return
    with Journal.open(base, "certify", _PROFILE, _SUBJECT, "dgr-bench certify") as journal:
        journal.put("split/5", {"seconds": 0.25, "tokens": [1, 2, 3], "error": ""})
        journal.put("split/9", {"seconds": 0.5, "tokens": [1, 2, 3], "error": "LinkBroken: it was"})
        metrics = {"median_s": 0.375, "rows": [{"length": 5, "first_s": 0.5}]}
        journal.finish(metrics, [Check(name="one", passed=True, cases=1, detail="")])


def _write_packed(base: Path) -> None:
    _write_result(base)
    (base / "result.json.xz").write_bytes(lzma.compress((base / "result.json").read_bytes()))
    (base / "result.json").unlink()


def _damaged_xz(drawn: random.Random, packed: bytes) -> bytes:
    """The stream, or what is in it."""
    if drawn.random() < 0.5:
        return damaged_bytes(drawn, packed)
    return lzma.compress(damaged_json(drawn, lzma.decompress(packed)), preset=0)


def _bomb(_: random.Random, __: Path, folder: Path) -> Path:
    """Three gigabytes in a small file."""
    path = folder / "result.json.xz"
    packer, blanks = lzma.LZMACompressor(preset=0), b" " * (64 << 20)
    with path.open("wb") as file:
        for _number in range(48):
            file.write(packer.compress(blanks))
        file.write(packer.flush())
    return path


def _resealed(damage: Mutation) -> Mutation:
    """A damaged result whose digest of the plan is right again, so that it gets further."""

    def change(drawn: random.Random, base: Path, folder: Path) -> Path:
        path = damage(drawn, base, folder)
        try:
            told = msgspec.json.decode(path.read_bytes())
            told["plan_digest"] = results.digest_of(told["plan"])
            path.write_bytes(msgspec.json.encode(told))
        except (ValueError, TypeError, KeyError, RecursionError, msgspec.MsgspecError):
            pass  # it is damaged enough
        return path

    return change


def _verify(path: Path) -> None:
    result = read_result(path)
    recompute(result, profile_in(result), path.parent)


def _compare(path: Path) -> None:
    result = read_result(path)
    compare(result, result)


def _resume(path: Path) -> None:
    with Journal.open(path.parent, "certify", _PROFILE, _SUBJECT, "dgr-bench certify") as journal:
        journal.put("split/11", {"seconds": 0.25})
        journal.finish({}, [])


def _profile(path: Path) -> None:
    profile = profiles.profile_of(str(path))
    assert profile.n_ctx > 0
    _ = profile.digest, profile.forked, profile.in_native(["f32"]).digest


def _unpack_all() -> None:
    setattr(results, "_unpacked", lambda _, packed: lzma.decompress(packed))  # noqa: B010 (a function of a module)


def _write_profile(base: Path) -> None:
    (base / "profile.json").write_bytes(msgspec.json.encode(_PROFILE))


_RESULT = "result.json"
KINDS: Mapping[str, FileKind] = {
    "profile": FileKind(
        write=_write_profile,
        damages={
            "text": rewritten("profile.json", damaged_json),
            "bytes": rewritten("profile.json", damaged_bytes),
            "place": misplaced_name("profile.json"),
        },
        doors={"read": _profile},
    ),
    "result": FileKind(
        write=_write_result,
        damages={
            "text": rewritten(_RESULT, damaged_json),
            "sealed": _resealed(rewritten(_RESULT, damaged_json)),
            "place": misplaced_name(_RESULT),
        },
        doors={"verify": _verify, "compare": _compare, "resume": _resume},
    ),
    "packed result": FileKind(
        write=_write_packed,
        damages={"stream": rewritten("result.json.xz", _damaged_xz), "place": misplaced_name("result.json.xz")},
        doors={"folder": lambda path: read_result(path.parent), "file": read_result},
        directed={"a bomb": _bomb},
        mutants={"unpacks all": _unpack_all},
    ),
}
