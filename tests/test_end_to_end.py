"""The whole product on the real engine and base: run, kill, resume, load the adapter elsewhere."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from marlaas.text.bases import resolve_base

JOBS = """
run: {base: tiny}
defaults: {steps: 4, prompts_per_step: 2, group_size: 4, eval_prompts: 8, seeded: true}
jobs:
  - {tenant: acme, name: sums, env: {family: math}}
  - {tenant: birch, name: functions, env: {family: code}, rank: 12, targets: [attention, mlp, head]}
  - {tenant: cedar, name: lookup, env: {family: search}, latency: {median_s: 0.05, sigma: 1.0}}
"""

NAMES = ("acme/sums", "birch/functions", "cedar/lookup")
LIMIT_S = 240


def start(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "marlaas.cli.main", "run", *arguments, "--plain"]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    return output


def curve(out: Path, name: str) -> list[dict]:
    lines = (out / "jobs" / name / "curve.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{key: row[key] for key in row if key != "elapsed_s"} for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "jobs.yaml").write_text(JOBS)
    output = finish(start(str(folder / "jobs.yaml"), "--out", str(folder / "out")))
    assert "mean of jobs" in output
    return folder / "out"


@pytest.mark.slow
def test_a_run_killed_at_a_random_moment_resumes_to_the_same_curves_bit_for_bit(
    uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (tmp_path / "jobs.yaml").write_text(JOBS)
    process = start(str(tmp_path / "jobs.yaml"), "--out", str(out))
    assert process.stdout is not None
    deadline = time.monotonic() + LIMIT_S
    for line in process.stdout:
        if "acme/sums  step 1/4" in line or time.monotonic() > deadline:
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    finish(start("--resume", str(out)))
    for name in NAMES:
        assert len(curve(out, name)) == 4
        assert curve(out, name) == curve(uninterrupted, name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_the_adapter_of_a_job_loads_in_peft_and_changes_the_stock_model_as_it_should(
    uninterrupted: Path,
) -> None:
    peft = pytest.importorskip("peft")
    from marlaas.engine.adapter_io import load_adapter, read_spec, target_kinds
    from marlaas.model.attention import PackedSequences
    from marlaas.model.base import load_base
    from marlaas.model.lora import LoraBatch, Segment

    folder = resolve_base("tiny")
    tokens = torch.arange(40) * 7 % 500
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        plain = stock(tokens[None]).logits[0]
    base = load_base(folder)
    for name in NAMES:
        adapter = uninterrupted / "jobs" / name / "versions" / "v000004" / "adapter"
        stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            expected = peft.PeftModel.from_pretrained(stock, adapter)(tokens[None]).logits[0]
        spec = read_spec(adapter)
        loaded = load_adapter(adapter, base.bank.bucket(spec.rank).layout)
        slot = base.bank.allocate(
            rank=spec.rank, scale=spec.alpha / spec.rank, kinds=target_kinds(spec)
        )
        base.bank.write(slot, loaded.row)
        batch = LoraBatch.build(base.bank, [Segment(slot, len(tokens))])
        with torch.no_grad(), base.bank.active(batch):
            positions = torch.arange(len(tokens))
            context = PackedSequences([len(tokens)])
            ours = base.head(base.hidden(tokens, positions, context, batch))
        assert (ours - expected).abs().max() < 1e-4
        assert (expected - plain).abs().max() > 1e-3, "the job has learned something"
