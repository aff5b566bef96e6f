"""Proves the patch series against the pristine tree; exits non-zero on any difference.

Every patch passes `git apply --check` and applies in order; the result has the pinned digest, and so has what the
build's own applier makes; every patch reverses, in reverse order, to the pristine tree. Needs git.

    python check_patches.py [--write]   # --write: put the new digest of the patched tree into pin.toml
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "cffi_build"))

import llama_cpp  # noqa: E402 (found through the line above)


def git_apply(tree: Path, patch: Path, *options: str) -> None:
    """Apply one patch as plain files, whatever repository lies above."""
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    for check in (["--check"], []):
        subprocess.run(["git", "apply", *options, *check, str(patch)], cwd=tree, env=environment, check=True)


def expect(what: str, found: str, wanted: str) -> None:
    if found != wanted:
        sys.exit(f"{what}: digest {found}, pin.toml says {wanted}")
    print(f"{what}: {found}")


def write_digest(digest: str) -> None:
    pin = HERE / "pin.toml"
    text = pin.read_text(encoding="utf-8")
    pin.write_text(re.sub(r'(?m)^patched_sha256 = ".*"$', f'patched_sha256 = "{digest}"', text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the patches against the pristine tree.")
    parser.add_argument("--write", action="store_true", help="record the digest of the patched tree")
    options = parser.parse_args()
    pinned = llama_cpp.PIN["tree"]

    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "git"
        tree.mkdir()
        llama_cpp.prepare_source(tree, patched=False)
        expect("pristine", llama_cpp.tree_digest(tree), pinned["sha256"])

        for program in llama_cpp.PROGRAMS:  # built on demand; here they are held against their pin
            own = Path(folder).resolve() / program
            own.mkdir()
            llama_cpp.copy_used_paths(own, llama_cpp.pin_table(program))
            print(f"{program}'s own: {llama_cpp.tree_digest(own, llama_cpp.pin_table(program))}")

        for patch in llama_cpp.patches():
            git_apply(tree, patch)
            print(f"applies: {patch.name}")
        patched = llama_cpp.tree_digest(tree)
        if options.write:
            write_digest(patched)
            pinned["patched_sha256"] = patched
        expect("patched by git", patched, pinned["patched_sha256"])

        for patch in reversed(llama_cpp.patches()):
            git_apply(tree, patch, "--reverse")
        expect("reversed", llama_cpp.tree_digest(tree), pinned["sha256"])

        built = tree.parent / "build"
        built.mkdir()
        llama_cpp.prepare_source(built, patched=True)
        expect("patched by the build", llama_cpp.tree_digest(built), pinned["patched_sha256"])


if __name__ == "__main__":
    try:
        main()
    except (llama_cpp.BuildError, subprocess.CalledProcessError) as error:
        sys.exit(f"check_patches: {error}")
