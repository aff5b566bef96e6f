"""The benchmark uses what any user can: public modules, and of them public names."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
from narrow import present

import dgr_bench

FILES = sorted(Path(dgr_bench.__file__).parent.rglob("*.py"))


def private_names(source: str) -> list[str]:
    """Names of dgr that a source imports, or reaches for, and that are not public."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dgr":
            module = importlib.import_module(node.module)
            public = set(getattr(module, "__all__", ()))
            for alias in node.names:
                is_module = (
                    Path(present(module.__file__)).parent / f"{alias.name}.py"
                ).exists() and not alias.name.startswith("_")
                if alias.name not in public and not is_module:
                    found.append(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner not in ("self", "cls", "argparse"):
                found.append(f".{node.attr}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_only_public_names(path: Path) -> None:
    assert private_names(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "from dgr.cluster.local import _check_fits",
        "from dgr.client.session import Answer",
        "def f(link): link._credit = 1",
    ],
)
def test_private_ones_would_be_seen(source: str) -> None:
    assert private_names(source)
