"""Coverage-guided fuzzing of one target with atheris, which `make fuzz-coverage` installs in an environment of its own.

    run_guided.py TARGET --seconds 60 --corpus FOLDER

What it finds is written to ``regressions/TARGET``, where the suite runs it from then on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import atheris

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
# What finds the sources of an editable install loads them in a way of its own, which leaves nothing to follow: it goes last.
sys.meta_path.sort(key=lambda finder: type(finder).__module__.startswith("_editable"))

#: What is followed; everything that was imported before is not.
with atheris.instrument_imports(include=["dgr", "guided", "tomllib"]):
    from guided.targets import TARGETS


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz one target, guided by what its code does.")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, required=True, help="a folder that is kept from one run to the next")
    args = parser.parse_args()
    target, found = TARGETS[args.target], HERE / "regressions" / args.target
    corpus = args.corpus / args.target
    for folder in (corpus, found):
        folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    flags = [
        f"-max_total_time={args.seconds}",
        "-max_len=65536",
        "-timeout=20",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *flags, f"-artifact_prefix={found}/", str(corpus)], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
