"""Completions that wait for a worker: each tenant has a lane of its own, and turns are fair.

    turn asked for ─► first in line ─► (fair queue: the lane's turn) ─► place reserved, charged
                                                                                  │
                                        settled on what it took ◄─── sampled ◄────┘

In a worker's fair queue a lane stands as one more job of its tenant while somebody waits in it, so
completions and groups of all tenants compete in predicted device seconds. The admission stage of
the controller calls it as a guest of the station; where there is room, and it is the lane's turn
anyway, nobody has to wait for that.

- While lanes are in use a few places of a worker are kept for tenants that have nothing there: a
  thousand samples of one tenant, each of them long, hold up another's single one for no longer than
  it takes alone. Such a place costs its tenant no turn: it is one at a time.
"""

import asyncio
from collections import deque
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

KEPT_SHARE = 16
"""One place in so many is kept for tenants that have nothing on a worker: a batch loses little by
being that much smaller."""

MIN_KEPT_BATCH = 8
"""Batches smaller than this are too small to keep anything of them."""


class Turn:
    """Leave to sample one sequence on a worker: reserved -> sampling -> closed.

    It is bound to the worker as it was when the turn came: what is loaded there goes with it.
    """

    __slots__ = ("_estimate_s", "_home", "_is_reserved", "_lane")

    def __init__(self, lane: "Lane", estimate_s: float | None) -> None:
        """`estimate_s` is what was charged, None if nothing was."""
        self._lane = lane
        self._estimate_s = estimate_s
        self._home = lane.station.home
        self._is_reserved = True
        lane.station.load.num_reserved += 1

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample the sequence that the turn is for."""
        station = self._lane.station
        self._use()
        kv_tokens = len(request.tokens) + request.sampling.max_tokens
        with station.load.sampling(kv_tokens, _nobody):  # `close` follows, and tells
            if station.home != self._home:
                raise WorkerLost(f"{station.worker.name} was started anew")
            return await station.worker.generator.generate(request)

    def settle(self, num_computed: int, num_sampled: int, max_tokens: int) -> float:
        """Correct the charge to what a completion cost, in tokens of the prompt that were computed
        for it and tokens sampled; return that in device seconds."""
        lane = self._lane
        device_s = lane.station.costs.seconds(
            TokenCounts(prefill=num_computed, decode=num_sampled, train=0)
        )
        if self._estimate_s is not None:
            lane.charge(device_s - self._estimate_s)
        lane.share += FOLLOW * (num_sampled / max_tokens - lane.share)
        return device_s

    def give_back(self) -> None:
        """Take back the charge of a completion that came to nothing without its client's doing."""
        if self._estimate_s is not None:
            self._lane.charge(-self._estimate_s)

    def close(self) -> None:
        """Let others have the place, whatever came of it."""
        self._use()
        self._lane.leave()

    def _use(self) -> None:
        self._lane.station.load.num_reserved -= self._is_reserved
        self._is_reserved = False


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A completion that waits for its turn, and what it is expected to cost."""

    counts: TokenCounts
    turn: asyncio.Future[Turn]


class Lane:
    """A tenant's completions that wait for one worker, first come first served.

    turn = await lane.turn(len(tokens), max_tokens)      # admission calls `_open` meanwhile
    try:
        completion = await turn.generate(request)
    finally:
        turn.close()
    device_s = turn.settle(num_computed, len(completion.tokens), max_tokens)
    """

    def __init__(self, tenant_id: TenantId, lanes: "Lanes") -> None:
        self._spec = JobSpec(tenant=tenant_id, name="#serve", env={})  # no job is called so
        self._job_id = self._spec.job_id
        self._lanes = lanes
        self.station = lanes.station
        self._waiting: deque[Waiting] = deque()
        self._num_turns = 0
        self.share = 0.5
        """Part of `max_tokens` that replies take, as far as is known."""
        self.station.guests[self._job_id] = self._open

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiting)

    @property
    def is_newcomer(self) -> bool:
        """True when the tenant has nothing under way here."""
        return self._num_turns == 0

    async def turn(self, num_tokens: int, max_tokens: int) -> Turn:
        """Wait until a completion may begin. Its place is reserved from then on."""
        counts = TokenCounts(prefill=num_tokens, decode=self.share * max_tokens, train=0)
        self._lanes.enter()
        turn = None if self._waiting else self._at_once(counts)
        return turn or await self._in_line(counts)

    def charge(self, cost_s: float) -> None:
        self.station.queue.charge(self._spec, cost_s)

    def charge_load(self) -> None:
        """Charge a version that was loaded for a completion of this lane."""
        cost = TokenCounts(prefill=LOAD_PREFILL_TOKENS, decode=0, train=0)
        self.charge(self.station.costs.seconds(cost))

    def leave(self) -> None:
        """A turn is over."""
        self._num_turns -= 1
        self._lanes.leave()

    def take_kept_place(self) -> None:
        """Give the first in line a place that is kept for newcomers, if that is what it is."""
        if self._waiting and self.is_newcomer:
            waiting = self._waiting.popleft()
            if not waiting.turn.cancelled():
                waiting.turn.set_result(self._begin(waiting.counts, is_charged=False))
            self._stand()

    def _at_once(self, counts: TokenCounts) -> Turn | None:
        """Return a turn that there is now, if nobody has to be asked."""
        load, queue = self.station.load, self.station.queue
        if not load.has_room:
            is_free = self.is_newcomer and load.has_kept_place
            return self._begin(counts, is_charged=False) if is_free else None
        self.station.costs.expect(self._job_id, counts)
        queue.add(self._spec)
        if queue.next() != self._job_id:
            return None
        turn = self._begin(counts, is_charged=True)
        queue.discard(self._spec)
        return turn

    async def _in_line(self, counts: TokenCounts) -> Turn:
        turn: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        waiting = Waiting(counts, turn)
        self._waiting.append(waiting)
        self._lanes.num_waiting += 1
        self._stand()
        if self.is_newcomer and len(self._waiting) == 1:
            self._lanes.newcomers.append(self)
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came while the client left
                turn.result().close()
                turn.result().give_back()
                raise
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._stand()
            self._lanes.leave()
            raise
        finally:
            self._lanes.num_waiting -= 1

    def _open(self) -> None:
        """Give the first in line its turn: the admission stage says that it is this lane's."""
        waiting = self._waiting.popleft()
        if not waiting.turn.cancelled():  # its client may have left just now
            waiting.turn.set_result(self._begin(waiting.counts, is_charged=True))
        self._stand()

    def _begin(self, counts: TokenCounts, *, is_charged: bool) -> Turn:
        estimate_s = None
        if is_charged:
            estimate_s = self.station.costs.seconds(counts)
            self.charge(estimate_s)
        self._num_turns += 1
        return Turn(self, estimate_s)

    def _stand(self) -> None:
        """Compete while somebody waits, at the cost of the first in line."""
        if self._waiting:
            self.station.costs.expect(self._job_id, self._waiting[0].counts)
            self.station.queue.add(self._spec)
            self._lanes.on_room()
        else:
            self.station.queue.discard(self._spec)


