"""How much of each tenant may be in training on one worker at a time, and what it pays.

    pass ─► enter: waits while the tenant's share is full ─► at the worker ─► leave
                                                                               │
                     the tenant's turns at sampling ◄── charged by its cost ◄──┘

A worker takes the policies that are queued there in turns, so who sends much waits for itself alone
as long as nobody's queue there is deep: each tenant has at most one pass, or several that come to
`max_tokens` together, at a worker. What is computed while somebody waits for a turn to sample is
charged in the worker's fair queue; on an idle worker it takes nothing from anybody.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from marlaas.loop.fairness import TokenCounts
from marlaas.loop.policies import Station
from marlaas.types import JobSpec, TenantId


@dataclass(slots=True, eq=False)
class TenantShare:
    """What one tenant has at a worker, and what waits here to follow, first come first served."""

    num_tokens: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)


class TrainingGate:
    """The gate of one station.

    async with gate.passing("acme", num_tokens):
        await station.worker.trainer.forward_backward(...)
    device_s = gate.charge("acme", num_tokens, is_forward_only=False)
    """

    def __init__(self, station: Station, *, max_tokens: int) -> None:
        self._station = station
        self._max_tokens = max_tokens
        self._shares: dict[TenantId, TenantShare] = {}

    @asynccontextmanager
    async def passing(self, tenant_id: TenantId, num_tokens: int) -> AsyncIterator[None]:
        """Wait until a pass may go to the worker, and count it there until the block ends."""
        share = self._shares.setdefault(tenant_id, TenantShare())
        if share.waiting or not self._fits(share, num_tokens):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            share.waiting.append((num_tokens, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it came while the caller gave up
                    self._leave(tenant_id, share, num_tokens)
                elif (num_tokens, turn) in share.waiting:
                    share.waiting.remove((num_tokens, turn))
                    self._admit(tenant_id, share)
                raise
        else:
            share.num_tokens += num_tokens
        try:
            yield
        finally:
            self._leave(tenant_id, share, num_tokens)

    def charge(self, tenant_id: TenantId, num_tokens: int, *, is_forward_only: bool) -> float:
        """Charge a pass to its tenant; return what it cost in device seconds."""
        counts = TokenCounts(
            prefill=num_tokens if is_forward_only else 0,
            decode=0,
            train=0 if is_forward_only else num_tokens,
        )
        station = self._station
        cost_s = station.costs.seconds(counts)
        if station.queue.has_waiting:
            # A tenant that never stood in the queue has no account there until it did.
            spec = JobSpec(tenant=tenant_id, name="#train", env={})  # no job is called so
            station.queue.add(spec)
            station.queue.discard(spec)
            station.queue.charge(spec, cost_s)
        return cost_s

    def _fits(self, share: TenantShare, num_tokens: int) -> bool:
        return share.num_tokens == 0 or share.num_tokens + num_tokens <= self._max_tokens

    def _leave(self, tenant_id: TenantId, share: TenantShare, num_tokens: int) -> None:
        share.num_tokens -= num_tokens
        self._admit(tenant_id, share)

    def _admit(self, tenant_id: TenantId, share: TenantShare) -> None:
        while share.waiting and self._fits(share, share.waiting[0][0]):
            tokens, turn = share.waiting.popleft()
            if not turn.cancelled():
                share.num_tokens += tokens
                turn.set_result(None)
        if not share.waiting and not share.num_tokens:
            self._shares.pop(tenant_id, None)
