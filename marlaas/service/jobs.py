"""Jobs: hand one over, look at it, stop it, let it go on; and sweeps, which are jobs that differ.

    body ─► uploads by digest, fork by number ─► words of the job file (`loop.jobspec`)
         ─► a custom environment tried on its first prompt (`trials.py`) ─► loop

- A job is fixed once accepted: names of uploads become digests and `best` becomes a number here, so
  nothing that is uploaded or judged later changes what it does.
- Handing over the same job again is the same job: 200 instead of 201, and nothing is doubled. Under
  an idempotency key the same is what was sent, whatever the names in it stand for by now.
- A sweep is no thing of its own: its jobs are `NAME-001`, `NAME-002`, ..., and its table compares
  what they say today.
"""

import asyncio
import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Query, Response

from marlaas.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded, UnsupportedFeature
from marlaas.loop.jobspec import ONE_JOB_KNOBS, describe_job, read_job
from marlaas.loop.model_names import find_version
from marlaas.service.auth import WithCaller
from marlaas.service.parts import Parts, WithParts
from marlaas.service.places import JobName, PageSize, SweepName
from marlaas.service.wire.common import finite
from marlaas.service.wire.jobs import JobBody, JobInfo, JobPage, SweepBody, SweepInfo, SweepRow
from marlaas.store.codec import encode
from marlaas.store.db import Store, StoredJob
from marlaas.store.files import check_segment
from marlaas.types import (
    MAX_NAME_CHARS,
    SEGMENT,
    EvalRecord,
    JobSpec,
    JobState,
    StepRecord,
    Tenant,
    TenantId,
    UploadKind,
)

router = APIRouter(tags=["jobs"])

MAX_SWEEP_JOBS = 999
"""Their numbers have three digits."""

IDEMPOTENCY_KEY = Header(
    alias="Idempotency-Key",
    max_length=200,
    description="The same key with another job is a conflict.",
)
_JOB_REQUEST = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": JobBody.model_json_schema()}},
    }
}


# ---------------------------------------------------------------------------------------------
# Jobs


@router.post(
    "/v1/jobs",
    status_code=201,
    openapi_extra=_JOB_REQUEST,
    responses={200: {"model": JobInfo, "description": "The same job was handed over before"}},
)
async def create_job(
    caller: WithCaller,
    parts: WithParts,
    response: Response,
    body: Annotated[dict[str, Any], Body()],
    key: Annotated[str, IDEMPOTENCY_KEY] = "",
) -> JobInfo:
    """Hand over a job, in the words of the job file but for `tenant` and `replicate`."""
    spec = await _known_or_read(parts, caller.tenant_id, body, key)
    is_new = not await parts.store.call(_is_job, caller.tenant_id, spec.name)
    if is_new:
        await _check_storage(parts, caller.tenant)
        await parts.trials.check(parts.store, [spec])
    stored = await parts.controller.submit(
        spec, idempotency_key=key, body_digest=_digest(body), owner=caller.tenant
    )
    response.status_code = 201 if is_new else 200
    return _info(parts, stored)


@router.get("/v1/jobs")
async def list_jobs(
    caller: WithCaller,
    parts: WithParts,
    state: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
    after: Annotated[
        str, Query(max_length=MAX_NAME_CHARS, description="Continue behind the job of this name.")
    ] = "",
    limit: PageSize = 100,
) -> JobPage:
    """List the tenant's jobs in the order they were handed over."""
    if after:
        check_segment("after", after)
    rows = await parts.store.call(
        Store.jobs, caller.tenant_id, state=state, after=after, limit=limit
    )
    next_after = rows[-1].spec.name if len(rows) == limit else None
    return JobPage(jobs=[_info(parts, row) for row in rows], next=next_after)


@router.get("/v1/jobs/{job}")
async def get_job(caller: WithCaller, parts: WithParts, job: JobName) -> JobInfo:
    """Show one job: its state and reason, how far it is, what it used and what it waits for."""
    return _info(parts, await parts.store.call(Store.job, caller.tenant_id, job))


