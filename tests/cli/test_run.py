"""`run` plans before it starts anything, and stops cleanly on the first signal."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from marlaas.cli import run
from marlaas.cli.display import Lines
from marlaas.cli.main import make_parser
from marlaas.config import Placement
from marlaas.errors import InvalidRequest
from marlaas.store.db import Store

JOBS = """\
run: {workers: 2, mode: lockstep}
jobs: [{tenant: a, name: b, env: {family: math}}]
"""


@pytest.fixture
def jobs(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("sums.yaml")
    path.write_text(JOBS)
    return path


def plan_of(*argv: str) -> run.Plan:
    return run.make_plan(make_parser().parse_args(["run", *argv]))


def begin(*argv: str) -> run.Plan:
    """Do what `run` does until the engines start."""
    args = make_parser().parse_args(["run", *argv])
    plan = run.make_plan(args)
    run._prepare_folder(plan, args.jobs)
    Store(plan.out).close()
    return plan


def test_flags_win_over_the_files_run_section(jobs):
    section = plan_of("sums.yaml", "--workers", "3", "--placement", "split").section
    assert (section.workers, section.placement, section.mode) == (3, Placement.SPLIT, "lockstep")


def test_split_needs_two_workers(jobs):
    with pytest.raises(InvalidRequest, match="at least 2"):
        plan_of("sums.yaml", "--workers", "1", "--placement", "split")


def test_a_run_without_out_gets_the_next_free_folder(jobs):
    assert plan_of("sums.yaml").out == Path("runs/sums")
    begin("sums.yaml")
    assert plan_of("sums.yaml").out == Path("runs/sums-2")


def test_a_folder_that_holds_a_run_is_not_run_into(jobs):
    begin("sums.yaml", "--out", "here")
    with pytest.raises(InvalidRequest, match="--resume here"):
        plan_of("sums.yaml", "--out", "here")


def test_a_folder_that_holds_something_else_is_not_run_into(jobs):
    Path("full").mkdir()
    Path("full/letter.txt").write_text("dear")
    with pytest.raises(InvalidRequest, match="not empty"):
        plan_of("sums.yaml", "--out", "full")


def test_a_run_that_never_began_does_not_block_its_folder(jobs):
    plan = begin("sums.yaml", "--out", "here")
    (plan.out / "store.db").unlink()
    assert plan_of("sums.yaml", "--out", "here").out == Path("here")


@pytest.mark.parametrize(
    "argv",
    [
        ("--resume", "here"),
        ("sums.yaml", "--resume", "here"),
        ("sums.yaml", "--out", "here", "--resume"),
    ],
)
def test_a_resumed_run_takes_jobs_and_settings_from_its_folder(jobs, argv):
    first = begin("sums.yaml", "--out", "here", "--workers", "1")
    resumed = plan_of(*argv)
    assert (resumed.specs, resumed.section) == (first.specs, first.section)
    assert (resumed.out, resumed.is_resumed) == (Path("here"), True)


def test_a_run_is_not_resumed_with_other_jobs_or_another_base(jobs):
    begin("sums.yaml", "--out", "here")
    jobs.write_text(JOBS.replace("name: b", "name: c"))
    with pytest.raises(InvalidRequest, match="has other jobs"):
        plan_of("sums.yaml", "--resume", "here")
    with pytest.raises(InvalidRequest, match="--base"):
        plan_of("--resume", "here", "--base", "smollm2-135m")


def test_the_run_folder_remembers_how_it_was_run(jobs):
    plan = begin("sums.yaml", "--out", "here")
    assert (plan.out / "jobs.yaml").read_text() == JOBS
    settings = json.loads((plan.out / "run.json").read_text())
    assert (settings["base"], settings["workers"], settings["mode"]) == ("tiny", 2, "lockstep")


def test_jobs_that_end_return_no_signal():
    async def jobs() -> str:
        await asyncio.sleep(0)
        return "done"

    ended = asyncio.run(run.until_stopped(jobs(), Lines(), lambda: None))
    assert ended == run.Ended(signal=None, result="done")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_cancels_the_jobs_and_lets_them_clean_up(number):
    events = []

    async def jobs() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            events.append("cleaned up")

    ended = asyncio.run(run.until_stopped(jobs(), Lines(), lambda: None))
    assert ended == run.Ended(signal=number, result=None)
    assert events == ["cleaned up"]


def test_jobs_that_stop_by_themselves_after_a_signal_count_as_stopped():
    async def jobs() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "stopped"
        return "done"

    ended = asyncio.run(run.until_stopped(jobs(), Lines(), lambda: None))
    assert ended == run.Ended(signal=signal.SIGTERM, result="stopped")


def test_an_error_of_the_jobs_is_passed_on():
    async def jobs() -> None:
        raise InvalidRequest("no such thing")

    with pytest.raises(InvalidRequest):
        asyncio.run(run.until_stopped(jobs(), Lines(), lambda: None))


def test_the_second_signal_ends_the_process_at_once():
    program = """
import asyncio, os, signal
from marlaas.cli import run
from marlaas.cli.display import Lines
async def jobs():
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        await asyncio.sleep(60)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
asyncio.run(run.until_stopped(jobs(), Lines(), lambda: print("cursor", flush=True)))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == -signal.SIGTERM
    assert ended.stdout == "cursor\n"
