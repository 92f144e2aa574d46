"""What the commands around a service say and refuse before, and beside, talking to one."""

import dataclasses
import io
import math
import os
from pathlib import Path

import pytest
from rich.console import Console

from marlaas.cli import live, rollouts
from marlaas.cli.connection import as_json
from marlaas.cli.jobs import job_table, log_line
from marlaas.cli.main import main
from marlaas.cli.runs import run_table
from marlaas.client.records import GroupInfo, JobInfo, Machine, Notice, Rollout, RunInfo, TenantInfo
from marlaas.store.db import Store
from marlaas.types import Event, EventKind, JobState, Message, Quotas, Usage, WorkerStats
from tests.cli.records import make_stats


@pytest.fixture(autouse=True)
def nobody(tmp_path, monkeypatch):
    """No test finds a person's own service or key."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MARLAAS_URL", raising=False)
    monkeypatch.delenv("MARLAAS_API_KEY", raising=False)


def shown(renderable: object, *, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


def make_info(name: str, state: JobState = JobState.QUEUED, **more: object) -> JobInfo:
    values = {
        "reason": "",
        "step": 2,
        "steps": 8,
        "created_s": 0.0,
        "elapsed_s": 60.0,
        "device_s": 12.0,
        "usage": Usage(sampled_tokens=1500, trained_tokens=500),
        "promoted": None,
        "waits_for": "",
        "place": None,
        "starts_in_s": None,
        "ends_in_s": None,
        "spec": {},
    }
    return JobInfo(name=name, state=state, **{**values, **more})


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["jobs"], 1, "no API key for http://127.0.0.1:8642"),
        (["jobs", "--url", "localhost"], 2, "expected http://HOST:PORT"),
        (["tenants", "set", "acme"], 2, "got nothing to set"),
        (["tenants", "set", "acme", "--tokens-a-day", "many"], 2, "--tokens-a-day: got 'many'"),
        (["tenants", "list", "acme"], 2, "expected NAME with add, set and purge only"),
        (["tenants", "add"], 2, "expected NAME with add, set and purge only"),
        (["keys"], 2, "either --tenant NAME or --operator"),
        (["keys", "add", "--tenant", "a", "--operator"], 2, "either --tenant NAME or --operator"),
        (["keys", "revoke", "--tenant", "a"], 2, "expected the id of a key"),
        (["adapters", "sums", "--version", "newest"], 2, "a number or latest, best, promoted"),
        (["adapters", "sums", "promote", "--out", "x"], 2, "expected download or merged"),
        (["rollouts", "a", "--tokens"], 2, "expected --show and --json"),
        (["rollouts", "a", "--show", "3", "--min-reward", "1"], 2, "--min-reward: chooses among"),
        (["rollouts", "a", "--limit", "0"], 2, "--limit: got 0"),
        (["chat", "--url", "http://x"], 2, "expected --job"),
        (["chat", "--job", "sums", "--base", "tiny"], 2, "expected no --base"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_be_right(argv, code, words, capsys):
    assert main(argv) == code
    assert words in capsys.readouterr().err


def test_a_service_that_is_not_there_is_said_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setenv("MARLAAS_API_KEY", "tml-x")
    assert main(["jobs", "--url", "http://127.0.0.1:9"]) == 1
    assert "no service answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_a_queued_job_says_its_place_and_why():
    waiting = make_info("a", place=3, starts_in_s=90.0, waits_for="8 jobs of the tenant run")
    paused = make_info("b", JobState.PAUSED, reason="paused by the tenant")
    text = shown(job_table([("acme", waiting), ("acme", paused)], has_owners=True))
    assert "acme/a" in text and "place 3, starts in 1:30: 8 jobs of the tenant run" in text
    assert "paused by the tenant" in text and "2.0k" in text
    assert "acme" not in shown(job_table([("acme", paused)], has_owners=False))


def test_the_conversations_of_a_group_are_shown_best_first_and_as_they_are():
    def rollout(index: int, reward: float | None, words: str) -> Rollout:
        return Rollout(
            index=index,
            messages=[Message("user", "3 + 4?"), Message("assistant", words)],
            turns=[],
            reward=reward,
            is_success=reward == 1.0,
            end="done" if reward is not None else "tool_timeout",
            detail="" if reward is not None else "the tool took too long",
            metrics={"format": 1.0},
            num_tokens=12,
        )

    group = GroupInfo(
        index=7,
        state="trained",
        reason="",
        version=3,
        step=4,
        prompt_index=7,
        trajectories=[rollout(0, None, "?"), rollout(1, 0.0, "[bold]8"), rollout(2, 1.0, "7")],
    )
    console = Console(width=80, file=io.StringIO(), record=True)
    rollouts.show_group(console, group)
    text = console.export_text()
    assert "group 7, prompt 7, version 3, trained on in step 4" in text
    assert text.index("#2  reward 1") < text.index("#1  reward 0") < text.index("#0  no verdict")
    assert "3 rollouts, best reward first; 1 without a verdict" in text
    assert "[bold]8" in text and "the tool took too long" in text


def make_machine(*workers: WorkerStats) -> Machine:
    return Machine(
        base="tiny",
        workers=list(workers),
        loop_lag_s=0.004,
        server_cpu_s=10.0,
        server_rss_bytes=200_000_000,
        sandbox_cpu_s=1.0,
        num_streams=3,
        notices=[Notice(stage="train", tenant="t1", job="a", cause="no step", since_s=75.0)],
    )


def test_top_shows_what_workers_did_lately_not_ever():
    begun, later = make_stats("engine-0", decode=50.0), make_stats("engine-0", decode=51.0)
    later = dataclasses.replace(later, elapsed_s=begun.elapsed_s + 2.0)
    fresh = make_stats("engine-1", train=1.0)
    before = live.Snapshot(machine=make_machine(begun), tenants=[])
    now = live.Snapshot(machine=make_machine(later, fresh), tenants=[])
    lately, unchanged = live.since(before, now).machine.workers
    assert (lately.elapsed_s, lately.busy_s) == (2.0, {"decode": 1.0})
    assert unchanged == fresh


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 50)])
def test_top_fits_the_terminal(width, height):
    jobs = [make_info(f"job-{n}", place=n + 1, waits_for="the machine is full") for n in range(30)]
    machine = make_machine(make_stats("engine-0", decode=50), make_stats("engine-1", train=20))
    tenants = [
        live.TenantNow(
            tenant=TenantInfo(tenant=f"t{n}", weight=1.0, quotas=Quotas(), created_s=0.0),
            jobs=jobs if n == 1 else [],
            today=Usage(sampled_tokens=12_000),
        )
        for n in range(40)
    ]
    page = live.render_top(
        live.Snapshot(machine=machine, tenants=tenants), "http://x", width, height
    )
    text = shown(page, width=width)
    assert len(text.splitlines()) <= height
    for words in ("event loop 4 ms late", "train t1/a: no step, for 1:15", "job-0", "30"):
        assert words in text


def test_a_run_is_shown_with_whose_it_is_and_what_it_holds():
    info = RunInfo(
        run="s-1:train:0",
        session="s-1",
        rank=8,
        version=7,
        is_live=True,
        num_waiting=2,
        num_checkpoints=3,
        stored_bytes=4_200_000,
        created_s=0.0,
        used_s=90.0,
        metadata={},
    )
    text = shown(run_table([("acme", info)], now_s=100.0, has_owners=True))
    for words in ("acme", "s-1:train:0", "live", "7", "2", "3", "4.2MB", "10s ago"):
        assert words in text
    assert "acme" not in shown(run_table([("acme", info)], now_s=100.0, has_owners=False))


def test_a_line_of_the_log_has_its_time_and_its_words():
    log = Event(seq=1, at_s=0.0, job="a", kind=EventKind.LOG, data={"text": "hello"})
    notice = Event(
        seq=2,
        at_s=0.0,
        job="a",
        kind=EventKind.NOTICE,
        data={"stage": "environment", "cause": "asleep", "since_s": 3.0},
    )
    assert log_line(log) == "1970-01-01 00:00:00  hello"
    assert log_line(notice).endswith("[environment] asleep")


def test_json_has_no_nan():
    assert as_json({"a": [math.nan, Usage(sampled_tokens=2)]})["a"][0] is None


def test_a_folder_that_is_served_is_not_served_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Store.open(tmp_path, runs_jobs=True)
    assert main(["serve", "--data", str(tmp_path)]) == 1
    first.close()
    assert f"in use by marlaas, pid {os.getpid()}" in capsys.readouterr().err
