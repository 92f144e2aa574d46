"""What the calls that jobs and clients make all the time cost, on SQLite or by URL.

Run `python -m tests.store.store_cost [URL]`. A group has 8 trajectories of 300 tokens; a step takes
four groups, one of them dropped, and finds a state file of a megabyte to delete. An operation of a
run has a payload and a result of 100 kB each.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from marlaas import runtime
from marlaas.store import codec
from marlaas.store.db import Store
from marlaas.types import StateKind
from tests.store.records import (
    ACME,
    RUN,
    group_of,
    operation_of,
    record_of,
    spec_of,
    trajectory_of,
    with_run,
    write_run_state,
    write_state,
)

T = TypeVar("T")

STEPS = 300


def measure(name: str, call: Callable[[T], object], values: Sequence[T]) -> None:
    began_s, began_cpu_s = time.perf_counter(), runtime.cpu_s()
    for value in values:
        call(value)
    cpu_us = (runtime.cpu_s() - began_cpu_s) / len(values) * 1e6
    wall_us = (time.perf_counter() - began_s) / len(values) * 1e6
    print(f"{name:40} {cpu_us:6.0f} us CPU {wall_us:6.0f} us wall")  # noqa: T201


def main(root: Path, url: str | None) -> None:
    store = Store.open(root, url=url)
    store.add_job(ACME, spec_of())
    rollouts = [trajectory_of(index, turns=((100, 300),), length=300) for index in range(8)]
    groups = [group_of(index, *rollouts) for index in range(4 * STEPS)]
    metrics = {f"metric_{number}": number / 7 for number in range(40)}
    records = [
        replace(record_of(step, *range(4 * step - 4, 4 * step)), metrics=metrics)
        for step in range(1, STEPS + 1)
    ]

    def commit(record) -> None:
        dropped = {record.group_indices[1]: "zero_variance"}
        store.commit_step(ACME, "sums", record, dropped=dropped)

    def commit_with_files(record) -> None:
        write_state(store, record.step, b"s" * 1_000_000)
        commit(record)

    measure("encode a group (part of finish_group)", codec.encode, groups)
    measure(
        "open_group", lambda group: store.open_group(ACME, "sums", group.index, version=0), groups
    )
    measure("finish_group", lambda group: store.finish_group(ACME, "sums", group), groups)
    measure("commit_step", commit, records[: STEPS // 2])
    measure("commit_step, state written and deleted", commit_with_files, records[STEPS // 2 :])
    measure_runs(store)
    store.close()


def measure_runs(store: Store) -> None:
    """One optimizer step after two passes, and what a client asks for meanwhile."""
    with_run(store)
    body, out = os.urandom(100_000), os.urandom(100_000)
    steps = range(1, 3 * STEPS, 3)
    timings: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        began_cpu_s = runtime.cpu_s()
        call()
        timings.setdefault(name, []).append(runtime.cpu_s() - began_cpu_s)

    for step in steps:
        for seq in (step, step + 1):
            new = operation_of(seq, payload=body)
            timed("accept", lambda new=new: store.accept(ACME, new))
            timed("accept again", lambda new=new: store.accept(ACME, new))
            timed(
                "finish_operation",
                lambda seq=seq: store.finish_operation(ACME, RUN, seq, result=out),
            )
            timed("operation", lambda seq=seq: store.operation(ACME, RUN, seq))
        store.accept(ACME, operation_of(step + 2, "optim_step"))
        version = step // 3 + 1
        path = write_run_state(store, version, 1_000_000)
        timed(
            "commit_run_step",
            lambda seq=step + 2, version=version, path=path: store.commit_run_step(
                ACME, RUN, seq, version=version, state_path=path,
                state_kind=StateKind.SNAPSHOT, adapter_hash="hash", result=b"stepped",
            ),
        )  # fmt: skip
        timed("touch_session", lambda: store.touch_session(ACME, "s-1"))
        timed("stored_bytes", lambda: store.stored_bytes(ACME))
    for name, cpu_s in timings.items():
        print(f"{name:40} {1e6 * sum(cpu_s) / len(cpu_s):6.0f} us CPU")  # noqa: T201
    began_cpu_s = runtime.cpu_s()
    num_dropped = store.drop_results(-1.0, limit=10 * STEPS)
    each_us = (runtime.cpu_s() - began_cpu_s) / num_dropped * 1e6
    print(f"{'drop_results, each':40} {each_us:6.0f} us CPU")  # noqa: T201
    assert num_dropped == 3 * STEPS + 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder), sys.argv[1] if len(sys.argv) > 1 else None)
