"""What a client asks of a run in tests, and what must come of it, computed one after another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from marlaas.loop.operations import (
    Body,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    SaveForSampler,
    SaveWeights,
)
from marlaas.types import AdamParams, Datum, Objective
from tests.fakes import ALPHABET, logprobs_of

ADAM = AdamParams(lr=0.5)
STEP = OptimStep(adam=ADAM)
CROSS_ENTROPY = Objective(name="cross_entropy")


def datum(letters: str = "abc", **changes: object) -> Datum:
    """Teach the fake policy to say what follows the first letter."""
    tokens = np.frombuffer(letters.encode(), dtype=np.uint8).astype(np.int32)
    weights = np.ones(len(tokens), dtype=np.float32)
    weights[0] = 0
    zeros = np.zeros(len(tokens), dtype=np.float32)
    made = Datum(tokens=tokens, weights=weights, advantages=zeros, sampling_logprobs=zeros)
    return replace(made, **changes)


def train(*letters: str, **changes: object) -> ForwardBackward:
    data = [datum(one) for one in letters or ("abc",)]
    return replace(ForwardBackward(data=data, objective=CROSS_ENTROPY), **changes)


def faulty() -> ForwardBackward:
    """Data that every engine refuses."""
    wrong = datum(advantages=np.zeros(7, np.float32))
    return ForwardBackward(data=[wrong], objective=CROSS_ENTROPY)


@dataclass
class Reference:
    """A run as it must be: the fake policy, trained with nothing going wrong."""

    logits: np.ndarray
    version: int = 0
    gradient: np.ndarray | None = None
    is_incomplete: bool = False
    trained_tokens: int = 0

    @classmethod
    def fresh(cls) -> "Reference":
        return cls(np.zeros(len(ALPHABET)))

    def apply(self, body: Body, saved: dict[str, np.ndarray]) -> str:
        """Do an operation; return the category of its error, or nothing. `saved` holds the weights
        of checkpoints, by name."""
        match body:
            case ForwardBackward():
                return self._pass(body)
            case OptimStep():
                return self._step(body)
            case SaveWeights():
                if body.name in saved and not body.overwrite:
                    return "user"
                saved[body.name] = self.logits
            case LoadWeights():
                name = body.path.rpartition("/")[2]
                if name not in saved:
                    return "user"
                self.logits, self.version = saved[name], self.version + 1
                self.gradient, self.is_incomplete = None, False
            case SaveForSampler():
                pass
            case _:
                raise AssertionError(body)
        return ""

    def _pass(self, body: ForwardBackward) -> str:
        if any(one.advantages.shape != one.tokens.shape for one in body.data):
            self.is_incomplete |= not body.is_forward_only
            return "user"
        self.trained_tokens += body.num_tokens
        for one in body.data if not body.is_forward_only else ():
            trained = np.flatnonzero(one.weights)
            counts = np.zeros(len(ALPHABET))
            for token in one.tokens[trained].tolist():
                counts[ALPHABET.tolist().index(token)] += 1.0
            counts -= float(len(trained)) * np.exp(logprobs_of(self.logits))
            self.gradient = counts if self.gradient is None else self.gradient + counts
        return ""

    def _step(self, body: OptimStep) -> str:
        is_incomplete, gradient = self.is_incomplete, self.gradient
        self.is_incomplete, self.gradient = False, None
        if is_incomplete:
            return "user"
        if gradient is not None:
            self.logits = self.logits + body.adam.lr * gradient
        self.version += 1
        return ""


def reference(batches: Sequence[Sequence[str]]) -> np.ndarray:
    """Return the weights that training on batches, one step each, gives."""
    run = Reference.fresh()
    for batch in batches:
        run.apply(train(*batch), {})
        run.apply(STEP, {})
    return run.logits
