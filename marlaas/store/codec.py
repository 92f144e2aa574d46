"""One encoding for every record: MessagePack by type annotation, arrays as raw bytes.

    encode(record) -> bytes          decode(bytes, type(record)) -> equal record

The store keeps groups and job specs in it, and messages between processes travel in it. It stands
alone: it imports nothing of this package, so that a worker can use it without the database.

- The reader names the type; nothing in the bytes can choose what is constructed.
- An array is its dtype, its shape and its bytes in C order. NaN and infinity survive.
- Decoded arrays own aligned, writable memory: they outlive the message, and PyTorch takes them.
"""

import struct
import sys
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")

_ARRAY = 1
"""MessagePack extension code of an array."""

assert sys.byteorder == "little", "arrays travel as they lie in memory"

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
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return _array_header(array.dtype, array.shape) + array.tobytes()


@lru_cache(maxsize=4096)
def _array_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    head = bytes((dtype.itemsize, ord(dtype.kind), len(shape)))
    return head + struct.pack(f"<{len(shape)}Q", *shape)


def _decode_extension(code: int, data: memoryview) -> np.ndarray:
    if code != _ARRAY:
        raise msgspec.ValidationError(f"unknown extension {code}")
    itemsize, kind, ndim = data[0], data[1], data[2]
    flat = np.frombuffer(data, _dtype(itemsize, kind), offset=3 + 8 * ndim)
    if ndim != 1:
        flat = flat.reshape(struct.unpack_from(f"<{ndim}Q", data, 3))
    return flat.copy()


@lru_cache(maxsize=64)
def _dtype(itemsize: int, kind: int) -> np.dtype:
    if chr(kind) not in _KINDS:
        raise msgspec.ValidationError(f"unknown array kind {chr(kind)!r}")
    return np.dtype(f"<{chr(kind)}{itemsize}")


def _decode_other(type_: type, value: object) -> object:
    """Accept what MessagePack has no type for: arrays, and the free JSON values of settings."""
    if type_ is np.ndarray and not isinstance(value, np.ndarray):
        raise msgspec.ValidationError(f"expected an array, got {type(value).__name__}")
    return value


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_other)


@lru_cache(maxsize=256)
def _decoder(type_: Any) -> msgspec.msgpack.Decoder:
    return msgspec.msgpack.Decoder(type_, dec_hook=_decode_other, ext_hook=_decode_extension)
