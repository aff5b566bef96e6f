"""Ctrl-C while a command is still being loaded: one line and exit code 130, whichever import it meets."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Interrupts when a module is about to be imported, as a signal that comes at that moment does.
_SCRIPT = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
        return None

sys.meta_path.insert(0, Interrupt())
from {entry} import main
sys.exit(main(["--help"]))
"""


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("dgr.cli", "dgr.cli.command_line"),
        ("dgr.cli", "trio"),
        ("dgr.cli", "dgr.core.values"),
        ("dgr.cli", "dgr.engine.native"),
        ("dgr_bench", "dgr_bench.cli"),
        ("dgr_bench", "trio"),
    ],
)
def test_an_interrupt_while_loading_is_one_line(entry: str, module: str) -> None:
    command = [sys.executable, "-P", "-c", _SCRIPT.format(entry=entry, module=module)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    program = "dgr" if entry == "dgr.cli" else "dgr-bench"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{program}: interrupted\n")


def test_the_package_imports_nothing_until_it_is_asked() -> None:
    """Else an interrupt could come before any line of ours that answers it."""
    script = (
        "import sys, dgr; print(*sorted(name for name in sys.modules if name.startswith(('dgr.', 'trio', 'msgspec'))))"
    )
    assert subprocess.check_output([sys.executable, "-P", "-c", script], text=True).split() == []


def test_every_public_name_is_there() -> None:
    import dgr

    assert set(dgr.__all__) == set(dgr._HOMES)
    assert all(getattr(dgr, name) is not None for name in dgr.__all__)
    assert set(dgr.__all__) <= set(dir(dgr))
    with pytest.raises(AttributeError, match="no attribute 'open_sesame'"):
        dgr.open_sesame  # noqa: B018 (looking it up is what is tested)
