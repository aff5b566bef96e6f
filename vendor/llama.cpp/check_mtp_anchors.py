"""Proves that the places docs/mtp-contract.md was read from are still what they were; exits non-zero when one changed.

mtp_anchors.toml lists them: file, first line, number of lines, the text of the first line, and a digest of all of them
without indentation. The tree is the sdist that the build has downloaded and checked, or DGR_LLAMA_CPP_SOURCE; more of it than
the build uses, since the driver lives in common/ and tools/, and the conversion in conversion/.

    python check_mtp_anchors.py             # compare, and say where a text has gone to
    python check_mtp_anchors.py --write     # after reading each place again: record lines and digests
    python check_mtp_anchors.py --tree DIR  # compare with another tree
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import tarfile
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ANCHORS = HERE / "mtp_anchors.toml"


@dataclass(frozen=True)
class Anchor:
    """A place upstream, and what the contract takes from it."""

    id: str
    file: str
    line: int
    lines: int
    text: str
    digest: str
    says: str

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" + (f"-{self.line + self.lines - 1}" if self.lines > 1 else "")


def read_anchors(path: Path = ANCHORS) -> list[Anchor]:
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    anchors = [Anchor(**entry) for entry in data["anchor"]]
    if len({anchor.id for anchor in anchors}) != len(anchors):
        raise ValueError(f"{path}: two anchors have one id")
    return anchors


def digest_lines(lines: Collection[str]) -> str:
    """Digest of a place; indentation does not count."""
    return hashlib.blake2b("\n".join(line.strip() for line in lines).encode(), digest_size=8).hexdigest()


def compare(anchor: Anchor, source: str | None) -> str | None:
    """What has changed; None when nothing has."""
    if source is None:
        return "the file is not there"
    lines = source.splitlines()
    here = lines[anchor.line - 1 : anchor.line - 1 + anchor.lines]
    if here and here[0].strip() == anchor.text:
        return None if digest_lines(here) == anchor.digest else "the lines behind it changed"
    found = places_of(anchor, lines)
    if not found:
        return "the text is gone"
    return f"the text is now at line {', '.join(map(str, found))}"


def places_of(anchor: Anchor, lines: list[str]) -> list[int]:
    return [number for number, line in enumerate(lines, 1) if line.strip() == anchor.text]


def read_sources(files: Collection[str], tree: Path | None) -> Mapping[str, str]:
    """Text of the files, out of a tree or of the pinned sdist."""
    if tree is not None:
        return {name: (tree / name).read_text(encoding="utf-8") for name in files if (tree / name).is_file()}
    sys.path.insert(0, str(HERE.parent.parent / "cffi_build"))
    import llama_cpp

    found = {}
    root = f"{llama_cpp.PIN['sdist']['root']}/"
    with tarfile.open(llama_cpp.fetch_sdist()) as archive:
        for member in archive:
            name = member.name.removeprefix(root)
            if member.isfile() and member.name.startswith(root) and name in files:
                content = archive.extractfile(member)
                assert content is not None
                found[name] = content.read().decode("utf-8")
                if len(found) == len(files):
                    break
    return found


def rewritten(text: str, anchors: Collection[Anchor], sources: Mapping[str, str]) -> str:
    """The anchor file with lines and digests as they are now; the text of each must be there exactly once, or nearest."""
    for anchor in anchors:
        lines = sources[anchor.file].splitlines()
        places = places_of(anchor, lines)
        if not places:
            raise ValueError(
                f"{anchor.id}: {anchor.text!r} is not in {anchor.file}; read it again and change the anchor"
            )
        line = min(places, key=lambda place: abs(place - anchor.line))
        digest = digest_lines(lines[line - 1 : line - 1 + anchor.lines])
        entry = re.compile(rf'(id = "{re.escape(anchor.id)}"\nfile = ".*"\nline = )\d+(\n(?:.*\n)*?digest = )".*"')
        text, count = entry.subn(lambda match, line=line, digest=digest: f'{match[1]}{line}{match[2]}"{digest}"', text)
        assert count == 1, anchor.id
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the places that the MTP contract was read from.")
    parser.add_argument("--tree", type=Path, default=os.environ.get("DGR_LLAMA_CPP_SOURCE"), help="a llama.cpp tree")
    parser.add_argument("--anchors", type=Path, default=ANCHORS, help="the list of places")
    parser.add_argument("--write", action="store_true", help="record lines and digests as they are")
    options = parser.parse_args()
    anchors = read_anchors(options.anchors)
    sources = read_sources({anchor.file for anchor in anchors}, options.tree)
    if options.write:
        text = options.anchors.read_text(encoding="utf-8")
        options.anchors.write_text(rewritten(text, anchors, sources), encoding="utf-8")
        anchors = read_anchors(options.anchors)
    changed = [(anchor, what) for anchor in anchors if (what := compare(anchor, sources.get(anchor.file))) is not None]
    for anchor, what in changed:
        print(f"{anchor.id}: {anchor.where}: {what}\n    {anchor.text}\n    it says: {anchor.says}", file=sys.stderr)
    if changed:
        sys.exit(
            f"check_mtp_anchors: {len(changed)} of {len(anchors)} places changed: read them, mend docs/mtp-contract.md and the"
            " model behind it (a new contract version, if it says something else now), then run this with --write"
        )
    print(f"{len(anchors)} places in {len(sources)} files are what the contract was read from")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"check_mtp_anchors: {error}")
