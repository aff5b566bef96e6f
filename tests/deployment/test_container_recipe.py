"""The container recipe: linted, small in what it may do, and made of what the project has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "deploy" / "docker" / "Dockerfile"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


def _complaints(text: str) -> list[str]:
    if HADOLINT is None:
        pytest.skip("hadolint is not installed; the extra `dev` brings it where there is a wheel")
    done = subprocess.run([HADOLINT, "--format", "json", "-"], input=text, capture_output=True, text=True, check=False)
    return [each["code"] for each in json.loads(done.stdout)]


def _instructions(text: str, name: str) -> list[str]:
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [line.split(None, 1)[1] for line in joined.splitlines() if line.startswith(f"{name} ")]


def test_the_recipe_is_clean() -> None:
    assert _complaints(RECIPE.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("3.12-slim-bookworm AS", "latest AS", "DL3007"),
        ("USER 10001:10001", "USER root", "DL3002"),
        ('ENTRYPOINT ["dgr"]', "ENTRYPOINT dgr", "DL3025"),
        ("# hadolint ignore=DL3008\n", "", "DL3008"),
    ],
)
def test_a_mistake_would_be_seen(old: str, new: str, code: str) -> None:
    text = RECIPE.read_text()
    assert old in text
    assert code in _complaints(text.replace(old, new))


def test_the_image_may_do_little() -> None:
    text = RECIPE.read_text()
    last = text[text.rindex("\nFROM ") :]
    assert _instructions(last, "USER") == ["10001:10001"]
    assert _instructions(last, "ENTRYPOINT") == ['["dgr"]']
    assert len(_instructions(last, "HEALTHCHECK")) == 1
    assert "apt-get" not in last  # no compiler, nothing of the build but the environment
    assert _instructions(last, "COPY") == ["--from=build /opt/dgr /opt/dgr"]
    # All that is written lies in the cache and in /tmp: the root may be read-only.
    assert "DGR_CACHE_DIR=/var/cache/dgr" in last
    assert _instructions(last, "VOLUME") == ["/var/cache/dgr"]


def test_the_recipe_is_made_of_what_there_is() -> None:
    text = RECIPE.read_text()
    copied = [word for line in _instructions(text, "COPY") if "--from" not in line for word in line.split()[:-1]]
    assert copied
    assert all((ROOT / word).exists() for word in copied)
    let_in = re.findall(r"^!(.+)$", RECIPE.with_name("Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert {*let_in} == {*copied}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    assert {*named.split(",")} <= {*extras}
