"""Jobs from a tenant's side: hand one over, follow it, look into it, take its adapter home.

    job = client.jobs.create(name="sums", env={"family": "math"}, steps=40)
    job.wait(progress=True)
    pandas.DataFrame(job.metrics())
    job.adapter("best").download("sums-adapter")

The service owns the job: a client that goes away takes nothing with it, and whoever has the key
finds the job again by its name.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from marlaas import runtime
from marlaas.client.archive import MAX_ADAPTER_BYTES, MAX_MODEL_BYTES, check_new, unpack
from marlaas.client.progress import ProgressLine
from marlaas.client.records import (
    Evaluation,
    GroupInfo,
    GroupRow,
    JobInfo,
    SweepInfo,
    SweepRow,
    Version,
    read,
)
from marlaas.client.transport import Params, Transport
from marlaas.types import Event, EventKind, JobState

PAGE = 500
"""Things asked for at a time where there may be many."""

VersionName = int | str
"""A number, `latest`, `best` or `promoted`."""


class Job:
    """One job of a tenant, as it stood when the service was last asked (`refresh`)."""

    def __init__(self, transport: Transport, info: JobInfo) -> None:
        self._transport = transport
        self.info = info

    def __repr__(self) -> str:
        words = self.reason or self.info.waits_for
        because = f": {words}" if words else ""
        return f"Job({self.name!r}, {self.state}{because}, step {self.step} of {self.steps})"

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def state(self) -> JobState:
        return self.info.state

    @property
    def reason(self) -> str:
        """Why it is in this state, where there is more to say than the state's name."""
        return self.info.reason

    @property
    def step(self) -> int:
        return self.info.step

    @property
    def steps(self) -> int:
        return self.info.steps

    def refresh(self) -> Self:
        """Ask the service how the job stands now."""
        self.info = read(JobInfo, self._call("GET"))
        return self

    # Moves ------------------------------------------------------------------------------------

    def pause(self) -> Self:
        """Stop it where it is; finished work is kept, and `resume` goes on with it."""
        return self._move("pause")

    def resume(self) -> Self:
        return self._move("resume")

    def cancel(self) -> Self:
        """End it for good; what it learned so far stays."""
        return self._move("cancel")

    def delete(self) -> None:
        """Remove the job and everything of it. It must have ended, or be paused."""
        self._call("DELETE")

    def _move(self, verb: str) -> Self:
        self._call("POST", f"/{verb}", is_repeatable=True)
        return self.refresh()

    # What happened ----------------------------------------------------------------------------

    def wait(self, *, progress: bool = False, timeout_s: float | None = None) -> Self:
        """Return once the job is neither queued nor running: it ended, or was paused.

        `progress` shows one line that keeps up with it. A service that restarts meanwhile is
        waited for.

        Raises:
            TimeoutError: `timeout_s` passed; the job goes on.
            MarlaasError: what the service answered, or `Unreachable`.
        """
        line = ProgressLine(sys.stderr if progress else None)
        deadline_s = None if timeout_s is None else runtime.now_s() + timeout_s
        try:
            for event in self.follow():
                if event is None:
                    # The stream stands, maybe anew: what was missed meanwhile is in the job itself.
                    line.show(self.refresh().info)
                else:
                    line.take(event)
                if not self.state.is_active or (event is not None and _ends(event)):
                    break
                if deadline_s is not None and runtime.now_s() > deadline_s:
                    raise TimeoutError(f"{self.name} is {self.state} after {timeout_s:g} s")
            line.show(self.refresh().info)
        finally:
            line.close()
        return self

    def follow(self, *, after: int | None = None) -> Iterator[Event | None]:
        """Yield what happens to the job from now on, or behind number `after`, without end.

        None comes when the stream stands, anew too, and now and then while nothing happens.
        """
        for event in self._transport.stream(f"{self._path}/events", after=after):
            yield None if event is None else read(Event, event)

    def events(self, *, after: int = 0, follow: bool = False) -> Iterator[Event]:
        """Yield what happened to the job; with `follow`, also what happens, until it stops."""
        if not follow:
            yield from self._recorded("/events", after)
            return
        for event in self.follow(after=after):
            if event is not None:
                after = event.seq
                yield event
            # The end of a job may lie behind us, or ahead of us when it was resumed since.
            if (event is None or _ends(event)) and not self.refresh().state.is_active:
                yield from self._recorded("/events", after)
                return

    def logs(self, *, after: int = 0, follow: bool = False) -> Iterator[Event]:
        """Yield what the tenant's own code printed or raised, and what stood still."""
        if not follow:
            yield from self._recorded("/logs", after)
            return
        for event in self.events(after=after, follow=True):
            if event.kind in (EventKind.LOG, EventKind.NOTICE):
                yield event

    def _recorded(self, below: str, after: int) -> Iterator[Event]:
        """Yield what was written behind a number; a page may be empty and not the last."""
        while True:
            page = self._call("GET", below, params={"after": after, "limit": PAGE})
            yield from (read(Event, event) for event in page["events"])
            if page["next"] == after:
                return
            after = page["next"]

    # What was learned -------------------------------------------------------------------------

    def metrics(self, *, after: int = 0) -> list[dict[str, float | bool | int | None]]:
        """Return the learning curve, a row a step: what a data frame is made from."""
        rows: list[dict[str, float | bool | int | None]] = []
        while page := self._call("GET", "/steps", params={"after": after, "limit": PAGE})["steps"]:
            for step in page:
                row = {name: step[name] for name in ("step", "elapsed_s", "is_empty", "is_vetoed")}
                rows.append({**row, **step["metrics"]})
            after = page[-1]["step"]
        return rows

    def evaluations(self) -> list[Evaluation]:
        return [read(Evaluation, row) for row in self._call("GET", "/evaluations")["evaluations"]]

    def evaluate(self, version: VersionName = "latest") -> int:
        """Have a kept version judged unless it was, and return its number.

        It takes a while; an event says how the version did.
        """
        answer = self._call("POST", "/evaluations", body={"version": version})
        return int(answer["version"])

    def groups(
        self,
        *,
        step: int | None = None,
        state: str | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
    ) -> Iterator[GroupRow]:
        """Yield the groups of the job, as few pages at a time as the caller reads."""
        chosen = {"step": step, "state": state, "min_reward": min_reward, "max_reward": max_reward}
        after: int | None = None
        while True:
            page = self._call("GET", "/groups", params={**chosen, "after": after, "limit": PAGE})
            yield from (read(GroupRow, row) for row in page["groups"])
            after = page["next"]
            if after is None:
                return

    def group(self, index: int, *, tokens: bool = False) -> GroupInfo:
        """Return a group with its conversations; `tokens` adds ids, logprobs and versions."""
        params = {"tokens": "true" if tokens else None}
        return read(GroupInfo, self._call("GET", f"/groups/{index}", params=params))

    def versions(self) -> list[Version]:
        return [read(Version, row) for row in self._call("GET", "/versions")["versions"]]

    def adapter(self, version: VersionName = "best") -> "Adapter":
        """Return the adapter of a version; nothing is asked of the service yet."""
        return Adapter(self._transport, self.name, version)

    @property
    def _path(self) -> str:
        return f"/v1/jobs/{quote(self.name, safe='')}"

    def _call(
        self,
        method: str,
        below: str = "",
        *,
        params: Params | None = None,
        body: object = None,
        is_repeatable: bool | None = None,
    ) -> Any:
        return self._transport.call(
            method, self._path + below, params=params, body=body, is_repeatable=is_repeatable
        )


