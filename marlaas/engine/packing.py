"""How training data become passes: predicted cost, chunks of one policy, passes over many.

    data of one policy ── cut ──► chunks ── ChunkQueue.pop_pass ──► a fused pass ── pack ──► arrays

Invariants:
- Where a policy's data are cut depends on its own data and the budget, never on who else trains.
- A pass takes each policy's chunks in the order they were submitted; policies take turns, so that
  none waits for more than one pass of each other policy.
- Chunks are taken whole. A pass stays within the budget unless a single chunk is larger.

A datum is scored cell by cell: a cell is one target of one entry, named by its place in the flat
arrays of the datum. Without targets of its own, cell t is token t.

Shape suffixes: N tokens of a pass, C cells of it, M positions whose next tokens they are, S
sequences of an attention batch, T tokens of a datum or of the longest sequence of a batch; c and m
are those of one chunk.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from marlaas.engine.pass_memory import PassSize
from marlaas.model.attention import AttentionBatch
from marlaas.model.bank import Slot
from marlaas.model.base import BaseModel
from marlaas.model.lora import Segment
from marlaas.model.prepack import padded_rows
from marlaas.types import LOSS_INPUTS, Datum, Objective

LOSS_INPUT_NAMES = frozenset(name for names in LOSS_INPUTS.values() for name in names)

NO_PLACES = np.zeros(0, dtype=np.int64)

MIN_SHARED = 4
"""Shortest common prefix that is computed once."""

MAX_COMPARED = 8
"""A datum is compared with so many before it: siblings are submitted side by side."""

MIN_FILL = 0.75
"""Sequences are attended in one batch while each is at least this fraction of the longest."""

MIN_SHARED_FILL = 0.6
"""Those with a shared prefix while their own tokens times their length come to this part of the
batch's: they are short, and a call costs as much as a few of them."""

MAX_MASKED = 2048
"""Longest sequence whose shared prefix is left out of attention's queries: it takes a mask of
queries times keys, where plain causal attention takes none."""

MAX_CHUNK_CELLS = 1 << 18
"""A chunk ends before it scores more, unless a single datum does: what is said of a cell takes some
100 bytes while its pass runs, and data that share all their tokens cost next to nothing else."""

VECTOR_ELEMENTS = 32
"""Element-wise CPU kernels work on blocks of at most this many fp32 elements (AVX-512, unrolled by
two) and treat what is left at the end of an array with scalar code, whose last bit may differ."""


# ---------------------------------------------------------------------------------------------
# Predicted cost


@dataclass(frozen=True, slots=True)
class PassCost:
    """What a pass over sequences costs, in the unit "tokens of a short sequence".

        FLOP per sequence of S tokens = 4 N S + 7 L d_a S^2
        cost(S) = S + (7 L d_a / 4 N) S^2

    N weights of the linears, L layers, d_a = query heads x head width. A prefix of P tokens that is
    there already takes cost(P) off.
    Source: `docs/algorithms.md` has the count; causal attention, backward 2.5 times forward.
    """

    cost_per_pair: float
    """Cost of one pair of positions in attention."""

    @classmethod
    def of(cls, base: BaseModel) -> "PassCost":
        shapes = base.bank.modules
        num_weights = sum(shape.in_features * shape.out_features for shape in shapes)
        queries = sum(shape.out_features for shape in shapes if shape.kind == "q_proj")
        return cls(cost_per_pair=7 * queries / (4 * num_weights))

    def __call__(self, num_tokens: int, num_shared: int = 0) -> float:
        """Return the cost of one sequence, the first `num_shared` tokens of which are there."""
        return num_tokens - num_shared + self.cost_per_pair * (num_tokens**2 - num_shared**2)


# ---------------------------------------------------------------------------------------------
# Chunks and passes

Fits = Callable[[PassSize], bool]
"""Says whether a pass of that size fits into memory."""

NOTHING = PassSize(0, 0, 0)


def always_fits(size: PassSize) -> bool:
    return True


