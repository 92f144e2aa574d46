"""Files and folders that appear whole or not at all, and, where asked for, survive a loss of power.

    write beside the target ─► (synced: what was written) ─► rename ─► (synced: the names)

A rename alone survives a kill of the process, which is the fault model by default. With `is_synced`
(`durability: power`) file contents reach the disk before their name does, and the name with every
folder above it before the call returns: a row that is committed afterwards never points to nothing.
Without it a call costs no sync at all.
"""

import os
import shutil
from pathlib import Path


def beside(path: Path, word: str) -> Path:
    """Return the hidden name next to `path` under which it is written, or put aside."""
    return path.with_name(f".{path.name}.{word}")


def put_file(new: Path, path: Path, *, is_synced: bool) -> None:
    """Give a finished file its name; one that has the name already is replaced."""
    if is_synced:
        _sync(new)
    os.replace(new, path)
    if is_synced:
        _sync_names(path)


def put_folder(new: Path, path: Path, *, is_synced: bool) -> None:
    """Give a finished folder its name; one that has the name already is replaced."""
    if is_synced:
        for file in new.iterdir():
            _sync(file)
        _sync(new)
    old = beside(path, "old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(new, path)
    if is_synced:
        _sync_names(path)
    shutil.rmtree(old, ignore_errors=True)


def _sync_names(path: Path) -> None:
    """Make a name durable: folders above it may be new, too, and a clean one costs next to
    nothing."""
    for folder in path.absolute().parents:
        try:
            _sync(folder)
        except PermissionError:
            return  # a folder that we may not read is not one that we made
        if folder.is_mount():
            return


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
