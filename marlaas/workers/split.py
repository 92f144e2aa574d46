"""Placement `split`: one worker samples, another trains; published adapters are carried over.

The loop sees a `Generator` and a `Trainer` like any other; only `publish` and what makes versions
live differ: the weights travel from the training worker to the sampling one.
"""

import asyncio
from collections.abc import Sequence

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
)
from marlaas.workers.local import LocalWorker


class SplitWorker:
    """A sampling worker joined to a training worker, which several pairs may share."""

    def __init__(self, sampling: LocalWorker, training: LocalWorker) -> None:
        self.sampling = sampling
        self.training = training
        self.name = sampling.name

    @property
    def capabilities(self) -> Capabilities:
        return self.sampling.capabilities

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self.sampling.generate(request)

    async def release(self, sequence_ids: Sequence[str]) -> None:
        await self.sampling.release(sequence_ids)

    async def create(self, policy_id: PolicyId, spec: AdapterSpec) -> str:
        adapter_hash = await self.training.create(policy_id, spec)
        await self._carry(policy_id, 0)
        return adapter_hash

    async def load(self, policy_id: PolicyId, snapshot: str) -> StepResult:
        result = await self.training.load(policy_id, snapshot)
        await self._carry(policy_id, result.version)
        return result

    async def load_version(self, policy_id: PolicyId, version: int, folder: str) -> str:
        adapter_hash = await self.training.load_version(policy_id, version, folder)
        await self._carry(policy_id, version)
        return adapter_hash

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

    async def publish(self, policy_id: PolicyId, version: int) -> None:
        await self.training.publish(policy_id, version)
        await self._carry(policy_id, version)

    async def retire(self, policy_id: PolicyId, version: int) -> None:
        await asyncio.gather(
            self.training.retire(policy_id, version), self.sampling.retire(policy_id, version)
        )

    async def save_adapter(self, policy_id: PolicyId, version: int, folder: str) -> str:
        return await self.training.save_adapter(policy_id, version, folder)

    async def remove(self, policy_id: PolicyId) -> None:
        await asyncio.gather(self.training.remove(policy_id), self.sampling.remove(policy_id))

    async def _carry(self, policy_id: PolicyId, version: int) -> None:
        exported = await self.training.export_version(policy_id, version)
        await self.sampling.import_version(policy_id, version, exported)
