"""What a benchmark ran on: processor, memory, versions, load, and how fast it was at that moment.

Every benchmark puts `describe` and `probe` beside its figures: a number without its machine cannot
be compared with another one.
"""

import os
import platform
import statistics
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

from marlaas import __version__
from marlaas.runtime import now_s

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")

PROBE_S = 0.25
"""Time that each product and the reading of the probe take."""

GEMM_SHAPES = ((512, 576, 1536), (256, 1536, 576), (1024, 576, 576))
"""Rows of full passes times weights of SmolLM2-135M; the fastest is what the machine can do."""

STREAM_ELEMENTS = 32 * 1024 * 1024
"""fp32 elements that the stream probe reads: 128 MiB, more than caches hold."""


def describe() -> dict[str, object]:
    """Return the machine and the versions as JSON values."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
        "marlaas": __version__,
        **{name: _version(name) for name in PACKAGES},
    }


def probe(num_threads: int = 1) -> dict[str, float]:
    """Return the rate of matrix products with packed weights and of reading memory, over a second
    or two: what fractions of the limit are fractions of."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    values = torch.ones(STREAM_ELEMENTS)
    try:
        gemm_gflops = max(_gemm_gflops(*shape) for shape in GEMM_SHAPES)
        stream_s = _median_s(values.sum)
    finally:
        torch.set_num_threads(before)
    return {
        "gemm_gflops": round(gemm_gflops, 1),
        "read_gb_per_s": round(4 * STREAM_ELEMENTS / stream_s / 1e9, 1),
    }


def _gemm_gflops(rows: int, width: int, out: int) -> float:
    """Return the rate of one product, by the better of packed and plain weights."""
    import torch

    from marlaas.model.prepack import PackedWeight, is_available

    x, weight = torch.ones(rows, width), torch.ones(out, width)
    products = [lambda: torch.nn.functional.linear(x, weight)]
    if is_available(weight):
        packed = PackedWeight(weight)
        products.append(lambda: packed.product(x, None))
    with torch.inference_mode():
        return 2 * rows * width * out / min(_median_s(product) for product in products) / 1e9


def as_markdown(machine: Mapping[str, object], rates: Mapping[str, float]) -> str:
    """Return both as one line to stand above a table."""
    packages = ", ".join(f"{name} {machine[name]}" for name in ("marlaas", *PACKAGES))
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"{machine['system']}; Python {machine['python']}, {packages}. At the start: load "
        f"{machine['load_average']}, {rates['gemm_gflops']} GFLOP/s in fp32 matrix products, "
        f"{rates['read_gb_per_s']} GB/s read from memory."
    )


def _median_s(work: Callable[[], object]) -> float:
    work()
    times, started = [], now_s()
    while not times or now_s() - started < PROBE_S:
        before = now_s()
        work()
        times.append(now_s() - before)
    return statistics.median(times)


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
