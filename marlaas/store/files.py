"""Where the files of jobs and uploads lie. The store owns these paths; workers write some of them.

    <root>/jobs/<tenant>/<job>/versions/v000012/state     training state, newest version only
    <root>/jobs/<tenant>/<job>/versions/v000012/adapter/  PEFT folder
    <root>/jobs/<tenant>/<job>/fork                       what it began from: state or PEFT folder
    <root>/runs/<tenant>/<run>/states/v000012             training state: snapshot, or PEFT folder
    <root>/runs/<tenant>/<run>/<kind>/<name>@3/           checkpoint: adapter/ and maybe state
    <root>/uploads/<tenant>/<sha256>                      what the tenant uploaded
    <root>/trash/                                         on its way out

- Writers write beside the target and rename, so a path either holds a whole file or nothing, and a
  file never changes: a hard link to it is a copy.
- Deleting comes after the commit that makes it right, and holds up nobody (`delete_on`). What a
  kill leaves behind takes space and means nothing; it goes with the job, or at its next step.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from marlaas.errors import InvalidRequest, StoreUnavailable
from marlaas.types import MAX_NAME_CHARS, SEGMENT, CheckpointKind, TenantId

_DIGEST = re.compile(r"[0-9a-f]{64}")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_CHECKPOINT_NAME = re.compile(r"#?[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_segment(what: str, name: str) -> str:
    """Return `name` if it can safely name a folder.

    Raises:
        InvalidRequest: it cannot.
    """
    if not SEGMENT.fullmatch(name):
        raise InvalidRequest(
            f"{what} {name!r}: use 1 to {MAX_NAME_CHARS} letters, digits, '.', '_' or '-', "
            "starting with a letter or digit"
        )
    return name


def check_run_id(run_id: str) -> str:
    """Return `run_id` if it can safely name a folder.

    Raises:
        InvalidRequest: it cannot.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise InvalidRequest(f"run {run_id!r}: a run id is SESSION:train:NUMBER")
    return run_id


def check_checkpoint_name(name: str) -> str:
    """Return `name` if it can safely name a folder.

    Raises:
        InvalidRequest: it cannot.
    """
    if not _CHECKPOINT_NAME.fullmatch(name):
        raise InvalidRequest(
            f"checkpoint {name!r}: use 1 to 128 letters, digits, '.', '_' or '-', starting with a "
            "letter or digit"
        )
    return name


