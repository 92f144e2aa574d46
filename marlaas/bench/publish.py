"""How long it takes from an optimizer step to the first token of the version that it made.

    optim_step, snapshot written ─► record committed ─► publish ─► first token under the new version

Real engine workers on `tiny` and a real store (SQLite), in both placements, idle and while a batch
of sequences decodes all the time. The worker does one decode step at a time in between, so each of
its three messages waits for one at most; the table gives the time of such a step beside the rest.
Times are wall times: medians, and the 99th percentile of the whole. The last line is one JSON
object.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from marlaas.bench import machine
from marlaas.config import Placement, RunSettings
from marlaas.launch import arrange, engine_settings, started
from marlaas.loop.policies import Worker
from marlaas.runtime import now_s
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import (
    AdamParams,
    AdapterSpec,
    Datum,
    GenerateRequest,
    JobSpec,
    JobState,
    Objective,
    PolicyId,
    SamplingParams,
    StepRecord,
    TenantId,
)

TENANT = TenantId("bench")
NEIGHBOUR = PolicyId("bench/neighbour")
PHASES = ("step", "commit", "publish", "first token", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    rounds: int = 100
    batch: int = 32
    """Sequences that decode meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One placement, idle or busy: the phases of every round, in seconds."""

    name: str
    decode_step_s: float
    """Mean time of a decode step of the neighbours; 0 where there are none."""
    rounds: tuple[Mapping[str, float], ...]

    def median_s(self, phase: str) -> float:
        return statistics.median(one[phase] for one in self.rounds)

    def p99_s(self, phase: str) -> float:
        return float(np.percentile([one[phase] for one in self.rounds], 99))


async def measure(placement: Placement, plan: Plan, folder: Path) -> list[Measured]:
    """Measure one placement, idle and then busy."""
    num_workers = 2 if placement is Placement.SPLIT else 1
    settings = engine_settings(RunSettings(num_workers=num_workers, placement=placement), "tiny")
    store = AsyncStore(Store(folder))
    measured = []
    try:
        async with started(settings) as engines:
            (worker,) = arrange(engines, placement)
            await worker.trainer.create(NEIGHBOUR, AdapterSpec())
            for is_busy in (False, True):
                name = f"{placement.value}, {'busy' if is_busy else 'idle'}"
                spec = JobSpec(tenant=TENANT, name="busy" if is_busy else "idle", env={})
                neighbours = _neighbours(worker, plan.batch if is_busy else 0)
                async with neighbours:
                    before = await worker.stats()
                    rounds = await _rounds(worker, store, spec, plan.rounds)
                    after = await worker.stats()
                steps = after.quanta.get("decode", 0) - before.quanta.get("decode", 0)
                busy_s = after.busy_s.get("decode", 0.0) - before.busy_s.get("decode", 0.0)
                decode_step_s = busy_s / max(steps, 1) if is_busy else 0.0
                measured.append(
                    Measured(name=name, decode_step_s=decode_step_s, rounds=tuple(rounds))
                )
    finally:
        await store.close()
    return measured


@asynccontextmanager
async def _neighbours(worker: Worker, count: int) -> AsyncIterator[None]:
    """Have so many sequences of another policy decode as long as the block runs."""

    async def decode(idx: int) -> None:
        for turn in range(1_000_000):
            request = _request(NEIGHBOUR, 0, f"neighbour/{idx}/{turn}", max_tokens=200, seed=idx)
            await worker.generator.generate(request)

    tasks = [asyncio.create_task(decode(idx)) for idx in range(count)]
    if tasks:
        await asyncio.sleep(0.3)  # until all of them decode
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)


async def _rounds(
    worker: Worker, store: AsyncStore, spec: JobSpec, count: int
) -> list[dict[str, float]]:
    policy_id = spec.policy_id
    adapter_hash = await worker.trainer.create(policy_id, spec.adapter)
    await store.call(Store.add_job, TENANT, spec)
    await store.call(Store.set_job_state, TENANT, spec.name, JobState.RUNNING)
    await store.call(Store.add_first_version, TENANT, spec.name, adapter_hash)
    rounds = []
    for version in range(1, count + 1):
        await worker.trainer.forward_backward(policy_id, [_datum()], Objective(name="dppo_tis"))
        rounds.append(await _round(worker, store, spec, version))
        await worker.trainer.retire(policy_id, version - 1)
    return rounds


async def _round(
    worker: Worker, store: AsyncStore, spec: JobSpec, version: int
) -> dict[str, float]:
    """Make, commit and publish a version and sample its first token; return the phases."""
    files = store.files.version(TENANT, spec.name, version).prepare()
    times = [now_s()]
    result = await worker.trainer.optim_step(spec.policy_id, AdamParams(lr=1e-4), files.state)
    times.append(now_s())
    record = StepRecord(
        step=version,
        group_indices=(),
        adapter_hash=result.adapter_hash,
        is_vetoed=result.is_vetoed,
        is_empty=False,
        metrics={},
        elapsed_s=times[-1],
    )
    await store.call(Store.commit_step, TENANT, spec.name, record, dropped={})
    times.append(now_s())
    await worker.trainer.publish(spec.policy_id, version)
    times.append(now_s())
    label = f"{spec.name}/{version}"
    completion = await worker.generator.generate(
        _request(spec.policy_id, version, label, max_tokens=1, seed=version)
    )
    times.append(now_s())
    assert completion.versions.tolist() == [version]
    phases = [end - start for start, end in pairwise(times)]
    return dict(zip(PHASES, [*phases, times[-1] - times[0]], strict=True))


def _request(
    policy_id: PolicyId, version: int, label: str, *, max_tokens: int, seed: int
) -> GenerateRequest:
    return GenerateRequest(
        request_id=label,
        sequence_id=label,
        policy_id=policy_id,
        version=version,
        tokens=np.arange(8, 24, dtype=np.int32),
        sampling=SamplingParams(max_tokens=max_tokens, seed=seed),
    )


def _datum() -> Datum:
    weights = np.zeros(32, dtype=np.float32)
    weights[16:] = 1.0
    return Datum(
        tokens=np.arange(32, dtype=np.int32),
        weights=weights,
        advantages=weights,
        sampling_logprobs=-5 * weights,
    )


def as_markdown(rows: Sequence[Measured]) -> str:
    """Return the table: medians, and the 99th percentile of the whole."""
    lines = [
        f"| placement | {' | '.join(PHASES)} | p99 of all | decode step |",
        "|---" * (len(PHASES) + 3) + "|",
    ]
    for row in rows:
        medians = " | ".join(_milliseconds(row.median_s(phase)) for phase in PHASES)
        tail, step = _milliseconds(row.p99_s("all")), _milliseconds(row.decode_step_s)
        lines.append(f"| {row.name} | {medians} | {tail} | {step} |")
    return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds else "-"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="marlaas bench publish", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="a fifth of the rounds")
    parser.add_argument("--rounds", type=int, default=Plan.rounds, help="versions (100)")
    parser.add_argument("--out", type=Path, help="folder for publish.json and publish.md")
    options = parser.parse_args(argv)
    plan = Plan(rounds=20 if options.quick else options.rounds)
    about, probe = machine.describe(), machine.probe()
    print(machine.as_markdown(about, probe))
    rows: list[Measured] = []
    for placement in (Placement.REPLICATED, Placement.SPLIT):
        with tempfile.TemporaryDirectory() as folder:
            rows += asyncio.run(measure(placement, plan, Path(folder)))
    print(as_markdown(rows))
    result = {
        "bench": "publish",
        "rounds": plan.rounds,
        "machine": about,
        "probe": probe,
        "rows": [
            {
                "name": row.name,
                "decode_step_ms": round(1e3 * row.decode_step_s, 2),
                **{f"{phase}_ms": round(1e3 * row.median_s(phase), 2) for phase in PHASES},
                "p99_ms": round(1e3 * row.p99_s("all"), 2),
            }
            for row in rows
        ],
    }
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "publish.json").write_text(json.dumps(result, indent=2) + "\n")
        (options.out / "publish.md").write_text(as_markdown(rows) + "\n")
    print(json.dumps(result))
    return 0
