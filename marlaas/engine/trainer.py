"""Trains many LoRA policies on one device: the Tinker verbs, synchronous, one fused pass at a time.

    submit_forward_backward ─┐                    ┌─► outputs per datum
    submit_forward ──────────┴─► queue ─► step() ─┤
                                                  └─► gradient rows ─► optim_step ─► weights

The worker calls it; keys and tickets are opaque here. `step` runs one pass over whatever is queued:
policies of different ranks, targets, objectives and temperatures, packed side by side.

Invariants:
- A policy's gradient is the one it would get alone: the loss is a sum of each policy's own, weight
  gradients are products over a policy's own tokens, clip and clock are its own.
- A loss or gradient that is not finite vetoes its policy's next step and reaches no other policy.
- With `is_exact` (fp32, CPU, one thread) no bit of a policy's outputs, gradient or update depends
  on which others share its passes.

Shape suffix: P length of a row.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from marlaas.engine.adapter_io import (
    adapter_tensors,
    hash_adapter,
    load_adapter,
    read_spec,
    target_kinds,
)
from marlaas.engine.datum_checks import MAX_CELLS, datum_problems
from marlaas.engine.fused_pass import PassRunner
from marlaas.engine.objectives import check_objective
from marlaas.engine.optimizer import adamw_, check_adam, clip_
from marlaas.engine.packing import (
    ChunkQueue,
    PackedPass,
    PassCost,
    Submission,
    cut,
    pack,
    size_of_datum,
)
from marlaas.engine.pass_memory import PassMemory
from marlaas.engine.policy_state import PolicyState, load_snapshot, save_snapshot
from marlaas.engine.types import Work
from marlaas.errors import InvalidRequest
from marlaas.model.bank import Slot, init_adapter
from marlaas.model.base import BaseModel
from marlaas.types import (
    RANK_BUCKETS,
    TARGET_GROUPS,
    AdamParams,
    AdapterSpec,
    Datum,
    DatumOutput,
    Objective,
    StepResult,
)

MAX_GRADIENT_NORM = 1e18
"""A gradient beyond it counts as not finite: its square would overflow the second moment in fp32,
which would silence the policy for ever."""


class LoraTrainer:
    """Holds the training state of every policy of one engine worker.

    A policy: `create or load -> (submit_forward_backward, step until finished, optim_step)* ->
    remove`. The slot given with a submission must hold the policy's newest weights.

        trainer = LoraTrainer(base)
        trainer.create("p", AdapterSpec(rank=8))
        slot = base.bank.allocate(rank=8, scale=2.0, kinds=target_kinds(spec))
        base.bank.write(slot, trainer.weights("p"))
        trainer.submit_forward_backward("p", slot, data, Objective(name="dppo_tis"), ticket=1)
        [(_, outputs)], work = trainer.step()
        trainer.optim_step("p", AdamParams(lr=1e-3))
        base.bank.write(slot, trainer.weights("p"))
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        budget_tokens: int = 512,
        is_exact: bool = False,
        checkpointing: str = "auto",
        memory_budget_bytes: int = 4 << 30,
    ) -> None:
        """
        Args:
            memory_budget_bytes: most that one pass may take at its peak, as predicted.
            checkpointing: `always`, `never`, or `auto`: when a pass does not fit without.
        """
        if is_exact:
            base.check_exact()
        self.base = base
        self._runner = PassRunner(
            base,
            is_exact=is_exact,
            checkpointing=checkpointing,
            memory_budget_bytes=memory_budget_bytes,
        )
        self._budget_tokens = budget_tokens
        self._is_exact = is_exact
        self._memory_budget_bytes = memory_budget_bytes
        self._queue = ChunkQueue(budget_tokens, is_exact=is_exact, fits=self._runner.fits)
        self._states: dict[Hashable, PolicyState] = {}
        self._dtype = torch.promote_types(base.dtype, torch.float32)

    @property
    def has_work(self) -> bool:
        return len(self._queue) > 0

    @property
    def cost(self) -> PassCost:
        """Predicts what sequences cost in a pass; for whoever plans or charges."""
        return self._runner.cost

    @property
    def memory(self) -> PassMemory:
        """Predicts what passes take of memory."""
        return self._runner.memory

    @property
    def max_tokens(self) -> int:
        """The longest datum that is sure to fit into memory, whatever its policy's adapter."""
        return min(self._runner.longest, self.base.max_context)

    # Policies ------------------------------------------------------------------------------

    def create(self, key: Hashable, spec: AdapterSpec) -> PolicyState:
        """Make a fresh policy at version 0, which changes nothing yet."""
        assert key not in self._states, "policy created twice"
        self._check_spec(spec)
        layout = self.base.bank.bucket(spec.rank).layout
        rows_4P = torch.zeros(4, layout.length, dtype=self._dtype, device=self.base.device)
        rows_4P[0] = init_adapter(layout, rank=spec.rank, kinds=target_kinds(spec), seed=spec.seed)
        self._states[key] = PolicyState(spec=spec, layout=layout, rows_4P=rows_4P)
        return self._states[key]

    def create_from(self, key: Hashable, spec: AdapterSpec, source: Path | str) -> PolicyState:
        """Make a policy at version 0 that begins where another one was.

        A PEFT folder gives weights alone; a snapshot file gives the moments and the update clock,
        too. Rank and targets must be those of `spec`; the scale is the source's, and the seed plays
        no part.

        Raises:
            NotFound: nothing at `source`.
            InvalidRequest: an adapter of another shape, or one that could not be trained whole.
        """
        assert key not in self._states, "policy created twice"
        self._check_spec(spec)
        is_snapshot = Path(source).is_file()
        state = self._read_snapshot(source) if is_snapshot else self._read_folder(source)
        problems = list(_shape_problems(spec, state))
        if problems:
            raise InvalidRequest(*(f"adapter {source}: {problem}" for problem in problems))
        state.spec = replace(spec, alpha=state.spec.alpha)
        state.version = 0
        self._states[key] = state
        return state

    def load(self, key: Hashable, path: Path | str) -> PolicyState:
        """Bring a policy back from a snapshot: weights, moments and clocks, no gradient."""
        assert key not in self._states, "policy loaded twice"
        self._states[key] = self._read_snapshot(path)
        return self._states[key]

    def _read_snapshot(self, path: Path | str) -> PolicyState:
        layouts = {rank: self.base.bank.bucket(rank).layout for rank in RANK_BUCKETS}
        return load_snapshot(path, layouts, device=self.base.device, dtype=self._dtype)

    def _read_folder(self, folder: Path | str) -> PolicyState:
        layout = self.base.bank.bucket(read_spec(folder).rank).layout
        loaded = load_adapter(folder, layout)
        rows_4P = torch.zeros(4, layout.length, dtype=self._dtype, device=self.base.device)
        rows_4P[0] = loaded.row
        return PolicyState(spec=loaded.spec, layout=layout, rows_4P=rows_4P)

    def save_snapshot(self, key: Hashable, path: Path | str, *, is_synced: bool = False) -> None:
        """Write a policy's weights, moments and clocks to a file."""
        save_snapshot(path, self._states[key], is_synced=is_synced)

    def remove(self, key: Hashable) -> list[Hashable]:
        """Forget a policy, zero its memory and return the tickets that will never finish."""
        dropped = [chunk.submission.ticket for chunk in self._queue.drop(key)]
        state = self._states.pop(key, None)
        if state is not None:
            state.rows_4P.zero_()
        return list(dict.fromkeys(dropped))

    def weights(self, key: Hashable) -> Tensor:
        """Return the newest weights [P] of a policy; a view, to be copied into a bank slot."""
        return self._states[key].weights_P

    def gradient(self, key: Hashable) -> Tensor:
        """Return what has been accumulated since the policy's last step [P]; a view."""
        return self._states[key].grad_P

    def state(self, key: Hashable) -> PolicyState:
        """Return all that is held of a policy; the trainer goes on changing it."""
        return self._states[key]

    def version(self, key: Hashable) -> int:
        return self._states[key].version

    def adapter_hash(self, key: Hashable) -> str:
        """Return the content hash of the newest weights."""
        state = self._states[key]
        return hash_adapter(state.weights_P, state.spec, state.layout)

    def _check_spec(self, spec: AdapterSpec) -> None:
        problems = []
        if not 1 <= spec.rank <= RANK_BUCKETS[-1]:
            problems.append(f"rank = {spec.rank}; expected 1..{RANK_BUCKETS[-1]}")
        if not (math.isfinite(spec.alpha) and spec.alpha > 0):
            problems.append(f"alpha = {spec.alpha}; expected a finite number > 0")
        present = {shape.kind for shape in self.base.bank.modules}
        unknown = [target for target in spec.targets if target not in TARGET_GROUPS]
        if unknown:
            problems.append(f"targets = {unknown}; expected some of {', '.join(TARGET_GROUPS)}")
        elif refused := self.base.target_problems(spec.targets):
            problems += refused
        elif not target_kinds(spec) & present:
            problems.append(f"targets = {spec.targets} name no linear of {self.base.name}")
        if problems:
            raise InvalidRequest(*problems)

    # Submitting ----------------------------------------------------------------------------

    def submit_forward_backward(
        self,
        key: Hashable,
        slot: Slot,
        data: Sequence[Datum],
        objective: Objective,
        ticket: Hashable,
    ) -> None:
        """Queue data whose summed loss is to be added to the policy's gradient.

        Raises:
            InvalidRequest: an unknown objective or malformed data; nothing is queued then.
        """
        assert key in self._states, "policy is not trained here"
        check_objective(objective)
        self._submit(key, slot, data, objective, ticket)

    def submit_forward(
        self, key: Hashable, slot: Slot | None, data: Sequence[Datum], ticket: Hashable
    ) -> None:
        """Queue data to be scored under a slot, or under the base (None): logprobs of every entry
        but the first, at each datum's temperature."""
        self._submit(key, slot, data, None, ticket)

    def _submit(
        self,
        key: Hashable,
        slot: Slot | None,
        data: Sequence[Datum],
        objective: Objective | None,
        ticket: Hashable,
    ) -> None:
        sizes = {"vocab_size": self.base.vocab_size, "max_context": self.base.max_context}
        problems = [
            f"datum {idx}: {problem}"
            for idx, datum in enumerate(data)
            for problem in datum_problems(datum, objective, **sizes)
        ]
        if not data:
            problems.append("no data; expected at least one datum")
        num_cells = sum(datum.weights.size for datum in data)
        if num_cells > MAX_CELLS:
            problems.append(f"{num_cells} targets in all; expected at most {MAX_CELLS} at once")
        if problems:
            raise InvalidRequest(*problems)
        bank = self.base.bank
        submission = Submission(
            ticket=ticket,
            key=key,
            slot=slot,
            data=data,
            objective=objective,
            outputs=[None] * len(data),
            has_head_adapter=slot is not None and "lm_head" in bank.kinds(slot),
        )
        if problems := list(self._memory_problems(submission)):
            raise InvalidRequest(*problems)
        fits = self._runner.fits
        self._queue.push(cut(submission, self.cost, self._budget_tokens, fits))

    def _memory_problems(self, submission: Submission) -> Iterator[str]:
        """Yield which data are too large for a pass of their own."""
        for idx, datum in enumerate(submission.data):
            size = size_of_datum(submission, datum)
            if not self._runner.fits(size):
                needed_mb, budget_mb = (
                    num_bytes / 2**20
                    for num_bytes in (self._runner.peak_bytes(size), self._memory_budget_bytes)
                )
                yield (
                    f"datum {idx}: {len(datum.tokens)} tokens take {needed_mb:.0f} MiB while they "
                    f"are computed, and there are {budget_mb:.0f}; expected at most "
                    f"{self.max_tokens} tokens"
                )

    # Passes --------------------------------------------------------------------------------

    def step(self) -> tuple[list[tuple[Hashable, list[DatumOutput]]], Work | None]:
        """Run one fused pass over what is queued; return what that finished, in tickets."""
        chunks = self._queue.pop_pass()
        if not chunks:
            return [], None
        packed = pack(chunks, is_exact=self._is_exact, is_prepacked=self.base.is_prepacked)
        is_training = packed.chunks[0].submission.is_training
        if is_training:
            states = [self._states[chunk.submission.key] for chunk in packed.chunks]
            outputs = self._runner.train(packed, states)
        else:
            outputs = self._runner.score(packed)
        num_tokens = sum(segment.length for segment in packed.segments[: len(chunks)])
        kind = "train" if is_training else "score"
        return self._collect(packed, outputs), Work(kind, num_tokens)

    def _collect(
        self, packed: PackedPass, outputs: list[DatumOutput]
    ) -> list[tuple[Hashable, list[DatumOutput]]]:
        finished, start = [], 0
        for chunk in packed.chunks:
            submission = chunk.submission
            num_data = chunk.end - chunk.start
            submission.outputs[chunk.start : chunk.end] = outputs[start : start + num_data]
            start += num_data
            submission.num_chunks_left -= 1
            if submission.num_chunks_left == 0:
                finished.append((submission.ticket, submission.outputs))
        return finished

    # Steps ---------------------------------------------------------------------------------

    def zero_grad(self, key: Hashable) -> None:
        """Clear the accumulated gradient and its poison; weights, moments and clocks stay."""
        assert key not in self._queue, "the policy has passes that have not run"
        self._states[key].clear_gradient()

    def optim_step(self, key: Hashable, adam: AdamParams) -> StepResult:
        """Make one update from the accumulated gradient, clear it and advance the clock.

        Without a gradient only the clock advances. So it does when a gradient or a loss that is
        not finite vetoes the step: weights and moments stay, and the gradient is cleared.
        """
        problems = check_adam(adam)
        if problems:
            raise InvalidRequest(*problems)
        assert key not in self._queue, "the policy has passes that have not run"
        state = self._states[key]
        norm, is_vetoed = 0.0, False
        if state.has_gradient:
            norm = clip_(state.grad_P, adam.max_grad_norm)
            is_vetoed = state.is_poisoned or not norm < MAX_GRADIENT_NORM
            if not is_vetoed:
                state.num_updates += 1
                adamw_(
                    state.weights_P,
                    state.exp_avg_P,
                    state.exp_avg_sq_P,
                    state.grad_P,
                    adam,
                    state.num_updates,
                )
        state.clear_gradient()
        state.version += 1
        return StepResult(
            version=state.version,
            grad_norm=norm,
            adapter_hash=self.adapter_hash(key),
            is_vetoed=is_vetoed,
        )


def _shape_problems(spec: AdapterSpec, state: PolicyState) -> Iterator[str]:
    """Yield why a policy of shape `spec` cannot begin with the weights of `state`."""
    found = state.spec
    if found.rank != spec.rank:
        yield f"rank {found.rank}, the policy's is {spec.rank}; expected the same"
    kinds, wanted = target_kinds(found), target_kinds(spec)
    if kinds != wanted:
        yield f"targets {sorted(kinds)}, the policy's are {sorted(wanted)}; expected the same"
    if kinds != wanted or found.rank != spec.rank:
        return
    # Where A and B are both zero, so is every gradient: such a linear would never be trained.
    for module, a_RD, b_OR in adapter_tensors(state.weights_P, found, state.layout):
        if not (a_RD.any() or b_OR.any()):
            yield f"no weights for {module.name}; expected some for every targeted linear"
