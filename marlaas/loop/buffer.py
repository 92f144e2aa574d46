"""The buffer of one job: which group may be opened, and which groups a step takes.

    waiting ─► open ─► finished ─► taken ─► consumed (trained or dropped)
       ▲         │
       └─────────┘ the worker that sampled it was lost

The staleness rule, and why it holds
------------------------------------
P groups make a step, S is the bound. A step at trainer version v trains on a group of version w
with staleness v - w, so the group must be taken at a version of at most w + S, its *deadline*. Call
a set of groups *safe at v* if for every j >= 0

    #{groups with deadline <= v + j}  <=  P (j + 1),                                          (*)

that is, if steps of P groups can take them all in time, earliest deadline first.

- Opening a group keeps what is held safe: its deadline v + S is the latest of all, so only j >= S
  is touched, where (*) says that at most P (1 + S) groups are held: the slots. A slot is held until
  the group was trained on *and* the new version published, so "the version now" cannot run ahead.
- A step goes ahead only if what it leaves behind is safe at v + 1. If it is not, it waits for the
  unfinished groups with the earliest deadlines, and at the straggler deadline they are cut, which
  finishes them. Once the P earliest are finished, taking them leaves the others safe: of the at
  most P (j + 2) groups with deadline <= v + 1 + j, P are gone (or all, if there were fewer).

Hence at v + 1 the held groups are safe again, j = 0 says that whatever is due can be taken, and no
group is ever trained on past its deadline. With S = 0 this is exact on-policy training.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from marlaas import runtime
from marlaas.types import Group


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to open a group: its index and the policy version to sample it with."""

    index: int
    version: int


