"""Versions of a job's adapter: list, promote, download, alone or merged into the base.

    PEFT folder ──► tar.gz ──► sent ──► deleted                              (adapter: megabytes)
    PEFT folder ──► worker merges ──► folder ──► sent as a tar ──► deleted   (merged: the base)

- What lies on the disk for readers is bounded: so many downloads of one tenant, and of all.
- A version that is pruned while it is packed is answered as one that is not kept.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Concatenate, ParamSpec

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from marlaas import runtime
from marlaas.errors import NotFound
from marlaas.loop.concurrency import to_its_end
from marlaas.loop.model_names import find_version
from marlaas.loop.shelf import ServedVersion
from marlaas.service.archives import (
    Download,
    check_archive,
    enter_scratch,
    pack,
    read_pieces,
    size_bytes_of,
    tar_bytes,
    tar_pieces,
)
from marlaas.service.auth import WithCaller
from marlaas.service.parts import Parts, WithParts
from marlaas.service.places import JobName, VersionName
from marlaas.service.wire.common import Responses
from marlaas.service.wire.jobs import KeepBody
from marlaas.service.wire.versions import VersionInfo, VersionList
from marlaas.store.db import Store
from marlaas.types import TenantId

P = ParamSpec("P")

router = APIRouter(tags=["adapters"])


@router.get("/v1/jobs/{job}/versions")
async def list_versions(caller: WithCaller, parts: WithParts, job: JobName) -> VersionList:
    """List every version of a job, oldest first, and what is kept of it."""
    return await parts.store.call(_versions, caller.tenant_id, job)


def _versions(store: Store, tenant_id: TenantId, job: str) -> VersionList:
    store.job(tenant_id, job)
    rows = store.versions(tenant_id, job)
    named = {word: _named(store, tenant_id, job, word) for word in ("latest", "best", "promoted")}
    return VersionList(versions=[VersionInfo.of(row, named) for row in rows])


def _named(store: Store, tenant_id: TenantId, job: str, word: str) -> int | None:
    try:
        served = find_version(store, tenant_id, f"{job}@{word}")
    except NotFound:
        return None
    return served.version if served else None


@router.post("/v1/jobs/{job}/versions/{version}/promote")
async def promote(
    caller: WithCaller, parts: WithParts, job: JobName, version: VersionName
) -> VersionInfo:
    """Make a version the one that `JOB@promoted` means. It is kept until another one is promoted:
    promoting an older one again is how to roll back."""
    return await parts.store.call(_change, caller.tenant_id, job, version, Store.promote)


@router.post("/v1/jobs/{job}/versions/{version}/keep")
async def keep(
    caller: WithCaller, parts: WithParts, job: JobName, version: VersionName, body: KeepBody
) -> VersionInfo:
    """Give a version a time to live: its adapter is kept that long whatever else is, and deleted
    then if the job has ended. `for_s: null` takes the time away again."""
    until_s = None if body.for_s is None else runtime.wall_time_s() + body.for_s
    return await parts.store.call(
        _change, caller.tenant_id, job, version, Store.keep_until, until_s
    )


def _change(
    store: Store,
    tenant_id: TenantId,
    job: str,
    version: str,
    verb: Callable[Concatenate[Store, TenantId, str, int, P], None],
    *args: P.args,
    **kwargs: P.kwargs,
) -> VersionInfo:
    """Do something with a version and return what is now kept of it."""
    served = find_version(store, tenant_id, f"{job}@{version}")
    assert served is not None, "a name with @ is no base"
    verb(store, tenant_id, job, served.version, *args, **kwargs)
    listed = _versions(store, tenant_id, job).versions
    return next(row for row in listed if row.version == served.version)


# ---------------------------------------------------------------------------------------------
# Downloads

_GZIP_ANSWER: Responses = {200: {"description": "A tar.gz", "content": {"application/gzip": {}}}}
_TAR_ANSWER: Responses = {200: {"description": "A tar", "content": {"application/x-tar": {}}}}


@router.get(
    "/v1/jobs/{job}/versions/{version}/adapter",
    response_class=StreamingResponse,
    responses=_GZIP_ANSWER,
)
async def download_adapter(
    caller: WithCaller, parts: WithParts, job: JobName, version: VersionName
) -> Response:
    """Download a version as a tar.gz of a folder that PEFT loads."""
    served = await _find(parts, caller.tenant_id, job, version)
    async with AsyncExitStack() as held:
        held.enter_context(parts.adapters.of(caller.tenant_id))
        archive = await enter_scratch(held, parts.scratch) / "adapter.tar.gz"
        limit = parts.settings.max_archive_bytes
        # To its end: what a thread still writes could not be deleted.
        try:
            await to_its_end(asyncio.to_thread(pack, Path(served.folder), archive, limit))
        except FileNotFoundError:
            raise NotFound(f"version {served.version} of job {job!r} is not kept") from None
        size_bytes = archive.stat().st_size
        return Download(
            held.pop_all(),
            read_pieces(archive),
            size_bytes=size_bytes,
            filename=f"{job}-v{served.version}.tar.gz",
        )


@router.get(
    "/v1/jobs/{job}/versions/{version}/merged",
    response_class=StreamingResponse,
    responses=_TAR_ANSWER,
)
async def download_merged(
    caller: WithCaller, parts: WithParts, job: JobName, version: VersionName
) -> Response:
    """Download the base with a version merged into it, as a tar of a Hugging Face folder."""
    served = await _find(parts, caller.tenant_id, job, version)
    async with AsyncExitStack() as held:
        held.enter_context(parts.merged.of(caller.tenant_id))
        model = await enter_scratch(held, parts.scratch) / "model"
        name = f"{job}@{served.version}"
        await to_its_end(parts.serving.merge(caller.tenant_id, name, model))
        check_archive("the merged model", size_bytes_of(model), parts.settings.max_archive_bytes)
        size_bytes = tar_bytes(model)
        return Download(
            held.pop_all(),
            tar_pieces(model),
            size_bytes=size_bytes,
            filename=f"{job}-v{served.version}.tar",
        )


async def _find(parts: Parts, tenant_id: TenantId, job: str, version: str) -> ServedVersion:
    served = await parts.store.call(find_version, tenant_id, f"{job}@{version}")
    assert served is not None, "a name with @ is no base"
    return served
