"""Schemas of jobs, their steps, evaluations, events and sweeps.

What a job may say is judged by `loop.jobspec`; `JobBody` lists its words for the OpenAPI document.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from marlaas.loop.jobspec import describe_job
from marlaas.service.wire.common import Answer, Body, Number, finite, finite_data, finite_row
from marlaas.service.wire.tenants import UsageInfo
from marlaas.store.db import StoredJob
from marlaas.types import (
    EvalRecord,
    Event,
    JobState,
    JobStatus,
    StepRecord,
)


class JobBody(Body):
    """A job in the words of the job file; `docs/jobs.md` says what each takes."""

    name: str
    env: dict[str, Any]
    algorithm: str | dict[str, Any] = "dppo_tis"
    rank: int = 8
    alpha: float = 16.0
    targets: str | list[str] = Field(default=["attention", "mlp"])
    steps: int = 20
    prompts_per_step: int = 4
    group_size: int = 8
    max_staleness: int = 4
    learning_rate: float = 2e-3
    max_tokens: int = 64
    temperature: float = 1.0
    eval_every: int = 0
    eval_prompts: int = 128
    stop_at_success: float = 0.0
    latency: dict[str, float] = Field(default={})
    rollout: Literal["pinned", "in_flight"] = "pinned"
    seeded: bool = False
    straggler_deadline_s: float = 60.0
    seed: int = 0
    keep_versions: int = 3
    max_job_tokens: int = 0
    max_device_s: float = 0.0
    fork: dict[str, Any] | None = None


class JobInfo(Answer):
    """A job: what was asked, how far it is, what it used and what it waits for."""

    name: str
    state: JobState
    reason: str
    step: int
    """Steps committed, hence the newest version."""
    steps: int
    created_s: float
    elapsed_s: float
    device_s: float
    usage: UsageInfo
    promoted: int | None
    waits_for: str
    place: int | None
    starts_in_s: Number
    ends_in_s: Number
    spec: dict[str, Any]
    """The job in the words of the job file, every knob resolved."""

    @classmethod
    def of(cls, job: StoredJob, status: JobStatus) -> "JobInfo":
        spec = describe_job(job.spec)
        del spec["tenant"]
        return cls(
            name=job.spec.name,
            state=job.state,
            reason=job.reason,
            step=job.step,
            steps=job.spec.steps,
            created_s=job.created_s,
            elapsed_s=job.elapsed_s,
            device_s=max(job.device_s, status.device_s),
            usage=UsageInfo.of(job.usage),
            promoted=job.promoted,
            waits_for=status.waits_for,
            place=status.place,
            starts_in_s=None if status.starts_in_s is None else finite(status.starts_in_s),
            ends_in_s=None if status.ends_in_s is None else finite(status.ends_in_s),
            spec=finite_data(spec),
        )


class JobPage(Answer):
    jobs: list[JobInfo]
    next: str | None
    """Hand it to `after` for the next page; null on the last one."""


class StepInfo(Answer):
    """One row of the learning curve; `docs/metrics.md` describes its columns."""

    step: int
    elapsed_s: float
    is_empty: bool
    is_vetoed: bool
    adapter_hash: str
    group_indices: list[int]
    metrics: dict[str, Number]

    @classmethod
    def of(cls, record: StepRecord) -> "StepInfo":
        return cls(
            step=record.step,
            elapsed_s=record.elapsed_s,
            is_empty=record.is_empty,
            is_vetoed=record.is_vetoed,
            adapter_hash=record.adapter_hash,
            group_indices=list(record.group_indices),
            metrics=finite_row(record.metrics),
        )


class StepPage(Answer):
    steps: list[StepInfo]
    next: int
    """Hand it to `after` for later steps."""


class KeepBody(Body):
    """How long a version is to live."""

    for_s: Annotated[float, Field(ge=0, le=1e9)] | None
    """Seconds from now; null: as long as the job's settings say."""


class EvaluationBody(Body):
    """A version to judge once more."""

    version: Annotated[int, Field(ge=0, le=2**53)] | Literal["latest", "best", "promoted"] = (
        "latest"
    )


class EvaluationInfo(Answer):
    """A version judged on held-out prompts."""

    version: int
    success: Number
    reward: Number
    num_prompts: int
    num_failed: int
    elapsed_s: float

    @classmethod
    def of(cls, record: EvalRecord) -> "EvaluationInfo":
        return cls(
            version=record.version,
            success=finite(record.success),
            reward=finite(record.reward),
            num_prompts=record.num_prompts,
            num_failed=record.num_failed,
            elapsed_s=record.elapsed_s,
        )


class EvaluationList(Answer):
    evaluations: list[EvaluationInfo]


class EvaluationStarted(Answer):
    """An evaluation that is under way; its event says what came of it."""

    version: int


class EventInfo(Answer):
    """One line of a tenant's history."""

    seq: int
    at_s: float
    job: str
    kind: str
    data: dict[str, Any]

    @classmethod
    def of(cls, event: Event) -> "EventInfo":
        return cls(
            seq=event.seq,
            at_s=event.at_s,
            job=event.job,
            kind=event.kind.value,
            data=finite_data(event.data),
        )


class EventPage(Answer):
    events: list[EventInfo]
    next: int
    """Hand it to `after`, or to `Last-Event-ID`, for what comes later."""


class SweepBody(Body):
    """A job, and for some of its knobs the values to try: every combination is a job."""

    name: str
    job: dict[str, Any] = Field(json_schema_extra={"description": "A job without its name."})
    grid: dict[str, Annotated[list[Any], Field(min_length=1, max_length=100)]] = Field(
        min_length=1, max_length=10
    )


class SweepRow(Answer):
    """One job of a sweep and where it stands."""

    job: str
    values: dict[str, Any]
    """The knobs in which the jobs of the sweep differ."""
    state: JobState
    reason: str
    step: int
    steps: int
    reward_mean: Number
    """Of the newest step."""
    success: Number
    """Of the newest evaluation."""
    best_success: Number
    best_version: int | None


class SweepInfo(Answer):
    """The jobs of a sweep, best first where there is a verdict."""

    name: str
    knobs: list[str]
    jobs: list[SweepRow]
