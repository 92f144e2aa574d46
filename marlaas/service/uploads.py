"""What tenants upload: prompts (JSONL) and environments (a Python file that runs in a sandbox).

An upload is stored by its content and found by its name. Jobs name it by digest, so a later upload
of that name changes no job. Checking a million lines runs off the event loop.
"""

import asyncio
from io import BytesIO
from typing import Any

from fastapi import APIRouter, Request

from marlaas.envs.custom import check_environment
from marlaas.envs.prompts import check_prompts
from marlaas.errors import QuotaExceeded, StoreUnavailable
from marlaas.service.auth import Caller, WithCaller
from marlaas.service.limits import read_body
from marlaas.service.parts import Parts, WithParts
from marlaas.service.places import UploadName
from marlaas.service.wire.versions import UploadInfo, UploadList
from marlaas.store.db import Store
from marlaas.store.files import Files
from marlaas.store.uploads import digest_of
from marlaas.types import Tenant, TenantId, Upload, UploadKind

router = APIRouter(tags=["uploads"])


def _takes(media_type: str, words: str) -> dict[str, Any]:
    """Return what the OpenAPI document says of a body that is no JSON."""
    schema = {"type": "string", "description": words}
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


@router.put(
    "/v1/prompts/{name}",
    openapi_extra=_takes(
        "application/jsonl", 'One JSON object a line, with "prompt" or "messages".'
    ),
)
async def put_prompts(
    caller: WithCaller, parts: WithParts, name: UploadName, request: Request
) -> UploadInfo:
    """Upload prompts. Every fault is named with its line; the file is taken whole or not at all."""
    async with parts.uploads.of(caller.tenant_id):
        content = await read_body(request)
        num_lines = await asyncio.to_thread(check_prompts, BytesIO(content))
        return await _keep(parts, caller, UploadKind.PROMPTS, name, content, num_lines)


@router.put(
    "/v1/environments/{name}",
    openapi_extra=_takes("text/x-python", "Python source with `reward`, or `start` and `step`."),
)
async def put_environment(
    caller: WithCaller, parts: WithParts, name: UploadName, request: Request
) -> UploadInfo:
    """Upload an environment. It is imported and looked at in a sandbox; it runs nowhere else."""
    async with parts.uploads.of(caller.tenant_id):
        content = await read_body(request)
        await check_environment(content)
        num_lines = content.count(b"\n") + (not content.endswith(b"\n"))
        return await _keep(parts, caller, UploadKind.ENVIRONMENT, name, content, num_lines)


@router.get("/v1/uploads")
async def list_uploads(caller: WithCaller, parts: WithParts) -> UploadList:
    """List what the tenant has under a name."""
    rows = await parts.store.call(Store.uploads, caller.tenant_id)
    return UploadList(uploads=[UploadInfo.of(row) for row in rows])


@router.delete("/v1/prompts/{name}", status_code=204)
async def delete_prompts(caller: WithCaller, parts: WithParts, name: UploadName) -> None:
    """Forget a name. Jobs that were handed over keep the prompts they began with."""
    await parts.store.call(Store.delete_upload, caller.tenant_id, UploadKind.PROMPTS, name)


@router.delete("/v1/environments/{name}", status_code=204)
async def delete_environment(caller: WithCaller, parts: WithParts, name: UploadName) -> None:
    """Forget a name. Jobs that were handed over keep the environment they began with."""
    await parts.store.call(Store.delete_upload, caller.tenant_id, UploadKind.ENVIRONMENT, name)


async def _keep(
    parts: Parts, caller: Caller, kind: UploadKind, name: str, content: bytes, num_lines: int
) -> UploadInfo:
    """Store an upload that was checked.

    Raises:
        QuotaExceeded: it does not fit the tenant's storage.
    """
    limit = caller.tenant.quotas.stored_bytes
    if limit is not None:
        used = await parts.store.call(Store.stored_bytes, caller.tenant_id)
        if used + len(content) > limit:
            raise QuotaExceeded(
                f"{used} of {limit} bytes are stored and this has {len(content)}; delete jobs or "
                "uploads",
                60.0,
            )
    # Not on the store's thread: everybody's commits would wait for the disk.
    try:
        digest = await asyncio.to_thread(_write, parts.store.files, caller.tenant_id, content)
    except StoreUnavailable:  # the tenant's folder may have gone with it
        tenant = caller.tenant
        await parts.store.call(Store.check_tenant, tenant.tenant_id, created_s=tenant.created_s)
        raise
    upload = await parts.store.call(_put, caller.tenant, kind, name, content, num_lines, digest)
    return UploadInfo.of(upload)


def _write(files: Files, tenant_id: TenantId, content: bytes) -> str:
    digest = digest_of(content)
    files.write_upload(tenant_id, digest, content)
    return digest


def _put(
    store: Store,
    tenant: Tenant,
    kind: UploadKind,
    name: str,
    content: bytes,
    num_lines: int,
    digest: str,
) -> Upload:
    store.check_tenant(tenant.tenant_id, created_s=tenant.created_s)
    return store.put_upload(tenant.tenant_id, kind, name, content, num_lines, digest=digest)
