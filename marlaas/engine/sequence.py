"""What the scheduler keeps books of: token sequences whose KV is wanted, in three roles.

A `LiveSequence` is one request from submission to result; a `Prefix` is the opening that several
share; a `Parked` is what stays of a finished turn while the environment answers.
"""

from dataclasses import dataclass, field

from marlaas.engine.kv_cache import Slab, SlabKind
from marlaas.engine.types import SequenceRequest
from marlaas.model.bank import Slot
from marlaas.types import StopReason


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
    waiters: list["LiveSequence"] = field(default_factory=list)
    """Sequences that go on once it is filled."""

    @property
    def is_ready(self) -> bool:
        return self.num_cached == len(self.tokens)


@dataclass(slots=True, eq=False, kw_only=True)
class LiveSequence(Context):
    """One request from submission to result."""

    request: SequenceRequest
    arrival: int
    limit: int
    """Most tokens, context and completion together."""
    prefix_len: int
    """Prefill is cut here, shared or not."""
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    """Most likely tokens with each sampled one, and their logprobs; where they are asked for."""
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

    @property
    def is_decoding(self) -> bool:
        return self.slab is not None and self.slab.kind is SlabKind.DECODING

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self.limit

    @property
    def limit_reason(self) -> StopReason:
        """Which limit a full sequence ran into."""
        is_long = self.num_sampled >= self.request.sampling.max_tokens
        return StopReason.LENGTH if is_long else StopReason.CONTEXT_FULL

    def may_reuse(self, num_tokens: int) -> bool:
        """Return whether KV of so many tokens is of use: what is asked of the context's own tokens
        has to be computed for it."""
        return not self.request.is_scored or num_tokens <= self.request.first_scored

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

    def note_slot(self) -> None:
        """Note under which slot the coming tokens are sampled."""
        if self.slots and self.slots[-1][1] == self.slot:
            return
        if self.slots and self.slots[-1][0] == self.num_sampled:
            self.slots.pop()
        self.slots.append((self.num_sampled, self.slot))

    def begin_decode(self) -> None:
        """Note that KV comes from decode steps from here on."""
        start = self.num_cached
        if not any(first <= start <= end for first, end in self.decoded):
            self.decoded.append([start, start])

    def note_decoded(self) -> None:
        """Note how far decode steps have come; before the slab is dropped or parked."""
        if self.decoded and self.is_decoding:
            self.decoded[-1][1] = max(self.decoded[-1][1], self.num_cached)


@dataclass(slots=True, eq=False, kw_only=True)
class Parked(Context):
    """A finished turn whose sequence will go on. In exact mode it outlives its slab."""

    prefix_len: int
    decoded: list[list[int]]
    is_mixed: bool
    is_in_flight: bool
