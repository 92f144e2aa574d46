"""What may stand in a column: text and JSON that both databases take, numbers that are numbers."""

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from marlaas.errors import InvalidRequest


def encode_json(value: object) -> str:
    """Return JSON in which NaN is null and text that is not Unicode was made so."""
    try:
        return _ENCODER.encode(value).decode()
    except UnicodeEncodeError:
        return _ENCODER.encode(_as_unicode(value)).decode()


def clean_text(value: str) -> str:
    """Return text without lone surrogates and zeros, which come in what foreign code prints."""
    return value.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def check_number(what: str, number: int) -> int:
    """Return a number that a client counts with, if a column takes it.

    Raises:
        InvalidRequest: it does not.
    """
    if not 0 <= number < 1 << 63:
        raise InvalidRequest(f"{what} {number}: use a number from 0 to 2**63 - 1")
    return number


def finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _as_unicode(value: object) -> object:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Mapping):
        return {_as_unicode(key): _as_unicode(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_unicode(inner) for inner in value]
    return value


def _encode_other(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


_ENCODER = msgspec.json.Encoder(enc_hook=_encode_other)
