"""One encoding for every record: MessagePack by type annotation, arrays as raw bytes.

    encode(record) -> bytes          decode(bytes, type(record)) -> equal record

The store keeps groups and job specs in it, and messages between processes travel in it. It stands
alone: it imports nothing of this package, so that a worker can use it without the database.

- The reader names the type; nothing in the bytes can choose what is constructed.
- An array is its dtype, its shape and its bytes in C order. NaN and infinity survive.
- Decoded arrays own aligned, writable memory: they outlive the message, and PyTorch takes them.
"""

from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")

_ARRAY = 1
"""MessagePack extension code of an array."""

_KINDS = frozenset("biuf")
"""dtype kinds that may travel: bool, signed, unsigned, float. Never objects."""


def encode(record: object) -> bytes:
    """Return the record (dataclasses, enums, containers, arrays) as bytes."""
    return _ENCODER.encode(record)


def decode(blob: bytes | bytearray | memoryview, type_: type[T]) -> T:
    """Return the record of the given type that `encode` made `blob` from.

    Raises:
        msgspec.ValidationError: the bytes do not describe such a record.
    """
    return _decoder(type_).decode(blob)


def _encode_other(value: object) -> object:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _KINDS:
            raise TypeError(f"arrays of dtype {value.dtype} are not encoded")
        return msgspec.msgpack.Ext(_ARRAY, _array_bytes(value))
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not encoded")


def _array_bytes(array: np.ndarray) -> bytes:
    """Return `itemsize kind ndim shape... data`: a short header, then the bytes of the array."""
    little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    shape = np.asarray(array.shape, dtype="<u8").tobytes()
    header = bytes((array.dtype.itemsize, ord(array.dtype.kind), array.ndim))
    return b"".join((header, shape, little.tobytes()))


def _decode_extension(code: int, data: memoryview) -> np.ndarray:
    if code != _ARRAY:
        raise msgspec.ValidationError(f"unknown extension {code}")
    itemsize, kind, ndim = data[0], chr(data[1]), data[2]
    if kind not in _KINDS:
        raise msgspec.ValidationError(f"unknown array kind {kind!r}")
    start = 3 + 8 * ndim
    shape = np.frombuffer(data[3:start], dtype="<u8").astype(int)
    flat = np.frombuffer(data[start:], dtype=np.dtype(f"<{kind}{itemsize}"))
    return flat.reshape(shape).copy()


def _decode_other(type_: type, value: object) -> object:
    """Accept what MessagePack has no type for: arrays, and the free JSON values of settings."""
    if type_ is np.ndarray and not isinstance(value, np.ndarray):
        raise msgspec.ValidationError(f"expected an array, got {type(value).__name__}")
    return value


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_other)


@lru_cache(maxsize=256)
def _decoder(type_: Any) -> msgspec.msgpack.Decoder:
    return msgspec.msgpack.Decoder(type_, dec_hook=_decode_other, ext_hook=_decode_extension)
