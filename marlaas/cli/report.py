"""The readable side of a run folder: curves, evaluations, trajectories, pictures, summary.

    <out>/summary.json, summary.png
    <out>/jobs/<tenant>/<name>/job.json            settings, state, headline figures
                               curve.jsonl, curve.png
                               evaluations.jsonl
                               trajectories.jsonl  messages, tokens, logprobs, versions, rewards

- All of it is derived from the store and may be deleted: `write_report` makes it again, whole.
- Each file is written beside its place and renamed, so a reader never sees half of one.
- `NaN` becomes null; a reward without a verdict is null, never 0.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from marlaas.cli import display, plots
from marlaas.errors import NotFound
from marlaas.loop.jobspec import describe_job
from marlaas.store.db import Store, StoredGroup
from marlaas.types import (
    EvalRecord,
    JobSpec,
    JobState,
    StepRecord,
    TenantId,
    Trajectory,
    Turn,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecords:
    """Everything the store holds about one job."""

    spec: JobSpec
    state: JobState
    reason: str
    elapsed_s: float
    steps: Sequence[StepRecord]
    evals: Sequence[EvalRecord]
    groups: Iterable[StoredGroup]
    """Read once, in order; may be a generator, since trajectories are bulky."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """The headline figures of one job."""

    tenant: str
    name: str
    family: str
    algorithm: str
    state: str
    reason: str
    steps: int
    success_before: float | None
    """Held-out success of version 0."""
    success_after: float | None
    """Held-out success of the newest trained version that was evaluated."""
    reward_before: float | None
    reward_after: float | None
    elapsed_s: float
    num_groups: int
    num_trajectories: int
    num_sampled_tokens: int
    ends: Mapping[str, int]
    """Trajectories by why they ended."""
    dropped_groups: Mapping[str, int]
    """Groups that were not trained on, by reason."""

    @property
    def gain(self) -> float | None:
        """Return the rise in held-out success, once there are two evaluations."""
        if self.success_before is None or self.success_after is None:
            return None
        return self.success_after - self.success_before


@dataclass(slots=True)
class _Tally:
    """Counts groups while they pass by on their way into a file."""

    num_groups: int = 0
    num_trajectories: int = 0
    num_sampled_tokens: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def watch(self, groups: Iterable[StoredGroup]) -> Iterator[StoredGroup]:
        for stored in groups:
            if stored.group is None:
                continue
            self.num_groups += 1
            if stored.reason:
                self.dropped[stored.reason] += 1
            for trajectory in stored.group.trajectories:
                self.num_trajectories += 1
                self.num_sampled_tokens += int(trajectory.loss_mask.sum())
                self.ends[trajectory.end.value] += 1
            yield stored


# ---------------------------------------------------------------------------------------------
# From the store to files


def write_report(out: Path) -> list[JobSummary]:
    """Make every readable file of a run folder anew from its store.

    Raises:
        NotFound: the folder holds no run.
    """
    if not (out / "store.db").is_file():
        raise NotFound(f"{out} holds no run (it has no store.db)")
    store = Store(out)
    try:
        jobs = list(_all_records(store))
        written = [write_job(store.files.job(job.spec.tenant, job.spec.name), job) for job in jobs]
    finally:
        store.close()
    write_summary(out, written, [curve_of(job) for job in jobs])
    return written


def _all_records(store: Store) -> Iterator[JobRecords]:
    for job in store.all_jobs():
        key = (job.spec.tenant, job.spec.name)
        yield JobRecords(
            spec=job.spec,
            state=job.state,
            reason=job.reason,
            elapsed_s=job.elapsed_s,
            steps=store.steps(*key),
            evals=store.evaluations(*key),
            groups=_groups(store, *key),
        )


def _groups(store: Store, tenant: TenantId, name: str) -> Iterator[StoredGroup]:
    """Read a job's groups only once asked for, so that one job's lie in memory at a time."""
    yield from store.groups(tenant, name)


def write_job(folder: Path, job: JobRecords) -> JobSummary:
    """Write one job's files into its folder and return its headline figures."""
    folder.mkdir(parents=True, exist_ok=True)
    tally = _Tally()
    rows = (
        trajectory_row(stored, trajectory)
        for stored in tally.watch(job.groups)
        for trajectory in (stored.group.trajectories if stored.group else ())
    )
    _write_lines(folder / "trajectories.jsonl", rows)
    _write_lines(folder / "curve.jsonl", map(step_row, job.steps))
    _write_lines(folder / "evaluations.jsonl", map(asdict, job.evals))
    summary = _summarise(job, tally)
    settings = {"settings": describe_job(job.spec), **asdict(summary)}
    _write_text(folder / "job.json", json.dumps(_json_ready(settings), indent=2) + "\n")
    plots.draw_curve(curve_of(job), folder / "curve.png")
    return summary