@router.delete("/v1/jobs/{job}", status_code=204)
async def delete_job(caller: WithCaller, parts: WithParts, job: JobName) -> None:
    """Remove a job with its rollouts and adapters. It must have ended, or be paused."""
    await parts.controller.delete(caller.tenant_id, job)


@router.post("/v1/jobs/{job}/pause")
async def pause_job(caller: WithCaller, parts: WithParts, job: JobName) -> JobInfo:
    """Stop a job where it is. A step that is being committed ends first; finished groups stay."""
    return _info(parts, await parts.controller.pause(caller.tenant_id, job))


@router.post("/v1/jobs/{job}/resume")
async def resume_job(caller: WithCaller, parts: WithParts, job: JobName) -> JobInfo:
    """Queue a job again that is paused, held or failed; it goes on behind its last step."""
    return _info(parts, await parts.controller.resume(caller.tenant_id, job))


@router.post("/v1/jobs/{job}/cancel")
async def cancel_job(caller: WithCaller, parts: WithParts, job: JobName) -> JobInfo:
    """End a job for good. What it learned stays until the job is deleted."""
    return _info(parts, await parts.controller.cancel(caller.tenant_id, job))


def _info(parts: Parts, stored: StoredJob) -> JobInfo:
    return JobInfo.of(stored, parts.controller.status(stored.spec.tenant, stored.spec.name))


def _is_job(store: Store, tenant_id: TenantId, name: str) -> bool:
    try:
        store.job(tenant_id, name)
    except NotFound:
        return False
    return True


async def _check_storage(parts: Parts, tenant: Tenant) -> None:
    """Refuse new work of a tenant whose storage is full.

    Raises:
        QuotaExceeded: it is.
    """
    limit = tenant.quotas.stored_bytes
    if limit is None:
        return
    used = await parts.store.call(Store.stored_bytes, tenant.tenant_id)
    if used >= limit:
        raise QuotaExceeded(f"{used} of {limit} bytes are stored; delete jobs or uploads", 60.0)


# ---------------------------------------------------------------------------------------------
# From a body to a spec


