"""Checks of arguments, and the stack level of a warning."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from wds_tensorcache.errors import list_names

_OWN = frozenset({__name__.partition(".")[0], "dali_plugin"})


def as_int(name: str, value: Any) -> int:
    """Return the argument called `name` as an int. Raise TypeError if `operator.index` refuses it."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r:.100}, expected an integer") from None


def check_options(
    call: Callable[..., Any], passed: Iterable[str], accepted: Iterable[str], remedies: Mapping[str, str] | None = None
) -> None:
    """Raise TypeError if `call` got an unknown option.

    Args:
        call: Class or function that the user called.
        passed: Names of the options in the call's `**options`.
        accepted: Names of the options that `call` accepts there.
        remedies: Remedies, by name, for options that only other libraries have.
    """
    accepted = list(accepted)
    for name in passed:
        if remedies is not None and name in remedies:
            raise TypeError(f"{call.__name__} has no argument {name!r}: {remedies[name]}")
        if name not in accepted:
            parameters = inspect.signature(call).parameters.values()
            names = [parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD]
            hint = f"there are {list_names(list(dict.fromkeys([*names, *accepted])), name)}"
            raise TypeError(f"{call.__name__} has no argument {name!r:.100}; {hint}")


def user_level() -> int:
    """Return the `stacklevel` at which a warning names the user's code.

    That is the first frame outside this package and `dali_plugin`; in a thread of this package, it is in the standard library.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OWN:
        level, frame = level + 1, frame.f_back
    return level
