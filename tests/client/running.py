"""A real service as a child process: `marlaas serve` on a loopback port, one worker, base tiny."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from marlaas.client import Client, Patience

ROOT = Path(__file__).parents[2]


@dataclass
class Running:
    """One service over any number of starts: made -> start -> (kill | stop) -> start -> ..."""

    folder: Path
    port: int = 0
    url: str = ""
    process: subprocess.Popen | None = None
    env: dict[str, str] = field(default_factory=dict)

    def start(self, *flags: str) -> None:
        """Start it and wait until it listens."""
        is_known = self.credentials.exists()
        home = {"HOME": str(self.folder / "home"), "OMP_WAIT_POLICY": "PASSIVE"}
        kept = {name: os.environ[name] for name in os.environ if not name.startswith("MARLAAS_U")}
        self.env = {**kept, **home, "PYTHONPATH": str(ROOT)}
        arguments = ["serve", "--data", str(self.data), "--port", str(self.port), "--workers", "1"]
        with (self.folder / "stderr.log").open("a") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "marlaas.cli.main", *arguments, *flags],
                env=self.env,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("listening on "):
                self.url = line.split()[-1]
                self.port = int(self.url.rpartition(":")[2])
            # The first start of all says after that where the operator's key is.
            if line.startswith("listening on " if is_known else "the key and the address"):
                return
        raise AssertionError((self.folder / "stderr.log").read_text()[-4000:])

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def credentials(self) -> Path:
        return self.folder / "home" / ".config" / "marlaas" / "credentials"

    @property
    def operator_key(self) -> str:
        return self.credentials.read_text().split('"')[-2]

    def client(self, key: str | None = None, *, tenant: str | None = None) -> Client:
        return Client(
            self.url,
            key or self.operator_key,
            tenant=tenant,
            patience=Patience(attempts=8, stream_s=60.0),
        )

    def kill(self) -> None:
        """End it without a word; engine workers notice by themselves."""
        assert self.process is not None
        self.process.kill()
        self._reap()

    def stop(self) -> int:
        """Let it drain, and return its exit code."""
        assert self.process is not None
        self.process.terminate()
        return self._reap()

    def _reap(self) -> int:
        assert self.process is not None and self.process.stdout is not None
        code = self.process.wait(timeout=60)
        self.process.stdout.close()
        return code
