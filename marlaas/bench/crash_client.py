"""The client of `bench crash`: hands jobs over and follows the streams, across every death."""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from marlaas.bench.workload import FAMILIES, MAX_TOKENS
from marlaas.client import Client
from marlaas.client.transport import read_events
from marlaas.errors import MarlaasError
from marlaas.types import EventKind, JobState

NUM_JOBS = 8
TENANTS = ("acme", "birch")


@dataclass
class Told:
    """What the event streams said, of all tenants; several threads write."""

    steps: dict[tuple[str, str, int], Mapping[str, Any]] = field(default_factory=dict)
    """Tenant, job, step -> the event's data."""
    doubled: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    newest_step_s: float = 0.0
    """Wall time at which the newest step was committed."""
    ended: set[tuple[str, str]] = field(default_factory=set)
    """Tenant and name of jobs that are over."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def hear(self, tenant: str, event: Mapping[str, Any]) -> None:
        """Take an event over."""
        with self.changed:
            if event["kind"] == EventKind.STEP.value:
                key = (tenant, event["job"], event["data"]["step"])
                if key in self.steps:
                    self.doubled.append("/".join(map(str, key)))
                self.steps[key] = event["data"]
                self.newest_step_s = max(self.newest_step_s, event["at_s"])
            elif event["kind"] == EventKind.STATE.value:
                state = JobState(event["data"]["state"])
                if state.is_terminal:
                    self.ended.add((tenant, event["job"]))
            self.changed.notify_all()

    def wait_for(self, is_so: Callable[[], bool], limit_s: float) -> bool:
        """Return whether something became so in time."""
        with self.changed:
            return self.changed.wait_for(is_so, limit_s)


class Listener(threading.Thread):
    """Follows one tenant's stream across deaths, behind the last event that it has."""

    def __init__(self, url: str, key: str, tenant: str, told: Told) -> None:
        super().__init__(name=f"listener {tenant}", daemon=True)
        self._url = url
        self._key = key
        self._tenant = tenant
        self._told = told
        self._seq = 0
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.is_set():
            with suppress(httpx.TransportError):
                self._listen()
            self.is_over.wait(0.1)

    def _listen(self) -> None:
        headers = {
            "X-API-Key": self._key,
            "Accept": "text/event-stream",
            "Last-Event-ID": str(self._seq),
        }
        with httpx.stream("GET", f"{self._url}/v1/events", headers=headers, timeout=30.0) as answer:
            if not answer.is_success:
                return
            for data in read_events(answer.iter_lines()):
                if data:
                    self._take(json.loads(data))

    def _take(self, event: Mapping[str, Any]) -> None:
        if event["seq"] != self._seq + 1:
            self._told.faults.append(
                f"{self._tenant}: event {event['seq']} came behind {self._seq}"
            )
        self._seq = event["seq"]
        self._told.hear(self._tenant, event)


class Submitter(threading.Thread):
    """Hands jobs over until the service has taken them, however often it dies meanwhile."""

    def __init__(self, url: str, keys: Mapping[str, str], jobs: "Sequence[Job]") -> None:
        super().__init__(name="submitter", daemon=True)
        self._clients = {tenant: Client(url, key) for tenant, key in keys.items()}
        self._jobs = jobs

    def run(self) -> None:
        for job in self._jobs:
            while True:
                try:
                    self._clients[job.tenant].jobs.create(**job.words)
                    break
                except MarlaasError as error:
                    if not error.code == "unreachable":
                        raise
                    time.sleep(0.2)
        for client in self._clients.values():
            client.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as it is handed over."""

    tenant: str
    words: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.words["name"]

    def __str__(self) -> str:
        return f"{self.tenant}/{self.name}"


def make_jobs(wave: int, steps: int) -> list[Job]:
    """Return eight jobs, in every wave the same but for their tenants; half of them seeded."""
    return [
        Job(
            tenant=f"{TENANTS[number % 2 ^ number // 2 % 2]}-{wave}",
            words={
                "name": f"job-{number}",
                "env": {"family": FAMILIES[number % len(FAMILIES)]},
                "steps": steps,
                "prompts_per_step": 2,
                "group_size": 4,
                "max_staleness": 2,
                "max_tokens": MAX_TOKENS[FAMILIES[number % len(FAMILIES)]],
                "latency": {"median_s": 0.05, "sigma": 1.0},
                "eval_every": 3,
                "eval_prompts": 8,
                "seeded": number % 2 == 0,
                "seed": number,
            },
        )
        for number in range(NUM_JOBS)
    ]
