"""What happens in one fused pass: hidden states, logprobs, losses, gradients, outputs per datum.

    packed arrays ─► hidden [N, D] ─► logprobs [M] ─► loss per token ─► d loss / d logprob [M]
                                          ▲                                     │
                   gradient rows ◄────────┴────────── backward ◄────── poisoned policies zeroed

The trainer calls it. Losses are computed on detached logprobs, so that what a policy sends back can
be looked at before any of it enters the shared backward pass.

Shape suffixes: N tokens of a pass, M scored tokens, B data of a pass, D width.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from marlaas.engine.checkpointing import checkpointed, decoder_layers
from marlaas.engine.logprobs import ScoredRows, selected_logprobs
from marlaas.engine.objectives import TrainedTokens, resolve_params, token_loss
from marlaas.engine.packing import Chunk, PackedPass, PassCost
from marlaas.engine.policy_state import PolicyState
from marlaas.model.attention import BatchedSequences
from marlaas.model.base import BaseModel
from marlaas.model.lora import LoraBatch
from marlaas.types import DatumOutput, Objective


class PassRunner:
    """Runs packed passes on one base; holds nothing between them."""

    def __init__(
        self,
        base: BaseModel,
        *,
        is_exact: bool,
        checkpointing: str,
        activation_budget_bytes: int,
    ) -> None:
        """
        Args:
            checkpointing: `always`, `never`, or `auto`: when a pass's predicted activations
                exceed `activation_budget_bytes`.
        """
        assert checkpointing in ("auto", "always", "never")
        self.base = base
        self.cost = PassCost.of(base)
        self._is_exact = is_exact
        self._checkpointing = checkpointing
        self._activation_budget_bytes = activation_budget_bytes
        self._layers = decoder_layers(base.model)
        self._dtype = torch.promote_types(base.dtype, torch.float32)

    def score(self, packed: PackedPass) -> list[DatumOutput]:
        """Return the logprobs of the scored tokens of every datum."""
        batch = LoraBatch.build(self.base.bank, packed.segments, is_exact=self._is_exact)
        with torch.no_grad(), self.base.bank.active(batch):
            logprobs_M = self._logprobs(packed, grad_rows=None)
        return _outputs(packed, logprobs_M, None, None)

    def train(self, packed: PackedPass, states: Sequence[PolicyState]) -> list[DatumOutput]:
        """Add every policy's gradient to its row; return what the pass says of every datum.

        Args:
            states: of the policy of each chunk.
        """
        if not len(packed.selected_M):
            return _outputs(packed, torch.zeros(0), None, None)
        grad_rows = [state.grad_P for state in states]
        bank = self.base.bank
        batch = LoraBatch.build(
            bank,
            packed.segments,
            grad_rows=[*grad_rows, *[None] * (len(packed.segments) - len(grad_rows))],
            is_exact=self._is_exact,
        )
        with torch.enable_grad(), bank.active(batch), self._checkpointing_of(packed):
            logprobs_M = self._logprobs(packed, grad_rows)
            loss_M, upstream_M, counts = self._losses(packed, logprobs_M.detach())
            _isolate_non_finite(packed, states, loss_M, upstream_M)
            logprobs_M.backward(upstream_M)
        return _outputs(packed, logprobs_M.detach(), loss_M, counts)

    def _logprobs(self, packed: PackedPass, grad_rows: list[Tensor] | None) -> Tensor:
        """Return the logprobs of the scored tokens [M]; the pass's adapters are active."""
        base = self.base
        hidden_ND = base.hidden(
            self._tensor(packed.tokens_N),
            self._tensor(packed.positions_N),
            BatchedSequences.build(packed.attention, base.dtype, base.device),
            base.bank.batch,
        )
        inverse_temperature_M = None
        if (packed.temperatures_M != 1.0).any():
            inverse_temperature_M = self._tensor(1.0 / packed.temperatures_M, self._dtype)
        rows = ScoredRows(
            targets_M=self._tensor(packed.targets_M),
            segments=packed.head_segments,
            inverse_temperature_M=inverse_temperature_M,
            grad_rows=grad_rows,
        )
        selected_MD = hidden_ND.index_select(0, self._tensor(packed.selected_M))
        return selected_logprobs(base, selected_MD, rows, is_exact=self._is_exact)

    def _losses(
        self, packed: PackedPass, logprobs_M: Tensor
    ) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
        """Return weight x loss [M], its gradient towards the logprobs [M], and per chunk the counts
        of its own tokens."""
        weights_M = self._tensor(packed.gather("weights"), self._dtype)
        advantages_M = self._tensor(packed.gather("advantages"), self._dtype)
        sampling_M = self._tensor(packed.gather("sampling_logprobs"), self._dtype)
        datum_M = self._tensor(packed.datum_M)
        loss_M, upstream_M = torch.zeros_like(logprobs_M), torch.zeros_like(logprobs_M)
        counts: list[dict[str, Tensor]] = [{} for _ in packed.chunks]
        for objective, chunk_ids in self._by_objective(packed):
            bounds = [packed.chunk_bounds[idx] for idx in chunk_ids]
            where = self._tensor(np.concatenate([np.arange(*bound) for bound in bounds]))
            reference = None
            if resolve_params(objective)["kl_coef"] > 0:
                values = [_reference_logprobs(packed.chunks[idx]) for idx in chunk_ids]
                reference = self._tensor(np.concatenate(values), self._dtype)
            leaf_M = logprobs_M[where].requires_grad_()
            tokens = TrainedTokens(
                logprobs_M=leaf_M,
                sampling_logprobs_M=sampling_M[where],
                advantages_M=advantages_M[where],
                datum_M=datum_M[where],
                num_data=len(packed.scored),
                reference_logprobs_M=reference,
            )
            out = token_loss(objective, tokens)
            weight_M = weights_M[where]
            (upstream_M[where],) = torch.autograd.grad(out.loss_M, leaf_M, weight_M)
            loss_M[where] = weight_M * out.loss_M.detach()
            lengths = [end - start for start, end in bounds]
            for name, values_M in out.counts.items():
                for idx, own_M in zip(chunk_ids, values_M.split(lengths), strict=True):
                    counts[idx][name] = own_M
        return loss_M, upstream_M, counts

    def _by_objective(self, packed: PackedPass) -> list[tuple[Objective, list[int]]]:
        """Return the pass's chunks by equal objective; in exact mode each chunk on its own."""
        groups: dict[Hashable, tuple[Objective, list[int]]] = {}
        for idx, chunk in enumerate(packed.chunks):
            objective = chunk.submission.objective
            assert objective is not None
            start, end = packed.chunk_bounds[idx]
            if start == end:
                continue
            same = idx if self._is_exact else (objective.name, *sorted(objective.params.items()))
            groups.setdefault(same, (objective, []))[1].append(idx)
        return list(groups.values())

    @contextmanager
    def _checkpointing_of(self, packed: PackedPass) -> Iterator[None]:
        predicted_bytes = self.cost.activation_bytes(
            packed.num_tokens, packed.num_queries, packed.num_keys
        )
        is_needed = self._checkpointing == "always" or (
            self._checkpointing == "auto" and predicted_bytes > self._activation_budget_bytes
        )
        with checkpointed(self._layers) if is_needed else nullcontext():
            yield

    def _tensor(self, values: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
        return torch.from_numpy(values).to(self.base.device, dtype)


def _isolate_non_finite(
    packed: PackedPass, states: Sequence[PolicyState], loss_M: Tensor, upstream_M: Tensor
) -> None:
    """Mark policies whose loss or its gradient is not finite, and zero what they send back."""
    is_finite_M = (loss_M.isfinite() & upstream_M.isfinite()).cpu().numpy()
    for state, (start, end) in zip(states, packed.chunk_bounds, strict=True):
        state.has_gradient |= end > start
        if not is_finite_M[start:end].all():
            state.is_poisoned = True
            upstream_M[start:end] = 0.0


def _reference_logprobs(chunk: Chunk) -> np.ndarray:
    """Return the reference logprobs of a chunk's trained tokens."""
    return np.concatenate(
        [datum.reference_logprobs[1:][datum.weights[1:] != 0] for datum in chunk.data]  # type: ignore[index]
    )


def _outputs(
    packed: PackedPass,
    logprobs_M: Tensor,
    loss_M: Tensor | None,
    counts: list[dict[str, Tensor]] | None,
) -> list[DatumOutput]:
    """Return what the pass says of each of its data."""
    num_data = len(packed.scored)
    logprobs = logprobs_M.float().cpu().numpy()
    loss_B = np.zeros(num_data)
    if loss_M is not None:
        loss_B = _sum_by_datum(loss_M, packed.datum_M, num_data)
    counts_B: list[dict[str, float]] = [{} for _ in range(num_data)]
    for chunk_counts, (start, end) in zip(counts or (), packed.chunk_bounds, strict=False):
        datum_m = packed.datum_M[start:end]
        for name, values_m in chunk_counts.items():
            sums_B = _sum_by_datum(values_m, datum_m, num_data)
            for idx in np.unique(datum_m):
                counts_B[idx][name] = float(sums_B[idx])
    outputs, start = [], 0
    for idx, (datum, scored) in enumerate(zip(packed.data, packed.scored, strict=True)):
        dense = np.zeros(len(datum.tokens), dtype=np.float32)
        dense[scored] = logprobs[start : start + len(scored)]
        start += len(scored)
        outputs.append(DatumOutput(logprobs=dense, loss=float(loss_B[idx]), counts=counts_B[idx]))
    return outputs


def _sum_by_datum(values_M: Tensor, datum_M: np.ndarray, num_data: int) -> np.ndarray:
    """Return the sum over each datum's tokens [B], in fp64."""
    return np.bincount(datum_M, weights=values_M.double().cpu().numpy(), minlength=num_data)