def _digest(body: Mapping[str, Any]) -> str:
    """Return what tells a body from others, however its keys are ordered."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


async def _known_or_read(
    parts: Parts, tenant_id: TenantId, body: Mapping[str, Any], key: str
) -> JobSpec:
    """Return what a body asks for: under a key that it came with before, what it meant then.

    Raises:
        InvalidRequest: with one problem per fault.
    """
    known = None
    if key:
        known = await parts.store.call(Store.spec_of_key, tenant_id, key, _digest(body))
    return known or await read_spec(parts, tenant_id, body)


async def read_spec(parts: Parts, tenant_id: TenantId, body: Mapping[str, Any]) -> JobSpec:
    """Return what a body asks for, with every name of something else resolved.

    Raises:
        InvalidRequest: with one problem per fault.
    """
    resolved, problems = await parts.store.call(_resolve_names, tenant_id, body)
    unsupported = []
    if body.get("seeded") is True and not parts.settings.exact:
        unsupported.append(
            "seeded: this service does not compute bit for bit; expected seeded: false, or a "
            "service that was started with `exact: true`"
        )
    try:
        # Making a family to check its settings may read files.
        spec = await asyncio.to_thread(
            read_job, resolved, tenant=tenant_id, max_context=parts.max_context
        )
    except InvalidRequest as error:
        raise InvalidRequest(*problems, *error.problems, *unsupported) from None
    if problems:
        raise InvalidRequest(*problems, *unsupported)
    if unsupported:
        raise UnsupportedFeature(*unsupported)
    return spec


def _resolve_names(
    store: Store, tenant_id: TenantId, body: Mapping[str, Any]
) -> tuple[Mapping[str, Any], list[str]]:
    """Return the body with digests for names of uploads, and numbers for words of versions; and
    the names that nothing has, in whose place something stands so that the rest is judged too.

    What is no name stays as it is, for `read_job` to judge.
    """
    resolved = dict(body)
    env, fork = body.get("env"), body.get("fork")
    problems: list[str] = []
    if isinstance(env, Mapping) and env.get("family") == "custom":
        resolved["env"] = {
            **env,
            **_digests(store, tenant_id, env, problems),
        }
    if isinstance(fork, Mapping) and isinstance(fork.get("job"), str):
        try:
            version = find_version(store, tenant_id, f"{fork['job']}@{fork.get('version', '')}")
        except (NotFound, InvalidRequest) as error:
            problems.append(f"fork: {error}")
            resolved["fork"] = {**fork, "job": "unknown", "version": 0}
        else:
            assert version is not None, "a name with @ is no base"
            resolved["fork"] = {**fork, "version": version.version}
    return resolved, problems


def _digests(
    store: Store, tenant_id: TenantId, env: Mapping[str, Any], problems: list[str]
) -> Mapping[str, str]:
    digests: dict[str, str] = {}
    for kind in UploadKind:
        name = env.get(kind.value)
        if isinstance(name, str):
            try:
                digests[kind.value] = store.upload(tenant_id, kind, name).digest
            except (NotFound, InvalidRequest):
                problems.append(f"env.{kind.value}: no upload {name!r}; expected one of yours")
                digests[kind.value] = hashlib.sha256().hexdigest()
    return digests


# ---------------------------------------------------------------------------------------------
# Sweeps


@router.post("/v1/sweeps", status_code=201, tags=["sweeps"])
async def create_sweep(
    caller: WithCaller,
    parts: WithParts,
    body: SweepBody,
    key: Annotated[str, IDEMPOTENCY_KEY] = "",
) -> SweepInfo:
    """Hand over a job for every combination of the grid's values; all of them, or none."""
    await _check_storage(parts, caller.tenant)
    bodies = _combinations(body)
    keys = [f"{key}/{job['name']}" if key else "" for job in bodies]
    specs = [
        await _known_or_read(parts, caller.tenant_id, job, member_key)
        for job, member_key in zip(bodies, keys, strict=True)
    ]
    await _check_queue(parts, caller.tenant, specs)
    await parts.trials.check(parts.store, await parts.store.call(_new_ones, specs))
    for spec, job, member_key in zip(specs, bodies, keys, strict=True):
        await parts.controller.submit(
            spec, idempotency_key=member_key, body_digest=_digest(job), owner=caller.tenant
        )
    return await _sweep(parts, caller.tenant_id, body.name)


@router.get("/v1/sweeps/{name}", tags=["sweeps"])
async def get_sweep(caller: WithCaller, parts: WithParts, name: SweepName) -> SweepInfo:
    """Compare the jobs of a sweep, best first where there is a verdict."""
    return await _sweep(parts, caller.tenant_id, name)


def _combinations(body: SweepBody) -> Sequence[Mapping[str, Any]]:
    """Return the jobs of a sweep, in the order of the grid: its last knob changes fastest.

    Raises:
        InvalidRequest: the grid names what no job has, or is too large.
    """
    problems = [
        f"grid.{knob}: unknown key; expected one of {', '.join(ONE_JOB_KNOBS)}"
        for knob in body.grid
        if knob not in ONE_JOB_KNOBS or knob == "name"
    ]
    problems += [f"job.{knob}: is in the grid too" for knob in body.grid if knob in body.job]
    if "name" in body.job:
        problems.append("job.name: the jobs of a sweep are named after it; expected no name")
    if not SEGMENT.fullmatch(f"{body.name}-001"):
        problems.append(
            f"name: expected up to {MAX_NAME_CHARS - 4} letters, digits, '.', '_' or '-'"
        )
    num_jobs = 1
    for values in body.grid.values():
        num_jobs *= len(values)
    if num_jobs > MAX_SWEEP_JOBS:
        problems.append(f"grid: makes {num_jobs} jobs; expected at most {MAX_SWEEP_JOBS}")
    if problems:
        raise InvalidRequest(*problems)
    return [
        {**body.job, **dict(zip(body.grid, values, strict=True)), "name": f"{body.name}-{n:03d}"}
        for n, values in enumerate(itertools.product(*body.grid.values()), start=1)
    ]


