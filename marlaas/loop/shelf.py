"""The versions that one worker holds for serving alone, beside whatever is trained there.

    absent ─► loaded ─► in use ─► idle ─► evicted, the least recently used first
                           ▲        │
                           └────────┘

- Every load gets a policy id of its own, which no job can have: a version that is trained, judged
  and served at the same time is three things to the worker, and none can end another.
- A version in use stays. There are at most `max_loaded`, of `max_bytes` in all as far as sizes are
  known; whoever needs one more waits for an idle one, without holding up those whose version is
  there.
- What was lost with a worker is loaded again when it is asked for.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from marlaas.errors import Conflict, NotFound, PolicyDiverged, WorkerLost
from marlaas.loop.concurrency import to_its_end
from marlaas.loop.policies import Home, Station
from marlaas.types import PolicyId, TenantId


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion:
    """A kept version of a job, or a checkpoint of a run. The hash tells it from one of a later job
    of the same name."""

    tenant_id: TenantId
    """Whose it is; another tenant may sample from it if it is published."""
    job: str
    """Or the run's id, which no job can have."""
    version: int
    adapter_hash: str
    folder: str
    """PEFT folder."""
    num_bytes: int = field(default=0, compare=False)
    """What it takes on a worker, roughly; 0 if that is not known."""


@dataclass(slots=True, eq=False)
class LoadedVersion:
    """A version on a worker."""

    policy_id: PolicyId
    home: Home
    """Where it was loaded; on a worker that has started anew it is gone."""
    num_users: int = 0


class Shelf:
    """What is loaded on one station: `take -> (generate) -> put_back`.

    loaded = shelf.take_loaded(version) or await shelf.take(version)
    try:
        ...  # requests name `loaded.policy_id` and `version.version`
    finally:
        shelf.put_back(loaded)
    """

    def __init__(
        self, station: Station, *, max_loaded: int, max_bytes: int, ids: itertools.count
    ) -> None:
        self._station = station
        self._max_loaded = max_loaded
        self._max_bytes = max_bytes
        self._ids = ids
        self._loaded: OrderedDict[ServedVersion, LoadedVersion] = OrderedDict()
        self._loading = asyncio.Lock()
        self._returned = asyncio.Event()
        self.num_loads = 0
        """Loads so far."""

    def __contains__(self, version: ServedVersion) -> bool:
        return self._find(version) is not None

    def __len__(self) -> int:
        return len(self._loaded)

    def take_loaded(self, version: ServedVersion) -> LoadedVersion | None:
        """Return the version if it is on this worker; it stays until `put_back`."""
        loaded = self._find(version)
        if loaded is not None:
            loaded.num_users += 1
            self._loaded.move_to_end(version)
        return loaded

    async def take(
        self, version: ServedVersion, on_load: Callable[[], None] = lambda: None
    ) -> LoadedVersion:
        """Return the version on this worker, loaded if it was not; it stays until `put_back`.

        `on_load` is called if it had to be loaded, which takes the worker some milliseconds.

        Raises:
            NotFound: its folder is gone.
            WorkerLost: the worker went away.
            PolicyDiverged: the folder does not hold what was committed.
        """
        if loaded := self.take_loaded(version):
            return loaded
        async with self._loading:
            loaded = self.take_loaded(version)
            if loaded is None:
                await self._drop_lost()
                await self._make_room(version)
                loaded = await to_its_end(self._load(version))
                on_load()
                loaded.num_users += 1
        return loaded

    def put_back(self, loaded: LoadedVersion) -> None:
        """Let a version be evicted once nobody else uses it."""
        loaded.num_users -= 1
        self._returned.set()

    def _find(self, version: ServedVersion) -> LoadedVersion | None:
        loaded = self._loaded.get(version)
        return loaded if loaded is not None and loaded.home == self._station.home else None

    async def _load(self, version: ServedVersion) -> LoadedVersion:
        name = f"{version.tenant_id}/{version.job}#serve-{next(self._ids)}"
        loaded = LoadedVersion(PolicyId(name), self._station.home)
        adapter_hash = await self._station.worker.trainer.load_version(
            loaded.policy_id, version.version, version.folder
        )
        self.num_loads += 1
        if adapter_hash != version.adapter_hash:
            await self._unload(version, loaded)
            raise PolicyDiverged(
                f"version {version.version} of {version.job} was loaded as {adapter_hash}, "
                f"committed was {version.adapter_hash}: its files have changed"
            )
        self._loaded[version] = loaded
        return loaded

    async def _make_room(self, version: ServedVersion) -> None:
        """Wait until one more version has a place; alone it has one, however large it is."""
        while self._loaded and not self._has_room(version):
            idle = next((one for one, held in self._loaded.items() if not held.num_users), None)
            if idle is not None:
                await self._unload(idle, self._loaded.pop(idle))
            else:
                self._returned.clear()
                await self._returned.wait()

    def _has_room(self, version: ServedVersion) -> bool:
        num_bytes = version.num_bytes + sum(held.num_bytes for held in self._loaded)
        return len(self._loaded) < self._max_loaded and num_bytes <= self._max_bytes

    async def _unload(self, version: ServedVersion, loaded: LoadedVersion) -> None:
        with suppress(NotFound, WorkerLost):
            await self._station.worker.trainer.retire(loaded.policy_id, version.version)

    async def _drop_lost(self) -> None:
        """Forget what went with a lost worker, and take off what half of a split one still has."""
        home = self._station.home
        lost = [version for version, loaded in self._loaded.items() if loaded.home != home]
        for version in lost:
            loaded = self._loaded.pop(version)
            with suppress(NotFound, Conflict, WorkerLost):
                await self._station.worker.trainer.remove(loaded.policy_id)
