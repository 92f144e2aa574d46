"""One process at a time runs the jobs of a store."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from marlaas.errors import StoreUnavailable
from marlaas.store.db import Store

ROOT = Path(__file__).parents[2]
HOLDER = (
    "import sys\n"
    "from pathlib import Path\n"
    "from marlaas.store.db import Store\n"
    "store = Store.open(Path(sys.argv[1]), url=sys.argv[2] or None, runs_jobs=True)\n"
    "print('open', flush=True)\n"
    "sys.stdin.read()\n"
)


def test_a_second_server_is_refused_with_the_pid_of_the_first(
    tmp_path: Path, url: str | None
) -> None:
    first = Store.open(tmp_path / "root", url=url, runs_jobs=True)
    # On PostgreSQL a folder of one's own does not help: the jobs are the same.
    other = tmp_path / ("root" if url is None else "other")
    with pytest.raises(StoreUnavailable, match=rf"in use by marlaas, pid {os.getpid()} on .* stop"):
        Store.open(other, url=url, runs_jobs=True)
    reader = Store.open(tmp_path / "root", url=url)
    assert reader.all_jobs() == []
    reader.close()
    first.close()
    Store.open(other, url=url, runs_jobs=True).close()


def test_a_killed_server_is_in_nobodys_way(tmp_path: Path, url: str | None) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "root"), url or ""]
    holder = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == "open\n"
    with pytest.raises(StoreUnavailable, match=f"pid {holder.pid} "):
        Store.open(tmp_path / "root", url=url, runs_jobs=True)
    holder.kill()
    holder.wait()
    holder.stdout.close()
    holder.stdin.close()
    Store.open(tmp_path / "root", url=url, runs_jobs=True).close()


def test_a_store_that_cannot_be_opened_is_held_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"no database" * 100)
    with pytest.raises(StoreUnavailable, match="not a database"):
        Store.open(tmp_path, runs_jobs=True)
    (tmp_path / "store.db").unlink()
    Store.open(tmp_path, runs_jobs=True).close()
