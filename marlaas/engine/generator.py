"""Samples tokens for many sequences at once, each under its own adapter; one device, one thread.

    submit -> step, step, step ... -> results

A step is one quantum of work: one prefill pass over the chunks of several sequences, or one decode
step of the whole batch. Both are one packed row of tokens, in which slots, ranks and lengths mix.
What to compute next is the scheduler's decision; where keys and values lie is the pool's.

In exact mode no bit of a sequence's tokens or logprobs depends on its neighbours, on the order of
arrival or on memory pressure: passes have at least `EXACT_MIN_ROWS` tokens, and every sequence is
cut, prefilled and decoded in its own way only (see `scheduler.py`).

Shape suffixes: N tokens of a pass, D width, V vocabulary, T positions of one chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from marlaas.config import slab_tokens
from marlaas.engine.kv_attention import DecodeContext, PrefillContext
from marlaas.engine.kv_cache import Chunk, Slab, SlabPool
from marlaas.engine.prompt_scores import PromptScores, score_problems
from marlaas.engine.sampler import SamplingBatch, most_likely, sample
from marlaas.engine.scheduler import Scheduler
from marlaas.engine.sequence import LiveSequence
from marlaas.engine.types import SequenceRequest, SequenceResult, Work
from marlaas.errors import CapacityExceeded, InvalidRequest, UnsupportedFeature
from marlaas.model.bank import Slot
from marlaas.model.base import BaseModel
from marlaas.model.lora import EXACT_MIN_ROWS, LoraBatch, Segment
from marlaas.model.prepack import padded_rows
from marlaas.types import StopReason

_STOP_TAIL_TOKENS = 8
"""Tokens decoded beyond the four per character that a stop string can take in UTF-8 bytes."""

_WORTHY_PREFILL = 0.5
"""A prefill pass that fills this share of its budget does not wait for company."""

_NEARLY_FULL = 0.75
"""Prefill waits for company only while the decode batch is at least this full."""

_MAX_PREFILL_WAIT = 6
"""Decode steps that a prefill pass waits at most: passes of 60 tokens cost three times as much per
token as passes of 250."""


class BatchGenerator:
    """Continuous batching over slots. See `docs/architecture.md` for who calls it.

        generator = BatchGenerator(base, kv_capacity_tokens=65536, max_context=2048)
        generator.submit(request)
        while generator.has_work:
            results, work = generator.step()

    Not thread-safe: one engine thread owns it together with the adapter bank.
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        kv_capacity_tokens: int,
        max_context: int,
        max_batch: int = 64,
        prefill_budget_tokens: int = 512,
        decode_text: Callable[[list[int]], str] | None = None,
        is_exact: bool = False,
    ) -> None:
        if slab_tokens(max_context) > kv_capacity_tokens:
            raise CapacityExceeded(
                f"kv_capacity_tokens {kv_capacity_tokens}: one sequence of max_context "
                f"{max_context} takes {slab_tokens(max_context)}"
            )
        if is_exact:
            base.check_exact()
        self.base = base
        self.max_context = max_context
        self.decode_text = decode_text
        self.is_exact = is_exact
        self.pool = SlabPool(
            num_layers=base.num_layers,
            num_kv_heads=base.num_kv_heads,
            head_dim=base.head_dim,
            dtype=base.dtype,
            device=base.device,
            capacity_tokens=kv_capacity_tokens,
        )
        self.scheduler = Scheduler(
            self.pool, max_batch=max_batch, budget_tokens=prefill_budget_tokens, is_exact=is_exact
        )
        self._batch: _DecodeBatch | None = None
        self._scores: dict[str, PromptScores] = {}
        """By request id, of those that asked for prompt logprobs."""
        self._num_submitted = 0
        self._decodes_since_prefill = 0

    # -- requests -----------------------------------------------------------------------------

    def submit(self, request: SequenceRequest) -> None:
        """Queue a request.

        Raises:
            CapacityExceeded: the context alone is longer than `max_context`.
            InvalidRequest: no tokens, ids outside the vocabulary, or scores that cannot be had.
            UnsupportedFeature: stop strings without a `decode_text`.
        """
        if request.tokens.ndim != 1:
            raise InvalidRequest(f"tokens have shape {request.tokens.shape}: expected (T,)")
        num_tokens = len(request.tokens)
        if num_tokens > self.max_context:
            raise CapacityExceeded(
                f"{num_tokens} tokens of context: expected at most {self.max_context}"
            )
        if not num_tokens:
            raise InvalidRequest("no tokens: expected at least one")
        if not 0 <= int(request.tokens.min()) <= int(request.tokens.max()) < self.base.vocab_size:
            raise InvalidRequest(f"token ids: expected 0 to {self.base.vocab_size - 1}")
        if request.sampling.stop_strings and self.decode_text is None:
            raise UnsupportedFeature("stop strings: this engine has no tokenizer to decode with")
        if problems := list(score_problems(request, self.base.vocab_size)):
            raise InvalidRequest(*problems)
        prefix_len = min(request.prefix_len, num_tokens - 1) if request.prefix_id else 0
        if request.is_scored and request.first_scored:
            prefix_len = min(prefix_len, request.first_scored)
        sequence = LiveSequence(
            slot=request.slot,
            tokens=request.tokens.tolist(),
            request=request,
            arrival=self._num_submitted,
            limit=min(num_tokens + request.sampling.max_tokens, self.max_context),
            prefix_len=prefix_len,
        )
        if scores := PromptScores.of(request):
            self._scores[request.request_id] = scores
        self._num_submitted += 1
        self.scheduler.add(sequence)

    def cancel(self, request_id: str) -> SequenceResult | None:
        """End a request now; return what it has so far, or None if it is not known (any more)."""
        sequence = self.scheduler.remove(request_id)
        return sequence and self._result(sequence, StopReason.CANCELLED)

    def release(self, sequence_id: str) -> None:
        """Drop what is kept for the further turns of a sequence."""
        self.scheduler.release(sequence_id)

    def forget_slot(self, slot: Slot) -> None:
        """Drop all KV computed under a slot that is about to be freed; no request may use it."""
        self.scheduler.forget_slot(slot)
        self._batch = None

    def switch_slot(self, old: Slot, new: Slot) -> None:
        """Let in-flight sequences of `old` go on under `new` from the next token."""
        self.scheduler.switch_slot(old, new)
        self._batch = None

    @property
    def num_decoding(self) -> int:
        return len(self.pool.decoding())

    @property
    def num_waiting(self) -> int:
        """Requests that do not decode yet."""
        return sum(1 for _ in self.scheduler.sequences()) - self.num_decoding

    @property
    def num_parked(self) -> int:
        """Sequences between turns whose KV is kept."""
        return sum(parked.slab is not None for parked in self.scheduler.parked.values())

    @property
    def kv_tokens(self) -> int:
        """KV memory in use, in tokens of slab capacity."""
        return self.pool.used_tokens

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # -- one quantum --------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> tuple[list[SequenceResult], Work | None]:
        """Do one prefill pass or one decode step; return what ended and what it took.

        Prefill keeps the batch full, but never runs twice in a row while others decode, and waits
        a few decode steps for company when little is to be filled and the batch is nearly full.
        """
        self.scheduler.admit()
        has_decoding = self.pool.has_decoding
        chunks = self.scheduler.next_prefill()
        if chunks and (not has_decoding or self._is_prefill_due(chunks)):
            self._decodes_since_prefill = 0
            work = self._prefill(chunks)
            return self._take_full(), work
        if has_decoding:
            self._decodes_since_prefill += 1
            results = self._take_full()
            self.scheduler.make_room()
            decoded, work = self._decode()
            return results + decoded, work
        return [], None

    def _is_prefill_due(self, chunks: list[Chunk]) -> bool:
        if self._decodes_since_prefill == 0:
            return False
        num_tokens = sum(chunk.end - chunk.slab.length for chunk in chunks)
        return (
            self._decodes_since_prefill >= _MAX_PREFILL_WAIT
            or num_tokens >= _WORTHY_PREFILL * self.scheduler.budget_tokens
            or self.num_decoding < _NEARLY_FULL * self.scheduler.max_batch
        )

    def _take_full(self) -> list[SequenceResult]:
        """End the sequences that may not sample a single token."""
        sequences = list(self.scheduler.running.values())
        full = [sequence for sequence in sequences if sequence.is_decoding and sequence.is_full]
        return [self._finish(sequence, sequence.limit_reason) for sequence in full]

    def _prefill(self, chunks: list[Chunk]) -> Work:
        tokens, positions, segments = [], [], []
        for chunk in chunks:
            owner, start = chunk.slab.owner, chunk.slab.length
            tokens += owner.tokens[start : chunk.end]  # type: ignore[attr-defined]
            positions += range(start, chunk.end)
            segments.append(Segment(owner.slot, chunk.end - start))  # type: ignore[attr-defined]
        num_tokens = len(tokens)
        num_missing = self._num_missing(num_tokens)
        context = PrefillContext(chunks, self.base.dtype, self.base.device)
        hidden_ND = self.base.hidden(
            self._tensor(tokens + [0] * num_missing),
            self._tensor(positions + [0] * num_missing),
            context,
            self._lora_batch([*segments, Segment(None, num_missing)]),
        )
        offset = 0
        for chunk, segment in zip(chunks, segments, strict=True):
            owner = chunk.slab.owner
            if isinstance(owner, LiveSequence) and owner.request.request_id in self._scores:
                hidden_TD = hidden_ND[offset : offset + segment.length]
                self._score(owner, chunk.slab.length, hidden_TD)
            offset += segment.length
        self.scheduler.prefilled(chunks)
        return Work("prefill", num_tokens)

    def _decode(self) -> tuple[list[SequenceResult], Work | None]:
        slabs = self.pool.decoding()
        if not slabs:
            return [], None  # All were preempted.
        if self._batch is None or self._batch.epoch != self.pool.decode_epoch:
            self._batch = self._build_batch(slabs)
        batch = self._batch
        num_rows = len(batch.sequences)
        batch.advance()
        with self.base.bank.active(batch.lora):
            hidden_ND = self.base.hidden(batch.token_N, batch.position_N, batch.context, batch.lora)
            logits_NV = self.base.head(hidden_ND)[:num_rows].float()
        top = batch.most_likely(logits_NV)
        samples = sample(logits_NV, batch.sampling, batch.next_position_N)
        batch.token_N[:num_rows] = samples.token_N
        batch.position_N[:num_rows] += 1
        token_N = samples.token_N.cpu().numpy()
        is_finite_N = samples.is_finite_N.cpu().numpy()
        batch.next_position_N += 1
        for slab in slabs:
            slab.length += 1
        is_ending_N = (
            (batch.stop_NS == token_N[:, None]).any(1)
            | (batch.next_position_N >= batch.limit_N)
            | ~is_finite_N
        )
        logprobs, replayed = samples.logprob_N.tolist(), []
        for row, (sequence, token) in enumerate(
            zip(batch.sequences, token_N.tolist(), strict=True)
        ):
            if len(sequence.tokens) == sequence.num_cached:
                sequence.tokens.append(token)
                sequence.logprobs.append(logprobs[row])
                if row in top:
                    sequence.top.append(top[row])
            else:
                replayed.append(row)
        for row in batch.text_rows:
            is_ending_N[row] |= self._has_stop_string(batch.sequences[row])
        is_ending_N[replayed] = False
        results = [
            self._end(batch.sequences[row], is_finite=bool(is_finite_N[row]))
            for row in np.flatnonzero(is_ending_N)
        ]
        if replayed:
            self._follow(batch, replayed)
        return results, Work("decode", num_rows)

    def _build_batch(self, slabs: list[Slab]) -> "_DecodeBatch":
        sequences: list[LiveSequence] = [slab.owner for slab in slabs]  # type: ignore[misc]
        for sequence in sequences:
            sequence.note_slot()
        num_missing = self._num_missing(len(slabs))
        padding = [0] * num_missing
        params = [sequence.request.sampling for sequence in sequences]
        stops = [p.stop_token_ids for p in params]
        stop_NS = np.full((len(stops), max(map(len, stops))), -1)
        for row, stop in enumerate(stops):
            stop_NS[row, : len(stop)] = stop
        return _DecodeBatch(
            epoch=self.pool.decode_epoch,
            sequences=sequences,
            context=DecodeContext(self.pool, is_exact=self.is_exact),
            lora=self._lora_batch(
                [*(Segment(s.slot, 1) for s in sequences), Segment(None, num_missing)],
                is_decode=True,
            ),
            sampling=SamplingBatch.build(params, self.base.vocab_size, self.base.device),
            token_N=self._tensor([s.tokens[s.num_cached] for s in sequences] + padding),
            position_N=self._tensor([slab.length for slab in slabs] + padding),
            next_position_N=np.array([slab.length + 1 for slab in slabs]),
            limit_N=np.array([s.limit for s in sequences]),
            stop_NS=stop_NS,
            text_rows=[row for row, p in enumerate(params) if p.stop_strings],
            top_rows=_rows_by_top(sequences),
        )

    def _follow(self, batch: "_DecodeBatch", rows: list[int]) -> None:
        """Go on with replayed rows: their next token is known, maybe to be prefilled."""
        for row in rows:
            sequence = batch.sequences[row]
            batch.token_N[row] = sequence.tokens[sequence.num_cached]
            budget = self.scheduler.budget_tokens
            if sequence.next_prefill_end(budget) > sequence.num_cached:
                self.scheduler.refill(sequence)

    # -- the end of a sequence ----------------------------------------------------------------

    def _end(self, sequence: LiveSequence, *, is_finite: bool) -> SequenceResult:
        """End a sequence after the token it just sampled."""
        if not is_finite:
            sequence.tokens.pop()
            sequence.logprobs.pop()
            del sequence.top[-1:]
            return self._finish(sequence, StopReason.NON_FINITE)
        if sequence.tokens[-1] in sequence.request.sampling.stop_token_ids:
            return self._finish(sequence, StopReason.STOP_TOKEN)
        if sequence.request.sampling.stop_strings and self._has_stop_string(sequence):
            return self._finish(sequence, StopReason.STOP_STRING)
        return self._finish(sequence, sequence.limit_reason)

    def _finish(self, sequence: LiveSequence, reason: StopReason) -> SequenceResult:
        keep_kv = sequence.request.keep_kv and reason is not StopReason.NON_FINITE
        self.scheduler.finish(sequence, keep_kv=keep_kv)
        return self._result(sequence, reason)

    def _result(self, sequence: LiveSequence, reason: StopReason) -> SequenceResult:
        request = sequence.request
        scores = self._scores.pop(request.request_id, None)
        result = SequenceResult(
            request_id=request.request_id,
            sequence_id=request.sequence_id,
            tokens=np.array(sequence.tokens[sequence.num_prompt :], dtype=np.int32),
            logprobs=np.array(sequence.logprobs, dtype=np.float32),
            stop_reason=reason,
            slots=sequence.slots or [(0, sequence.slot)],
            num_cached_tokens=sequence.num_reused,
        )
        if scores is not None and scores.is_complete:
            result = replace(result, **scores.fields())
        if num_top := request.topk_sample_logprobs:
            ids, values = zip(*sequence.top, strict=True) if sequence.top else ((), ())
            result.topk_sample_ids = np.array(ids, dtype=np.int32).reshape(-1, num_top)
            result.topk_sample_logprobs = np.array(values, dtype=np.float32).reshape(-1, num_top)
        return result

    def _has_stop_string(self, sequence: LiveSequence) -> bool:
        stops = sequence.request.sampling.stop_strings
        num_tail = 4 * max(map(len, stops)) + _STOP_TAIL_TOKENS
        tail = sequence.tokens[max(sequence.num_prompt, len(sequence.tokens) - num_tail) :]
        assert self.decode_text is not None
        text = self.decode_text(tail)
        return any(stop in text for stop in stops)

    def _score(self, sequence: LiveSequence, start: int, hidden_TD: Tensor) -> None:
        """Score the context tokens that follow the positions of a prefill chunk."""
        scores = self._scores[sequence.request.request_id]
        end = min(start + len(hidden_TD), sequence.num_prompt - 1)
        first = max(start, scores.num_scored)  # Scored already, if it was preempted since.
        if first < end:
            next_token_T = self._tensor(sequence.tokens[first + 1 : end + 1])
            to_logits = partial(self._logits, sequence.slot)
            scores.add(hidden_TD[first - start : end - start], next_token_T, to_logits)

    def _logits(self, slot: Slot | None, hidden_TD: Tensor) -> Tensor:
        """Return the logits of positions of one sequence, float32 [T, V]."""
        num_missing = self._num_missing(len(hidden_TD))
        lora = self._lora_batch([Segment(slot, len(hidden_TD)), Segment(None, num_missing)])
        with self.base.bank.active(lora):
            return self.base.head(F.pad(hidden_TD, (0, 0, 0, num_missing)))[
                : len(hidden_TD)
            ].float()

    # -- small things -------------------------------------------------------------------------

    def _num_missing(self, num_rows: int) -> int:
        """Return how many rows of padding a pass needs."""
        if self.base.is_prepacked:
            return padded_rows(num_rows) - num_rows
        return max(0, EXACT_MIN_ROWS - num_rows) if self.is_exact else 0

    def _lora_batch(self, segments: list[Segment], *, is_decode: bool = False) -> LoraBatch | None:
        if all(segment.slot is None for segment in segments):
            return None
        with torch.inference_mode(False):  # The bank keeps copies, which training uses as well.
            return LoraBatch.build(
                self.base.bank, segments, is_exact=self.is_exact, is_decode=is_decode
            )

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.base.device)


