"""The JSON that goes over the wire, one schema per thing, and how it is made of domain records.

- A schema is built from a record by its `of`; nothing else converts, and nothing converts twice.
- Bodies that come in refuse unknown fields. What a job may say is judged by `loop.jobspec`, whose
  words `JobBody` lists for the OpenAPI document.
- JSON has no NaN: a number that is not finite goes out as null.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from marlaas.loop.jobspec import describe_job
from marlaas.store.db import StoredGroup, StoredJob, StoredVersion
from marlaas.types import (
    ApiKey,
    EvalRecord,
    Event,
    GroupSummary,
    JobState,
    JobStatus,
    Notice,
    Quotas,
    Role,
    StepRecord,
    Tenant,
    Trajectory,
    Turn,
    Upload,
    Usage,
    WorkerStats,
)

Responses = dict[int | str, dict[str, Any]]
"""What a route says of its answers in the OpenAPI document."""

Number = float | None
"""Null where there is nothing to say: NaN and infinity have no JSON."""


def finite(value: float) -> Number:
    """Return a number that JSON can hold."""
    return value if math.isfinite(value) else None


def finite_row(row: Mapping[str, float]) -> dict[str, Number]:
    """Return a row of numbers that JSON can hold."""
    return {name: finite(value) for name, value in row.items()}


def finite_data(value: Any) -> Any:
    """Return JSON-like data with every number that JSON cannot hold replaced by null."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, Mapping):
        return {str(key): finite_data(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite_data(inner) for inner in value]
    return value


class Answer(BaseModel):
    """Something that goes out."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Body(BaseModel):
    """Something that comes in: every field is known, or the request is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    not_supported: ClassVar[frozenset[str]] = frozenset()
    """Fields that a caller may know from elsewhere, refused as what they are."""


# ---------------------------------------------------------------------------------------------
# Errors


class Problem(Answer):
    """What went wrong, for programs (`code`) and for people (`message`)."""

    code: str
    message: str
    problems: list[str] = []
    """Every fault of the request, where there are several."""
    request_id: str = ""
    """Names the request in the server's log."""


class ErrorAnswer(Answer):
    """The body of every answer that is not a success."""

    error: Problem


# ---------------------------------------------------------------------------------------------
# Usage, tenants, keys


class UsageInfo(Answer):
    """What was used, by stage."""

    sampled_tokens: int
    trained_tokens: int
    evaluated_tokens: int
    served_tokens: int
    prefill_tokens: int
    device_s: float
    sandbox_cpu_s: float

    @classmethod
    def of(cls, usage: Usage) -> "UsageInfo":
        return cls(**{name: getattr(usage, name) for name in Usage.__slots__})


class UsageReport(Answer):
    """A tenant's usage in all, by job and by UTC day."""

    total: UsageInfo
    today: UsageInfo
    by_job: dict[str, UsageInfo]
    """Job "" is what no job used: completions."""
    by_day: dict[str, UsageInfo]
    stored_bytes: int


class QuotasInfo(Answer):
    """Limits of a tenant: null is no limit, 0 allows none."""

    max_running_jobs: int | None
    max_queued_jobs: int | None
    tokens_a_day: int | None
    stored_bytes: int | None
    sandbox_cpu_s_a_day: float | None
    requests_a_second: float | None

    @classmethod
    def of(cls, quotas: Quotas) -> "QuotasInfo":
        return cls(**{name: getattr(quotas, name) for name in Quotas.__slots__})


Limit = Annotated[int, Field(ge=0, le=2**53)]
LimitNumber = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Weight = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


MIN_RATE = 1e-3


def _check_rate(rate: float) -> float:
    if 0 < rate < MIN_RATE:
        raise ValueError(f"expected 0 (none), or at least {MIN_RATE:g}")
    return rate


class QuotasBody(Body):
    """Limits to set; a field that is left out keeps its value."""

    max_running_jobs: Limit | None = None
    max_queued_jobs: Limit | None = None
    tokens_a_day: Limit | None = None
    stored_bytes: Limit | None = None
    sandbox_cpu_s_a_day: LimitNumber | None = None
    requests_a_second: Annotated[LimitNumber, AfterValidator(_check_rate)] | None = None

    def over(self, quotas: Quotas) -> Quotas:
        """Return `quotas` with what the body names replaced; null lifts a limit."""
        kept = {name: getattr(quotas, name) for name in Quotas.__slots__}
        return Quotas(**{**kept, **{name: getattr(self, name) for name in self.model_fields_set}})


class TenantBody(Body):
    """A tenant to add."""

    tenant: str
    weight: Weight = 1.0
    quotas: QuotasBody = QuotasBody()


class TenantChange(Body):
    """What to change about a tenant; a field that is left out keeps its value."""

    weight: Weight | None = None
    quotas: QuotasBody = QuotasBody()


class TenantInfo(Answer):
    """A tenant, its share and its limits."""

    tenant: str
    weight: float
    quotas: QuotasInfo
    created_s: float

    @classmethod
    def of(cls, tenant: Tenant) -> "TenantInfo":
        return cls(
            tenant=tenant.tenant_id,
            weight=tenant.weight,
            quotas=QuotasInfo.of(tenant.quotas),
            created_s=tenant.created_s,
        )


class TenantList(Answer):
    tenants: list[TenantInfo]


class WhoAmI(Answer):
    """Whose key this is, and what it may still do today."""

    tenant: str
    role: Role
    key_id: str
    weight: float
    quotas: QuotasInfo
    usage_today: UsageInfo


class KeyBody(Body):
    """A key to make."""

    label: str = Field(default="", max_length=200)


class KeyInfo(Answer):
    """What is kept of a key."""

    key_id: str
    tenant: str
    role: Role
    label: str
    created_s: float
    revoked_s: float | None

    @classmethod
    def of(cls, key: ApiKey) -> "KeyInfo":
        return cls(**_of_key(key))


class NewKey(KeyInfo):
    """A key that was just made; `secret` is shown this once."""

    secret: str

    @classmethod
    def made(cls, key: ApiKey, secret: str) -> "NewKey":
        return cls(**_of_key(key), secret=secret)


def _of_key(key: ApiKey) -> dict[str, Any]:
    return {
        "key_id": key.key_id,
        "tenant": key.tenant_id,
        "role": key.role,
        "label": key.label,
        "created_s": key.created_s,
        "revoked_s": key.revoked_s,
    }


class KeyList(Answer):
    keys: list[KeyInfo]


class AuditEntry(Answer):
    """One thing that an operator did."""

    seq: int
    at_s: float
    actor: str
    action: str
    tenant: str
    detail: Any


class AuditPage(Answer):
    entries: list[AuditEntry]
    next: int
    """Hand it to `after` for what comes later."""


# ---------------------------------------------------------------------------------------------
# Jobs


class JobBody(Body):
    """A job in the words of the job file; `docs/jobs.md` says what each takes."""

    name: str
    env: dict[str, Any]
    algorithm: str | dict[str, Any] = "dppo_tis"
    rank: int = 8
    alpha: float = 16.0
    targets: str | list[str] = ["attention", "mlp"]
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
    latency: dict[str, float] = {}
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


# ---------------------------------------------------------------------------------------------
# Groups


class GroupRow(Answer):
    """What a list shows of a group."""

    index: int
    state: str
    reason: str
    version: int
    step: int | None
    num_trajectories: int
    reward_mean: Number
    success_mean: Number
    num_tokens: int

    @classmethod
    def of(cls, row: GroupSummary) -> "GroupRow":
        return cls(
            index=row.index,
            state=row.state,
            reason=row.reason,
            version=row.version,
            step=row.step,
            num_trajectories=row.num_trajectories,
            reward_mean=None if row.reward_mean is None else finite(row.reward_mean),
            success_mean=None if row.success_mean is None else finite(row.success_mean),
            num_tokens=row.num_tokens,
        )


class GroupPage(Answer):
    groups: list[GroupRow]
    next: int | None
    """Hand it to `after` for the next page; null on the last one."""


class MessageInfo(Answer):
    role: str
    content: str


class TurnInfo(Answer):
    """One generation: tokens [start, end) were sampled."""

    start: int
    end: int
    version: int
    adapter_hash: str
    stop_reason: str
    latency_s: float

    @classmethod
    def of(cls, turn: Turn) -> "TurnInfo":
        return cls(
            start=turn.start,
            end=turn.end,
            version=turn.version,
            adapter_hash=turn.adapter_hash,
            stop_reason=turn.stop_reason.value,
            latency_s=turn.latency_s,
        )


class TokensInfo(Answer):
    """Every token of a trajectory; the lists are aligned."""

    ids: list[int]
    is_sampled: list[bool]
    sampling_logprobs: list[Number]
    versions: list[int]
    """-1 where the token was not sampled."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> "TokensInfo":
        return cls(
            ids=trajectory.tokens.tolist(),
            is_sampled=trajectory.loss_mask.tolist(),
            sampling_logprobs=[finite(value) for value in trajectory.sampling_logprobs.tolist()],
            versions=trajectory.versions.tolist(),
        )


class TrajectoryInfo(Answer):
    """One rollout, readable."""

    index: int
    messages: list[MessageInfo]
    turns: list[TurnInfo]
    reward: Number
    is_success: bool
    end: str
    detail: str
    metrics: dict[str, Number]
    num_tokens: int
    tokens: TokensInfo | None
    """Only when asked for."""

    @classmethod
    def of(cls, trajectory: Trajectory, *, with_tokens: bool) -> "TrajectoryInfo":
        return cls(
            index=trajectory.index,
            messages=[MessageInfo(role=m.role, content=m.content) for m in trajectory.messages],
            turns=[TurnInfo.of(turn) for turn in trajectory.turns],
            reward=finite(trajectory.reward) if trajectory.end.is_trainable else None,
            is_success=trajectory.is_success,
            end=trajectory.end.value,
            detail=trajectory.detail,
            metrics=finite_row(trajectory.metrics),
            num_tokens=len(trajectory.tokens),
            tokens=TokensInfo.of(trajectory) if with_tokens else None,
        )


class GroupInfo(Answer):
    """A group with all its trajectories; none while it is being sampled."""

    index: int
    state: str
    reason: str
    version: int
    step: int | None
    prompt_index: int | None
    trajectories: list[TrajectoryInfo]

    @classmethod
    def of(cls, stored: StoredGroup, *, with_tokens: bool) -> "GroupInfo":
        group = stored.group
        trajectories = () if group is None else group.trajectories
        return cls(
            index=stored.index,
            state=stored.state,
            reason=stored.reason,
            version=stored.version,
            step=stored.step,
            prompt_index=None if group is None else group.prompt_index,
            trajectories=[TrajectoryInfo.of(t, with_tokens=with_tokens) for t in trajectories],
        )


# ---------------------------------------------------------------------------------------------
# Versions, uploads, sweeps


class VersionInfo(Answer):
    """A policy version and what is kept of it."""

    version: int
    adapter_hash: str
    has_adapter: bool
    """It can be downloaded, served, forked, judged."""
    has_state: bool
    success: Number
    created_s: float
    expires_s: float | None
    is_latest: bool
    is_best: bool
    is_promoted: bool

    @classmethod
    def of(cls, row: StoredVersion, named: Mapping[str, int | None]) -> "VersionInfo":
        return cls(
            version=row.version,
            adapter_hash=row.adapter_hash,
            has_adapter=row.has_adapter,
            has_state=row.has_state,
            success=None if row.success is None else finite(row.success),
            created_s=row.created_s,
            expires_s=row.expires_s,
            is_latest=row.version == named["latest"],
            is_best=row.version == named["best"],
            is_promoted=row.version == named["promoted"],
        )


class VersionList(Answer):
    versions: list[VersionInfo]


class UploadInfo(Answer):
    """A file of a tenant."""

    kind: str
    name: str
    digest: str
    size_bytes: int
    num_lines: int
    created_s: float

    @classmethod
    def of(cls, upload: Upload) -> "UploadInfo":
        return cls(
            kind=upload.kind.value,
            name=upload.name,
            digest=upload.digest,
            size_bytes=upload.size_bytes,
            num_lines=upload.num_lines,
            created_s=upload.created_s,
        )


class UploadList(Answer):
    uploads: list[UploadInfo]


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


# ---------------------------------------------------------------------------------------------
# Completions (OpenAI's shapes)


class ChatMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class SamplingBody(Body):
    """How to sample. What cannot be honoured is refused, never ignored."""

    not_supported: ClassVar[frozenset[str]] = frozenset(
        {
            "logprobs",
            "top_logprobs",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "functions",
            "function_call",
            "response_format",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "best_of",
            "echo",
            "suffix",
            "stream_options",
            "modalities",
            "audio",
            "prediction",
            "reasoning_effort",
            "verbosity",
            "service_tier",
            "store",
            "metadata",
            "web_search_options",
            "prompt_cache_key",
            "safety_identifier",
        }
    )
    """What OpenAI's routes take besides."""

    model: str = Field(max_length=300)
    """`base`, `JOB`, `JOB@VERSION`, `JOB@latest`, `JOB@best` or `JOB@promoted`."""
    temperature: float = Field(default=1.0, ge=0, le=10, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0, le=10**6)
    min_p: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    n: int = Field(default=1, ge=1, le=64)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: str | list[str] | None = None
    stream: bool = False
    user: str | None = None
    """Taken and not used, as OpenAI's clients send it."""


class ChatBody(SamplingBody):
    messages: list[ChatMessage] = Field(min_length=1, max_length=10_000)
    max_tokens: int | None = Field(default=None, ge=1, le=10**6)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=10**6)