@dataclass(slots=True, kw_only=True, eq=False)
class Submission:
    """One call of a policy on its way through the trainer: `queued -> in chunks -> finished`."""

    ticket: Hashable
    key: Hashable
    """The policy; None is the base."""
    slot: Slot | None
    data: Sequence[Datum]
    objective: Objective | None
    """None: only score, no gradient."""
    outputs: list
    """One `DatumOutput` per datum, None until its chunk has run."""
    num_chunks_left: int = 0
    has_head_adapter: bool = False

    @property
    def is_training(self) -> bool:
        return self.objective is not None


class SharedPrefix(NamedTuple):
    """The first `length` inputs of a datum equal those of an earlier datum of its chunk."""

    source: int
    """Which one, counted from the chunk's start."""
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Data [start, end) of one submission, run in one pass."""

    submission: Submission
    start: int
    end: int
    shared: tuple[SharedPrefix, ...]
    """Per datum, what it need not compute again."""
    cost: float
    size: PassSize
    """What it takes of a pass's memory."""

    @property
    def data(self) -> Sequence[Datum]:
        return self.submission.data[self.start : self.end]


def cut(
    submission: Submission, cost: PassCost, budget_tokens: float, fits: Fits = always_fits
) -> list[Chunk]:
    """Cut a submission's data, in order, into chunks of whole data within the budget of tokens and,
    unless a single datum is larger, of memory.

    A prefix that several data of a chunk have in common, such as the prompt of a group, is computed
    once and costs once.
    """
    chunks: list[Chunk] = []
    start, held, num_cells = 0, 0.0, 0
    held_size = NOTHING
    inputs: list[np.ndarray] = []
    shared: list[SharedPrefix] = []

    def close(end: int) -> None:
        nonlocal start, held, num_cells, held_size
        chunks.append(Chunk(submission, start, end, tuple(shared), held, held_size))
        start, held, num_cells, held_size = end, 0.0, 0, NOTHING
        inputs.clear()
        shared.clear()

    for idx, datum in enumerate(submission.data):
        wanted = wanted_cells(datum, submission.is_training)
        own = datum.tokens[: _num_inputs(datum, wanted)]
        prefix = _longest_shared_prefix(own, inputs)
        is_full = held + cost(len(own), prefix.length) > budget_tokens
        is_full |= num_cells + len(wanted) > MAX_CHUNK_CELLS
        size = _size_of(submission, len(own), prefix.length, len(wanted))
        if idx > start and (is_full or not fits(held_size + size)):
            close(idx)
            prefix = SharedPrefix(0, 0)
            size = _size_of(submission, len(own), 0, len(wanted))
        held += cost(len(own), prefix.length)
        held_size += size
        num_cells += len(wanted)
        inputs.append(own)
        shared.append(prefix)
    close(len(submission.data))
    submission.num_chunks_left = len(chunks)
    return chunks


def _size_of(submission: Submission, length: int, num_shared: int, num_cells: int) -> PassSize:
    """Return what one sequence adds to a pass."""
    slot, num_new = submission.slot, length - num_shared
    is_masked = num_shared > 0 and length <= MAX_MASKED
    num_queries = num_new if is_masked else length
    return PassSize(
        num_tokens=num_new,
        num_queries=num_queries,
        num_keys=length,
        num_rows=min(num_cells, length),
        num_ranks=num_new * slot.rank if slot is not None else 0,
        num_masked=num_queries * length if is_masked else 0,
        has_head_adapter=submission.has_head_adapter,
    )


def size_of_datum(submission: Submission, datum: Datum) -> PassSize:
    """Return the size of a pass over one datum alone."""
    wanted = wanted_cells(datum, submission.is_training)
    return _size_of(submission, _num_inputs(datum, wanted), 0, len(wanted))


def _longest_shared_prefix(own: np.ndarray, inputs: Sequence[np.ndarray]) -> SharedPrefix:
    best = SharedPrefix(0, 0)
    for source in range(max(0, len(inputs) - MAX_COMPARED), len(inputs)):
        length = _common_length(own, inputs[source])
        if length > best.length:
            best = SharedPrefix(source, length)
    return best if best.length >= MIN_SHARED else SharedPrefix(0, 0)


def _common_length(one: np.ndarray, other: np.ndarray) -> int:
    num = min(len(one), len(other))
    differs = one[:num] != other[:num]
    first = int(differs.argmax()) if num else 0
    return first if num and differs[first] else num


