"""What the service says of things, as plain frozen records.

Fields are those of the JSON that `marlaas.service.wire` describes. A field that this version of the
client does not know is left out, so a newer service can be talked to; None stands for a number that
there is none of.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from marlaas.errors import MarlaasError
from marlaas.types import JobState, Message, Quotas, Role, Usage, WorkerStats

RecordT = TypeVar("RecordT")


def read(kind: type[RecordT], data: object) -> RecordT:
    """Return JSON values as a record.

    Raises:
        MarlaasError: it is not one; service and client are of versions too far apart.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise MarlaasError(
            f"the service's answer is no {kind.__name__} as this client knows it ({error}); "
            "expected a service and a client of the same version"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """A job as it stood when the service was asked."""

    name: str
    state: JobState
    reason: str
    step: int
    """Steps committed, hence the newest version."""
    steps: int
    created_s: float
    elapsed_s: float
    device_s: float
    usage: Usage
    promoted: int | None
    waits_for: str
    """Why it is queued, or makes no progress, in words; else empty."""
    place: int | None
    """1-based place among the queued jobs."""
    starts_in_s: float | None
    ends_in_s: float | None
    spec: Mapping[str, Any]
    """The job in the words of the job file, every knob resolved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A version judged on held-out prompts."""

    version: int
    success: float | None
    reward: float | None
    num_prompts: int
    num_failed: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A policy version and what is kept of it."""

    version: int
    adapter_hash: str
    has_adapter: bool
    """It can be downloaded, served, forked and judged."""
    has_state: bool
    """It can be trained on."""
    success: float | None
    created_s: float
    expires_s: float | None
    is_latest: bool
    is_best: bool
    is_promoted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """What a list shows of a group."""

    index: int
    state: str
    reason: str
    version: int
    step: int | None
    num_trajectories: int
    reward_mean: float | None
    success_mean: float | None
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Every token of a trajectory; the lists are aligned."""

    ids: list[int]
    is_sampled: list[bool]
    sampling_logprobs: list[float | None]
    versions: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnInfo:
    """One generation: tokens [start, end) were sampled."""

    start: int
    end: int
    version: int
    adapter_hash: str
    stop_reason: str
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One trajectory, readable."""

    index: int
    messages: list[Message]
    turns: list[TurnInfo]
    reward: float | None
    """None where the environment gave no verdict."""
    is_success: bool
    end: str
    detail: str
    metrics: Mapping[str, float | None]
    num_tokens: int
    tokens: Tokens | None = None
    """Only when asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """The trajectories of one prompt; none while it is being sampled."""

    index: int
    state: str
    reason: str
    version: int
    step: int | None
    prompt_index: int | None
    trajectories: list[Rollout]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One job of a sweep and where it stands."""

    job: str
    values: Mapping[str, Any]
    """The knobs in which the jobs of the sweep differ."""
    state: JobState
    reason: str
    step: int
    steps: int
    reward_mean: float | None
    success: float | None
    best_success: float | None
    best_version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepInfo:
    """The jobs of a sweep, best first where there is a verdict."""

    name: str
    knobs: list[str]
    jobs: list[SweepRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """A tenant's usage in all, by job ("" is what no job used) and by UTC day."""

    total: Usage
    today: Usage
    by_job: Mapping[str, Usage]
    by_day: Mapping[str, Usage]
    stored_bytes: int
    live_runs: int = 0
    """Runs of Tinker clients, as `max_runs` counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """A policy that a Tinker client drives operation by operation."""

    run: str
    session: str
    rank: int
    version: int
    """Optimizer steps and loads so far."""
    is_live: bool
    """It counts against the tenant's `max_runs`."""
    num_waiting: int
    """Operations that were accepted and are not executed yet."""
    num_checkpoints: int
    stored_bytes: int
    created_s: float
    used_s: float
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhoAmI:
    """Whose key this is."""

    tenant: str
    role: Role
    key_id: str
    weight: float
    quotas: Quotas
    usage_today: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantInfo:
    """A tenant, its share of the machine and its limits."""

    tenant: str
    weight: float
    quotas: Quotas
    created_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyInfo:
    """What is kept of a key."""

    key_id: str
    tenant: str
    role: Role
    label: str
    created_s: float
    revoked_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey(KeyInfo):
    """A key that was just made; the service shows `secret` this once."""

    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One thing that an operator did."""

    seq: int
    at_s: float
    actor: str
    action: str
    tenant: str
    detail: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that makes no progress."""

    stage: str
    tenant: str
    job: str
    cause: str
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Workers, the server process, and what stands still."""

    base: str
    workers: list[WorkerStats]
    loop_lag_s: float
    server_cpu_s: float
    server_rss_bytes: int
    sandbox_cpu_s: float
    num_streams: int
    notices: list[Notice]
