"""Unpacks the archive of an adapter or a model, which came over a network, into a folder of plain
files.

- Nothing lands outside the folder: names that are absolute or climb, links and devices are refused.
- The folder is there whole or not at all, and no larger than the caller allows: sizes are added up
  before anything is written, and no more than that is read.
"""

import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from marlaas.errors import InvalidRequest

MAX_ADAPTER_BYTES = 8 << 30
"""Far above the adapter of rank 64 of any base that this runs on."""
MAX_MODEL_BYTES = 1 << 40
"""Far above any base that this runs on, merged or not."""
MAX_MEMBERS = 1000


def unpack(archive: Path, folder: Path, *, max_bytes: int = MAX_ADAPTER_BYTES) -> Path:
    """Unpack a tar, or a tar.gz by its name, of plain files into a new folder.

    Raises:
        InvalidRequest: the folder has content already, or the archive is not what it should be.
    """
    check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".marlaas-", dir=folder.parent) as beside:
        part = Path(beside) / folder.name
        part.mkdir()
        mode = "r:gz" if archive.suffix == ".gz" else "r:"
        try:
            with tarfile.open(archive, mode) as tar:
                for member, path in _plain_files(tar, max_bytes):
                    _write(tar, member, part / path)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise InvalidRequest(f"{archive.name}: cannot be unpacked ({error})") from error
        part.replace(folder)
    return folder


def check_new(folder: Path) -> None:
    """Refuse a folder that has content, before anything is fetched for it.

    Raises:
        InvalidRequest: something lies there already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidRequest(f"{folder}: exists and is not empty; expected a new folder")


def _plain_files(
    tar: tarfile.TarFile, max_bytes: int
) -> Iterator[tuple[tarfile.TarInfo, PurePosixPath]]:
    """Yield the files of an archive with the paths that they may have, all checked beforehand."""
    members: list[tuple[tarfile.TarInfo, PurePosixPath]] = []
    size_bytes = 0
    for number, member in enumerate(tar):
        path = PurePosixPath(member.name)
        if number >= MAX_MEMBERS:
            raise InvalidRequest(f"archive: has more than {MAX_MEMBERS} members")
        if path.is_absolute() or ".." in path.parts or "\\" in member.name:
            raise InvalidRequest(f"archive: {member.name!r} would land outside the folder")
        if member.isdir():
            continue
        if not member.isreg() or not path.parts:
            raise InvalidRequest(f"archive: {member.name!r} is not a plain file")
        size_bytes += member.size
        if size_bytes > max_bytes:
            raise InvalidRequest(f"archive: unpacks to more than {max_bytes} bytes")
        members.append((member, path))
    yield from members


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source = tar.extractfile(member)
    assert source is not None, "a plain file has content"
    # "x": a name that comes twice is refused instead of overwritten.
    with source, target.open("xb") as file:
        shutil.copyfileobj(source, file)
