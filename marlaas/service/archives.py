"""Folders packed and sent: archives of adapters and models, and single files of them.

- Packing runs off the event loop; what is packed is measured first and refused past the limit.
- Archives hold plain files with the names of the folder, and nothing of this machine: no owner, no
  time, no path. The same folder gives the same bytes.
- What lies on the disk for a reader goes once it was sent, however that ends.
"""

import asyncio
import gzip
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from marlaas.errors import TooLarge

PIECE_BYTES = 1 << 20

STALL_S = 120.0
"""How long a reader may take for one piece before its download is given up."""


class Download(StreamingResponse):
    """Sends what lies in a scratch folder, and closes what it holds however that ends: the folder,
    and its place among the downloads. A reader who takes nothing for long is given up."""

    def __init__(
        self, held: AsyncExitStack, pieces: Iterator[bytes], *, size_bytes: int, filename: str
    ) -> None:
        media_type = _media_type(filename)
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


def _media_type(filename: str) -> str:
    if filename.endswith(".gz"):
        return "application/gzip"
    return "application/x-tar" if filename.endswith(".tar") else "application/octet-stream"


async def enter_scratch(held: AsyncExitStack, root: Path) -> Path:
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


def size_bytes_of(folder: Path) -> int:
    """Return the size of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


def check_archive(what: str, size_bytes: int, limit: int) -> None:
    """Refuse to pack what is larger than the operator allows.

    Raises:
        TooLarge: it is.
    """
    if size_bytes > limit:
        raise TooLarge(f"{what} has {size_bytes} bytes; at most {limit} may be downloaded")


def pack(folder: Path, archive: Path, limit: int) -> None:
    """Write the folder of an adapter as a tar.gz.

    Raises:
        FileNotFoundError: it was deleted meanwhile.
        TooLarge: it is over the limit.
    """
    check_archive("the adapter", size_bytes_of(folder), limit)
    # No time and no name in the header: the same version gives the same bytes.
    with archive.open("wb") as file, gzip.GzipFile("", "wb", 1, file, mtime=0) as packed:
        for piece in tar_pieces(folder):
            packed.write(piece)


def tar_pieces(folder: Path) -> Iterator[bytes]:
    """Yield a tar of a folder of plain files piece by piece."""
    for path in sorted(folder.iterdir()):
        member = tarfile.TarInfo(path.name)
        member.size = path.stat().st_size
        yield member.tobuf(tarfile.USTAR_FORMAT)
        yield from read_pieces(path)
        yield b"\0" * (-member.size % tarfile.BLOCKSIZE)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def tar_bytes(folder: Path) -> int:
    """Return how long the tar of a folder is."""
    blocks = [-(-path.stat().st_size // tarfile.BLOCKSIZE) + 1 for path in folder.iterdir()]
    return (sum(blocks) + 2) * tarfile.BLOCKSIZE


def read_pieces(path: Path) -> Iterator[bytes]:
    """Yield a file piece by piece."""
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece
