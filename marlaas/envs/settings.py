"""Settings of task families: frozen dataclasses read from a tenant's mapping, all faults at once.

A field declares its range or choices beside its default:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class DiceSettings:
        sides: int = in_range(6, 2, 100)
        kind: str = one_of("fair", "loaded")
"""

import difflib
from collections.abc import Mapping
from dataclasses import Field, field, fields
from typing import Any, TypeVar

from marlaas.errors import InvalidRequest

SettingsT = TypeVar("SettingsT")


def in_range(default: float, low: float, high: float) -> Any:
    """Return a dataclass field whose value must lie in [low, high]; its type is the default's."""
    return field(default=default, metadata={"range": (low, high)})


def one_of(default: str, *others: str) -> Any:
    """Return a dataclass field whose value must be one of the given strings."""
    return field(default=default, metadata={"choices": (default, *others)})


def parse_settings(cls: type[SettingsT], mapping: Mapping[str, object]) -> SettingsT:
    """Make settings of class `cls` from a mapping; absent keys take their defaults.

    A class may have a method `faults() -> list[str]` for rules between fields.

    Raises:
        InvalidRequest: names every fault of the mapping, and what would be right.
    """
    known = {declared.name: declared for declared in fields(cls)}  # type: ignore[arg-type]
    problems = [_unknown_key(key, list(known)) for key in mapping if key not in known]
    for key, value in mapping.items():
        if key in known:
            problems += _value_faults(known[key], value)
    if problems:
        raise InvalidRequest(*problems)
    settings = cls(**{key: _converted(known[key], value) for key, value in mapping.items()})
    find_faults = getattr(settings, "faults", list)
    if faults := find_faults():
        raise InvalidRequest(*faults)
    return settings


def did_you_mean(name: str, known: list[str]) -> str:
    """Return the end of an error message: the closest known name, or all of them."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known))}"


def _unknown_key(key: str, known: list[str]) -> str:
    return f"unknown setting {key!r}; {did_you_mean(key, known)}"


def _value_faults(declared: Field, value: object) -> list[str]:
    wanted = type(declared.default)
    accepted = (int, float) if wanted is float else (wanted,)
    is_bool_by_mistake = isinstance(value, bool) and wanted is not bool
    if not isinstance(value, accepted) or is_bool_by_mistake:
        return [f"{declared.name} must be of type {wanted.__name__}, got {value!r}"]
    low, high = declared.metadata.get("range", (None, None))
    if low is not None and not low <= value <= high:
        return [f"{declared.name} must be between {low} and {high}, got {value!r}"]
    choices = declared.metadata.get("choices")
    if choices and value not in choices:
        return [f"{declared.name} must be one of {', '.join(choices)}, got {value!r}"]
    return []


def _converted(declared: Field, value: Any) -> Any:
    return float(value) if type(declared.default) is float else value