def write_summary(out: Path, jobs: Sequence[JobSummary], curves: Sequence[plots.Curve]) -> None:
    """Write what holds for the whole run."""
    gains = [job.gain for job in jobs if job.gain is not None]
    summary = {
        "num_jobs": len(jobs),
        "num_done": sum(job.state == JobState.DONE for job in jobs),
        "mean_gain": sum(gains) / len(gains) if gains else None,
        "num_sampled_tokens": sum(job.num_sampled_tokens for job in jobs),
        "num_trajectories": sum(job.num_trajectories for job in jobs),
        "jobs": [{**asdict(job), "gain": job.gain} for job in jobs],
    }
    _write_text(out / "summary.json", json.dumps(_json_ready(summary), indent=2) + "\n")
    plots.draw_summary(curves, out / "summary.png")


def _summarise(job: JobRecords, tally: _Tally) -> JobSummary:
    before = next((record for record in job.evals if record.version == 0), None)
    trained = [record for record in job.evals if record.version > 0]
    after = max(trained, key=lambda record: record.version, default=None)
    return JobSummary(
        tenant=job.spec.tenant,
        name=job.spec.name,
        family=str(job.spec.env.get("family", "")),
        algorithm=str(job.spec.algorithm.get("preset", "")),
        state=job.state.value,
        reason=job.reason,
        steps=len(job.steps),
        success_before=before.success if before else None,
        success_after=after.success if after else None,
        reward_before=before.reward if before else None,
        reward_after=after.reward if after else None,
        elapsed_s=job.elapsed_s,
        num_groups=tally.num_groups,
        num_trajectories=tally.num_trajectories,
        num_sampled_tokens=tally.num_sampled_tokens,
        ends=dict(tally.ends),
        dropped_groups=dict(tally.dropped),
    )


# ---------------------------------------------------------------------------------------------
# Rows


def step_row(record: StepRecord) -> dict[str, object]:
    """Return one flat line of `curve.jsonl`."""
    return {
        "step": record.step,
        "elapsed_s": round(record.elapsed_s, 3),
        **record.metrics,
        "is_vetoed": record.is_vetoed,
        "is_empty": record.is_empty,
        "adapter_hash": record.adapter_hash,
        "groups": list(record.group_indices),
    }


def trajectory_row(stored: StoredGroup, trajectory: Trajectory) -> dict[str, object]:
    """Return one line of `trajectories.jsonl`: who said what, and the exact tokens behind it."""
    assert stored.group is not None
    return {
        "group": stored.index,
        "index": trajectory.index,
        "prompt": stored.group.prompt_index,
        "reward": trajectory.reward if trajectory.end.is_trainable else None,
        "is_success": trajectory.is_success if trajectory.end.is_trainable else None,
        "end": trajectory.end.value,
        "detail": trajectory.detail,
        "group_state": stored.state.value,
        "group_reason": stored.reason,
        "step": stored.step,
        "metrics": dict(trajectory.metrics),
        "messages": [asdict(message) for message in trajectory.messages],
        "tokens": trajectory.tokens.tolist(),
        "turns": [_turn_row(turn, trajectory) for turn in trajectory.turns],
    }


