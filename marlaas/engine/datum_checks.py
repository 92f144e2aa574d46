"""Refuses data that cannot be trained on or scored, before anything of them is queued.

The trainer calls it for every submission. Each problem names field and position and says what would
be right; whoever submits adds which datum it was.
"""

import math
from collections.abc import Iterator

import numpy as np

from marlaas.engine.objectives import resolve_params
from marlaas.types import LOSS_INPUTS, Datum, Objective

MAX_TARGETS = 256
"""Targets of one entry. Each is a cell of every per-token array, and of the answer."""

MAX_CELLS = 1 << 24
"""Targets of all data of one call: 64 MiB in each of its per-token arrays and in the answer."""


def datum_problems(
    datum: Datum, objective: Objective | None, *, vocab_size: int, max_context: int
) -> Iterator[str]:
    """Yield what is wrong with a datum under an objective; None only scores."""
    if datum.tokens.ndim != 1:
        yield f"tokens has shape {datum.tokens.shape}; expected (T,)"
        return
    num_tokens = len(datum.tokens)
    if not 2 <= num_tokens <= max_context:
        yield f"{num_tokens} tokens; expected 2..{max_context}"
        return
    yield from _id_problems("tokens", datum.tokens, 0, vocab_size)
    if not (math.isfinite(datum.temperature) and datum.temperature > 0):
        yield f"temperature = {datum.temperature}; expected a finite number > 0"
    shape = datum.tokens.shape
    if datum.targets is not None:
        shape = datum.targets.shape
        if shape[:1] != (num_tokens,) or len(shape) > 2 or not datum.targets.size:
            yield f"targets has shape {shape}; expected ({num_tokens},) or ({num_tokens}, K)"
            return
        if len(shape) == 2 and shape[1] > MAX_TARGETS:
            yield f"targets has shape {shape}; expected at most {MAX_TARGETS} per token"
            return
        yield from _id_problems("targets", datum.targets, -1, vocab_size)
    fields = {
        name: getattr(datum, name)
        for name in ("weights", "advantages", "sampling_logprobs", "reference_logprobs")
    }
    fields |= {f"loss_inputs[{name!r}]": values for name, values in datum.loss_inputs.items()}
    problems = [
        problem
        for name, values in fields.items()
        if values is not None
        for problem in _array_problems(name, values, shape)
    ]
    yield from problems
    if problems:
        return
    if datum.weights[0].any():
        yield "weights[0] is not 0; nothing predicts the first token"
    if datum.targets is not None:
        is_lost = (datum.weights != 0) & (datum.targets < 0)
        if is_lost.any():
            yield f"weights{_first(is_lost)} is not 0; expected 0 where targets has -1"
    if objective is not None:
        yield from _loss_problems(datum, objective)


def _id_problems(name: str, ids: np.ndarray, least: int, vocab_size: int) -> Iterator[str]:
    if ids.dtype.kind not in "iu":
        yield f"{name} has dtype {ids.dtype}; expected int32"
    elif ids.min() < least or ids.max() >= vocab_size:
        where = _first((ids < least) | (ids >= vocab_size), ids)
        yield f"{name}{where}; expected {least}..{vocab_size - 1}"


def _array_problems(name: str, values: np.ndarray, shape: tuple[int, ...]) -> Iterator[str]:
    if values.shape != shape:
        yield f"{name} has shape {values.shape}; expected {shape}"
    elif values.dtype not in (np.float32, np.float64):
        yield f"{name} has dtype {values.dtype}; expected float32"
    elif not (is_finite := np.isfinite(values)).all():
        yield f"{name}{_first(~is_finite, values)}; expected a finite number"


def _loss_problems(datum: Datum, objective: Objective) -> Iterator[str]:
    params, inputs = resolve_params(objective), datum.loss_inputs
    if params["kl_coef"] > 0 and datum.reference_logprobs is None:
        yield "no reference_logprobs; an objective with kl_coef needs them"
    known = LOSS_INPUTS.get(objective.name, ())
    unknown = [name for name in inputs if name not in known]
    if unknown:
        yield (
            f"loss_inputs {', '.join(unknown)}: objective {objective.name} reads "
            f"{'no such; expected any of ' + ', '.join(known) if known else 'none; expected none'}"
        )
        return
    if "clip_low" in inputs or "clip_high" in inputs:
        low, high = (inputs.get(name, params[name]) for name in ("clip_low", "clip_high"))
        is_crossed = np.broadcast_to(np.less(low + high, 0.0), datum.weights.shape)
        if is_crossed.any():
            yield f"clip_low + clip_high at {_first(is_crossed)} is negative; expected at least 0"
    if "ratio_mask" in inputs and (is_negative := inputs["ratio_mask"] < 0).any():
        values = inputs["ratio_mask"]
        yield f"loss_inputs['ratio_mask']{_first(is_negative, values)}; expected 0 or more"


def _first(is_wrong: np.ndarray, values: np.ndarray | None = None) -> str:
    """Return the first position that is wrong as `[t]` or `[t, k]`, and its value."""
    position = np.unravel_index(int(is_wrong.argmax()), is_wrong.shape)
    text = f"[{', '.join(map(str, position))}]"
    return text if values is None else f"{text} = {values[position]}"
