"""Completions that wait for a worker: each tenant has a lane of its own, and turns are fair.

    turn asked for ─► first in line ─► (fair queue: the lane's turn) ─► place reserved, charged
                                                                                  │
                                        settled on what it took ◄─── sampled ◄────┘

In a worker's fair queue a lane stands as one more job of its tenant while somebody waits in it, so
completions and groups of all tenants compete in predicted device seconds. The admission stage of
the controller calls it as a guest of the station.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from marlaas.errors import WorkerLost
from marlaas.loop.fairness import TokenCounts
from marlaas.loop.policies import Placement, Station
from marlaas.types import Completion, GenerateRequest, JobSpec, TenantId

LOAD_PREFILL_TOKENS = 64
"""What loading a version costs a worker, in tokens of prefill (rank 8 on the base `tiny`: 1.6 ms,
against 28 us a token)."""

FOLLOW = 0.2
"""Weight of the newest completion in a lane's running guess of how long replies are."""


class Place:
    """Room for one sequence on a worker: reserved -> sampling -> free, or reserved -> closed.

    It is bound to the worker as it was when the place was given: what is loaded there goes with it.
    """

    def __init__(self, station: Station, on_room: Callable[[], None]) -> None:
        self._station = station
        self._home = station.home
        self._on_room = on_room
        self._is_reserved = True
        station.load.num_reserved += 1

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample the sequence that the place is for."""
        self._use()
        kv_tokens = len(request.tokens) + request.sampling.max_tokens
        with self._station.load.sampling(kv_tokens, self._on_room):
            worker = self._station.worker
            if self._station.home != self._home:
                raise WorkerLost(f"{worker.name} was started anew")
            return await worker.generator.generate(request)

    def close(self) -> None:
        """Give the place back if it was not used. Idempotent."""
        self._use()
        self._on_room()

    def _use(self) -> None:
        self._station.load.num_reserved -= self._is_reserved
        self._is_reserved = False


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Leave to sample one sequence on a worker."""

    place: Place
    """To be closed whatever happens."""
    num_tokens: int
    """Of the prompt."""
    max_tokens: int
    estimate_s: float
    """Device seconds that were charged for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A completion that waits for its turn, and what it is expected to cost."""

    num_tokens: int
    max_tokens: int
    counts: TokenCounts
    turn: asyncio.Future[Turn]


class Lane:
    """A tenant's completions that wait for one worker, first come first served.

    turn = await lane.turn(len(tokens), max_tokens)      # admission calls `_open` meanwhile
    completion = await turn.place.generate(request)
    turn.place.close()
    device_s = lane.settle(turn, completion)
    """

    def __init__(self, tenant_id: TenantId, station: Station, placement: Placement) -> None:
        self._spec = JobSpec(tenant=tenant_id, name="#serve", env={})  # no job is called so
        self._station = station
        self._placement = placement
        self._waiting: deque[Waiting] = deque()
        self._share = 0.5
        """Part of `max_tokens` that replies take, as far as is known."""
        station.guests[self._spec.job_id] = self._open

    def __len__(self) -> int:
        return len(self._waiting)

    async def turn(self, num_tokens: int, max_tokens: int) -> Turn:
        """Wait until a completion may begin. Its place is reserved from then on."""
        counts = TokenCounts(prefill=num_tokens, decode=self._share * max_tokens, train=0)
        turn: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        waiting = Waiting(num_tokens, max_tokens, counts, turn)
        self._waiting.append(waiting)
        self._stand()
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came while the client left
                turn.result().place.close()
                self.give_back(turn.result())
            elif waiting in self._waiting:
                self._waiting.remove(waiting)
                self._stand()
            raise

    def settle(self, turn: Turn, completion: Completion) -> float:
        """Correct the charge to what a completion cost; return that in device seconds."""
        num_sampled = len(completion.tokens)
        num_computed = turn.num_tokens - completion.num_cached_tokens
        device_s = self._station.costs.seconds(
            TokenCounts(prefill=num_computed, decode=num_sampled, train=0)
        )
        self._station.queue.charge(self._spec, device_s - turn.estimate_s)
        self._share += FOLLOW * (num_sampled / turn.max_tokens - self._share)
        return device_s

    def give_back(self, turn: Turn) -> None:
        """Take back the charge of a completion that came to nothing without its client's doing."""
        self._station.queue.charge(self._spec, -turn.estimate_s)

    def charge_load(self) -> None:
        """Charge a version that was loaded for a completion of this lane."""
        cost = TokenCounts(prefill=LOAD_PREFILL_TOKENS, decode=0, train=0)
        self._station.queue.charge(self._spec, self._station.costs.seconds(cost))

    def _open(self) -> None:
        """Give the first in line its turn: the admission stage says that it is this lane's."""
        waiting = self._waiting.popleft()
        if not waiting.turn.cancelled():  # its client may have left just now
            place = Place(self._station, self._placement.on_room)
            estimate_s = self._station.costs.seconds(waiting.counts)
            self._station.queue.charge(self._spec, estimate_s)
            turn = Turn(place, waiting.num_tokens, waiting.max_tokens, estimate_s)
            waiting.turn.set_result(turn)
        self._stand()

    def _stand(self) -> None:
        """Compete while somebody waits, at the cost of the first in line."""
        if self._waiting:
            self._station.costs.expect(self._spec.job_id, self._waiting[0].counts)
            self._station.queue.add(self._spec)
            self._placement.on_room()
        else:
            self._station.queue.discard(self._spec)
