"""A PostgreSQL server for the tests: the one of MARLAAS_TEST_POSTGRES_URL, or one that they start.

url = server()             # None, reason   when there is neither
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psycopg
import sqlalchemy as sa

URL_VARIABLE = "MARLAAS_TEST_POSTGRES_URL"


class NoServer(Exception):
    """There is no PostgreSQL here; says why."""


@dataclass
class Server:
    """A server that databases are made on, one for each test."""

    url: sa.URL
    process: subprocess.Popen | None = None
    command: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    @contextmanager
    def database(self) -> Iterator[str]:
        """Yield the URL of a new database; it is dropped afterwards."""
        name = f"marlaas_test_{os.getpid()}_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        try:
            yield self.url.set(database=name).render_as_string(hide_password=False)
        finally:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def execute(self, statement: str) -> None:
        plain = self.url.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute(statement)

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **_other_user()
        )
        for _ in range(200):
            with suppress(psycopg.OperationalError):
                self.execute("SELECT 1")
                return
            time.sleep(0.05)
        raise NoServer("PostgreSQL did not start within ten seconds")

    def stop(self) -> None:
        """Stop at once: connections are cut."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait()


@contextmanager
def server() -> Iterator[Server]:
    """Yield a server.

    Raises:
        NoServer: there is none, and none can be started.
    """
    if os.environ.get(URL_VARIABLE):
        yield Server(sa.make_url(os.environ[URL_VARIABLE]))
        return
    binaries = _binaries()
    # Sockets have short paths, and the folder must be open to the other user.
    folder = Path(tempfile.mkdtemp(prefix="marlaas-pg-", dir="/tmp"))
    try:
        user = _other_user()
        if user:
            os.chown(folder, user["user"], user["group"])
        data = folder / "data"
        made = subprocess.run(
            [binaries / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8",
             "--no-sync"],
            capture_output=True, text=True, cwd="/", **user,
        )  # fmt: skip
        if made.returncode:
            raise NoServer(f"initdb failed: {made.stderr.strip()[-200:]}")
        command = [str(binaries / "postgres"), "-D", str(data), "-k", str(folder), "-F",
                   "-c", "listen_addresses=", "-c", "shared_buffers=16MB"]  # fmt: skip
        url = sa.URL.create("postgresql+psycopg", "postgres", database="postgres",
                            query={"host": str(folder)})  # fmt: skip
        started = Server(url, command=command)
        started.start()
        try:
            yield started
        finally:
            started.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _binaries() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    if on_path is not None:
        found.append(Path(on_path).resolve())
    if not found:
        raise NoServer(f"no PostgreSQL binaries; install them, or set {URL_VARIABLE}")
    return found[-1].parent


def _other_user() -> dict:
    """Return whom to run the server as: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise NoServer("PostgreSQL does not run as root, and there is no other user")
