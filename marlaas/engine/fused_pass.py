"""What happens in one fused pass: hidden states, logprobs, losses, gradients, outputs per datum.

    packed arrays ─► hidden [N, D] ─► logprobs [C] ─► loss per cell ─► d loss / d logprob [C]
                                          ▲                                     │
                   gradient rows ◄────────┴────────── backward ◄────── poisoned policies zeroed

The trainer calls it. Losses are computed on detached logprobs, so that what a policy sends back can
be looked at before any of it enters the shared backward pass. Rows of logits that no loss falls on
are scored aside and take no part in it.

Shape suffixes: N tokens of a pass, M rows of logits, C scored cells, B data of a pass, D width; c
are the cells that an objective reads.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from marlaas.engine.allocator import blocks_from_system
from marlaas.engine.checkpointing import checkpointed, decoder_layers
from marlaas.engine.logprobs import ScoredRows, selected_logprobs
from marlaas.engine.objectives import TrainedTokens, resolve_params, token_loss
from marlaas.engine.packing import HeadRows, PackedPass, PassCost
from marlaas.engine.pass_memory import PassMemory, PassSize
from marlaas.engine.policy_state import PolicyState
from marlaas.model.attention import BatchedSequences
from marlaas.model.base import BaseModel
from marlaas.model.lora import LoraBatch
from marlaas.types import LOSS_INPUTS, DatumOutput, Objective

LARGE_SHARE = 0.5
"""A pass that takes more than this share of the budget gives its memory back."""


class PassRunner:
    """Runs packed passes on one base; holds nothing between them."""

    def __init__(
        self,
        base: BaseModel,
        *,
        is_exact: bool,
        checkpointing: str,
        memory_budget_bytes: int,
    ) -> None:
        """
        Args:
            checkpointing: `always`, `never`, or `auto`: when the predicted peak of a pass without
                it exceeds `memory_budget_bytes`.
        """
        assert checkpointing in ("auto", "always", "never")
        self.base = base
        self.cost = PassCost.of(base)
        self.memory = PassMemory.of(base)
        self._is_exact = is_exact
        self._checkpointing = checkpointing
        self._memory_budget_bytes = memory_budget_bytes
        self._layers = decoder_layers(base.model)
        self._dtype = torch.promote_types(base.dtype, torch.float32)

    def peak_bytes(self, size: PassSize) -> int:
        """Return the peak of a training pass of some size, checkpointed or not as may be chosen."""
        is_checkpointed = self._checkpointing != "never"
        return self.memory.training(size, is_checkpointed=is_checkpointed)

    def fits(self, size: PassSize) -> bool:
        """Return whether a pass of some size keeps to the budget."""
        return self.peak_bytes(size) <= self._memory_budget_bytes

    @property
    def longest(self) -> int:
        """The longest sequence that may be trained on, whatever its adapter."""
        is_checkpointed = self._checkpointing != "never"
        return self.memory.longest(self._memory_budget_bytes, is_checkpointed=is_checkpointed)

    def score(self, packed: PackedPass) -> list[DatumOutput]:
        """Return the logprobs of the scored tokens of every datum."""
        if not len(packed.targets_C):
            return _outputs(packed, torch.zeros(0), None, None)
        batch = LoraBatch.build(self.base.bank, packed.segments, is_exact=self._is_exact)
        memory = self._memory_for(self.memory.scoring(packed.size))
        with torch.no_grad(), self.base.bank.active(batch), memory:
            hidden_ND = self._hidden(packed)
            logprobs_C = self._logprobs(packed, packed.looked_at, hidden_ND)
        return _outputs(packed, _in_order(packed, (packed.looked_at, logprobs_C)), None, None)

    def train(self, packed: PackedPass, states: Sequence[PolicyState]) -> list[DatumOutput]:
        """Add every policy's gradient to its row; return what the pass says of every datum.

        Args:
            states: of the policy of each chunk.
        """
        if not len(packed.trained.cell_C):
            return self.score(packed)
        grad_rows = [state.grad_P for state in states]
        bank = self.base.bank
        batch = LoraBatch.build(
            bank,
            packed.segments,
            grad_rows=[*grad_rows, *[None] * (len(packed.segments) - len(grad_rows))],
            is_exact=self._is_exact,
        )
        with torch.enable_grad(), bank.active(batch), self._checkpointing_of(packed):
            hidden_ND = self._hidden(packed)
            trained_C = self._logprobs(packed, packed.trained, hidden_ND, grad_rows)
            parts = [(packed.trained, trained_C.detach())]
            if len(packed.looked_at.cell_C):
                with torch.no_grad():
                    looked_at_C = self._logprobs(packed, packed.looked_at, hidden_ND)
                parts.append((packed.looked_at, looked_at_C))
            logprobs_C = _in_order(packed, *parts)
            loss_C, upstream_C, counts = self._losses(packed, logprobs_C)
            _isolate_non_finite(packed, states, loss_C, upstream_C)
            trained_C.backward(upstream_C[self._tensor(packed.trained.cell_C)])
        return _outputs(packed, logprobs_C, loss_C, counts)

    def _hidden(self, packed: PackedPass) -> Tensor:
        """Return the last hidden states [N, D]; the pass's adapters are active."""
        base = self.base
        return base.hidden(
            self._tensor(packed.tokens_N),
            self._tensor(packed.positions_N),
            BatchedSequences.build(packed.attention, base.dtype, base.device),
            base.bank.batch,
        )

    def _logprobs(
        self,
        packed: PackedPass,
        rows: HeadRows,
        hidden_ND: Tensor,
        grad_rows: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the logprobs of the cells of some rows, in their order."""
        inverse_temperature_M = None
        if (rows.temperature_M != 1.0).any():
            inverse_temperature_M = self._tensor(1.0 / rows.temperature_M, self._dtype)
        scored = ScoredRows(
            targets_C=self._tensor(packed.targets_C[rows.cell_C]),
            segments=packed.segments_of(rows),
            row_C=None if rows.row_C is None else self._tensor(rows.row_C),
            inverse_temperature_M=inverse_temperature_M,
            grad_rows=grad_rows,
        )
        hidden_MD = hidden_ND.index_select(0, self._tensor(rows.place_M))
        return selected_logprobs(self.base, hidden_MD, scored, is_exact=self._is_exact)

    def _losses(
        self, packed: PackedPass, logprobs_C: Tensor
    ) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
        """Return weight x loss [C], its gradient towards the logprobs [C], and per chunk the counts
        of its own cells."""
        weights = packed.gather("weights")
        is_read = weights != 0
        inputs = {name: packed.gather(name) for name in sorted(_names_of_inputs(packed))}
        if "ratio_mask" in inputs:
            mask = inputs["ratio_mask"]
            inputs["ratio_mask"] = np.where(np.isnan(mask), is_read, mask)
            is_read = is_read | (inputs["ratio_mask"] != 0)
        weights_C = self._tensor(weights, self._dtype)
        advantages_C = self._tensor(packed.gather("advantages"), self._dtype)
        sampling_C = self._tensor(packed.gather("sampling_logprobs"), self._dtype)
        datum_C = self._tensor(packed.datum_C)
        loss_C, upstream_C = torch.zeros_like(logprobs_C), torch.zeros_like(logprobs_C)
        counts: list[dict[str, Tensor]] = [{} for _ in packed.chunks]
        for objective, chunk_ids in self._by_objective(packed):
            bounds = [packed.chunk_bounds[idx] for idx in chunk_ids]
            cells = np.concatenate([np.arange(*bound) for bound in bounds])
            cells = cells[is_read[cells]]
            params = resolve_params(objective)
            where = self._tensor(cells)
            leaf_c = logprobs_C[where].requires_grad_()
            tokens = TrainedTokens(
                logprobs_M=leaf_c,
                sampling_logprobs_M=sampling_C[where],
                advantages_M=advantages_C[where],
                datum_M=datum_C[where],
                num_data=len(packed.scored),
                reference_logprobs_M=(
                    self._tensor(packed.gather("reference_logprobs")[cells], self._dtype)
                    if params["kl_coef"] > 0
                    else None
                ),
                inputs={
                    name: self._tensor(_filled(values[cells], params.get(name)), self._dtype)
                    for name, values in inputs.items()
                    if name in LOSS_INPUTS.get(objective.name, ())
                },
            )
            out = token_loss(objective, tokens)
            weight_c = weights_C[where]
            (upstream_C[where],) = torch.autograd.grad(out.loss_M, leaf_c, weight_c)
            loss_C[where] = weight_c * out.loss_M.detach()
            for name, values_c in out.counts.items():
                values_C = torch.zeros_like(logprobs_C)
                values_C[where] = torch.where(weight_c != 0, values_c.to(self._dtype), 0.0)
                for idx, (start, end) in zip(chunk_ids, bounds, strict=True):
                    counts[idx][name] = values_C[start:end]
        return loss_C, upstream_C, counts

    def _by_objective(self, packed: PackedPass) -> list[tuple[Objective, list[int]]]:
        """Return the pass's chunks by equal objective, those without a loss left out; in exact mode
        each chunk on its own."""
        groups: dict[Hashable, tuple[Objective, list[int]]] = {}
        for idx, chunk in enumerate(packed.chunks):
            objective = chunk.submission.objective
            assert objective is not None
            if not packed.trained.lengths[idx]:
                continue
            same = idx if self._is_exact else (objective.name, *sorted(objective.params.items()))
            groups.setdefault(same, (objective, []))[1].append(idx)
        return list(groups.values())

    @contextmanager
    def _checkpointing_of(self, packed: PackedPass) -> Iterator[None]:
        plain_bytes = self.memory.training(packed.size, is_checkpointed=False)
        is_needed = self._checkpointing == "always" or (
            self._checkpointing == "auto" and plain_bytes > self._memory_budget_bytes
        )
        if is_needed:
            with blocks_from_system(), checkpointed(self._layers):
                yield
        else:
            with self._memory_for(plain_bytes):
                yield

    def _memory_for(self, peak_bytes: int) -> AbstractContextManager[None]:
        """Return where a pass that keeps its activations, or has none, is to happen."""
        is_large = peak_bytes > LARGE_SHARE * self._memory_budget_bytes
        return blocks_from_system() if is_large else nullcontext()

    def _tensor(self, values: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
        return torch.from_numpy(values).to(self.base.device, dtype)


def _isolate_non_finite(
    packed: PackedPass, states: Sequence[PolicyState], loss_C: Tensor, upstream_C: Tensor
) -> None:
    """Mark policies whose loss or its gradient is not finite, and zero what they send back."""
    is_finite_C = (loss_C.isfinite() & upstream_C.isfinite()).cpu().numpy()
    chunks = zip(states, packed.chunk_bounds, packed.trained.lengths, strict=True)
    for state, (start, end), num_trained in chunks:
        state.has_gradient |= num_trained > 0
        if not is_finite_C[start:end].all():
            state.is_poisoned = True
            upstream_C[start:end] = 0.0


def _in_order(packed: PackedPass, *parts: tuple[HeadRows, Tensor]) -> Tensor:
    """Return the logprobs of the pass's cells [C] from those of its rows."""
    (_, first), *_ = parts
    logprobs_C = first.new_empty(len(packed.targets_C))
    for rows, own_C in parts:
        logprobs_C[torch.from_numpy(rows.cell_C).to(first.device)] = own_C
    return logprobs_C


def _names_of_inputs(packed: PackedPass) -> set[str]:
    return {name for datum in packed.data for name in datum.loss_inputs}


def _filled(values_c: np.ndarray, default: float | None) -> np.ndarray:
    """Return an input of the loss, the objective's parameter where a datum has none."""
    if default is None:
        return values_c
    # Wide, so that the parameter keeps its digits beside inputs in fp32.
    return np.where(np.isnan(values_c), default, values_c.astype(np.float64))


def _outputs(
    packed: PackedPass,
    logprobs_C: Tensor,
    loss_C: Tensor | None,
    counts: list[dict[str, Tensor]] | None,
) -> list[DatumOutput]:
    """Return what the pass says of each of its data."""
    num_data = len(packed.scored)
    logprobs = logprobs_C.float().cpu().numpy()
    loss_B = np.zeros(num_data)
    if loss_C is not None:
        loss_B = _sum_by_datum(loss_C, packed.datum_C, num_data)
    counts_B: list[dict[str, float]] = [{} for _ in range(num_data)]
    for chunk_counts, (start, end) in zip(counts or (), packed.chunk_bounds, strict=False):
        datum_c = packed.datum_C[start:end]
        for name, values_c in chunk_counts.items():
            sums_B = _sum_by_datum(values_c, datum_c, num_data)
            for idx in np.unique(datum_c):
                counts_B[idx][name] = float(sums_B[idx])
    outputs, start = [], 0
    for idx, (datum, scored) in enumerate(zip(packed.data, packed.scored, strict=True)):
        dense = np.zeros(datum.weights.shape, dtype=np.float32)
        dense.reshape(-1)[scored] = logprobs[start : start + len(scored)]
        start += len(scored)
        outputs.append(DatumOutput(logprobs=dense, loss=float(loss_B[idx]), counts=counts_B[idx]))
    return outputs


def _sum_by_datum(values_C: Tensor, datum_C: np.ndarray, num_data: int) -> np.ndarray:
    """Return the sum over each datum's cells [B], in fp64."""
    return np.bincount(datum_C, weights=values_C.double().cpu().numpy(), minlength=num_data)