def _turn_row(turn: Turn, trajectory: Trajectory) -> dict[str, object]:
    """Return one generation: tokens [start, end) of its trajectory, with their logprobs."""
    versions = trajectory.versions[turn.start : turn.end]
    row: dict[str, object] = {
        "start": turn.start,
        "end": turn.end,
        "version": turn.version,
        "adapter_hash": turn.adapter_hash,
        "stop_reason": turn.stop_reason.value,
        "latency_s": round(turn.latency_s, 6),
        "sampling_logprobs": exact(trajectory.sampling_logprobs[turn.start : turn.end]),
    }
    if len(versions) and (versions != versions[0]).any():
        row["versions"] = versions.tolist()
    return row


def exact(values: np.ndarray) -> list[float]:
    """Return float32 values as the shortest decimals that read back as the same float32."""
    return [float(text) for text in values.astype(np.float32).astype(str)]


def curve_of(job: JobRecords) -> plots.Curve:
    """Return what is drawn of a job."""
    settings = job.spec
    return plots.Curve(
        title=f"{settings.tenant}/{settings.name}",
        subtitle=(
            f"{settings.env.get('family', '')}, {settings.algorithm.get('preset', '')}, "
            f"rank {settings.adapter.rank}, {settings.prompts_per_step} prompts × "  # noqa: RUF001
            f"{settings.group_size} a step, staleness up to {settings.max_staleness}"
        ),
        steps=[record.step for record in job.steps],
        rewards=[record.metrics.get("reward_mean", math.nan) for record in job.steps],
        successes=[record.metrics.get("success", math.nan) for record in job.steps],
        eval_versions=[record.version for record in job.evals],
        eval_successes=[record.success for record in job.evals],
        eval_rewards=[record.reward for record in job.evals],
    )


def _write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    beside = path.with_name(path.name + ".tmp")
    with beside.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(_json_ready(row), ensure_ascii=False) + "\n")
    beside.replace(path)


def _write_text(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _json_ready(value: Any) -> Any:
    """Return the value with every NaN and infinity, which JSON lacks, as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    return value


# ---------------------------------------------------------------------------------------------
# The table at the end


def final_table(jobs: Sequence[JobSummary], width: int) -> Table:
    """Return the table that a run ends with: what each job learned, and what it took."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("job", no_wrap=True)
    table.add_column("held-out success", no_wrap=True)
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("ended", no_wrap=True)
    for job in jobs:
        table.add_row(
            display.shortened(f"{job.tenant}/{job.name}", max(12, width - 56)),
            _gain_text(job.success_before, job.success_after),
            "·" if job.reward_after is None else f"{job.reward_after:.2f}",
            str(job.steps),
            display.seconds(job.elapsed_s),
            display.count(job.num_sampled_tokens),
            Text(
                job.state if JobState(job.state).is_terminal else "unfinished",
                style="green" if job.state == JobState.DONE else "yellow",
            ),
        )
    gains = [job for job in jobs if job.gain is not None]
    if len(gains) > 1:
        before = sum(job.success_before or 0.0 for job in gains) / len(gains)
        after = sum(job.success_after or 0.0 for job in gains) / len(gains)
        tokens = sum(job.num_sampled_tokens for job in jobs)
        row = ["mean of jobs", _gain_text(before, after), "", "", "", display.count(tokens), ""]
        table.add_section()
        table.add_row(*row, style="bold")
    return table


def _gain_text(before: float | None, after: float | None) -> Text:
    if before is None or after is None:
        known = [display.percent(value) for value in (before, after) if value is not None]
        return Text(f"{known[0]:>4}" if known else "   ·")
    gain = round(100 * after) - round(100 * before)
    text = Text(f"{display.percent(before):>4} → {display.percent(after):>4}  ")
    return text.append(f"{gain:+d}", style="green" if gain > 0 else "red" if gain < 0 else "dim")


def print_report(console: Console, out: Path, jobs: Sequence[JobSummary]) -> None:
    """Print the final table, why jobs ended early, and where everything lies."""
    console.print(final_table(jobs, console.width))
    console.print()
    for job in jobs:
        if job.reason:
            words = f"{job.tenant}/{job.name} {job.state}: {job.reason}"
            console.print(words, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Curves, trajectories and adapters: {out}", highlight=False, soft_wrap=True)


def command(args: argparse.Namespace) -> int:
    """Run `marlaas report DIR`."""
    print_report(Console(), args.out, write_report(args.out))
    return 0
