"""Tensors of the wire to arrays and back: dense or compressed sparse rows, in protobuf or in JSON.

- Whatever a client says of a tensor is checked against the bytes that are there, before anything as
  large as it claims to be is made.
- A sparse tensor has a filler in every cell that it does not list; what that is, its reader knows.
- Every fault is named with where it is: `data[3].loss_fn_inputs.advantages[17]`.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from marlaas.errors import InvalidRequest
from marlaas.service.tinker.schema import BFLOAT16, FLOAT32, INT32, INT64

MAX_CELLS = 1 << 24
"""Cells of one tensor, listed or not: 64 MiB in single precision."""

_DTYPES = {
    FLOAT32: np.dtype("<f4"),
    INT64: np.dtype("<i8"),
    INT32: np.dtype("<i4"),
    BFLOAT16: np.dtype("<u2"),
}
_INDEX = np.dtype("<i8")
_MAX_AXES = 2


@dataclass(frozen=True, slots=True)
class Csr:
    """The cells that a sparse tensor lists, and its layout."""

    values: np.ndarray
    crow: np.ndarray
    """int64 [rows + 1]. Row i has the cells crow[i] .. crow[i + 1]."""
    col: np.ndarray
    """int64 [cells]."""
    shape: tuple[int, int]

    def rows(self) -> np.ndarray:
        """Return the row of each cell."""
        return np.repeat(np.arange(self.shape[0]), np.diff(self.crow))

    def dense(self, filler: float) -> np.ndarray:
        out = np.full(self.shape, filler, dtype=self.values.dtype)
        out[self.rows(), self.col] = self.values
        return out


def read_tensor(where: str, tensor: Any, *, filler: int = 0) -> np.ndarray:
    """Return a protobuf tensor as float32 or int64.

    Raises:
        InvalidRequest: says where and what would be right.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidRequest(f"{where}: dtype {tensor.dtype}; expected float32 (1) or int64 (2)")
    encoding = tensor.WhichOneof("encoding")
    if encoding is None:
        raise InvalidRequest(f"{where}: has no values; expected dense bytes or a CSR matrix")
    if encoding == "dense":
        values = _widen(_array(where, tensor.dense, dtype))
        return _shaped(where, values, tuple(tensor.shape))
    csr = tensor.sparse_csr
    sparse = check_csr(
        where,
        _widen(_array(f"{where}.values", csr.values, dtype)),
        _array(f"{where}.crow_indices", csr.crow_indices, _INDEX),
        _array(f"{where}.col_indices", csr.col_indices, _INDEX),
        tuple(tensor.shape),
    )
    return sparse.dense(filler)


def check_csr(
    where: str, values: np.ndarray, crow: np.ndarray, col: np.ndarray, shape: tuple[int, ...]
) -> Csr:
    """Return a sparse matrix whose indices are good.

    Raises:
        InvalidRequest: they are not.
    """
    _check_shape(where, shape)
    if len(shape) != 2:
        raise InvalidRequest(f"{where}: shape {list(shape)}; expected two axes for a CSR matrix")
    rows, columns = shape
    if crow.shape != (rows + 1,):
        raise InvalidRequest(f"{where}: {crow.size} row pointers; expected {rows + 1}")
    if crow[0] != 0 or crow[-1] != values.size or (np.diff(crow) < 0).any():
        raise InvalidRequest(
            f"{where}: row pointers; expected them to rise from 0 to {values.size}"
        )
    if col.size != values.size:
        raise InvalidRequest(f"{where}: {col.size} column indices for {values.size} values")
    if col.size and (col.min() < 0 or col.max() >= columns):
        raise InvalidRequest(f"{where}: a column index is not in 0..{columns - 1}")
    return Csr(values, crow, col, (rows, columns))


def write_tensor(tensor: Any, values: np.ndarray) -> None:
    """Fill a protobuf tensor with a dense float32 or int64 array."""
    is_float = values.dtype.kind == "f"
    tensor.dtype = FLOAT32 if is_float else INT64
    tensor.dense = pack(values, "<f4" if is_float else "<i8")
    tensor.shape.extend(values.shape)


def write_csr(tensor: Any, sparse: Csr) -> None:
    """Fill a protobuf tensor with a sparse float32 matrix."""
    tensor.dtype = FLOAT32
    tensor.sparse_csr.values = pack(sparse.values, "<f4")
    tensor.sparse_csr.crow_indices = pack(sparse.crow, "<i8")
    tensor.sparse_csr.col_indices = pack(sparse.col, "<i8")
    tensor.shape.extend(sparse.shape)


def pack(values: np.ndarray, dtype: str) -> bytes:
    """Return an array as the wire has it."""
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def read_int32(where: str, data: bytes) -> np.ndarray:
    """Return token ids.

    Raises:
        InvalidRequest: the bytes are no int32 array.
    """
    return _array(where, data, _DTYPES[INT32])


def _array(where: str, data: bytes, dtype: np.dtype) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise InvalidRequest(f"{where}: {len(data)} bytes; expected a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype=dtype)


def _widen(values: np.ndarray) -> np.ndarray:
    """Return int32 as int64, and bfloat16, the upper half of a float32, as that."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.int64) if values.dtype == np.int32 else values


def _shaped(where: str, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if not shape:
        return values
    _check_shape(where, shape)
    if prod(shape) != values.size:
        raise InvalidRequest(
            f"{where}: {values.size} values; expected as many as {list(shape)} has"
        )
    return values.reshape(shape)


def _check_shape(where: str, shape: tuple[int, ...]) -> None:
    if len(shape) > _MAX_AXES or any(size < 0 for size in shape):
        raise InvalidRequest(f"{where}: shape {list(shape)[:8]}; expected one or two axes")
    if prod(shape) > MAX_CELLS:
        raise InvalidRequest(f"{where}: shape {list(shape)}; expected at most {MAX_CELLS} cells")