def is_digest(value: object) -> bool:
    """Return whether a value is a sha256 in hex, as uploads are named."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


@dataclass(frozen=True, slots=True)
class PolicyFiles:
    """The files that a policy leaves on the disk at one point of its life."""

    folder: Path

    @property
    def state(self) -> str:
        """Training state: adapter, moments and step clock in one file."""
        return str(self.folder / "state")

    @property
    def adapter(self) -> str:
        """The adapter alone, as a folder that PEFT loads."""
        return str(self.folder / "adapter")

    def prepare(self) -> Self:
        """Make the folder that the files go to."""
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        return self


@dataclass(frozen=True, slots=True)
class VersionFiles(PolicyFiles):
    """The files of one policy version."""

    def state_bytes(self) -> int:
        """Return the size of the state file, 0 if there is none."""
        return size_of(Path(self.state))

    def adapter_bytes(self) -> int:
        """Return the size of the adapter folder, 0 if there is none."""
        return size_of(Path(self.adapter))


@dataclass(frozen=True, slots=True)
class CheckpointFiles(PolicyFiles):
    """The files of one checkpoint: what it saves at another time under that name has others."""


class Files:
    """Builds every path below the store's root, and deletes below it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._deleting: Executor | None = None

    def make_root(self) -> None:
        with disk_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)

    # Paths --------------------------------------------------------------------------------

    def job(self, tenant_id: TenantId, job: str) -> Path:
        """Folder of one job."""
        return self.root / "jobs" / check_segment("tenant", tenant_id) / check_segment("job", job)

    def version(self, tenant_id: TenantId, job: str, version: int) -> VersionFiles:
        """Files of one policy version; nothing is created."""
        assert version >= 0
        return VersionFiles(self.job(tenant_id, job) / "versions" / f"v{version:06d}")

    def fork(self, tenant_id: TenantId, job: str) -> Path:
        """What a forked job begins from: a PEFT folder or a training state, its own."""
        return self.job(tenant_id, job) / "fork"

    def run(self, tenant_id: TenantId, run_id: str) -> Path:
        """Folder of one run."""
        return self.root / "runs" / check_segment("tenant", tenant_id) / check_run_id(run_id)

    def run_state(self, tenant_id: TenantId, run_id: str, version: int) -> str:
        """Where the training state of a run at a version goes; its folder is made."""
        assert version >= 0
        folder = self.run(tenant_id, run_id) / "states"
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return str(folder / f"v{version:06d}")

    def checkpoint(
        self,
        tenant_id: TenantId,
        run_id: str,
        kind: CheckpointKind,
        name: str,
        *,
        generation: int = 0,
    ) -> CheckpointFiles:
        """Files of one checkpoint; nothing is created. A generation that was never used before
        under this name, such as the number of the operation, lets one be written beside another
        that it replaces."""
        assert generation >= 0
        folder = self.run(tenant_id, run_id) / CheckpointKind(kind).value
        return CheckpointFiles(folder / f"{check_checkpoint_name(name)}@{generation}")

    def upload(self, tenant_id: TenantId, digest: str) -> Path:
        """File of one upload."""
        assert is_digest(digest)
        return self.root / "uploads" / check_segment("tenant", tenant_id) / digest

    # Writing ------------------------------------------------------------------------------

    def write_upload(self, tenant_id: TenantId, digest: str, content: bytes) -> None:
        """Write an upload's file, whole and on the disk, unless it is there."""
        path = self.upload(tenant_id, digest)
        partial = path.with_suffix(".partial")
        with disk_errors(path):
            if path.exists():
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(partial, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                partial.rename(path)
                _sync_folder(path.parent)
            finally:
                partial.unlink(missing_ok=True)

    def link(self, source: Path | str, target: Path | str) -> None:
        """Make a file, or a folder of files, appear at another place too; whole or not at all."""
        target = Path(target)
        partial = target.with_name(f"{target.name}.partial")
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            _remove(partial)
            if Path(source).is_dir():
                shutil.copytree(source, partial, copy_function=link_or_copy)
                _remove(target)
            else:
                link_or_copy(str(source), str(partial))
            partial.replace(target)
            _remove(partial)  # a rename between two names of one file leaves both
            _sync_folder(target.parent)

    # Deleting -----------------------------------------------------------------------------

    def delete_on(self, executor: Executor | None) -> None:
        """Delete on a thread from now on, or (None) within each call."""
        self._deleting = executor

    def delete_state(self, tenant_id: TenantId, job: str, version: int) -> None:
        self._delete(_delete_state, self.version(tenant_id, job, version).folder)

    def delete_states_before(self, tenant_id: TenantId, job: str, version: int) -> None:
        """Delete every older state: of the step before, and what kills have left behind."""
        folder = self.job(tenant_id, job) / "versions"
        self._delete(_delete_states_before, folder, version)

    def delete_adapter(self, tenant_id: TenantId, job: str, version: int) -> None:
        self._delete(_delete_adapter, self.version(tenant_id, job, version).folder)

    def delete_job(self, tenant_id: TenantId, job: str) -> None:
        """Delete a job's folder. Its place is free at once."""
        self._throw_away(self.job(tenant_id, job))

    def delete_run_states_before(self, tenant_id: TenantId, run_id: str, version: int) -> None:
        """Delete every older training state, and what kills have left behind."""
        self._delete(_delete_older, self.run(tenant_id, run_id) / "states", version)

    def delete_run_states(self, tenant_id: TenantId, run_id: str) -> None:
        self._throw_away(self.run(tenant_id, run_id) / "states")

    def delete_checkpoint(self, folder: Path) -> None:
        """Delete a checkpoint's folder. Its place is free at once."""
        self._throw_away(folder)

    def delete_strays(self, named: Set[Path], *, before_s: float) -> None:
        """Delete states and checkpoints of runs that are not among those `named`, unless they were
        changed after a time: they may be about to get a name."""
        self._delete(_delete_strays, self.root / "runs", named, before_s)

    def delete_upload(self, tenant_id: TenantId, digest: str) -> None:
        with suppress(OSError):
            self.upload(tenant_id, digest).unlink()

    def delete_tenant(self, tenant_id: TenantId) -> None:
        check_segment("tenant", tenant_id)
        for kind in ("jobs", "uploads", "runs"):
            self._throw_away(self.root / kind / tenant_id)

    def _throw_away(self, folder: Path) -> None:
        trash = self.root / "trash"
        with suppress(OSError):
            number = folder.stat().st_ino  # no two folders have the same one, in the trash either
            trash.mkdir(exist_ok=True)
            folder.rename(trash / str(number))
            self._delete(_empty, trash)

    def _delete(self, function: Callable[..., None], *values: object) -> None:
        if self._deleting is None:
            function(*values)
        else:
            self._deleting.submit(function, *values)


def link_or_copy(source: str, copy: str) -> None:
    try:
        os.link(source, copy)
    except PermissionError:  # a file system without hard links
        shutil.copy2(source, copy)


def size_of(path: Path) -> int:
    """Return the size of a file, or of all files in a folder and below; 0 if there is none."""
    try:
        if path.is_dir():
            return sum(size_of(inner) for inner in path.iterdir())
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _sync_folder(folder: Path) -> None:
    """Make a rename in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Say what the operating system refused as `StoreUnavailable`."""
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"{path}: {error.strerror or error}") from error


# ---------------------------------------------------------------------------------------------
# Deletions. One that fails leaves a file that no row names: nobody needs to hear of it.


def _delete_state(folder: Path) -> None:
    with suppress(OSError):
        (folder / "state").unlink()
    _delete_if_empty(folder)


def _delete_states_before(versions: Path, newest: int) -> None:
    with suppress(OSError):
        for folder in versions.iterdir():
            if int(folder.name.removeprefix("v")) < newest and (folder / "state").exists():
                _delete_state(folder)


def _delete_older(states: Path, newest: int) -> None:
    with suppress(OSError):
        for path in states.iterdir():
            number = path.name.removeprefix("v").partition(".")[0]
            if number.isdigit() and int(number) < newest:
                _remove(path)


def _delete_strays(runs: Path, named: Set[Path], before_s: float) -> None:
    for path in runs.glob("*/*/*/*"):  # tenant, run, kind or "states", one of them
        with suppress(OSError):
            if path not in named and path.stat().st_mtime <= before_s:
                _remove(path)


def _remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _delete_adapter(folder: Path) -> None:
    shutil.rmtree(folder / "adapter", ignore_errors=True)
    _delete_if_empty(folder)


def _delete_if_empty(folder: Path) -> None:
    with suppress(OSError):  # it is not empty, or gone
        folder.rmdir()


def _empty(trash: Path) -> None:
    with suppress(OSError):
        for folder in trash.iterdir():
            shutil.rmtree(folder, ignore_errors=True)
