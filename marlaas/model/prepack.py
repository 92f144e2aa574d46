"""Copies of frozen weights in the layout that the CPU's matrix kernels work in.

`torch` lays a weight out anew at every product, or uses kernels that do without; on a weight that
never changes this can be done once. oneDNN products from such a copy take 0.3 to 0.9 of the time of
plain ones, by CPU and shape (see `docs/benchmarks.md`).

- A copy is private to its process, where the mapped weights are shared; `config` decides whether
  there is memory for it.
- Whether it pays is measured when a base is loaded; where it does not, or where this build of torch
  lacks the operation, products stay plain.
- Exact mode does without: its bits are those of plain products, whose rows are known not to
  influence each other.
- oneDNN makes and keeps a kernel for every number of rows that it meets, which takes as long as the
  product itself. Rows are therefore padded to few numbers, by whoever lays a pass out or else here.

Shape suffixes: N tokens, D input width, O output width.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from marlaas.runtime import cpu_s

MIN_WORK = 1 << 18
"""Multiplications from which on a packed product is faster. Below, the 8 us that it takes to begin
weigh more: one row times 192 x 192 takes 3 us plain, 11 packed; times 576 x 49,152 7 and 3 ms."""

FEW_ROWS = 8
FINE_ROWS = 128
"""More than a few rows are padded, to a multiple of 8 up to so many, beyond it to one of 32."""

PROBE_ROWS = 64
PROBE_ROUNDS = 7
WORTHWHILE = 0.9
"""A packed product must take less than this part of a plain one's time."""


def padded_rows(num_rows: int) -> int:
    """Return how many rows a product of `num_rows` rows is made with."""
    if num_rows <= FEW_ROWS:
        return num_rows
    multiple = 8 if num_rows <= FINE_ROWS else 32
    return -(-num_rows // multiple) * multiple


class PackedWeight:
    """One linear's weight for products with many rows: `x W^T + bias`, and `dY W` on the way back.

    The copy for the way back is made when a training pass first needs it.
    """

    def __init__(self, weight_OD: Tensor) -> None:
        self._weight_OD = weight_OD
        self._forward = _reorder(weight_OD)
        self._backward: Tensor | None = None

    def pays(self, num_rows: int) -> bool:
        """Return whether a product of so many rows is faster from the packed copy."""
        return num_rows * self._weight_OD.numel() >= MIN_WORK

    def product(self, x_ND: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return `x W^T + bias` [N, O]."""
        return _linear(x_ND, self._forward, bias_O)

    def back(self, grad_NO: Tensor) -> Tensor:
        """Return `dY W` [N, D]."""
        if self._backward is None:
            self._backward = _reorder(self._weight_OD.t().contiguous())
        return _linear(grad_NO, self._backward, None)


def should_prepack(linears: Iterable[nn.Linear]) -> bool:
    """Return whether packed weights are to be had and pay, judged by the largest linear."""
    largest = max(linears, key=lambda linear: linear.weight.numel())
    return is_available(largest.weight) and is_worthwhile(largest.weight)


def is_available(weight_OD: Tensor) -> bool:
    """Return whether this build of torch can pack this weight."""
    has_operations = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )
    is_fp32_on_cpu = weight_OD.device.type == "cpu" and weight_OD.dtype == torch.float32
    return has_operations and is_fp32_on_cpu and torch.backends.mkldnn.is_available()


@torch.inference_mode()
def is_worthwhile(weight_OD: Tensor) -> bool:
    """Measure whether a packed product is faster on this machine."""
    packed = PackedWeight(weight_OD)
    x_ND = torch.ones(PROBE_ROWS, weight_OD.shape[1])
    plain_s = _best_s(lambda: F.linear(x_ND, weight_OD))
    packed_s = _best_s(lambda: packed.product(x_ND, None))
    return packed_s < WORTHWHILE * plain_s


def _best_s(product: Callable[[], Tensor]) -> float:
    """Return CPU seconds, which a busy neighbour lengthens least, of the fastest of some rounds."""
    product()
    times = []
    for _ in range(PROBE_ROUNDS):
        began_s = cpu_s()
        product()
        times.append(cpu_s() - began_s)
    return min(times)


def _reorder(weight_OD: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight_OD.detach(), None)


def _linear(x_ND: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    num_rows = x_ND.shape[0]
    num_missing = padded_rows(num_rows) - num_rows
    if num_missing:
        x_ND = F.pad(x_ND, (0, 0, 0, num_missing))
    y_NO = torch.ops.mkldnn._linear_pointwise(x_ND, packed, bias_O, "none", [], "")
    return y_NO[:num_rows] if num_missing else y_NO
