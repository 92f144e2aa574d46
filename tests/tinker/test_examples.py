"""The examples that use the SDK run to their end, with few steps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.tinker.served import WAIT_S, Tenant, new_run

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(tenant: Tenant, name: str, *arguments: str) -> str:
    where = {"TINKER_BASE_URL": tenant.running.url, "TINKER_API_KEY": tenant.key}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env={**os.environ, **where},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_reinforcement_learning_in_sixty_lines(acme: Tenant):
    assert len((EXAMPLES / "tinker_rl.py").read_text().splitlines()) <= 60
    said = run(acme, "tinker_rl.py", "--steps", "10")
    rewards = [float(value) for value in re.findall(r"step +\d: reward ([01]\.\d\d)", said)]
    assert len(rewards) == 10
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.15  # it shows that something is learned
    assert re.search(r"tinker://.*/weights/sums", said)


def test_fine_tuning_brings_home_an_adapter(acme: Tenant, tmp_path: Path):
    said = run(acme, "tinker_sft.py", "--steps", "6", "--batch", "8", "--out", str(tmp_path / "a"))
    losses = [float(value) for value in re.findall(r"([\d.]+) nats", said)]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert load_file(tmp_path / "a" / "adapter_model.safetensors")


def test_the_command_line_of_the_sdk_takes_a_training_checkpoint_home(acme: Tenant, tmp_path: Path):
    run = new_run(acme.service())
    path = run.save_state("cli").result(timeout=WAIT_S).path
    where = {"TINKER_BASE_URL": acme.running.url, "TINKER_API_KEY": acme.key}
    command = "import tinker.cli.__main__ as cli; cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "checkpoint", "download", path, "--output", str(tmp_path)],
        env={**os.environ, **where},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (file,) = tmp_path.rglob("adapter_model.safetensors")
    assert load_file(file)
