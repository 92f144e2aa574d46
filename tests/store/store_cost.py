"""What the calls that a job makes all the time cost: CPU and waiting, on SQLite or by URL.

Run `python -m tests.store.store_cost [URL]`. A group has 8 trajectories of 300 tokens; a step takes
four groups, one of them dropped, and finds a state file of a megabyte to delete.
"""

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
from tests.store.records import ACME, group_of, record_of, spec_of, trajectory_of, write_state

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
    store.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder), sys.argv[1] if len(sys.argv) > 1 else None)
