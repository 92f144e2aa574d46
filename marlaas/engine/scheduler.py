"""Decides what the generator computes next, and who has KV memory meanwhile.

    waiting -> filling -> decoding -> finished            (parked with its KV if it will go on)
       ^                     |
       `----- preempted -----'

Prefill computes all tokens but the last; the last one, whose logits are wanted, always goes through
a decode step. So a sequence whose prefix is shared, parked or preempted needs no special case: it
fills what is missing, if anything, and decodes.

Rules:
- A sequence's prefill is cut at its own places only (its prefix length, and each `budget` tokens
  from where it started), never where a neighbour happened to fill a pass: attention rounds
  differently when a chunk is cut elsewhere.
- Memory goes first to who came first. When it is short: parked KV goes, oldest first; then shared
  prefixes, least recently used first; then the youngest running sequence starts over later.
- In exact mode a sequence that lost its KV gets the same bits again: what was decoded is replayed
  by decode steps on the known tokens, what was prefilled by the same prefill.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from marlaas.engine.kv_cache import Chunk, Slab, SlabKind, SlabPool
from marlaas.engine.types import SequenceRequest
from marlaas.model.lora import Slot

GROWTH_TOKENS = 64
"""Room for sampled tokens that a sequence starts with; it moves to larger slabs as it grows."""


@dataclass(slots=True, eq=False, kw_only=True)
class Context:
    """Tokens under one slot whose KV is wanted."""

    slot: Slot | None
    tokens: list[int]
    slab: Slab | None = None

    @property
    def num_cached(self) -> int:
        return self.slab.length if self.slab else 0

    def next_prefill_end(self, budget: int) -> int:
        """Return where the next chunk of prefill ends; `num_cached` when there is none to do."""
        return min(self.num_cached + budget, len(self.tokens))


@dataclass(slots=True, eq=False, kw_only=True)
class Prefix(Context):
    """A shared opening of several sequences: filled once, then copied into each one's slab."""

    key: tuple
    waiters: list["Running"] = field(default_factory=list)
    """Sequences that go on once it is filled."""

    @property
    def is_ready(self) -> bool:
        return self.num_cached == len(self.tokens)


@dataclass(slots=True, eq=False, kw_only=True)
class Running(Context):
    """One request from submission to result."""

    request: SequenceRequest
    arrival: int
    limit: int
    """Most tokens, context and completion together."""
    prefix_len: int
    """Prefill is cut here, shared or not."""
    logprobs: list[float] = field(default_factory=list)
    slots: list[tuple[int, Slot | None]] = field(default_factory=list)
    """(first sampled token, slot) of each run of tokens under one slot."""
    decoded: list[list[int]] = field(default_factory=list)
    """[start, end) of positions whose KV came from decode steps; the last end may lag behind."""
    is_replaying: bool = False
    """Decoded KV is replayed by decode steps (exact mode) rather than prefilled."""
    is_mixed: bool = False
    """Its KV was computed under more than one slot: of no use to any other sequence."""
    num_reused: int = 0
    """Context tokens that were not computed for this request."""

    @property
    def num_prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - self.num_prompt

    def _replay_range(self) -> list[int] | None:
        """Return the first decoded range that is still to be replayed, if any."""
        if self.is_replaying:
            for span in self.decoded:
                if span[1] > self.num_cached:
                    return span
        return None

    def next_prefill_end(self, budget: int) -> int:
        start, end = self.num_cached, len(self.tokens) - 1
        span = self._replay_range()
        if span is not None:
            end = max(start, min(end, span[0]))
        if start < self.prefix_len:
            end = min(end, self.prefix_len)
        return min(start + budget, end)

    def begin_decode(self) -> None:
        """Note that KV comes from decode steps from here on."""
        start = self.num_cached
        if not any(first <= start <= end for first, end in self.decoded):
            self.decoded.append([start, start])

    def note_decoded(self) -> None:
        """Note how far decode steps have come; before the slab is dropped or parked."""
        if self.decoded and self.slab is not None and self.slab.kind is SlabKind.DECODING:
            self.decoded[-1][1] = max(self.decoded[-1][1], self.num_cached)


