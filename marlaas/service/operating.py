"""How the service does: health for load balancers, metrics for Prometheus, workers and a trace for
whoever wants to know where the time goes."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Query, Response
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import CounterMetricFamily, Metric

from marlaas import runtime
from marlaas.service.auth import WithOperator
from marlaas.service.parts import Parts, WithParts
from marlaas.service.telemetry import Trace, gauge
from marlaas.service.wire.operating import Health, NoticeInfo, WorkerInfo, WorkersInfo
from marlaas.store.db import Store
from marlaas.types import JobState, TenantId, Usage

open_routes = APIRouter(tags=["health"])
router = APIRouter(tags=["operating"])

READY_TIMEOUT_S = 2.0
"""A store that does not answer for so long is not ready."""

_NOBODY = TenantId("-")
"""No tenant has this name: asking for its events costs the least."""


@open_routes.get("/healthz")
async def healthz() -> Health:
    """Say that the process answers. A supervisor restarts one that does not."""
    return Health(status="ok")


@open_routes.get("/readyz", responses={503: {"model": Health, "description": "Not ready"}})
async def readyz(parts: WithParts, response: Response) -> Health:
    """Say whether requests are welcome: the store answers, a worker lives, nothing is draining."""
    problems = []
    if parts.draining.is_set():
        problems.append("the service is ending")
    if not await _store_answers(parts):
        problems.append("the store does not answer")
    if not parts.controller.placement.alive:
        problems.append("no engine worker is left")
    response.status_code = 503 if problems else 200
    return Health(status="unavailable" if problems else "ok", problems=problems)


async def _store_answers(parts: Parts) -> bool:
    # A call that is given up goes on in the store's thread, so it is not waited for by cancelling.
    asking = asyncio.ensure_future(parts.store.call(Store.last_event, _NOBODY))
    done, _ = await asyncio.wait([asking], timeout=READY_TIMEOUT_S)
    if not done:
        asking.add_done_callback(lambda task: task.cancelled() or task.exception())
    return bool(done) and asking.exception() is None


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(operator: WithOperator, parts: WithParts) -> Response:
    """Everything that is counted, in Prometheus' text format."""
    streams = {"sse": parts.hub.num_streams}
    gauges = [
        gauge("marlaas_jobs", "Jobs of all tenants", "state", await parts.store.call(_job_counts)),
        gauge("marlaas_streams", "Event streams that are open", "kind", streams),
        gauge("marlaas_loop_lag_seconds", "How late the event loop came last", "of", _lag(parts)),
    ]
    gauges += await _by_tenant(parts)
    content = await asyncio.to_thread(parts.telemetry.exposition, gauges)
    return Response(content, media_type=CONTENT_TYPE_LATEST)


def _job_counts(store: Store) -> Mapping[str, int]:
    counts: Counter[str] = Counter({state.value: 0 for state in JobState})
    for tenant in store.tenants():
        for state, number in store.job_counts(tenant.tenant_id).items():
            counts[state.value] += number
    return counts


async def _by_tenant(parts: Parts) -> list[Metric]:
    """What the store counts for each tenant: jobs, completions and Tinker clients alike."""
    tokens: Counter[tuple[str, str]] = Counter()
    device_s: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    for tenant in await parts.store.call(Store.tenants):
        label = parts.telemetry.tenant_label(tenant.tenant_id)
        # A call each: what others ask of the store goes between them.
        used, num_runs, num_bytes = await parts.store.call(_holdings, tenant.tenant_id)
        for stage in ("sampled", "trained", "evaluated", "served"):
            tokens[label, stage] += getattr(used, f"{stage}_tokens")
        device_s[label] += used.device_s
        runs[label] += num_runs
        stored[label] += num_bytes
    counted = CounterMetricFamily(
        "marlaas_used_tokens", "Tokens as quotas count them", labels=["tenant", "stage"]
    )
    for labels, number in tokens.items():
        counted.add_metric(labels, number)
    busy = CounterMetricFamily(
        "marlaas_used_device_seconds", "Time of engines, as shares count it", labels=["tenant"]
    )
    for label, seconds in device_s.items():
        busy.add_metric([label], seconds)
    return [
        counted,
        busy,
        gauge("marlaas_runs", "Runs of Tinker clients, as `max_runs` counts", "tenant", runs),
        gauge("marlaas_stored_bytes", "What is stored", "tenant", stored),
    ]


def _holdings(store: Store, tenant_id: TenantId) -> tuple[Usage, int, int]:
    return (
        store.usage(tenant_id),
        store.num_live_runs(tenant_id),
        store.stored_bytes(tenant_id),
    )


def _lag(parts: Parts) -> Mapping[str, float]:
    return {"server": parts.controller.lag_s}


@router.get("/v1/workers")
async def workers(operator: WithOperator, parts: WithParts) -> WorkersInfo:
    """Where the time of the machine goes, and what stands still."""
    return WorkersInfo(
        base=parts.settings.base,
        workers=[WorkerInfo.of(stats) for stats in parts.telemetry.workers],
        loop_lag_s=parts.controller.lag_s,
        server_cpu_s=runtime.cpu_s(),
        server_rss_bytes=runtime.rss_bytes(),
        sandbox_cpu_s=await parts.store.call(_sandbox_cpu_s),
        num_streams=parts.hub.num_streams,
        notices=[NoticeInfo.of(notice) for notice in parts.telemetry.notices],
    )


def _sandbox_cpu_s(store: Store) -> float:
    return sum(store.usage(tenant.tenant_id).sandbox_cpu_s for tenant in store.tenants())


@router.get(
    "/v1/trace", response_class=Response, responses={200: {"content": {"application/json": {}}}}
)
async def trace(
    operator: WithOperator,
    parts: WithParts,
    seconds: Annotated[
        float, Query(gt=0, le=3600, description="How far back the trace goes.")
    ] = 10.0,
) -> Response:
    """Stages of the loop by worker and job, and requests, for ui.perfetto.dev."""
    spans = parts.telemetry.trace.last(seconds)  # here, where spans are added
    content = await asyncio.to_thread(Trace.document, spans)
    return Response(content, media_type="application/json")