class Lanes:
    """The lanes of all tenants at one worker: `lanes.of(tenant_id).turn(...)`."""

    def __init__(self, station: Station, placement: Placement) -> None:
        self.station = station
        self._placement = placement
        self._lanes: dict[TenantId, Lane] = {}
        self._num_open = 0
        """Completions that wait or have their turn."""
        self.num_waiting = 0
        self.newcomers: deque[Lane] = deque()
        """Lanes that had nothing under way when somebody came who has to wait."""
        most = station.load.max_decoding
        self._num_kept = max(1, most // KEPT_SHARE) if most >= MIN_KEPT_BATCH else 0

    def of(self, tenant_id: TenantId) -> Lane:
        lane = self._lanes.get(tenant_id)
        if lane is None:
            lane = self._lanes[tenant_id] = Lane(tenant_id, self)
        return lane

    @property
    def num_busy(self) -> int:
        """How many sequences are at the worker, or wait for it here."""
        load = self.station.load
        return load.num_sampling + load.num_reserved + self.num_waiting

    def on_room(self) -> None:
        self._placement.on_room()

    def enter(self) -> None:
        """A completion has come."""
        self._num_open += 1
        self.station.load.num_kept = self._num_kept

    def leave(self) -> None:
        """A completion is over, or its client has left."""
        self._num_open -= 1
        if not self._num_open:
            self.station.load.num_kept = 0
        while self.newcomers and self.station.load.has_kept_place:
            self.newcomers.popleft().take_kept_place()
        self._placement.on_room()


def _nobody() -> None:
    """Be told, and do nothing."""
