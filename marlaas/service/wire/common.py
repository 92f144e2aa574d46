"""What every schema of the wire stands on: numbers that JSON can hold, and the shape of errors.

- A schema is built from a record by its `of`; nothing else converts, and nothing converts twice.
- Bodies that come in refuse unknown fields.
- JSON has no NaN: a number that is not finite goes out as null.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

Responses = dict[int | str, dict[str, Any]]
"""What a route says of its answers in the OpenAPI document."""

Number = float | None
"""Null where there is nothing to say: NaN and infinity have no JSON."""


def finite(value: float) -> Number:
    """Return a number that JSON can hold."""
    return value if math.isfinite(value) else None


def finite_row(row: Mapping[str, float]) -> dict[str, Number]:
    """Return a row of numbers that JSON can hold."""
    return {name: finite(value) for name, value in row.items()}


def finite_data(value: Any) -> Any:
    """Return JSON-like data with every number that JSON cannot hold replaced by null."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, Mapping):
        return {str(key): finite_data(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite_data(inner) for inner in value]
    return value


class Answer(BaseModel):
    """Something that goes out."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Body(BaseModel):
    """Something that comes in: every field is known, or the request is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    not_supported: ClassVar[frozenset[str]] = frozenset()
    """Fields that a caller may know from elsewhere, refused as what they are."""


class Problem(Answer):
    """What went wrong, for programs (`code`) and for people (`message`)."""

    code: str
    message: str
    problems: list[str] = []
    """Every fault of the request, where there are several."""
    request_id: str = ""
    """Names the request in the server's log."""


class ErrorAnswer(Answer):
    """The body of every answer that is not a success."""

    error: Problem