class Buffer:
    """Holds the groups of one job between admission and training.

    The admission stage calls `next_ticket` and `open`; the rollout stage `finish` or `reopen`; the
    train stage awaits `take`, then calls `publish` once the new version is live.

    Seeded jobs follow a fixed lag instead: group i is sampled with version max(0, i // P - S) and
    the step at version k takes groups kP .. kP + P - 1 in that order, so no wall time enters.

    Example, P = 2, S = 1 (four slots):

        buffer.open(buffer.next_ticket())                 # four times: groups 0..3 at version 0
        buffer.next_ticket()                              # None: no slot is free
        buffer.finish(group_2); buffer.finish(group_3)    # two finished, 0 and 1 are not
        await buffer.take(...)                            # goes ahead: 0 and 1 still make version 1
        buffer.publish(1)                                 # two slots free: groups 4, 5 at version 1
        buffer.finish(group_4); buffer.finish(group_5)
        await buffer.take(...)                            # waits: 0 and 1 are due at this very step
    """

    def __init__(
        self, *, num_steps: int, prompts_per_step: int, max_staleness: int, is_seeded: bool
    ) -> None:
        self.version = 0
        self._num_groups = num_steps * prompts_per_step
        self._prompts_per_step = prompts_per_step
        self._max_staleness = max_staleness
        self._is_seeded = is_seeded
        self._next_index = 0
        self._returned: list[int] = []
        """Indices that were open when their worker was lost, to be opened again first."""
        self._open: dict[int, int] = {}
        """Index -> version of the groups being sampled."""
        self._finished: dict[int, Group] = {}
        self._taken: dict[int, Group] = {}
        self._changed = asyncio.Event()
        self._is_closed = False

    # Admission ----------------------------------------------------------------------------

    def restore(self, version: int, consumed: Sequence[int], finished: Sequence[Group]) -> None:
        """Start from the durable record: version, consumed indices, groups still to be trained."""
        self.version = version
        self._finished = {group.index: group for group in finished}
        known = {*consumed, *self._finished}
        self._next_index = max(known, default=-1) + 1
        self._returned = sorted(set(range(self._next_index)) - known)

    def next_ticket(self) -> Ticket | None:
        """Return the next group that may be opened now, or None if there is none."""
        if self._is_closed or self.num_held >= self.num_slots:
            return None
        index = self._returned[0] if self._returned else self._next_index
        if index >= self._num_groups:
            return None
        if not self._is_seeded:
            return Ticket(index, self.version)
        version = self._seeded_version(index)
        return Ticket(index, version) if version <= self.version else None

    def open(self, ticket: Ticket) -> None:
        """Take the slot that `next_ticket` offered."""
        assert ticket == self.next_ticket(), "tickets are used at once and in order"
        if self._returned:
            self._returned.pop(0)
        else:
            self._next_index += 1
        self._open[ticket.index] = ticket.version
        assert self.num_held <= self.num_slots

    # Rollout ------------------------------------------------------------------------------

    def finish(self, group: Group) -> None:
        """Hand over an open group's record."""
        version = self._open.pop(group.index)
        assert version == group.version
        self._finished[group.index] = group
        self._changed.set()

    def reopen(self, index: int) -> None:
        """Give an open group's slot back: it is sampled again, under the version of that time."""
        del self._open[index]
        self._returned = sorted((*self._returned, index))
        self._changed.set()

    # Training -----------------------------------------------------------------------------

    async def take(self, *, deadline_s: float, cut: Callable[[int], None]) -> list[Group] | None:
        """Wait for a step's groups and return them, oldest first; None once closed.

        A step that only stragglers hold back waits `deadline_s`, then calls `cut` on each: their
        rollouts must finish soon.
        """
        assert not self._taken, "the step before has not been published"
        blocked_at_s = None
        while not self._is_closed:
            self._changed.clear()
            chosen = self._choose()
            stragglers = self._stragglers(chosen) if chosen else []
            if chosen and not stragglers:
                self._taken = {index: self._finished.pop(index) for index in chosen}
                return list(self._taken.values())
            if stragglers and not self._is_seeded:
                blocked_at_s = runtime.now_s() if blocked_at_s is None else blocked_at_s
                left_s = blocked_at_s + deadline_s - runtime.now_s()
            else:
                blocked_at_s, left_s = None, None
            if left_s is not None and left_s <= 0:
                for index in stragglers:
                    cut(index)
                left_s = None
            await self._wait(left_s)
        return None

    def publish(self, version: int) -> None:
        """Free the slots of the step that was taken: `version` is live."""
        assert version == self.version + 1
        self.version = version
        self._taken = {}

    def close(self) -> None:
        """Open nothing more and let `take` return None."""
        self._is_closed = True
        self._changed.set()

    # --------------------------------------------------------------------------------------

    @property
    def finished(self) -> Sequence[Group]:
        """Groups that wait for their step."""
        return list(self._finished.values())

    @property
    def num_slots(self) -> int:
        return self._prompts_per_step * (1 + self._max_staleness)

    @property
    def num_held(self) -> int:
        return len(self._open) + len(self._finished) + len(self._taken)

    def oldest_needed_version(self) -> int:
        """Return the oldest version that a held or future group was or will be sampled with."""
        held = [*self._open.values(), *(group.version for group in self._taken.values())]
        held += [version for _, version in self._finished_versions()]
        if self._is_seeded:
            upcoming = self._returned[0] if self._returned else self._next_index
            if upcoming < self._num_groups:
                held.append(self._seeded_version(upcoming))
        return min((self.version, *held))

    def _seeded_version(self, index: int) -> int:
        return max(0, index // self._prompts_per_step - self._max_staleness)

    def _choose(self) -> list[int]:
        """Return the finished groups that a step would take now; empty if there are too few."""
        count = self._prompts_per_step
        if self._is_seeded:
            due = range(self.version * count, (self.version + 1) * count)
            return list(due) if all(index in self._finished for index in due) else []
        by_age = sorted(self._finished, key=lambda index: (self._finished[index].version, index))
        return by_age[:count] if len(by_age) >= count else []

    def _stragglers(self, chosen: Sequence[int]) -> list[int]:
        """Return the unfinished groups that must finish before a step may take `chosen`.

        They are the earliest unfinished ones of the first j at which (*) fails for what would be
        left at version + 1, as many as are too many.
        """
        if self._is_seeded:
            return []
        count, taken = self._prompts_per_step, set(chosen)
        left = sorted(
            (version, index)
            for index, version in (*self._open.items(), *self._finished_versions())
            if index not in taken
        )
        for place, (version, _) in enumerate(left):
            steps_left = version + self._max_staleness - self.version
            excess = place + 1 - count * steps_left
            if excess > 0:
                due = [index for _, index in left[: place + 1] if index in self._open]
                return due[:excess]
        return []

    def _finished_versions(self) -> list[tuple[int, int]]:
        return [(index, group.version) for index, group in self._finished.items()]

    async def _wait(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass
