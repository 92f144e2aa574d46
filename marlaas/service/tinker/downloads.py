"""Checkpoints to take away, as folders that PEFT loads.

    external_weights_urls ─► one signed address a file ─► plain GET, without a key, for an hour
    archive               ─► one signed address of a tar.gz of the folder (302)

- An address names tenant, checkpoint and file, and cannot be changed: it is signed with a key of
  this service. It opens nothing else, and nothing once the checkpoint is gone or another one.
- Only adapters are given out, never the optimizer's state.
"""

import asyncio
import hashlib
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi import Path as InPath
from fastapi.responses import RedirectResponse, StreamingResponse

from marlaas import runtime
from marlaas.errors import InvalidRequest, NotFound
from marlaas.loop.concurrency import to_its_end
from marlaas.service.archives import (
    Download,
    check_archive,
    enter_scratch,
    pack,
    read_pieces,
)
from marlaas.service.parts import Parts, WithParts
from marlaas.service.tinker.door import PREFIX, WithTenant, answer
from marlaas.service.tinker.records import CheckpointName, KindName, RunName
from marlaas.store.db import Store
from marlaas.types import Checkpoint, CheckpointKind, TenantId

router = APIRouter(prefix=PREFIX, tags=["tinker: downloads"])
open_routes = APIRouter(prefix=PREFIX, tags=["tinker: downloads"])

URL_S = 3600.0
"""How long an address opens something."""

ARCHIVE = "adapter.tar.gz"
"""Name of the file that is the whole folder; no file in it is called so."""

_MAC_BYTES = 16


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """What an address opens."""

    tenant: str
    run_id: str
    kind: str
    name: str
    adapter_hash: str
    """Of the checkpoint that it was given out for."""
    file: str
    until_s: float


@router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls")
async def external_weights_urls(
    tenant: WithTenant,
    parts: WithParts,
    request: Request,
    run_id: RunName,
    kind: KindName,
    name: CheckpointName,
) -> Response:
    """Give out an address for each file of an external checkpoint."""
    checkpoint = await parts.store.call(Store.checkpoint, tenant, run_id, kind, name)
    if kind is not CheckpointKind.EXTERNAL:
        raise InvalidRequest(
            f"{checkpoint.path} is no external checkpoint; expected one that save_weights_external "
            "made, or the path's /archive"
        )
    until_s = runtime.wall_time_s() + URL_S
    files = await asyncio.to_thread(_files, checkpoint)
    urls = {file: _url(parts, request, tenant, checkpoint, file, until_s) for file in files}
    return answer({"urls": urls, "expires": datetime.fromtimestamp(until_s, UTC).isoformat()})


@router.get(
    "/training_runs/{run_id}/checkpoints/{kind}/{name}/archive",
    status_code=302,
    response_class=RedirectResponse,
)
async def checkpoint_archive(
    tenant: WithTenant,
    parts: WithParts,
    request: Request,
    run_id: RunName,
    kind: KindName,
    name: CheckpointName,
) -> Response:
    """Give out the address of a checkpoint's adapter as a tar.gz, of any kind of checkpoint."""
    checkpoint = await parts.store.call(Store.checkpoint, tenant, run_id, kind, name)
    until_s = runtime.wall_time_s() + URL_S
    url = _url(parts, request, tenant, checkpoint, ARCHIVE, until_s)
    expires = format_datetime(datetime.fromtimestamp(until_s, UTC), usegmt=True)
    return RedirectResponse(url, 302, headers={"Expires": expires})


@open_routes.get(
    "/downloads/{ticket}/{file}",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {}, "application/gzip": {}}}},
)
async def download(
    parts: WithParts,
    ticket: Annotated[str, InPath(max_length=2000)],
    file: Annotated[str, InPath(max_length=200)],
) -> Response:
    """Send a file that an address was given out for."""
    opened = _opened(parts, ticket)
    if opened is None or opened.file != file or opened.until_s < runtime.wall_time_s():
        raise NotFound("no such download, or its time is over; ask for the address again")
    tenant, kind = TenantId(opened.tenant), CheckpointKind(opened.kind)
    checkpoint = await parts.store.call(Store.checkpoint, tenant, opened.run_id, kind, opened.name)
    if checkpoint.adapter_hash != opened.adapter_hash:
        raise NotFound(f"{checkpoint.path} was saved anew; ask for the address again")
    limit = parts.settings.max_archive_bytes
    folder = _adapter(checkpoint)
    async with AsyncExitStack() as held:
        held.enter_context(parts.adapters.of(tenant))
        try:
            if file == ARCHIVE:
                path = await enter_scratch(held, parts.scratch) / ARCHIVE
                # To its end: what a thread still writes could not be deleted.
                await to_its_end(asyncio.to_thread(pack, folder, path, limit))
            else:
                path = folder / file
                check_archive("the file", path.stat().st_size, limit)
        except FileNotFoundError:
            raise NotFound(f"{checkpoint.path} is not kept any more") from None
        size_bytes = path.stat().st_size
        return Download(held.pop_all(), read_pieces(path), size_bytes=size_bytes, filename=file)


def _adapter(checkpoint: Checkpoint) -> Path:
    return checkpoint.folder / "adapter"


def _files(checkpoint: Checkpoint) -> list[str]:
    folder = _adapter(checkpoint)
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_file())
    except FileNotFoundError:
        raise NotFound(f"{checkpoint.path} is not kept any more") from None


# ---------------------------------------------------------------------------------------------
# Addresses


def _url(
    parts: Parts,
    request: Request,
    tenant: TenantId,
    checkpoint: Checkpoint,
    file: str,
    until_s: float,
) -> str:
    ticket = Ticket(
        tenant=tenant,
        run_id=checkpoint.run_id,
        kind=checkpoint.kind.value,
        name=checkpoint.name,
        adapter_hash=checkpoint.adapter_hash,
        file=file,
        until_s=until_s,
    )
    data = msgspec.json.encode(ticket)
    sealed = urlsafe_b64encode(_mac(parts, data) + data).decode().rstrip("=")
    return f"{str(request.base_url).rstrip('/')}{PREFIX}/downloads/{sealed}/{quote(file)}"


def _opened(parts: Parts, ticket: str) -> Ticket | None:
    try:
        sealed = urlsafe_b64decode(ticket + "=" * (-len(ticket) % 4))
    except ValueError:
        return None
    mac, data = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(parts, data)):
        return None
    return msgspec.json.decode(data, type=Ticket)


def _mac(parts: Parts, data: bytes) -> bytes:
    return hmac.digest(parts.download_key, data, hashlib.sha256)[:_MAC_BYTES]