class CompletionBody(SamplingBody):
    prompt: str | list[int]
    """Text, or token ids."""
    max_tokens: int = Field(default=16, ge=1, le=10**6)


class ModelInfo(Answer):
    """Something that can be named as `model`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Unix seconds; 0 for the base."""
    owned_by: str


class ModelList(Answer):
    object: Literal["list"] = "list"
    data: list[ModelInfo]


class TokenCounts(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatChoice(Answer):
    index: int
    message: MessageInfo
    finish_reason: Literal["stop", "length"]


class ChatAnswer(Answer):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenCounts


class CompletionChoice(Answer):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]


class CompletionAnswer(Answer):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenCounts


# ---------------------------------------------------------------------------------------------
# Operating


class Health(Answer):
    status: Literal["ok", "unavailable"]
    problems: list[str] = []


class WorkerInfo(Answer):
    """Where an engine worker's time went since it started."""

    name: str
    elapsed_s: float
    busy_s: dict[str, float]
    cpu_s: dict[str, float]
    tokens: dict[str, int]
    quanta: dict[str, int]
    num_decoding: int
    num_waiting: int
    num_parked: int
    kv_tokens: int
    kv_capacity_tokens: int
    rss_bytes: int

    @classmethod
    def of(cls, stats: WorkerStats) -> "WorkerInfo":
        return cls(
            name=stats.name,
            elapsed_s=stats.elapsed_s,
            busy_s=dict(stats.busy_s),
            cpu_s=dict(stats.cpu_s),
            tokens=dict(stats.tokens),
            quanta=dict(stats.quanta),
            num_decoding=stats.num_decoding,
            num_waiting=stats.num_waiting,
            num_parked=stats.num_parked,
            kv_tokens=stats.kv_tokens,
            kv_capacity_tokens=stats.kv_capacity_tokens,
            rss_bytes=stats.rss_bytes,
        )


class NoticeInfo(Answer):
    """Something that makes no progress."""

    stage: str
    tenant: str
    job: str
    cause: str
    since_s: float

    @classmethod
    def of(cls, notice: Notice) -> "NoticeInfo":
        return cls(
            stage=notice.stage,
            tenant=notice.tenant,
            job=notice.job,
            cause=notice.cause,
            since_s=notice.since_s,
        )


class WorkersInfo(Answer):
    """The machine: workers, the server process, what stands still."""

    base: str
    workers: list[WorkerInfo]
    loop_lag_s: float
    """How late the event loop came when that was last measured."""
    server_cpu_s: float
    server_rss_bytes: int
    sandbox_cpu_s: float
    """Of all tenants, ever."""
    num_streams: int
    notices: list[NoticeInfo]
