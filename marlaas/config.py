"""Frozen settings of the machine side, read once and printed at start. A tenant's knobs are in
`types.JobSpec`, not here.

`resolve` turns what the operator asked for into what will run, filling in everything that depends
on the machine; nothing changes after that.
"""

import os
from dataclasses import dataclass
from enum import StrEnum

from marlaas.errors import InvalidRequest


class Placement(StrEnum):
    """Which workers sample and which train."""

    REPLICATED = "replicated"
    """Every worker does both for its share of the policies; no core waits for the other stage."""
    SPLIT = "split"
    """One worker trains, the others sample; adapters are carried over at publish."""


class Durability(StrEnum):
    """Which end of a process or machine leaves everything that was recorded on disk."""

    PROCESS = "process"
    """A kill. Files are renamed into place and never synced: a step pays nothing for it."""
    POWER = "power"
    """A loss of power, too. Snapshots and adapters are synced, with the folders that name them,
    before their row is written: a few milliseconds a step on an SSD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What the operator asks for; None means: choose for this machine."""

    num_workers: int | None = None
    placement: Placement = Placement.REPLICATED
    kv_capacity_tokens: int | None = None
    max_batch: int | None = None
    """Sequences in one worker's decode batch."""
    durability: Durability = Durability.PROCESS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Everything one engine worker is started with."""

    name: str
    base_name: str
    base_folder: str
    num_threads: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    kv_capacity_tokens: int = 65536
    max_batch: int = 64
    max_context: int = 2048
    prefill_budget_tokens: int = 512
    train_budget_tokens: int = 1024
    """Tokens of one fused training pass."""
    is_exact: bool = False
    """Every result is independent of neighbours, bit for bit (seeded jobs need it)."""
    is_prepacked: bool = False
    """Keep copies of the base's weights for faster products, if they turn out faster here."""
    durability: Durability = Durability.PROCESS
    """How far the files that it writes are on disk when the call that wrote them is answered."""

    def environment(self) -> dict[str, str]:
        """Return the environment variables to start the worker with, set before torch is loaded."""
        threads = str(self.num_threads)
        return {
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
        }


def resolve(
    run: RunSettings,
    *,
    base_name: str,
    base_folder: str,
    max_context: int,
    kv_bytes_per_token: int,
    base_bytes: int,
    is_exact: bool = False,
) -> list[EngineSettings]:
    """Return the settings of every engine worker of a run.

    Raises:
        InvalidRequest: the combination cannot run here.
    """
    cores = len(os.sched_getaffinity(0))
    num_workers = run.num_workers or cores
    if num_workers < 1:
        raise InvalidRequest(f"workers: got {num_workers}; expected at least 1")
    if run.placement is Placement.SPLIT and num_workers < 2:
        raise InvalidRequest(
            "placement split needs at least 2 workers (one trains, the others sample); "
            "expected --workers 2 or more, or --placement replicated"
        )
    is_small = kv_bytes_per_token <= SMALL_KV_BYTES
    capacity = run.kv_capacity_tokens or _kv_capacity(kv_bytes_per_token, num_workers)
    return [
        EngineSettings(
            name=f"engine-{idx}",
            base_name=base_name,
            base_folder=base_folder,
            # How threads share a product depends on its size, hence on the company.
            num_threads=1 if is_exact else max(1, cores // num_workers),
            kv_capacity_tokens=capacity,
            max_batch=run.max_batch or (128 if is_small else 64),
            train_budget_tokens=1024 if is_small else 256,
            max_context=max_context,
            is_exact=is_exact,
            is_prepacked=not is_exact and _has_room_to_prepack(base_bytes, num_workers),
            durability=run.durability,
        )
        for idx in range(num_workers)
    ]


KV_MEMORY_SHARE = 0.25
"""Share of the machine's memory that all workers' KV may take together."""

MAX_KV_TOKENS = 1 << 18

SMALL_KV_BYTES = 8192
"""A base whose KV takes at most this much a token is small. A decode step is then mostly overhead,
which a batch of 128 halves against one of 64, and a training pass of 1,024 tokens takes about 0.1 s
on a core. On a larger base 256 tokens are a second or more already, and fuse as well."""


PREPACK_MEMORY_SHARE = 0.25
"""Share of the machine's memory that all workers' copies of the weights may take together: each has
one for forward and one for backward products."""


def _has_room_to_prepack(base_bytes: int, num_workers: int) -> bool:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 2 * base_bytes * num_workers <= PREPACK_MEMORY_SHARE * memory_bytes


def _kv_capacity(kv_bytes_per_token: int, num_workers: int) -> int:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    tokens = int(memory_bytes * KV_MEMORY_SHARE / num_workers / kv_bytes_per_token)
    return max(1024, min(MAX_KV_TOKENS, tokens // 1024 * 1024))
