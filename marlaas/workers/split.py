"""Placement `split`: one worker samples, another trains; published adapters are carried over.

The loop sees a `Generator` and a `Trainer` like any other; only `publish` and what makes versions
live differ: the weights travel from the training worker to the sampling one.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from marlaas.errors import Conflict, NotFound
from marlaas.types import (
    AdamParams,
    AdapterSpec,
    Capabilities,
    Completion,
    Datum,
    DatumOutput,
    GenerateRequest,
    Objective,
    PolicyId,
    StepResult,
    WorkerStats,
)
from marlaas.workers.local import LocalWorker


class SplitWorker:
    """A sampling worker joined to a training worker, which several pairs may share."""

    def __init__(self, sampling: LocalWorker, training: LocalWorker) -> None:
        self.sampling = sampling
        self.training = training
        self.name = sampling.name

    @property
    def incarnation(self) -> int:
        return self.sampling.incarnation + self.training.incarnation

    @property
    def generator(self) -> "SplitWorker":
        return self

    @property
    def trainer(self) -> "SplitWorker":
        return self

    @property
    def max_decoding(self) -> int:
        return self.sampling.max_decoding

    @property
    def kv_capacity_tokens(self) -> int:
        return self.sampling.kv_capacity_tokens

    async def recover(self) -> None:
        await asyncio.gather(self.sampling.recover(), self.training.recover())

    async def stats(self) -> WorkerStats:
        return await self.sampling.stats()

    @property
    def capabilities(self) -> Capabilities:
        trained = self.training.capabilities.max_trained_tokens
        return replace(self.sampling.capabilities, max_trained_tokens=trained)

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self.sampling.generate(request)

    async def release(self, sequence_ids: Sequence[str]) -> None:
        await self.sampling.release(sequence_ids)

    async def create(self, policy_id: PolicyId, spec: AdapterSpec) -> str:
        await self._forget(policy_id)
        adapter_hash = await self.training.create(policy_id, spec)
        await self._carry(policy_id, 0)
        return adapter_hash

    async def create_from(self, policy_id: PolicyId, spec: AdapterSpec, source: str) -> str:
        await self._forget(policy_id)
        adapter_hash = await self.training.create_from(policy_id, spec, source)
        await self._carry(policy_id, 0)
        return adapter_hash

    async def load(self, policy_id: PolicyId, snapshot: str) -> StepResult:
        await self._forget(policy_id)
        result = await self.training.load(policy_id, snapshot)
        await self._carry(policy_id, result.version)
        return result

    async def load_version(self, policy_id: PolicyId, version: int, folder: str) -> str:
        # After the loss of one half the other may hold the version still.
        with contextlib.suppress(Conflict):
            await self.training.load_version(policy_id, version, folder)
        exported = await self.training.export_version(policy_id, version)
        with contextlib.suppress(Conflict):
            await self.sampling.import_version(policy_id, version, exported)
        return exported.adapter_hash

    async def forward_backward(
        self, policy_id: PolicyId, data: Sequence[Datum], objective: Objective
    ) -> list[DatumOutput]:
        return await self.training.forward_backward(policy_id, data, objective)

    async def forward(
        self, policy_id: PolicyId | None, version: int, data: Sequence[Datum]
    ) -> list[DatumOutput]:
        return await self.training.forward(policy_id, version, data)

    async def optim_step(
        self, policy_id: PolicyId, adam: AdamParams, snapshot: str | None = None
    ) -> StepResult:
        return await self.training.optim_step(policy_id, adam, snapshot)

    async def zero_grad(self, policy_id: PolicyId) -> None:
        await self.training.zero_grad(policy_id)

    async def save_state(self, policy_id: PolicyId, path: str) -> None:
        await self.training.save_state(policy_id, path)

    async def publish(self, policy_id: PolicyId, version: int) -> None:
        await self.training.publish(policy_id, version)
        await self._carry(policy_id, version)

    async def retire(self, policy_id: PolicyId, version: int) -> None:
        await asyncio.gather(
            self.training.retire(policy_id, version), self.sampling.retire(policy_id, version)
        )

    async def save_adapter(self, policy_id: PolicyId, version: int, folder: str) -> str:
        return await self.training.save_adapter(policy_id, version, folder)

    async def merge(self, adapter_folder: str, out_folder: str) -> None:
        await self.training.merge(adapter_folder, out_folder)

    async def remove(self, policy_id: PolicyId) -> None:
        await self._forget(policy_id)

    async def _forget(self, policy_id: PolicyId) -> None:
        """Drop what the half that survived a loss still holds of a policy."""
        for worker in (self.training, self.sampling):
            with contextlib.suppress(NotFound):
                await worker.remove(policy_id)

    async def _carry(self, policy_id: PolicyId, version: int) -> None:
        exported = await self.training.export_version(policy_id, version)
        await self.sampling.import_version(policy_id, version, exported)
