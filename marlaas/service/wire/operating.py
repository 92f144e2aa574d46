"""Schemas of what operators look at: health, workers, what makes no progress."""

from typing import Literal

from pydantic import Field

from marlaas.service.wire.common import Answer
from marlaas.types import (
    Notice,
    WorkerStats,
)


class Health(Answer):
    status: Literal["ok", "unavailable"]
    problems: list[str] = Field(default=[])


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
