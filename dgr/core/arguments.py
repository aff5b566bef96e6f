"""What every argument is looked at for: its type and its limits, refused by name with :class:`~dgr.errors.InputError`.

One function per kind of value, for arguments of functions; ``attrs`` validators made of them, for fields of option
structs. True and False are not numbers here, and NaN lies within no limits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, TypeVar

from dgr.errors import InputError, InvalidToken

__all__ = [
    "check_callable",
    "check_flag",
    "check_instance",
    "check_member",
    "check_number",
    "check_text",
    "check_whole",
    "flag",
    "instance",
    "member",
    "number",
    "optional",
    "text",
    "token_ids",
    "whole",
]

M = TypeVar("M", bound=Enum)
#: What attrs calls with the instance, the attribute and the value.
Validator = Callable[[Any, Any, Any], None]
#: What is called with the name and the value of an argument.
Check = Callable[[str, object], None]


def _limits(least: float, most: float) -> str:
    if math.isinf(most):
        return f"{least:g} or more" if isinstance(least, float) else f"{least} or more"
    return f"from {least} to {most}"


def check_whole(name: str, value: object, least: int, most: float = math.inf) -> None:
    """Refuse what is not a whole number within limits."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InputError(f"{name} is {_shown(value)}; give a whole number, {_limits(least, most)}")


def check_number(name: str, value: object, least: float, most: float = math.inf, *, above: bool = False) -> None:
    """Refuse what is not a number within limits; ``above``: ``least`` itself is outside."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InputError(f"{name} is {_shown(value)}; give a number, {_limits(float(least), most)}")
    if above and value == least:
        raise InputError(f"{name} is {_shown(value)}; give a number above {least:g}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InputError(f"{name} is {_shown(value)}; give True or False")


def check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InputError(f"{name} is {_shown(value)}; give a text")


def check_instance(name: str, value: object, *kinds: type) -> None:
    if not isinstance(value, kinds):
        raise InputError(f"{name} is {_shown(value)}; give a {' or a '.join(kind.__name__ for kind in kinds)}")


def check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise InputError(f"{name} is {_shown(value)}; give a function")


def check_member(name: str, value: object, kind: type[M]) -> None:
    if not isinstance(value, kind):
        raise InputError(f"{name} is {_shown(value)}; give one of {', '.join(str(each.value) for each in kind)}")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 100 else f"{shown[:100]}..."


# --- the same for fields ---------------------------------------------------------------------------------------------


def _field(check: Check) -> Validator:
    return lambda _instance, attribute, value: check(attribute.name, value)


def whole(least: int, most: float = math.inf) -> Validator:
    return _field(lambda name, value: check_whole(name, value, least, most))


def number(least: float, most: float = math.inf, *, above: bool = False) -> Validator:
    return _field(lambda name, value: check_number(name, value, least, most, above=above))


def flag() -> Validator:
    return _field(check_flag)


def text() -> Validator:
    return _field(check_text)


def member(kind: type[M]) -> Validator:
    return _field(lambda name, value: check_member(name, value, kind))


def instance(kind: type) -> Validator:
    return _field(lambda name, value: check_instance(name, value, kind))


def optional(validator: Validator) -> Validator:
    def check(instance: Any, attribute: Any, value: Any) -> None:
        if value is not None:
            validator(instance, attribute, value)

    return check


# --- token ids -------------------------------------------------------------------------------------------------------


def token_ids(name: str, tokens: object, n_vocab: int, first: int = 0) -> list[int]:
    """Token ids of any integer type (numpy's too) as Python's own. Raises :class:`~dgr.errors.InvalidToken`.

    ``first``: the position of the first one, for the message.
    """
    if isinstance(tokens, str | bytes | bytearray | memoryview) or not isinstance(tokens, Iterable):
        raise InvalidToken(f"{name} is {_shown(tokens)}; give token ids, a sequence of whole numbers below {n_vocab}")
    ids: list[int] = []
    for position, token in enumerate(tokens, first):
        try:
            value = operator.index(token)
        except TypeError:
            value = -1
        if isinstance(token, bool) or not 0 <= value < n_vocab:
            raise InvalidToken(
                f"token id {_shown(token)} at position {position} ({name}) is outside the vocabulary of {n_vocab}: give whole"
                f" numbers from 0 to {n_vocab - 1}"
            )
        ids.append(value)
    return ids
