"""What a plain install, without any extra, can do: everything but what an extra is for."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

#: Refuses any module that neither Python, dgr nor a core dependency of dgr brings, and those named as arguments.
PLAIN = textwrap.dedent(
    """
    import importlib.metadata, re, sys

    def closure(name, seen):
        if name not in seen:
            seen.add(name)
            for line in importlib.metadata.requires(name) or ():
                requirement, _, marker = line.partition(";")
                if "extra" not in marker and "python_version" not in marker and "platform" not in marker:
                    closure(re.match(r"[\\w.-]+", requirement)[0].lower().replace("_", "-"), seen)
        return seen

    core = closure("dgr", set())
    brought = {
        module
        for module, names in importlib.metadata.packages_distributions().items()
        if any(name.lower().replace("_", "-") in core for name in names)
    }
    brought -= {"bench", *sys.argv[1:]}

    class Plain:
        def find_spec(self, name, path=None, target=None):
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in brought and top != "dgr":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Plain())
    for module in [name for name in sys.modules if name.partition(".")[0] in sys.argv[1:]]:
        del sys.modules[module]
    """
)


def run_plainly(code: str, *blocked: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PLAIN + textwrap.dedent(code), *blocked]
    return subprocess.run(command, capture_output=True, text=True, check=False)


IMPORT_ALL = """
import importlib, pkgutil
import dgr

needs = {}
for module in pkgutil.walk_packages(dgr.__path__, "dgr."):
    if module.name.endswith(("._native", "._probe", ".__main__")):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as missing:
        needs[module.name] = missing.name
assert len(sys.modules) > 100
print(needs)
"""


#: What the extra ``http`` brings, ``metrics`` among it, for the folders that may need it.
HTTP = {"anycorn", "deepseek_recipe", "h11", "prometheus_client", "starlette"}


def test_every_module_is_imported_but_those_of_an_extra() -> None:
    done = run_plainly(IMPORT_ALL)
    assert done.stderr == ""
    needs = ast.literal_eval(done.stdout)
    names = ("api", "connections", "http", "metrics", "monitor")
    folders = tuple(f"dgr.serving.{name}." for name in names)
    assert needs.pop("dgr.serving.tracing.otel") == "opentelemetry"
    assert needs.pop("dgr.protocol.planes") == "zstandard"
    assert {needs.pop("dgr.cli.ray_actor"), needs.pop("dgr.cli.ray_up")} == {"ray"}
    assert all(module.startswith(folders) and needed in HTTP for module, needed in needs.items()), needs


def test_a_missing_dependency_would_be_seen() -> None:
    done = run_plainly(IMPORT_ALL, "numpy")
    assert "'dgr.selftest.fixture.values': 'numpy'" in done.stdout


COMMANDS = """
from dgr.cli import main

for command in (["selftest", "numerics", "--help"], ["fixture", "--help"]):
    try:
        main(command)
    except SystemExit as done:
        assert done.code == 0, command
assert "numpy" not in sys.modules, "numpy is loaded for a help text"
"""


def test_the_commands_that_write_models_are_there_and_load_numpy_only_to_write() -> None:
    done = run_plainly(COMMANDS)
    assert done.returncode == 0, done.stderr
    assert "--types" in done.stdout
    assert "--preset" in done.stdout


def test_a_model_is_written(tmp_path: Path) -> None:
    """Of blocks, whose size native code tells."""
    out = tmp_path / "m.gguf"
    done = run_plainly(
        f"""
        from dgr.cli import main

        sys.exit(main(["fixture", {str(out)!r}, "--layers", "1", "--weights", "mixed_q2_k"]))
        """
    )
    assert done.returncode == 0, done.stderr
    assert out.stat().st_size > 100_000
