"""Where the files of a job lie. The store owns these paths; workers write what they point to.

    <root>/jobs/<tenant>/<job>/versions/v000012/state     training state, newest version only
    <root>/jobs/<tenant>/<job>/versions/v000012/adapter/  PEFT folder

Writers write beside the target and rename, so a path either holds a whole file or nothing.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from marlaas.errors import InvalidRequest
from marlaas.types import TenantId

_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What may name a folder: no separator, no leading dot, nothing a shell would expand."""


def check_segment(what: str, name: str) -> str:
    """Return `name` if it can safely name a folder.

    Raises:
        InvalidRequest: it cannot.
    """
    if not _SEGMENT.fullmatch(name):
        raise InvalidRequest(
            f"{what} {name!r}: use 1 to 128 letters, digits, '.', '_' or '-', starting with a "
            "letter or digit"
        )
    return name


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """The files of one policy version."""

    folder: Path

    @property
    def state(self) -> str:
        """Training state: adapter, moments and step clock in one file."""
        return str(self.folder / "state")

    @property
    def adapter(self) -> str:
        """The adapter alone, as a folder that PEFT loads."""
        return str(self.folder / "adapter")

    def prepare(self) -> "VersionFiles":
        """Make the folder that the files go to."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def delete_state(self) -> None:
        Path(self.state).unlink(missing_ok=True)
        self._delete_if_empty()

    def delete_adapter(self) -> None:
        shutil.rmtree(self.adapter, ignore_errors=True)
        self._delete_if_empty()

    def _delete_if_empty(self) -> None:
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()


@dataclass(frozen=True, slots=True)
class Files:
    """Builds every path below the store's root."""

    root: Path

    def job(self, tenant_id: TenantId, job: str) -> Path:
        """Folder of one job."""
        return self.root / "jobs" / check_segment("tenant", tenant_id) / check_segment("job", job)

    def version(self, tenant_id: TenantId, job: str, version: int) -> VersionFiles:
        """Files of one policy version; nothing is created."""
        assert version >= 0
        return VersionFiles(self.job(tenant_id, job) / "versions" / f"v{version:06d}")
