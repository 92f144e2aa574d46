"""Versions of a job's adapter: list, promote, download, alone or merged into the base.

    PEFT folder ──► tar.gz ──► sent ──► deleted                              (adapter: megabytes)
    PEFT folder ──► worker merges ──► folder ──► sent as a tar ──► deleted   (merged: the base)

- Packing runs off the event loop; what is packed is measured first and refused past the limit.
- What lies on the disk for readers is bounded: so many downloads of one tenant, and of all.
- A version that is pruned while it is packed is answered as one that is not kept.
- Archives hold plain files with the names of the folder, and nothing of this machine: no owner, no
  time, no path. The same version gives the same bytes.
"""

import asyncio
import gzip
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Concatenate, ParamSpec

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from marlaas import runtime
from marlaas.errors import NotFound
from marlaas.loop.concurrency import to_its_end
from marlaas.loop.model_names import find_version
from marlaas.loop.shelf import ServedVersion
from marlaas.service.auth import WithCaller
from marlaas.service.limits import check_archive
from marlaas.service.parts import Parts, WithParts
from marlaas.service.places import JobName, VersionName
from marlaas.service.wire.common import Responses
from marlaas.service.wire.jobs import KeepBody
from marlaas.service.wire.versions import VersionInfo, VersionList
from marlaas.store.db import Store
from marlaas.types import TenantId

P = ParamSpec("P")

router = APIRouter(tags=["adapters"])

PIECE_BYTES = 1 << 20

STALL_S = 120.0
"""How long a reader may take for one piece before its download is given up."""


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


class Download(StreamingResponse):
    """Sends what lies in a scratch folder, and closes what it holds however that ends: the folder,
    and its place among the downloads. A reader who takes nothing for long is given up."""

    def __init__(
        self, held: AsyncExitStack, pieces: Iterator[bytes], *, size_bytes: int, filename: str
    ) -> None:
        media_type = "application/gzip" if filename.endswith(".gz") else "application/x-tar"
        headers = {
            "Content-Length": str(size_bytes),
            "Content-Disposition": f'attachment; filename="{filename}"',
        }
        super().__init__(pieces, media_type=media_type, headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_soon(message: Message) -> None:
            async with asyncio.timeout(STALL_S):
                await send(message)

        async with self._held:
            await super().__call__(scope, receive, send_soon)


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
        archive = await _enter_scratch(held, parts.scratch) / "adapter.tar.gz"
        limit = parts.settings.max_archive_bytes
        # To its end: what a thread still writes could not be deleted.
        await to_its_end(asyncio.to_thread(_pack, served, archive, limit))
        size_bytes = archive.stat().st_size
        return Download(
            held.pop_all(),
            _read(archive),
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
        model = await _enter_scratch(held, parts.scratch) / "model"
        name = f"{job}@{served.version}"
        await to_its_end(parts.serving.merge(caller.tenant_id, name, model))
        check_archive("the merged model", _size_bytes(model), parts.settings.max_archive_bytes)
        size_bytes = _tar_bytes(model)
        return Download(
            held.pop_all(),
            _tar_pieces(model),
            size_bytes=size_bytes,
            filename=f"{job}-v{served.version}.tar",
        )


async def _find(parts: Parts, tenant_id: TenantId, job: str, version: str) -> ServedVersion:
    served = await parts.store.call(find_version, tenant_id, f"{job}@{version}")
    assert served is not None, "a name with @ is no base"
    return served


async def _enter_scratch(held: AsyncExitStack, root: Path) -> Path:
    """Return a new folder that is deleted when `held` is closed."""
    scratch = await asyncio.to_thread(_make_scratch, root)
    held.push_async_callback(_delete, scratch)
    return scratch


def _make_scratch(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=root))


async def _delete(scratch: Path) -> None:
    # Also when the request was cancelled: the thread goes on, whoever stops waiting for it.
    await asyncio.shield(asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True))


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _pack(served: ServedVersion, archive: Path, limit: int) -> None:
    """Write a version's folder as a tar.gz.

    Raises:
        NotFound: the version was pruned meanwhile.
        TooLarge: it is over the limit.
    """
    folder = Path(served.folder)
    try:
        check_archive("the adapter", _size_bytes(folder), limit)
        # No time and no name in the header: the same version gives the same bytes.
        with archive.open("wb") as file, gzip.GzipFile("", "wb", 1, file, mtime=0) as packed:
            for piece in _tar_pieces(folder):
                packed.write(piece)
    except FileNotFoundError:
        raise NotFound(f"version {served.version} of job {served.job!r} is not kept") from None


def _tar_pieces(folder: Path) -> Iterator[bytes]:
    """Yield a tar of a folder of plain files piece by piece."""
    for path in sorted(folder.iterdir()):
        member = tarfile.TarInfo(path.name)
        member.size = path.stat().st_size
        yield member.tobuf(tarfile.USTAR_FORMAT)
        yield from _read(path)
        yield b"\0" * (-member.size % tarfile.BLOCKSIZE)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def _tar_bytes(folder: Path) -> int:
    """Return how long the tar of a folder is."""
    blocks = [-(-path.stat().st_size // tarfile.BLOCKSIZE) + 1 for path in folder.iterdir()]
    return (sum(blocks) + 2) * tarfile.BLOCKSIZE


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece
