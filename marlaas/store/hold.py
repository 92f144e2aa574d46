"""Who runs the jobs of a store: one process at a time, and the next one is told who.

    hold(root) ─► runs jobs ─► os.close, or the process ends in whatever way

- The hold is a lock on a file of the folder, so a kill ends it and no stale one is ever in the way.
  The file stays: if it went, two processes could each hold a file of that name.
- Readers do not ask: reports and backups come and go beside a server.
- On PostgreSQL the server's own connection holds an advisory lock, too: two servers on one database
  may have folders of their own. A connection that is made anew takes it anew, or may not write.
"""

import fcntl
import os
import socket
from pathlib import Path
from typing import Any

from marlaas.errors import StoreUnavailable
from marlaas.store.files import disk_errors

LOCK_FILE = "server.lock"
"""In the store's folder: locked by who runs jobs, and says who that is."""

_SERVER_LOCK = 5_605_270_802
"""Key of the PostgreSQL advisory lock of who runs jobs."""

_FIND_HOLDER = f"""
SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND objsubid = 1
AND classid = {_SERVER_LOCK >> 32} AND objid = {_SERVER_LOCK & 0xFFFFFFFF}
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


def hold(root: Path) -> int:
    """Become the one that runs jobs in a folder; return what to close in the end.

    Raises:
        StoreUnavailable: another process does, or the folder cannot be locked.
    """
    path = root / LOCK_FILE
    with disk_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _this_process().encode(), 0)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace")
            os.close(descriptor)
            raise in_use(str(root), holder) from None
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def hold_database(cursor: Any, where: str) -> None:
    """Become the one that runs jobs of a PostgreSQL database, as long as a connection lasts.

    Raises:
        StoreUnavailable: another server does.
    """
    cursor.execute("SELECT set_config('application_name', %s, false)", [_this_process()])
    cursor.execute(f"SELECT pg_try_advisory_lock({_SERVER_LOCK})")
    if not cursor.fetchone()[0]:
        cursor.execute(_FIND_HOLDER)
        row = cursor.fetchone()
        raise in_use(where, row[0] if row else "")


def in_use(where: str, holder: str) -> StoreUnavailable:
    """Return the refusal of a second server."""
    return StoreUnavailable(
        f"{where} is in use by {holder or 'another process'}, which runs its jobs: stop that one, "
        "hand your jobs over to it (marlaas submit), or use another folder or database"
    )


def _this_process() -> str:
    return f"marlaas, pid {os.getpid()} on {socket.gethostname()}"