class ChunkQueue:
    """Chunks that wait, first in first out per policy; policies take turns.

    `push -> pop_pass`; `drop` takes out all of one policy.
    """

    def __init__(self, budget_tokens: float, *, is_exact: bool, fits: Fits = always_fits) -> None:
        self._budget_tokens = budget_tokens
        self._fits = fits
        self._is_exact = is_exact
        self._waiting: OrderedDict[Hashable, deque[Chunk]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(chunks) for chunks in self._waiting.values())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._waiting

    def push(self, chunks: Sequence[Chunk]) -> None:
        """Add chunks of one submission behind those that its policy already has."""
        for chunk in chunks:
            self._waiting.setdefault(chunk.submission.key, deque()).append(chunk)

    def drop(self, key: Hashable) -> list[Chunk]:
        """Take out every chunk of one policy."""
        return list(self._waiting.pop(key, ()))

    def pop_pass(self) -> list[Chunk]:
        """Take the chunks of the next pass; scoring and training never share one.

        The policy that has waited longest is served in any case, the others while they fit. In
        exact mode a policy has one chunk in a pass, so that company cannot merge two of them.
        """
        if not self._waiting:
            return []
        is_training = next(iter(self._waiting.values()))[0].submission.is_training
        taken: list[Chunk] = []
        left, size = self._budget_tokens, NOTHING
        for key in list(self._waiting):
            waiting = self._waiting[key]
            served = 0
            while waiting and waiting[0].submission.is_training == is_training:
                is_beyond = waiting[0].cost > left or not self._fits(size + waiting[0].size)
                if taken and (is_beyond or (served and self._is_exact)):
                    break
                chunk = waiting.popleft()
                left -= chunk.cost
                size += chunk.size
                taken.append(chunk)
                served += 1
            if not waiting:
                del self._waiting[key]
            elif served:
                self._waiting.move_to_end(key)
        return taken


# ---------------------------------------------------------------------------------------------
# Arrays of one pass


def cells_per_entry(datum: Datum) -> int:
    """Return K, the number of targets of each entry."""
    return 1 if datum.weights.ndim == 1 else datum.weights.shape[1]


def wanted_cells(datum: Datum, is_training: bool) -> np.ndarray:
    """Return the cells whose logprob is wanted, in order: those that the loss reads, or all."""
    if is_training and not datum.is_scored_everywhere:
        is_wanted = datum.weights != 0
        if "ratio_mask" in datum.loss_inputs:
            is_wanted |= datum.loss_inputs["ratio_mask"] != 0
    else:
        is_wanted = np.ones(datum.weights.shape, dtype=bool)
    is_wanted[0] = False
    if datum.targets is not None:
        is_wanted &= datum.targets >= 0
    return np.flatnonzero(is_wanted)


def num_inputs(datum: Datum, is_training: bool) -> int:
    """Return how many leading tokens have to be computed to score what is wanted."""
    return _num_inputs(datum, wanted_cells(datum, is_training))


def _num_inputs(datum: Datum, wanted: np.ndarray) -> int:
    return int(wanted[-1]) // cells_per_entry(datum) if len(wanted) else 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadRows:
    """Positions whose logits are wanted, chunk by chunk, and the cells that are scored from them.

    Cells about one position share its row of logits: the K targets of an entry, and the same entry
    of several data within a prefix that they share.
    """

    place_M: np.ndarray
    """Place in the pass of each position."""
    temperature_M: np.ndarray
    lengths: tuple[int, ...]
    """Rows of each chunk."""
    cell_C: np.ndarray
    """Which cells of the pass are scored, by row."""
    row_C: np.ndarray | None
    """The row of each; None: one each, in order."""


