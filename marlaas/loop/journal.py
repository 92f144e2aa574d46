"""The operations of one run in the order of their numbers, whatever the order they came in.

    arrives ─► waits for its turn ─► started ─► finished
                      └─► given up: a number before it never came

- An operation starts when every number before it was started, and is finished in the same order.
- A refused number is used up: nobody waits for it. If it was a pass, the gradient lacks it from
  its turn on.
- This is the memory of it; what is durable is in the store (`store/operations.py`).

Numbers [0, next_seq) are finished, [next_seq, start_seq) started, [start_seq, ...) to come.
"""

import asyncio
from dataclasses import dataclass, field

from marlaas import runtime
from marlaas.loop.operations import Body, OperationKind, Result, Waiting, body_of
from marlaas.types import Operation


def _new_future() -> "asyncio.Future[Result | Waiting]":
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """An accepted operation without an outcome."""

    seq: int
    kind: OperationKind
    body: Body
    num_bytes: int
    """Of its payload."""
    arrived_s: float = field(default_factory=runtime.now_s)
    num_losses: int = 0
    """Workers that were lost while it was the next to be finished."""
    done: "asyncio.Future[Result | Waiting]" = field(default_factory=_new_future)
    """Its outcome; `Waiting` when the server is told to stop before there is one."""

    @classmethod
    def of(cls, operation: Operation) -> "Entry":
        """Return the entry of an accepted operation with its payload."""
        return cls(
            seq=operation.seq,
            kind=OperationKind(operation.kind),
            body=body_of(operation),
            num_bytes=len(operation.payload),
        )


class Journal:
    """`add*`, `refuse*` -> `take` -> `finish`, in order.

    journal = Journal(next_seq=1)
    journal.add(entry_2); journal.take()               # None: 1 is to come
    journal.add(entry_1); journal.take(), journal.take()
    journal.finish(entry_1, result)
    """

    def __init__(self, next_seq: int, *, is_incomplete: bool = False) -> None:
        self.next_seq = next_seq
        self.is_incomplete = is_incomplete
        """The gradient lacks a pass that failed or was refused."""
        self.num_bytes = 0
        """Of the payloads of all operations without an outcome."""
        self._start_seq = next_seq
        self._entries: dict[int, Entry] = {}
        self._refused: dict[int, bool] = {}
        """Used up ahead of their turn, and whether they were passes."""
        self.changed = asyncio.Event()
        """Something was added, or somebody else wants whoever waits for that to look again."""

    def __len__(self) -> int:
        """Return how many operations have no outcome."""
        return len(self._entries)

    def find(self, seq: int) -> Entry | None:
        return self._entries.get(seq)

    def add(self, entry: Entry) -> None:
        """Take an accepted operation; one that is there, or finished, changes nothing."""
        is_over = entry.seq < self.next_seq or entry.seq in self._refused
        if not is_over and entry.seq not in self._entries:
            self._entries[entry.seq] = entry
            self.num_bytes += entry.num_bytes
            self.changed.set()

    def refuse(self, seq: int, *, is_pass: bool) -> None:
        """A number is used up without an operation."""
        if seq >= self.next_seq and seq not in self._entries:
            self._refused[seq] = is_pass
            self._skip()
            self.changed.set()

    def skip_to(self, next_seq: int, *, is_incomplete: bool) -> None:
        """Numbers before this one are used up, as the store knows."""
        for seq in range(self.next_seq, next_seq):
            self.refuse(seq, is_pass=False)
        self.is_incomplete |= is_incomplete

    def peek(self) -> Entry | None:
        """Return the operation that may start next, if it is there."""
        while self._start_seq in self._refused:
            self._start_seq += 1
        return self._entries.get(self._start_seq)

    def take(self) -> Entry:
        """Start the operation that `peek` returned."""
        entry = self._entries[self._start_seq]
        self._start_seq += 1
        return entry

    def put_back(self) -> None:
        """Whatever was started begins anew."""
        self._start_seq = self.next_seq

    def finish(self, entry: Entry, result: Result) -> None:
        """The outcome of the oldest started operation is stored: it may be seen."""
        assert entry.seq == self.next_seq, f"{entry.seq} finished, {self.next_seq} was to be"
        del self._entries[entry.seq]
        self.num_bytes -= entry.num_bytes
        self.next_seq += 1
        self._skip()
        if not entry.done.done():
            entry.done.set_result(result)

    # Gaps -----------------------------------------------------------------------------------

    @property
    def missing_seq(self) -> int | None:
        """The number that the others wait for, once all that started is finished."""
        is_gap = self._entries and self.peek() is None and self._start_seq == self.next_seq
        return self.next_seq if is_gap else None

    @property
    def gap_since_s(self) -> float:
        """When the last of those that wait behind the gap arrived. While more come, the missing one
        may come too: of a large batch clients send the first part last."""
        return max(entry.arrived_s for entry in self._entries.values())

    @property
    def last_seq(self) -> int:
        return max(self._entries)

    def stop(self, waiting: Waiting) -> None:
        """Whoever waits for an outcome is told to ask again."""
        for entry in self._entries.values():
            if not entry.done.done():
                entry.done.set_result(waiting)

    def _skip(self) -> None:
        while self.next_seq in self._refused:
            self.is_incomplete |= self._refused.pop(self.next_seq)
            self.next_seq += 1
        self._start_seq = max(self._start_seq, self.next_seq)
