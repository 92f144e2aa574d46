"""The seams to the world: time and seeded randomness. Simulation replaces what is here.

Time inside the loop is the running event loop's own clock, so that a virtual event loop
(`VirtualTimeLoop`) makes every wait and every time-out of the system virtual at once. No other
module reads a wall clock or makes an unseeded generator; a test holds that.
"""

import asyncio
import gc
import hashlib
import os
import selectors
import time
from collections.abc import Coroutine
from typing import TypeVar

import numpy as np

T = TypeVar("T")

YOUNG_OBJECTS = 20_000
"""New containers after which garbage is collected, in a process with a settled heap."""


def now_s() -> float:
    """Return monotonic seconds: of the running event loop if there is one, else of the system."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.perf_counter()


def cpu_s() -> float:
    """Return CPU seconds used by this process so far."""
    return time.process_time()


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settle_heap() -> None:
    """Leave out of garbage collection what this process has loaded by now, and collect less often.

    Called once a server has started: modules and settings stay to its end, and of what the loop
    makes hardly anything is cyclic. Collections took a tenth of its CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def wall_time_s() -> float:
    """Return seconds since the epoch, for records that people read and for days; never for
    ordering. Under virtual time it goes with the virtual clock."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return time.time()
    return loop.epoch_s + loop.time() if isinstance(loop, VirtualTimeLoop) else time.time()


def derive_seed(*labels: int | str) -> int:
    """Return a 63-bit seed that depends on every label, in order, and on nothing else."""
    digest = hashlib.blake2b("\x1f".join(map(repr, labels)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def unguessable_bytes(num_bytes: int) -> bytes:
    """Return random bytes that nobody can foresee, for keys; nothing that is computed uses them."""
    return os.urandom(num_bytes)


def rng(*labels: int | str) -> np.random.Generator:
    """Return a generator seeded by the labels: the same labels give the same stream."""
    return np.random.Generator(np.random.Philox(derive_seed(*labels)))


class _JumpingSelector(selectors.DefaultSelector):
    """Where a real selector would sleep until the next timer, moves the virtual clock there."""

    virtual_s = 0.0

    def select(self, timeout: float | None = None) -> list:
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("virtual time: every task waits and no timer is set (deadlock)")
        if not events and timeout:
            self.virtual_s += timeout
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps over idle time: hours of waiting run in milliseconds.

    Only timers and tasks may drive it; threads and sockets have no place in a simulation.
    """

    def __init__(self, epoch_s: float = 0.0) -> None:
        self.epoch_s = epoch_s
        """Wall time when the virtual clock shows 0."""
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.virtual_s


def run_virtual(main: Coroutine[object, object, T], *, epoch_s: float = 0.0) -> T:
    """Run a coroutine to its end under virtual time, which begins at `epoch_s`."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(epoch_s)) as runner:
        return runner.run(main)
