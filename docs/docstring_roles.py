"""For the reference: the roles of docstrings (``:class:`~dgr.errors.InputError```) as the names that they show."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":[a-z]+:`(~?)([^`]+)`")


def _shown(match: re.Match[str]) -> str:
    short, name = match.groups()
    return f"`{name.rpartition('.')[2] if short else name}`"


class DocstringRoles(griffe.Extension):
    """Rewrites docstrings as they are collected."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(_shown, obj.docstring.value)
