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

PROBE_S = 0.5
"""Time that each half of the probe takes."""

GEMM_SHAPE = (512, 576, 1536)
"""Rows of a packed training pass times an MLP weight of SmolLM2-135M."""

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
    """Return the rate of matrix products and of reading memory, over about a second."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    rows, width, out = GEMM_SHAPE
    x, weight = torch.ones(rows, width), torch.ones(out, width)
    values = torch.ones(STREAM_ELEMENTS)
    try:
        gemm_s = _median_s(lambda: torch.nn.functional.linear(x, weight))
        stream_s = _median_s(values.sum)
    finally:
        torch.set_num_threads(before)
    return {
        "gemm_gflops": round(2 * rows * width * out / gemm_s / 1e9, 1),
        "read_gb_per_s": round(4 * STREAM_ELEMENTS / stream_s / 1e9, 1),
    }


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
