"""`run` on a service of its own: it stops cleanly, and its folder is a service's like any other."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from marlaas.store.db import Store
from marlaas.types import OPERATOR, JobState
from tests.client.running import ROOT, Running

pytestmark = pytest.mark.slow

JOBS = """\
run: {base: tiny, workers: 1}
defaults: {steps: 500, prompts_per_step: 2, group_size: 4, eval_prompts: 0}
jobs:
  - {tenant: acme, name: sums, env: {family: math}}
"""
CUSTOM = """\
run: {base: tiny, workers: 1}
defaults: {steps: 2, prompts_per_step: 2, group_size: 2, eval_prompts: 2, max_tokens: 16}
jobs:
  - {tenant: acme, name: own, env: {family: custom, environment: ./reward.py, prompts: p.jsonl}}
"""
REWARD = "def reward(prompt, reply):\n    return float(len(reply) % 2)\n"
PROMPTS = "".join(f'{{"prompt": "Say something about {n}"}}\n' for n in range(20))


def start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "marlaas.cli.main", "run", *arguments, "--plain"],
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_stopped_run_is_whole_and_a_service_goes_on_with_it(tmp_path: Path):
    jobs, out = tmp_path / "jobs.yaml", tmp_path / "data"
    jobs.write_text(JOBS)
    process = start(str(jobs), "--out", str(out))
    assert process.stdout is not None
    for line in process.stdout:
        if "step 3/500" in line:
            process.send_signal(signal.SIGTERM)
            break
    words = process.stdout.read()
    process.stdout.close()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert "Stopping cleanly" in words and f"marlaas run --resume {out}" in words
    assert re.search(r"acme/sums .* unfinished", words)
    store = Store(out)
    stopped_at = store.job("acme", "sums").step
    assert all(key.revoked_s is not None for key in store.keys(OPERATOR))
    store.close()

    service = Running(tmp_path)
    service.start()
    with service.client(tenant="acme") as client:
        job = client.jobs.get("sums")
        assert job.state.is_active
        for event in job.events(follow=True):
            if event.data.get("step") == stopped_at + 2:
                break
        assert job.cancel().state is JobState.CANCELLED
        assert [row["step"] for row in job.metrics()][: stopped_at + 2] == [
            *range(1, stopped_at + 3)
        ]
    assert service.stop() == 0


def test_a_signal_when_every_job_is_over_leaves_nothing_to_go_on_with(tmp_path: Path):
    jobs = tmp_path / "jobs.yaml"
    jobs.write_text(JOBS.replace("steps: 500", "steps: 1"))
    process = start(str(jobs), "--out", str(tmp_path / "data"))
    assert process.stdout is not None
    for line in process.stdout:
        if line.rstrip().endswith("done"):
            break
    time.sleep(0.3)  # the service drains by now
    process.send_signal(signal.SIGINT)
    words = process.stdout.read()
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert "is closed" not in words and "warning" not in words
    assert "--resume" not in words and re.search(r"acme/sums .* done", words)


def test_local_files_are_uploaded_and_a_resumed_run_needs_them_no_more(tmp_path: Path):
    jobs, out = tmp_path / "jobs.yaml", tmp_path / "out"
    reward, prompts = tmp_path / "reward.py", tmp_path / "p.jsonl"
    jobs.write_text(CUSTOM)
    reward.write_text(REWARD)
    prompts.write_text(PROMPTS + "{}\n")
    words, _ = (process := start(str(jobs), "--out", str(out))).communicate(timeout=120)
    assert process.returncode == 2
    assert "acme/own: line 21" in words
    prompts.write_text(PROMPTS)
    out = tmp_path / "again"
    words, _ = (process := start(str(jobs), "--out", str(out))).communicate(timeout=120)
    assert process.returncode == 0, words
    reward.unlink()
    prompts.unlink()
    words, _ = (process := start("--resume", str(out))).communicate(timeout=120)
    assert process.returncode == 0, words
    assert re.search(r"acme/own .* done", words)