def head_rows(layouts: Sequence["_ChunkLayout"]) -> tuple[HeadRows, HeadRows]:
    """Return the rows that a loss falls on, and those that are only looked at.

    Which rows there are, and in what order, depends on a chunk's own data alone.
    """
    kinds: tuple[list[_RowsOfChunk], list[_RowsOfChunk]] = ([], [])
    num_cells = 0
    for layout in layouts:
        place_c = _concatenate(layout.selected, np.int64)
        is_trained_c = _concatenate(layout.is_trained, np.bool_)
        temperature_c = np.repeat(layout.temperatures, [len(cells) for cells in layout.scored])
        key_c = place_c
        if len(set(layout.temperatures)) > 1:
            # At two temperatures one position has two rows.
            values, kind_c = np.unique(temperature_c, return_inverse=True)
            key_c = place_c * len(values) + kind_c
        _, first_m, row_c = np.unique(key_c, return_index=True, return_inverse=True)
        has_loss_m = np.zeros(len(first_m), dtype=bool)
        has_loss_m[row_c[is_trained_c]] = True
        cell_c = np.argsort(row_c, kind="stable")
        for kind, is_own_m in zip(kinds, (has_loss_m, ~has_loss_m), strict=True):
            own_cell_c = cell_c[is_own_m[row_c[cell_c]]]
            own_row_c = (is_own_m.cumsum() - 1)[row_c[own_cell_c]]
            first = first_m[is_own_m]
            kind.append(
                _RowsOfChunk(
                    place_c[first], temperature_c[first], num_cells + own_cell_c, own_row_c
                )
            )
        num_cells += len(place_c)
    with_loss, without = (_join_rows(kind) for kind in kinds)
    return with_loss, without


class _RowsOfChunk(NamedTuple):
    place_m: np.ndarray
    temperature_m: np.ndarray
    cell_c: np.ndarray
    row_c: np.ndarray