class Adapter:
    """A version of a job's adapter on the service."""

    def __init__(self, transport: Transport, job: str, version: VersionName) -> None:
        self._transport = transport
        self._path = f"/v1/jobs/{quote(job, safe='')}/versions/{quote(str(version), safe='')}"
        self.model = f"{job}@{version}"
        """Its name for `Client.chat`."""

    def download(self, path: str | Path) -> Path:
        """Write it as a PEFT folder, new at `path`, and return where it lies."""
        return self._fetch("adapter", "adapter.tar.gz", Path(path), MAX_ADAPTER_BYTES)

    def merged(self, path: str | Path) -> Path:
        """Write the base with the adapter merged into it as a Hugging Face folder, new at `path`,
        and return where it lies."""
        return self._fetch("merged", "model.tar", Path(path), MAX_MODEL_BYTES)

    def _fetch(self, what: str, name: str, folder: Path, max_bytes: int) -> Path:
        check_new(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside the folder: a model is larger than many a place for temporary files.
        with tempfile.TemporaryDirectory(prefix=".marlaas-", dir=folder.parent) as beside:
            archive = Path(beside) / name
            self._transport.download(f"{self._path}/{what}", archive)
            return unpack(archive, folder, max_bytes=max_bytes)

    def promote(self) -> Version:
        """Make it the one that `JOB@promoted` means; it is kept until another one is."""
        answer = self._transport.call("POST", f"{self._path}/promote", is_repeatable=True)
        return read(Version, answer)

    def keep(self, for_s: float | None) -> Version:
        """Keep it for so many seconds from now; it is deleted then, once the job has ended. None
        leaves it to the job's `keep_versions` again."""
        answer = self._transport.call(
            "POST", f"{self._path}/keep", body={"for_s": for_s}, is_repeatable=True
        )
        return read(Version, answer)


class Jobs:
    """The jobs of a tenant."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, **job: object) -> Job:
        """Hand over a job in the words of the job file (`docs/jobs.md`), and return it.

        The same job handed over twice is one job, so nothing is lost and nothing doubled when an
        answer does not arrive.

        Raises:
            InvalidRequest: with every problem that the service found.
            Conflict: the tenant has another job of that name.
        """
        answer = self._transport.call(
            "POST",
            "/v1/jobs",
            body=job,
            headers={"Idempotency-Key": key_of(job)},
            is_repeatable=True,
        )
        return Job(self._transport, read(JobInfo, answer))

    def get(self, name: str) -> Job:
        answer = self._transport.call("GET", f"/v1/jobs/{quote(name, safe='')}")
        return Job(self._transport, read(JobInfo, answer))

    def list(self, *, state: JobState | str | None = None) -> list[Job]:
        jobs: list[Job] = []
        after: str | None = None
        while True:
            page = self._transport.call(
                "GET", "/v1/jobs", params={"state": state, "after": after, "limit": PAGE}
            )
            jobs += [Job(self._transport, read(JobInfo, row)) for row in page["jobs"]]
            after = page["next"]
            if after is None:
                return jobs


class Sweep:
    """Jobs that differ in a few knobs, compared."""

    def __init__(self, transport: Transport, info: SweepInfo) -> None:
        self._transport = transport
        self.info = info

    def __repr__(self) -> str:
        num_over = sum(row.state.is_terminal for row in self.rows)
        knobs = ", ".join(self.info.knobs)
        return f"Sweep({self.name!r} over {knobs}: {num_over} of {len(self.rows)} jobs ended)"

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def rows(self) -> list[SweepRow]:
        """The jobs, best first where there is a verdict."""
        return self.info.jobs

    def refresh(self) -> Self:
        answer = self._transport.call("GET", f"/v1/sweeps/{quote(self.name, safe='')}")
        self.info = read(SweepInfo, answer)
        return self

    def wait(self, *, timeout_s: float | None = None) -> Self:
        """Return once none of its jobs is queued or running.

        Raises:
            TimeoutError: `timeout_s` passed; the jobs go on.
        """
        deadline_s = runtime.now_s() + timeout_s if timeout_s is not None else None
        jobs = Jobs(self._transport)
        for row in self.rows:
            left_s = None if deadline_s is None else max(0.0, deadline_s - runtime.now_s())
            jobs.get(row.job).wait(timeout_s=left_s)
        return self.refresh()


def key_of(body: Mapping[str, object]) -> str:
    """Return a key that the same request has every time, and no other one has."""
    words = json.dumps(body, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(words.encode()).hexdigest()


def _ends(event: Event) -> bool:
    """Return whether the job was no longer queued or running after this event."""
    is_state = event.kind is EventKind.STATE
    return is_state and not JobState(str(event.data["state"])).is_active
