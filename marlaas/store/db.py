"""The durable record of every tenant and job: one database, and the files beside it.

    add_job ─► open_group ─► finish_group ─► commit_step ─► (publish) ─► keep_adapter
                                                  └──► add_evaluation

| part | keeps |
|---|---|
| `jobs.py` | jobs and their states |
| `steps.py` | steps and evaluations |
| `versions.py` | policy versions, which of their files are kept, which is promoted |
| `groups.py` | trajectories |
| `usage.py` | what was used and what is stored |
| `events.py` | history, numbered by tenant |
| `uploads.py` | what tenants upload |
| `sessions.py`, `runs.py` | sessions of clients, their runs and samplers |
| `operations.py` | what clients ask of their runs, and what came of it |
| `checkpoints.py` | saved versions of runs |
| `tenants.py` | tenants, keys, the audit log |
| `backup.py` | a copy of everything, and the way back |

- Finished groups are stored before they are trained on; a step's record, the fate of its groups,
  its version, the cursor, usage and the event are one transaction, committed before the version
  is published.
- Calls are synchronous and take 0.05 to 0.5 ms on SQLite; a service makes them on a thread of their
  own (`async_store.py`).
- `durability="process"` survives a kill of the process, `"power"` also a loss of power.
- Every function on tenant rows takes `tenant_id` first; the exceptions stand in `CROSS_TENANT`.
- A row that does not exist and a row of another tenant look alike.
"""

from pathlib import Path

from marlaas.store.backup import Backups, BackupSummary, restore
from marlaas.store.checkpoints import Checkpoints, split_path
from marlaas.store.groups import GroupState, StoredGroup
from marlaas.store.jobs import StoredJob
from marlaas.store.runs import RunRow
from marlaas.store.tenants import Tenants
from marlaas.store.versions import StoredVersion

__all__ = [
    "CROSS_TENANT",
    "BackupSummary",
    "GroupState",
    "RunRow",
    "Store",
    "StoredGroup",
    "StoredJob",
    "StoredVersion",
    "restore",
    "split_path",
]

CROSS_TENANT = (
    "open",
    "close",
    "backup",
    "all_jobs",
    "drop_expired",
    "drop_results",
    "unfinished_runs",
    "tenants",
    "add_tenant",
    "update_tenant",
    "find_key",
    "audit",
    "audit_log",
)
"""Public functions that are the operator's, not a tenant's."""


class Store(Tenants, Checkpoints, Backups):
    """One open database with the files beside it.

    Lifecycle: constructed (schema brought up to date) -> used by one thread at a time -> closed. A
    second process that is to run jobs on the same store (`runs_jobs`) is refused; readers may come
    and go.

        store = Store(Path("runs/7"))
        store.add_job("acme", spec)
        store.open_group("acme", "sums", 0, version=0)
        store.finish_group("acme", "sums", group)
        store.commit_step("acme", "sums", record, dropped={3: "zero_variance"})
        store.job("acme", "sums").step                      # 1
    """

    def __init__(
        self,
        root: Path,
        *,
        durability: str = "process",
        url: str | None = None,
        runs_jobs: bool = False,
    ) -> None:
        """Open the store of a folder; the folder is made, and the database without a URL is in it.

        Raises:
            StoreUnavailable: the database cannot be reached, written or read, or is too new; or
                another process runs the jobs that this one is to run.
        """
        super().__init__(root, durability=durability, url=url, runs_jobs=runs_jobs)
        self._tidied = set()
        self._is_swept = False

    @classmethod
    def open(
        cls,
        root: Path,
        *,
        url: str | None = None,
        durability: str = "process",
        runs_jobs: bool = False,
    ) -> "Store":
        """Open a store: SQLite in `root/store.db`, or PostgreSQL by URL. Files lie in `root`."""
        return cls(root, durability=durability, url=url, runs_jobs=runs_jobs)

    def drop_expired(self) -> int:
        """Delete adapters and checkpoints whose time is over, the training state of runs that
        nobody goes on with, and sessions that left nothing, of all tenants; return how many went.
        Once in a process, what kills have left of others goes too."""
        if not self._is_swept:
            self._is_swept = True
            self._delete_strays()
        return (
            self._drop_expired_adapters()
            + self._drop_expired_checkpoints()
            + self._end_old_runs()
            + self._drop_empty_sessions()
        )