def _join_rows(chunks: Sequence[_RowsOfChunk]) -> HeadRows:
    lengths = tuple(len(chunk.place_m) for chunk in chunks)
    starts = np.cumsum([0, *lengths])[:-1].tolist()
    row_C = _concatenate(
        [start + chunk.row_c for chunk, start in zip(chunks, starts, strict=True)], np.int64
    )
    return HeadRows(
        place_M=_concatenate([chunk.place_m for chunk in chunks], np.int64),
        temperature_M=_concatenate([chunk.temperature_m for chunk in chunks], np.float64),
        lengths=lengths,
        cell_C=_concatenate([chunk.cell_c for chunk in chunks], np.int64),
        row_C=None if len(row_C) == sum(lengths) else row_C,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPass:
    """One fused pass as arrays: policies one after another, a policy's sequences in order."""

    chunks: tuple[Chunk, ...]
    tokens_N: np.ndarray
    positions_N: np.ndarray
    """Restart at 0 with every sequence."""
    attention: tuple[AttentionBatch, ...]
    """Sequences that attend together. A shared prefix is among the keys of several."""
    segments: tuple[Segment, ...]
    """One per chunk, then the padding if there is any."""
    trained: HeadRows
    """Those that a loss falls on; none in a pass that only scores."""
    looked_at: HeadRows
    """Those that are only scored."""
    targets_C: np.ndarray
    datum_C: np.ndarray
    """Which datum of the pass a cell belongs to."""
    scored: tuple[np.ndarray, ...]
    """Per datum of the pass, the cells that are scored."""
    chunk_bounds: tuple[tuple[int, int], ...]
    """Per chunk, its half-open range in C."""

    @property
    def data(self) -> list[Datum]:
        return [datum for chunk in self.chunks for datum in chunk.data]

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, padding included."""
        return len(self.tokens_N)

    @property
    def size(self) -> PassSize:
        """What the pass takes of memory, repeated queries and keys as often as they occur."""
        slots = [segment.slot for segment in self.segments]
        return PassSize(
            num_tokens=self.num_tokens,
            num_queries=sum(batch.num_queries for batch in self.attention),
            num_keys=sum(batch.num_keys for batch in self.attention),
            num_rows=len(self.trained.place_M) + len(self.looked_at.place_M),
            num_ranks=sum(
                segment.length * slot.rank
                for segment, slot in zip(self.segments, slots, strict=True)
                if slot is not None
            ),
            num_masked=sum(batch.num_masked for batch in self.attention),
            has_head_adapter=any(chunk.submission.has_head_adapter for chunk in self.chunks),
        )

    def segments_of(self, rows: HeadRows) -> list[Segment]:
        """Return whose rows these are."""
        return [
            Segment(segment.slot, length)
            for segment, length in zip(self.segments, rows.lengths, strict=False)
        ]

    def gather(self, name: str) -> np.ndarray:
        """Return a per-token field of the data at the scored cells [C]; 0 where a datum has none.

        Of a field of `loss_inputs`, NaN where a datum has none.
        """
        pieces = []
        for datum, scored in zip(self.data, self.scored, strict=True):
            values, missing = getattr(datum, name, None), 0.0
            if name in LOSS_INPUT_NAMES:
                values, missing = datum.loss_inputs.get(name), np.nan
            pieces.append(
                np.full(len(scored), missing, dtype=np.float32)
                if values is None
                else values.reshape(-1)[scored]
            )
        return np.concatenate(pieces)


def pack(chunks: Sequence[Chunk], *, is_exact: bool, is_prepacked: bool = False) -> PackedPass:
    """Lay the chunks of one pass out, those of one adapter and one rank next to each other.

    An exact pass is padded with a sequence of its own to a multiple of `VECTOR_ELEMENTS` tokens, so
    that no real element is ever in the odd tail of an array; this covers the least row count for
    bitwise equal matrix products, too. Sequences attend together with those of their own chunk only
    then. On a base with packed weights the padding is what their products ask for.
    """
    ordered = sorted(chunks, key=lambda chunk: chunk.submission.slot or Slot(0, -1))
    layouts, num_tokens = [], 0
    for chunk in ordered:
        layouts.append(_ChunkLayout.of(chunk, num_tokens))
        num_tokens = layouts[-1].end
    tokens = [layout.tokens for layout in layouts]
    positions = [layout.positions for layout in layouts]
    segments = [
        Segment(chunk.submission.slot, len(layout.tokens))
        for chunk, layout in zip(ordered, layouts, strict=True)
    ]
    sequences = [layout.sequences for layout in layouts]
    num_padding = -num_tokens % VECTOR_ELEMENTS if is_exact else 0
    if is_prepacked:
        num_padding = padded_rows(num_tokens) - num_tokens
    if num_padding:
        padding = np.arange(num_padding)
        tokens.append(np.zeros(num_padding, dtype=np.int64))
        positions.append(padding)
        segments.append(Segment(None, num_padding))
        sequences.append([PassSequence(num_tokens + padding, 0)])
    data = [datum for chunk in ordered for datum in chunk.data]
    scored = [scored for layout in layouts for scored in layout.scored]
    trained, looked_at = head_rows(layouts)
    ends = np.cumsum([sum(map(len, layout.scored)) for layout in layouts]).tolist()
    together = sequences if is_exact else [[one for own in sequences for one in own]]
    return PackedPass(
        chunks=tuple(ordered),
        tokens_N=_concatenate(tokens, np.int64),
        positions_N=_concatenate(positions, np.int64),
        attention=tuple(batch for own in together for batch in attention_batches(own)),
        segments=tuple(segments),
        trained=trained,
        looked_at=looked_at,
        targets_C=_concatenate(
            [_targets(datum)[cells] for datum, cells in zip(data, scored, strict=True)], np.int64
        ),
        datum_C=np.repeat(np.arange(len(data)), [len(cells) for cells in scored]),
        scored=tuple(scored),
        chunk_bounds=tuple(zip([0, *ends[:-1]], ends, strict=True)),
    )


class PassSequence(NamedTuple):
    """One sequence of a pass as attention sees it."""

    place_T: np.ndarray
    """The place in the pass of each of its tokens."""
    num_shared: int
    """How many of the first are another sequence's, which computes them."""

    @property
    def length(self) -> int:
        return len(self.place_T)

    @property
    def num_left_out(self) -> int:
        """Tokens at the front that are not among its queries."""
        return self.num_shared if self.length <= MAX_MASKED else 0

    @property
    def num_own(self) -> int:
        """Its queries."""
        return self.length - self.num_left_out

    @property
    def area(self) -> int:
        """Queries times keys."""
        return self.num_own * self.length

    def order(self) -> tuple[int, int]:
        """Return a key that sorts many queries and many keys first."""
        return -self.num_own, -self.length


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkLayout:
    """Where the tokens of one chunk are in a pass."""

    tokens: np.ndarray
    """The tokens to compute, shared ones once."""
    positions: np.ndarray
    end: int
    """Place after the last one."""
    sequences: list["PassSequence"]
    """Those that have tokens of their own."""
    scored: list[np.ndarray]
    """Per datum, the cells whose logprob is wanted."""
    selected: list[np.ndarray]
    """Per datum, the places of their predictions."""
    is_trained: list[np.ndarray]
    """Per datum, on which of them a loss falls."""
    temperatures: list[float]
    """Per datum."""

    @classmethod
    def of(cls, chunk: Chunk, start: int) -> "_ChunkLayout":
        tokens: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        sequences: list[PassSequence] = []
        scored: list[np.ndarray] = []
        selected: list[np.ndarray] = []
        is_training = chunk.submission.is_training
        end = start
        for datum, (source, num_shared) in zip(chunk.data, chunk.shared, strict=True):
            wanted = wanted_cells(datum, is_training)
            entries = wanted // cells_per_entry(datum)
            length = int(entries[-1]) if len(entries) else 0
            num_new = length - num_shared
            shared = sequences[source].place_T[:num_shared] if num_shared else NO_PLACES
            place_T = np.concatenate([shared, np.arange(end, end + num_new)])
            sequences.append(PassSequence(place_T, num_shared))
            tokens.append(datum.tokens[num_shared:length])
            positions.append(np.arange(num_shared, length))
            scored.append(wanted)
            selected.append(place_T[entries - 1])
            end += num_new
        return cls(
            tokens=_concatenate(tokens, np.int64),
            positions=_concatenate(positions, np.int64),
            end=end,
            sequences=[own for own in sequences if own.num_own],
            scored=scored,
            selected=selected,
            is_trained=[
                datum.weights.reshape(-1)[cells] != 0
                if is_training
                else np.zeros(len(cells), dtype=bool)
                for datum, cells in zip(chunk.data, scored, strict=True)
            ],
            temperatures=[datum.temperature for datum in chunk.data],
        )


def attention_batches(sequences: Sequence[PassSequence]) -> list[AttentionBatch]:
    """Return sequences as batches of similar ones, those without a shared prefix first.

    What is added at a sequence's end is never seen by its own tokens, attention being causal.
    """
    whole = sorted((one for one in sequences if not one.num_left_out), key=PassSequence.order)
    shared = sorted((one for one in sequences if one.num_left_out), key=PassSequence.order)
    batches: list[list[PassSequence]] = []
    for one in whole:
        if not batches or one.length < MIN_FILL * batches[-1][0].length:
            batches.append([])
        batches[-1].append(one)
    out = [AttentionBatch(_stack([one.place_T for one in batch])) for batch in batches]
    batches.clear()
    filled = 0
    for one in shared:
        filled += one.area
        if not batches or filled < MIN_SHARED_FILL * _area([*batches[-1], one]):
            batches.append([])
            filled = one.area
        batches[-1].append(one)
    return out + [
        AttentionBatch(
            keys_ST=_stack([one.place_T for one in batch]),
            queries_SQ=_stack([one.place_T[one.num_left_out :] for one in batch]),
            positions_SQ=_stack([np.arange(one.num_left_out, one.length) for one in batch]),
        )
        for batch in batches
    ]


def _area(batch: Sequence[PassSequence]) -> int:
    """Return queries times keys of a batch, padding included."""
    num_queries = max(one.num_own for one in batch)
    return len(batch) * num_queries * max(one.length for one in batch)


def _stack(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return rows as one array; short ones repeat their last element."""
    out = np.empty((len(rows), max(map(len, rows))), dtype=np.int64)
    for idx, row in enumerate(rows):
        out[idx, : len(row)] = row
        out[idx, len(row) :] = row[-1]
    return out


def _targets(datum: Datum) -> np.ndarray:
    """Return the token of every cell."""
    return datum.tokens if datum.targets is None else datum.targets.reshape(-1)


def _concatenate(pieces: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    if not pieces:
        return np.zeros(0, dtype=dtype)
    return np.concatenate(pieces).astype(dtype, copy=False)