def _rows_by_top(sequences: list[LiveSequence]) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        if num_top := sequence.request.topk_sample_logprobs:
            rows.setdefault(num_top, []).append(row)
    return rows


@dataclass(slots=True, kw_only=True)
class _DecodeBatch:
    """Everything about a decode batch that stays while its rows do, and its moving positions."""

    epoch: int
    """The pool's, when it was built."""
    sequences: list[LiveSequence]
    context: DecodeContext
    lora: LoraBatch | None
    sampling: SamplingBatch
    token_N: Tensor
    """The newest token of each row, whose KV the next step computes; padding at the end."""
    position_N: Tensor
    """Its position."""
    next_position_N: np.ndarray
    """The position of the token that the next step samples."""
    limit_N: np.ndarray
    """The first position that each row may not sample any more."""
    stop_NS: np.ndarray
    """Stop tokens per row, -1 where there are fewer."""
    text_rows: list[int]
    """Rows with stop strings."""
    top_rows: dict[int, list[int]]
    """Rows that want their most likely tokens, by how many."""

    def most_likely(self, logits_NV: Tensor) -> dict[int, tuple[list[int], list[float]]]:
        """Return ids and logprobs of the most likely tokens of the rows that want them."""
        out = {}
        for num_top, rows in self.top_rows.items():
            row_M = torch.tensor(rows, device=logits_NV.device)
            ids_MK, values_MK = most_likely(logits_NV, self.sampling, row_M, num_top)
            out |= zip(rows, zip(ids_MK.tolist(), values_MK.tolist(), strict=True), strict=True)
        return out

    def advance(self) -> None:
        """Point the attention at this step's positions."""
        max_positions = [
            int(self.next_position_N[part.own].max()) - 1 for part in self.context.parts
        ]
        self.context.advance(self.position_N, max_positions)
