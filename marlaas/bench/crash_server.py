"""The service of `bench crash`: `marlaas serve`, with a store that ends the process on command.

    python -m marlaas.bench.crash_server PLAN.json

    call of the store ─► BEFORE ─► statements ─► INSIDE, right before COMMIT ─► AFTER ─► answer

- The service itself knows nothing of this: `launch.serve` is handed this store instead of its own.
- Once the strike file is there, the n-th call of the operation that it names, from then on, is the
  last thing that this process does; the file says at which moment.
- Groups that are opened although they were finished before, in this life or an earlier one, are
  noted in the record file.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from marlaas.config import ServeSettings
from marlaas.launch import serve
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import GroupState, Store
from marlaas.types import TenantId

P = ParamSpec("P")
T = TypeVar("T")

PAGE = 1000


class Moment(StrEnum):
    """When, around an operation of the store, the process ends."""

    BEFORE = "before"
    INSIDE = "inside"
    """All is written and nothing committed."""
    AFTER = "after"
    """All is committed and nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """One durable boundary: at the `number`-th call of `operation`."""

    operation: str
    moment: Moment
    number: int = 1

    def write(self, path: Path) -> None:
        """Arm the server that watches `path`."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.rename(path)

    @classmethod
    def read(cls, path: Path) -> "Boundary":
        fields = json.loads(path.read_text())
        return cls(**{**fields, "moment": Moment(fields["moment"])})


def die() -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


class FatalStore(Store):
    """A store that calls `at_commit` right before every commit."""

    at_commit: Callable[[], None] = staticmethod(lambda: None)

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        with super()._transaction() as db:
            yield db
            self.at_commit()


class FatalAsyncStore(AsyncStore):
    """A store that ends the process at a boundary: unarmed -> armed, once the file is there.

    All of it happens on the store's thread.
    """

    def __init__(
        self,
        store: FatalStore,
        *,
        strike_file: Path,
        record_file: Path,
        die: Callable[[], None] = die,
    ) -> None:
        super().__init__(store)
        store.at_commit = lambda: self._pass(Moment.INSIDE)
        self._strike_file = strike_file
        self._record_file = record_file
        self._die = die
        self._boundary: Boundary | None = None
        self._operation = ""
        self._num_calls = 0
        self._finished = _finished_groups(store)

    async def call(
        self, function: Callable[Concatenate[Store, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return what the function returns, unless this is the end."""

        def watched(store: Store) -> T:
            self._begin(function.__name__, args)
            self._pass(Moment.BEFORE)
            result = function(store, *args, **kwargs)
            self._pass(Moment.AFTER)
            return result

        return await super().call(watched)

    def _begin(self, operation: str, args: tuple[Any, ...]) -> None:
        self._note_group(operation, args)
        if self._boundary is None and self._strike_file.exists():
            self._boundary = Boundary.read(self._strike_file)
        self._operation = operation
        if self._boundary is not None and operation == self._boundary.operation:
            self._num_calls += 1

    def _pass(self, moment: Moment) -> None:
        boundary = self._boundary
        if (
            boundary is not None
            and (boundary.operation, boundary.moment) == (self._operation, moment)
            and self._num_calls >= boundary.number
        ):
            self._die()

    def _note_group(self, operation: str, args: tuple[Any, ...]) -> None:
        if operation == Store.open_group.__name__ and args[:3] in self._finished:
            with self._record_file.open("a") as file:
                file.write(json.dumps(args[:3]) + "\n")
        elif operation == Store.finish_group.__name__:
            tenant_id, job, group = args
            self._finished.add((tenant_id, job, group.index))


def _finished_groups(store: Store) -> set[tuple[TenantId, str, int]]:
    """Return every group that needs no sampling any more: tenant, job, index."""
    found: set[tuple[TenantId, str, int]] = set()
    for stored in store.all_jobs():
        tenant_id, job, after = stored.spec.tenant, stored.spec.name, -1
        while page := store.group_page(tenant_id, job, after=after, limit=PAGE):
            after = page[-1].index
            found |= {
                (tenant_id, job, row.index) for row in page if row.state != GroupState.OPEN.value
            }
    return found


def run(plan_file: Path) -> None:
    """Serve as the plan says: settings of the service, strike file and record file."""
    plan = json.loads(plan_file.read_text())

    def open_store(settings: ServeSettings) -> AsyncStore:
        return FatalAsyncStore(
            FatalStore(Path(settings.folder), durability=settings.durability, runs_jobs=True),
            strike_file=Path(plan["strike_file"]),
            record_file=Path(plan["record_file"]),
        )

    asyncio.run(serve(ServeSettings(**plan["settings"]), open_store=open_store))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