@dataclass(slots=True, eq=False, kw_only=True)
class Parked(Context):
    """A finished turn whose sequence will go on. In exact mode it outlives its slab."""

    prefix_len: int
    decoded: list[list[int]]
    is_mixed: bool
    is_in_flight: bool


class Scheduler:
    """Queues and memory of one generator. Who calls what, each quantum:

    scheduler.admit()                         # waiting -> filling, as memory allows
    chunks = scheduler.next_prefill()         # then after the pass: scheduler.prefilled(chunks)
    scheduler.make_room()                     # before a decode step
    scheduler.finish(sequence, keep_kv=...)   # after it, for each that ended
    """

    def __init__(
        self, pool: SlabPool, *, max_batch: int, budget_tokens: int, is_exact: bool = False
    ) -> None:
        self.pool = pool
        self.max_batch = max_batch
        self.budget_tokens = budget_tokens
        self.is_exact = is_exact
        self.waiting: list[Running] = []
        """By arrival."""
        self.running: dict[str, Running] = {}
        """By request id: has a slab, fills or decodes."""
        self.filling: list[Running | Prefix] = []
        self.prefixes: dict[tuple, Prefix] = {}
        """Least recently used first."""
        self.parked: dict[str, Parked] = {}
        """By sequence id, oldest first."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.filling)

    def sequences(self) -> Iterator[Running]:
        """Yield every sequence that has not ended."""
        yield from self.waiting
        yield from self.running.values()
        for prefix in self.prefixes.values():
            yield from prefix.waiters

    # -- in and out ---------------------------------------------------------------------------

    def add(self, sequence: Running) -> None:
        insort(self.waiting, sequence, key=lambda other: other.arrival)

    def remove(self, request_id: str) -> Running | None:
        """Take a sequence out, wherever it is, and free its KV."""
        sequence = next((s for s in self.sequences() if s.request.request_id == request_id), None)
        if sequence is None:
            return None
        if request_id in self.running:
            self.finish(sequence, keep_kv=False)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            for prefix in list(self.prefixes.values()):
                if sequence in prefix.waiters:
                    prefix.waiters.remove(sequence)
                    if not prefix.waiters and not prefix.is_ready:
                        self._drop_prefix(prefix)
        return sequence

    def finish(self, sequence: Running, *, keep_kv: bool) -> None:
        """Take a running sequence out; park its KV or free it."""
        del self.running[sequence.request.request_id]
        if sequence in self.filling:
            self.filling.remove(sequence)
        sequence.note_decoded()
        slab, sequence.slab = sequence.slab, None
        assert slab is not None, "a running sequence has a slab"
        if not keep_kv:
            self.pool.free(slab)
            return
        self.pool.set_kind(slab, SlabKind.IDLE)
        self.release(sequence.request.sequence_id)
        parked = Parked(
            slot=sequence.slot,
            tokens=sequence.tokens[: slab.length],
            slab=slab,
            prefix_len=sequence.prefix_len,
            decoded=sequence.decoded,
            is_mixed=sequence.is_mixed,
            is_in_flight=sequence.request.is_in_flight,
        )
        slab.owner = parked
        self.parked[sequence.request.sequence_id] = parked

    def release(self, sequence_id: str) -> None:
        """Forget what is parked for a sequence."""
        parked = self.parked.pop(sequence_id, None)
        if parked is not None and parked.slab is not None:
            self.pool.free(parked.slab)

    def forget_slot(self, slot: Slot) -> None:
        """Drop every KV computed under a slot. No running sequence uses it."""
        assert all(s.slot != slot for s in self.sequences()), f"{slot} is in use"
        for sequence_id in [key for key, parked in self.parked.items() if parked.slot == slot]:
            self.release(sequence_id)
        for prefix in [prefix for prefix in self.prefixes.values() if prefix.slot == slot]:
            self._drop_prefix(prefix)

    def switch_slot(self, old: Slot, new: Slot) -> None:
        """Let in-flight sequences of one slot go on under another from the next token."""
        for prefix in list(self.prefixes.values()):
            leaving = [s for s in prefix.waiters if s.request.is_in_flight and s.slot == old]
            for sequence in leaving:
                prefix.waiters.remove(sequence)
                self.add(sequence)
            if leaving and not prefix.waiters and not prefix.is_ready:
                self._drop_prefix(prefix)
        for sequence in self.sequences():
            if sequence.request.is_in_flight and sequence.slot == old:
                sequence.slot = new
                sequence.is_mixed |= sequence.num_cached > 0
        for parked in self.parked.values():
            if parked.is_in_flight and parked.slot == old:
                parked.slot, parked.is_mixed = new, True

    # -- what to compute ----------------------------------------------------------------------

    def admit(self) -> None:
        """Give slabs to waiting sequences, first come first served, until one has to wait."""
        while self.waiting and len(self.running) < self.max_batch:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                return

    def next_prefill(self) -> list[Chunk]:
        """Return the chunks of the next prefill pass, within the token budget; maybe none."""
        chunks: list[Chunk] = []
        left = self.budget_tokens
        for context in self.filling:
            assert context.slab is not None
            end = context.next_prefill_end(self.budget_tokens)
            if end - context.num_cached > left:
                break
            left -= end - context.num_cached
            chunks.append(Chunk(context.slab, end))
        return chunks

    def prefilled(self, chunks: list[Chunk]) -> None:
        """Move on what a prefill pass completed."""
        for chunk in chunks:  # all lengths first: moving a slab carries no more than its length
            chunk.slab.length = chunk.end
        for chunk in chunks:
            self._advance(chunk.slab.owner)  # type: ignore[arg-type]

    def refill(self, sequence: Running) -> None:
        """Put a replaying sequence that reached tokens that were prefilled back to filling."""
        assert sequence.slab is not None
        self.pool.set_kind(sequence.slab, SlabKind.FILLING)
        self.filling.append(sequence)

    def make_room(self) -> None:
        """See that every decoding slab has room for one more position; preempt if need be."""
        for slab in self.pool.decoding():
            if slab.length < slab.capacity or slab.kind is not SlabKind.DECODING:
                continue
            while not self.pool.grow(slab, slab.length + 1):
                if self._reclaim():
                    continue
                youngest = max(self.running.values(), key=lambda sequence: sequence.arrival)
                self.preempt(youngest)
                if youngest is slab.owner:
                    break

    def preempt(self, sequence: Running) -> None:
        """Free a running sequence's KV and let it wait again with what it has sampled."""
        self.finish(sequence, keep_kv=False)
        sequence.is_replaying, sequence.is_mixed = self.is_exact, False
        if not self.is_exact:
            sequence.decoded = []
        self.add(sequence)

    # -- admission ----------------------------------------------------------------------------

    def _admit(self, sequence: Running) -> bool:
        """Give the first waiting sequence its slab, or let it wait for its prefix."""
        if self._unpark(sequence):
            return True
        prefix = None
        if self._may_share(sequence):
            prefix = self._prefix_of(sequence)
            if prefix is not None and not prefix.is_ready:
                self.waiting.remove(sequence)
                prefix.waiters.append(sequence)
                return True
        slab = self._allocate(sequence, self._start_tokens(sequence), keep=prefix)
        if slab is None and not self.running and not self.filling:
            # Only the prefix itself stands in the way: without it, the sequence fits.
            prefix = None
            slab = self._allocate(sequence, self._start_tokens(sequence))
        if slab is None:
            return False
        if prefix is not None and prefix.slab is not None:
            self.pool.copy(prefix.slab, slab)
            sequence.num_reused = max(sequence.num_reused, slab.length)
        self._start(sequence, slab)
        return True

    def _start(self, sequence: Running, slab: Slab) -> None:
        slab.owner, sequence.slab = sequence, slab
        self.waiting.remove(sequence)
        self.running[sequence.request.request_id] = sequence
        self.filling.append(sequence)
        self._advance(sequence)

    def _advance(self, context: Running | Prefix) -> None:
        """Let a filling context that has nothing left to prefill go on."""
        assert context.slab is not None
        if context.next_prefill_end(self.budget_tokens) > context.num_cached:
            return
        self.filling.remove(context)
        if isinstance(context, Running):
            context.begin_decode()
            self.pool.set_kind(context.slab, SlabKind.DECODING)
            return
        self.pool.set_kind(context.slab, SlabKind.IDLE)
        waiters, context.waiters = context.waiters, []
        for sequence in waiters:
            self.add(sequence)

    def _unpark(self, sequence: Running) -> bool:
        """Go on from the KV of the sequence's last turn, if it is there and is of use."""
        request = sequence.request
        parked = self.parked.get(request.sequence_id)
        if parked is None or request.prompt_logprobs or request.topk_prompt_logprobs:
            return False
        length = len(parked.tokens)
        is_same = parked.slot == sequence.slot and parked.is_mixed <= request.is_in_flight
        if (
            not is_same
            or sequence.tokens[:length] != parked.tokens
            or length >= sequence.num_prompt
        ):
            self.release(request.sequence_id)
            return False
        if parked.slab is None:
            # Its KV was dropped: the same computation gives the same bits.
            del self.parked[request.sequence_id]
            sequence.decoded, sequence.is_replaying = parked.decoded, True
            sequence.prefix_len = parked.prefix_len
            return False
        # Grown here, not while it decodes, and never at the cost of itself.
        del self.parked[request.sequence_id]
        if not self._grow_idle(parked.slab, self._start_tokens(sequence)):
            self.parked[request.sequence_id] = parked
            return False
        sequence.decoded, sequence.is_mixed = parked.decoded, parked.is_mixed
        sequence.prefix_len = parked.prefix_len
        sequence.num_reused = parked.slab.length
        self.pool.set_kind(parked.slab, SlabKind.FILLING)
        self._start(sequence, parked.slab)
        return True

    def _may_share(self, sequence: Running) -> bool:
        request = sequence.request
        is_scored = request.prompt_logprobs or request.topk_prompt_logprobs > 0
        return bool(request.prefix_id) and sequence.prefix_len > 0 and not is_scored

    def _prefix_of(self, sequence: Running) -> Prefix | None:
        """Return the sequence's shared prefix, begun if need be; None if memory forbids it."""
        tokens = sequence.tokens[: sequence.prefix_len]
        key = (sequence.slot, sequence.request.prefix_id, tuple(tokens))
        prefix = self.prefixes.pop(key, None)
        if prefix is None:
            prefix = Prefix(slot=sequence.slot, tokens=tokens, key=key)
            prefix.slab = self._allocate(prefix, len(tokens))
            if prefix.slab is None:
                return None
            self.filling.append(prefix)
        self.prefixes[key] = prefix
        return prefix

    def _start_tokens(self, sequence: Running) -> int:
        return min(sequence.limit, len(sequence.tokens) + GROWTH_TOKENS)

    # -- memory -------------------------------------------------------------------------------

    def _allocate(self, owner: Context, num_tokens: int, keep: Prefix | None = None) -> Slab | None:
        """Return a new slab, at the cost of what is idle except `keep` if need be."""
        while True:
            slab = self.pool.allocate(owner, num_tokens)
            if slab is not None or not self._reclaim(keep):
                return slab

    def _grow_idle(self, slab: Slab, num_tokens: int) -> bool:
        while not self.pool.grow(slab, num_tokens):
            if not self._reclaim():
                return False
        return True

    def _reclaim(self, keep: Prefix | None = None) -> bool:
        """Free the idle slab that is missed least; False if there is none."""
        for sequence_id, parked in self.parked.items():
            if parked.slab is not None:
                self.pool.free(parked.slab)
                parked.slab = None
                if not self.is_exact:
                    del self.parked[sequence_id]
                return True
        for prefix in self.prefixes.values():
            if prefix.is_ready and prefix is not keep:
                self._drop_prefix(prefix)
                return True
        return False

    def _drop_prefix(self, prefix: Prefix) -> None:
        assert not prefix.waiters and prefix.slab is not None
        del self.prefixes[prefix.key]
        if prefix in self.filling:
            self.filling.remove(prefix)
        self.pool.free(prefix.slab)
