"""What the engine speaks: slots, never tenants or policies. The workers translate.

`workers/` owns the mapping of (policy, version) to slots and their reference counts; it pins a slot
for as long as a sequence or a training chunk uses it.
"""

from dataclasses import dataclass, field

import numpy as np

from marlaas.model.bank import Slot
from marlaas.types import SamplingParams, StopReason


@dataclass(slots=True, kw_only=True)
class SequenceRequest:
    """Continue one sequence under one slot. See `marlaas.types.GenerateRequest` for the fields."""

    request_id: str
    sequence_id: str
    slot: Slot | None
    tokens: np.ndarray
    sampling: SamplingParams
    prefix_id: str = ""
    prefix_len: int = 0
    keep_kv: bool = False
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    target_prompt_ids: np.ndarray | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_from: int = 0
    topk_sample_logprobs: int = 0
    is_in_flight: bool = False

    @property
    def is_scored(self) -> bool:
        """True when something is asked of the context's own tokens."""
        return (
            self.prompt_logprobs
            or self.topk_prompt_logprobs > 0
            or self.target_prompt_ids is not None
            or self.prompt_alt_tokens_k > 0
        )

    @property
    def first_scored(self) -> int:
        """The first position whose prediction is asked for, were anything: what is before it may
        come from memory."""
        return min(max(self.prompt_logprobs_from, 1), len(self.tokens)) - 1


@dataclass(slots=True, kw_only=True)
class SequenceResult:
    """What came of one `SequenceRequest`."""

    request_id: str
    sequence_id: str
    tokens: np.ndarray
    """int32 [C]."""
    logprobs: np.ndarray
    """float32 [C]."""
    stop_reason: StopReason
    slots: list[tuple[int, Slot | None]] = field(default_factory=list)
    """(first token index, slot) of each run of tokens under one slot; one unless in-flight."""
    prompt_logprobs: np.ndarray | None = None
    topk_prompt_ids: np.ndarray | None = None
    topk_prompt_logprobs: np.ndarray | None = None
    target_prompt_logprobs: np.ndarray | None = None
    prompt_alt_ids: np.ndarray | None = None
    prompt_alt_logprobs: np.ndarray | None = None
    topk_sample_ids: np.ndarray | None = None
    topk_sample_logprobs: np.ndarray | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """What one quantum of engine work did, for accounting: tokens of one kind."""

    kind: str
    """`decode`, `prefill`, `train` or `score`."""
    num_tokens: int
