"""Jobs that begin where another job is: at a version's adapter, or at its whole training state.

    submit: check_fork ─► add_job ─► take_fork: the source's files become the new job's own (links)
    start at version 0: take_fork ─► Trainer.create_from(files)

- From the moment it was accepted a fork needs its source no more: that job may train on, prune or
  be deleted.
- All functions are calls of the store (`AsyncStore.call`), so nothing comes between their steps. A
  kill between `add_job` and `take_fork` is made good when the job starts.
"""

import os
import shutil
from pathlib import Path

from marlaas.errors import InvalidRequest, NotFound
from marlaas.store.db import Store
from marlaas.store.files import VersionFiles, disk_errors
from marlaas.types import Fork, JobSpec


def check_fork(store: Store, spec: JobSpec) -> None:
    """Make sure that what a job is to begin from, if anything, is there and has its shape.

    Raises:
        InvalidRequest: it is not kept, or has another shape.
    """
    if spec.fork is not None:
        _source(store, spec, spec.fork)


def take_fork(store: Store, spec: JobSpec) -> Path:
    """Return the job's own copy of what it begins from; make it if it is not there.

    Raises:
        InvalidRequest: it is not there, and neither is the source any more.
        StoreUnavailable: the disk refused.
    """
    assert spec.fork is not None
    target = store.files.fork(spec.tenant, spec.name)
    if not target.exists():
        files = _source(store, spec, spec.fork)
        with disk_errors(target):
            _link(Path(files.state if spec.fork.with_optimizer else files.adapter), target)
        size = files.state_bytes() if spec.fork.with_optimizer else files.adapter_bytes()
        store.count_fork(spec.tenant, spec.name, size)
    return target


def _source(store: Store, spec: JobSpec, fork: Fork) -> VersionFiles:
    """Return the files of a fork's source."""
    try:
        source = store.job(spec.tenant, fork.job)
    except NotFound:
        raise InvalidRequest(f"fork.job: no job {fork.job!r}") from None
    _check_shape(spec, source.spec)
    versions = store.versions(spec.tenant, fork.job)
    kept = [row.version for row in versions if row.has_adapter]
    with_state = [row.version for row in versions if row.has_state]
    if fork.with_optimizer and fork.version not in with_state:
        raise InvalidRequest(
            f"fork.version: the optimizer state of version {fork.version} of {fork.job!r} is not "
            f"kept; it is for {with_state or 'none'}"
        )
    if not fork.with_optimizer and fork.version not in kept:
        raise InvalidRequest(
            f"fork.version: version {fork.version} of {fork.job!r} is not kept; kept are {kept}"
        )
    return store.files.version(spec.tenant, fork.job, fork.version)


def _check_shape(spec: JobSpec, source: JobSpec) -> None:
    for name in ("rank", "alpha", "targets"):
        mine, theirs = getattr(spec.adapter, name), getattr(source.adapter, name)
        if mine != theirs:
            raise InvalidRequest(
                f"adapter.{name}: {mine!r}, but job {source.name!r} has {theirs!r}: a fork has the "
                "shape of what it begins from"
            )


def _link(source: Path, target: Path) -> None:
    """Make `target` the same file or folder as `source`, whole or not at all. What a version's
    paths hold is never changed, only replaced, so a link is as good as a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.partial")
    if beside.is_dir():
        shutil.rmtree(beside)
    else:
        beside.unlink(missing_ok=True)
    if source.is_dir():
        shutil.copytree(source, beside, copy_function=os.link)
    else:
        os.link(source, beside)
    beside.rename(target)