async def _check_queue(parts: Parts, tenant: Tenant, specs: Sequence[JobSpec]) -> None:
    """Refuse a sweep of which only a part could be taken.

    Raises:
        QuotaExceeded: it would.
        Conflict: one of its names is that of another job.
    """
    num_new = await parts.store.call(_num_new, specs)
    limit = tenant.quotas.max_queued_jobs
    if limit is None:
        return
    counts = await parts.store.call(Store.job_counts, tenant.tenant_id)
    if counts.get(JobState.QUEUED, 0) + num_new > limit:
        raise QuotaExceeded(f"{num_new} new jobs do not fit a queue of {limit}", 60.0)


def _new_ones(store: Store, specs: Sequence[JobSpec]) -> Sequence[JobSpec]:
    return [spec for spec in specs if not _is_job(store, spec.tenant, spec.name)]


def _num_new(store: Store, specs: Sequence[JobSpec]) -> int:
    num_new = 0
    for spec in specs:
        if not _is_job(store, spec.tenant, spec.name):
            num_new += 1
        elif encode(store.job(spec.tenant, spec.name).spec) != encode(spec):
            raise Conflict(f"job {spec.name!r} exists with other settings; expected another name")
    return num_new


@dataclass(frozen=True, slots=True)
class _Member:
    """One job of a sweep with what its row shows."""

    job: StoredJob
    last_step: StepRecord | None
    evaluations: list[EvalRecord]


async def _sweep(parts: Parts, tenant_id: TenantId, name: str) -> SweepInfo:
    members = await parts.store.call(_members, tenant_id, name)
    described = [_knobs(member.job.spec) for member in members]
    knobs = [
        knob
        for knob in described[0]
        if any(row.get(knob) != described[0][knob] for row in described[1:])
    ]
    rows = [
        _row(member, {knob: row.get(knob) for knob in knobs})
        for member, row in zip(members, described, strict=True)
    ]
    rows.sort(key=lambda row: -1.0 if row.best_success is None else row.best_success, reverse=True)
    return SweepInfo(name=name, knobs=knobs, jobs=rows)


def _members(store: Store, tenant_id: TenantId, name: str) -> list[_Member]:
    """Return the jobs of a sweep that are left.

    Raises:
        NotFound: there are none.
    """
    members: list[_Member] = []
    numbered = re.compile(re.escape(name) + r"-[0-9]{3}")
    for stored in store.jobs(tenant_id):
        job = stored.spec.name
        if numbered.fullmatch(job):
            steps = store.steps(tenant_id, job, after=stored.step - 1)
            evaluations = store.evaluations(tenant_id, job)
            members.append(_Member(stored, steps[-1] if steps else None, evaluations))
    if not members:
        raise NotFound(f"no sweep {name!r}")
    return members


def _knobs(spec: JobSpec) -> Mapping[str, Any]:
    described = describe_job(replace(spec, name="job"))
    return {"fork": None, **described}


def _row(member: _Member, values: Mapping[str, Any]) -> SweepRow:
    judged = [record for record in member.evaluations if math.isfinite(record.success)]
    best = max(judged, key=lambda record: (record.success, -record.version), default=None)
    step = member.last_step
    return SweepRow(
        job=member.job.spec.name,
        values=dict(values),
        state=member.job.state,
        reason=member.job.reason,
        step=member.job.step,
        steps=member.job.spec.steps,
        reward_mean=finite(step.metrics.get("reward_mean", float("nan"))) if step else None,
        success=judged[-1].success if judged else None,
        best_success=best.success if best else None,
        best_version=best.version if best else None,
    )
