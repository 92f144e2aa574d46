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

from marlaas.engine.kv_cache import Chunk, Slab, SlabKind, SlabPool
from marlaas.engine.sequence import Context, LiveSequence, Parked, Prefix
from marlaas.model.bank import Slot

GROWTH_TOKENS = 64
"""Room for sampled tokens that a sequence starts with; it moves to larger slabs as it grows."""


class Scheduler:
    """Queues and memory of one generator, which calls in each quantum

        admit()                         waiting -> filling, as memory allows
        next_prefill(), prefilled()     before and after a prefill pass: filling -> decoding
        make_room(), finish()           before and after a decode step

    A pass itself is the generator's; what is here needs no model.
    """

    def __init__(
        self, pool: SlabPool, *, max_batch: int, budget_tokens: int, is_exact: bool = False
    ) -> None:
        self.pool = pool
        self.max_batch = max_batch
        self.budget_tokens = budget_tokens
        self.is_exact = is_exact
        self.waiting: list[LiveSequence] = []
        """By arrival."""
        self.running: dict[str, LiveSequence] = {}
        """By request id: has a slab, fills or decodes."""
        self.filling: list[LiveSequence | Prefix] = []
        self.prefixes: dict[tuple, Prefix] = {}
        """Least recently used first."""
        self.parked: dict[str, Parked] = {}
        """By sequence id, oldest first."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.filling)

    def sequences(self) -> Iterator[LiveSequence]:
        """Yield every sequence that has not ended."""
        yield from self.waiting
        yield from self.running.values()
        for prefix in self.prefixes.values():
            yield from prefix.waiters

    # -- in and out ---------------------------------------------------------------------------

    def add(self, sequence: LiveSequence) -> None:
        insort(self.waiting, sequence, key=lambda other: other.arrival)

    def remove(self, request_id: str) -> LiveSequence | None:
        """Take a sequence out, wherever it is, and free its KV."""
        sequence = next((s for s in self.sequences() if s.request.request_id == request_id), None)
        if sequence is None:
            return None
        if request_id in self.running:
            self.finish(sequence, keep_kv=False)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            prefix = next(p for p in self.prefixes.values() if sequence in p.waiters)
            self._leave(prefix, [sequence])
        return sequence

    def finish(self, sequence: LiveSequence, *, keep_kv: bool) -> None:
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
            self._leave(prefix, leaving)
            for sequence in leaving:
                self.add(sequence)
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

    def refill(self, sequence: LiveSequence) -> None:
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

    def preempt(self, sequence: LiveSequence) -> None:
        """Free a running sequence's KV and let it wait again with what it has sampled."""
        self.finish(sequence, keep_kv=False)
        sequence.is_replaying, sequence.is_mixed = self.is_exact, False
        if not self.is_exact:
            sequence.decoded = []
        self.add(sequence)

    # -- admission ----------------------------------------------------------------------------

    def _admit(self, sequence: LiveSequence) -> bool:
        """Give the first waiting sequence its slab, or let it wait for its prefix."""
        parked = self._take_parked(sequence)
        if parked is not None:
            return self._resume(sequence, parked)
        prefix = None
        is_shared = sequence.request.prefix_id and sequence.prefix_len
        if is_shared and sequence.may_reuse(sequence.prefix_len):
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

    def _start(self, sequence: LiveSequence, slab: Slab) -> None:
        slab.owner, sequence.slab = sequence, slab
        self.waiting.remove(sequence)
        self.running[sequence.request.request_id] = sequence
        self.filling.append(sequence)
        self._advance(sequence)

    def _advance(self, context: LiveSequence | Prefix) -> None:
        """Let a filling context that has nothing left to prefill go on."""
        assert context.slab is not None
        if context.next_prefill_end(self.budget_tokens) > context.num_cached:
            return
        self.filling.remove(context)
        if isinstance(context, LiveSequence):
            context.begin_decode()
            self.pool.set_kind(context.slab, SlabKind.DECODING)
            return
        self.pool.set_kind(context.slab, SlabKind.IDLE)
        waiters, context.waiters = context.waiters, []
        for sequence in waiters:
            self.add(sequence)

    def _take_parked(self, sequence: LiveSequence) -> Parked | None:
        """Return the KV of the sequence's last turn, if it is there and is of use to this one."""
        request = sequence.request
        parked = self.parked.get(request.sequence_id)
        length = len(parked.tokens) if parked is not None else 0
        if parked is None or not sequence.may_reuse(length):
            return None
        if (
            parked.slot != sequence.slot
            or (parked.is_mixed and not request.is_in_flight)
            or length >= sequence.num_prompt
            or sequence.tokens[:length] != parked.tokens
        ):
            self.release(request.sequence_id)
            return None
        del self.parked[request.sequence_id]
        sequence.decoded, sequence.prefix_len = parked.decoded, parked.prefix_len
        if parked.slab is None:
            # The KV was dropped: the same computation will give the same bits.
            sequence.is_replaying = True
            return None
        return parked

    def _resume(self, sequence: LiveSequence, parked: Parked) -> bool:
        """Go on from parked KV; it stays parked, and the sequence waits, while memory is short."""
        assert parked.slab is not None
        while not self.pool.grow(parked.slab, self._start_tokens(sequence)):
            if not self._reclaim():
                self.parked[sequence.request.sequence_id] = parked
                return False
        sequence.is_mixed, sequence.num_reused = parked.is_mixed, parked.slab.length
        self.pool.set_kind(parked.slab, SlabKind.FILLING)
        self._start(sequence, parked.slab)
        return True

    def _prefix_of(self, sequence: LiveSequence) -> Prefix | None:
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

    def _start_tokens(self, sequence: LiveSequence) -> int:
        return min(sequence.limit, len(sequence.tokens) + GROWTH_TOKENS)

    # -- memory -------------------------------------------------------------------------------

    def _allocate(self, owner: Context, num_tokens: int, keep: Prefix | None = None) -> Slab | None:
        """Return a new slab, at the cost of what is idle except `keep` if need be."""
        while True:
            slab = self.pool.allocate(owner, num_tokens)
            if slab is not None or not self._reclaim(keep):
                return slab

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

    def _leave(self, prefix: Prefix, sequences: list[LiveSequence]) -> None:
        """Let sequences wait no longer for a prefix; without any, it is not computed."""
        prefix.waiters = [sequence for sequence in prefix.waiters if sequence not in sequences]
        if not prefix.waiters and not prefix.is_ready:
            self._drop_prefix(prefix)

    def _drop_prefix(self, prefix: Prefix) -> None:
        assert not prefix.waiters and prefix.slab is not None
        del self.prefixes[prefix.key]
        if prefix in self.filling:
            self.filling.remove(prefix)
        self.pool.free(prefix.slab)
