"""The crash benchmark strikes where it says, sees what was done anew, and finds what is wrong."""

import argparse
import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from marlaas.bench import crash_audit
from marlaas.bench.crash_client import Told, make_jobs
from marlaas.bench.crash_server import Boundary, FatalAsyncStore, FatalStore, Moment
from marlaas.bench.crash_strikes import FIRST_OPERATIONS, OPERATIONS, Target, draw_strikes
from marlaas.bench.crash_trial import Trial
from marlaas.bench.processes import descendants
from marlaas.store.db import Store
from marlaas.types import EventKind, Group, JobSpec, JobState, StepRecord

SPEC = JobSpec(tenant="acme", name="sums", env={"family": "math"})


class Killed(BaseException):
    """Stands for the end of the process."""


def die() -> None:
    raise Killed


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    store = Store(tmp_path / "data")
    store.add_job("acme", SPEC)
    store.close()
    yield tmp_path


def fatal(folder: Path) -> FatalAsyncStore:
    return FatalAsyncStore(
        FatalStore(folder / "data"),
        strike_file=folder / "strike.json",
        record_file=folder / "again.jsonl",
        die=die,
    )


def open_groups(folder: Path, *indices: int) -> list[int]:
    """Open groups until the process dies; return what a next life finds."""

    async def main() -> None:
        store = fatal(folder)
        try:
            for index in indices:
                await store.call(Store.open_group, "acme", "sums", index, version=0)
        except Killed:
            pass
        finally:
            await store.close()

    asyncio.run(main())
    after = Store(folder / "data")
    try:
        return [row.index for row in after.groups("acme", "sums")]
    finally:
        after.close()


@pytest.mark.parametrize(
    ("moment", "left"), [(Moment.BEFORE, [0]), (Moment.INSIDE, [0]), (Moment.AFTER, [0, 1])]
)
def test_the_process_ends_at_the_moment_around_the_commit(
    folder: Path, moment: Moment, left: list[int]
) -> None:
    Boundary(operation="open_group", moment=moment, number=2).write(folder / "strike.json")
    assert open_groups(folder, 0, 1, 2) == left


def test_other_operations_and_servers_that_are_not_armed_live_on(folder: Path) -> None:
    assert open_groups(folder, 0) == [0]
    Boundary(operation="finish_group", moment=Moment.BEFORE).write(folder / "strike.json")
    assert open_groups(folder, 1) == [0, 1]


def test_a_group_that_is_opened_again_after_it_was_finished_is_noted(folder: Path) -> None:
    async def main() -> None:
        store = fatal(folder)
        await store.call(Store.open_group, "acme", "sums", 0, version=0)
        await store.call(Store.open_group, "acme", "sums", 0, version=0)
        group = Group(index=0, prompt_index=0, version=0, trajectories=())
        await store.call(Store.finish_group, "acme", "sums", group)
        await store.close()
        assert not (folder / "again.jsonl").exists()
        store = fatal(folder)
        await store.call(Store.open_group, "acme", "sums", 0, version=0)
        await store.close()

    asyncio.run(main())
    assert (folder / "again.jsonl").read_text() == '["acme", "sums", 0]\n'


def test_fifty_kills_meet_every_boundary_and_every_kind_of_process() -> None:
    strikes = draw_strikes(50, seed=0)
    assert len(strikes) == 50
    struck = {(one.boundary.operation, one.boundary.moment) for one in strikes if one.boundary}
    every = {(name, moment) for name in (*FIRST_OPERATIONS, *OPERATIONS) for moment in Moment}
    assert struck == every
    assert set(Counter(one.target for one in strikes)) == set(Target)
    assert draw_strikes(50, seed=0) == strikes != draw_strikes(50, seed=1)


def test_every_boundary_is_an_operation_that_the_loop_calls() -> None:
    from marlaas.loop.jobs import accept

    names = {accept.__name__, *(name for name in dir(Store) if callable(getattr(Store, name)))}
    assert {*OPERATIONS, *FIRST_OPERATIONS} <= names


def test_a_step_that_the_client_was_told_and_that_is_not_there_is_lost(folder: Path) -> None:
    job = replace(make_jobs(0, 2)[0], tenant="acme")
    job = replace(job, words={**job.words, "name": "sums"})
    store = Store(folder / "data")
    store.set_job_state("acme", "sums", JobState.RUNNING)
    store.add_first_version("acme", "sums", "a")
    told = Told()
    for step in (1, 2, 2):
        told.hear(
            "acme",
            {"kind": EventKind.STEP.value, "job": "sums", "at_s": 1.0,
             "data": {"step": step, "elapsed_s": float(step)}},
        )  # fmt: skip
    store.open_group("acme", "sums", 0, version=0)
    store.finish_group("acme", "sums", Group(index=0, prompt_index=0, version=0, trajectories=()))
    record = StepRecord(
        step=1, group_indices=(0,), adapter_hash="b", is_vetoed=False, is_empty=True, metrics={},
        elapsed_s=1.0,
    )  # fmt: skip
    store.commit_step("acme", "sums", record, dropped={0: "zero_variance"})
    findings = crash_audit.Findings()
    crash_audit._check_job(findings, store, told, job)
    store.close()
    assert told.doubled == ["acme/sums/2"]
    assert findings.lost == ["acme/sums step 2"]
    assert findings.faults == ["acme/sums is running: ", "acme/sums has steps [1]"]
    assert not findings.is_clean


def test_processes_are_found_below_their_server_and_known_to_be_gone() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    while not (found := [one for one in descendants(parent.pid) if "input()" in one.command]):
        assert parent.poll() is None
    (child,) = found
    assert child.is_alive
    parent.communicate(b"\n")
    assert not child.is_alive


@pytest.mark.slow
def test_a_server_that_is_killed_loses_doubles_and_repeats_nothing(tmp_path: Path) -> None:
    args = argparse.Namespace(base="tiny", workers=1, steps=2, seed=3)
    whole = Trial(tmp_path / "whole", args).run([])
    struck = Trial(tmp_path / "struck", args).run(draw_strikes(2, seed=3))
    findings = crash_audit.audit(struck, whole)
    assert findings.is_clean, findings
    assert findings.is_seeded_identical
    assert len(struck.deaths) == 2 and struck.num_survivors == 0
    assert np.all(np.array(struck.recoveries_s) > 0)
