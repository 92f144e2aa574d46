"""The losses that clients name, as our token objectives.

    | client's name         | objective             | trained entries       | bounds         |
    |-----------------------|-----------------------|-----------------------|----------------|
    | `cross_entropy`       | `cross_entropy`       | weight not 0, or all  |                |
    | `importance_sampling` | `importance_sampling` | advantage not 0       |                |
    | `ppo`                 | `ppo`                 | the same              | 0.8, 1.2       |
    | `cispo`               | `cispo`               | the same              | 0.0, 4.0       |
    | `gspo`                | `gspo`                | the same, or mask     | 0.9997, 1.0004 |
    | `dro`                 | `dro`                 | the same, or logprob  |                |
    | `stable_reinforce`    | `dppo_tis`            | the same, or logprob  |                |

- A loss is a plain sum: no mean over tokens or data. Entries of weight 0 add nothing to any of
  these sums, so leaving them out changes no value and no gradient. Of `dro` and `stable_reinforce`
  an entry without advantage and without sampling logprob is the padding of a prompt.
- Clients give bounds on the ratio itself; objectives have distances from 1.
- Where no default is published: gspo's bounds are its paper's, dro's beta is the documented
  example, and `stable_reinforce`, whose formula is not published, is trained by `dppo_tis`. Clients
  are told (`INFO`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from marlaas.errors import InvalidRequest, UnsupportedFeature
from marlaas.types import OBJECTIVE_PARAMS, Objective

INFO = (
    "Losses whose formula or defaults the hosted service does not publish are defined by this "
    "service: stable_reinforce is trained as truncated importance sampling with the DPPO mask "
    "(arXiv 2602.04879), gspo clips to [0.9997, 1.0004] by default (arXiv 2507.18071), dro has "
    "beta 0.05 by default. docs/tinker.md has the formulas."
)

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
TARGETS, WEIGHTS, MASK = "target_tokens", "weights", "sequence_ratio_mask"
LOGPROBS, ADVANTAGES = "logprobs", "advantages"


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of the wire."""

    name: str
    objective: str
    needs: tuple[str, ...] = (LOGPROBS, ADVANTAGES)
    """Inputs beside the targets that every datum has."""
    may_have: tuple[str, ...] = ()
    bounds: tuple[float, float] | None = None
    """Of the ratio, where the client names none."""
    numbers: tuple[str, ...] = ()
    """Parameters that are called the same here and there."""
    only: Mapping[str, float] | None = None
    """Options that are taken for a client's sake, with the one value that is."""

    @property
    def inputs(self) -> tuple[str, ...]:
        return (TARGETS, *self.needs, *self.may_have)


_CLIPPED = (LOW, HIGH)
LOSSES: Mapping[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", "cross_entropy", needs=(), may_have=(WEIGHTS,)),
        Loss("importance_sampling", "importance_sampling"),
        Loss("ppo", "ppo", may_have=_CLIPPED, bounds=(0.8, 1.2)),
        Loss("cispo", "cispo", may_have=_CLIPPED, bounds=(0.0, 4.0)),
        Loss(
            "gspo",
            "gspo",
            may_have=(*_CLIPPED, MASK),
            bounds=(
                1 - OBJECTIVE_PARAMS["gspo"]["clip_low"],
                1 + OBJECTIVE_PARAMS["gspo"]["clip_high"],
            ),
        ),
        Loss("dro", "dro", numbers=("beta",)),
        Loss("stable_reinforce", "dppo_tis", only={"kl_coeff": 0.0}),
    )
}


def loss_named(name: str) -> Loss:
    """Return a loss.

    Raises:
        UnsupportedFeature: there is none of that name here.
    """
    if name == "custom":
        raise UnsupportedFeature(
            "loss_fn custom: this service runs no loss of a client's; forward_backward_custom "
            "computes it at the client when client/config was read from this service"
        )
    if name not in LOSSES:
        raise UnsupportedFeature(f"loss_fn {name[:40]!r}; expected one of {', '.join(LOSSES)}")
    return LOSSES[name]


def read_objective(loss: Loss, config: Mapping[str, float | str]) -> Objective:
    """Return the objective that a loss with its options is.

    Raises:
        InvalidRequest: an option that the loss has not, or a value that it cannot have.
    """
    problems = list(_problems(loss, config))
    if problems:
        raise InvalidRequest(*problems)
    params = {name: float(config[name]) for name in loss.numbers if name in config}
    if loss.bounds is not None:
        low, high = (float(config.get(name, default)) for name, default in
                     zip(_CLIPPED, loss.bounds, strict=True))  # fmt: skip
        if low > high:
            raise InvalidRequest(f"loss_fn_config: {LOW} {low:g} is over {HIGH} {high:g}")
        params |= {"clip_low": 1.0 - low, "clip_high": high - 1.0}
    return Objective(name=loss.objective, params=params)


def _problems(loss: Loss, config: Mapping[str, float | str]) -> Iterator[str]:
    only = loss.only or {}
    known = (*(_CLIPPED if loss.bounds else ()), *loss.numbers, *only)
    for name, value in config.items():
        place = f"loss_fn_config.{name[:40]}"
        if name not in known:
            words = f"expected {' or '.join(known)}" if known else "expected none"
            yield f"{place}: {loss.name} has no such option here; {words}"
        elif isinstance(value, str) or not np.isfinite(value):
            yield f"{place}: got {str(value)[:40]!r}; expected a finite number"
        elif value < 0 and name not in _CLIPPED:
            yield f"{place}: got {value:g}; expected 0 or more"
        elif name in only and value != only[name]:
            yield f"{place}: got {value:g}; only {only[name]:g} is supported"


def is_trained(loss: Loss, inputs: Mapping[str, np.ndarray], has_target: np.ndarray) -> np.ndarray:
    """Return which entries add to a loss, as float32: its weights, but for `cross_entropy`, where
    a client that names no weights has every target weigh 1."""
    if WEIGHTS in loss.may_have:
        return inputs.get(WEIGHTS, has_target.astype(np.float32))
    trained = inputs[ADVANTAGES] != 0
    if loss.objective in ("dro", "dppo_tis"):
        trained = trained | (inputs[LOGPROBS] != 0)
    if MASK in inputs:
        trained = trained | (inputs[MASK] != 0)
    return trained.astype(np.float32)


def token_parameters(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what a datum says of the objective token by token."""
    found = {}
    if LOW in inputs:
        found["clip_low"] = np.float32(1.0) - inputs[LOW]
    if HIGH in inputs:
        found["clip_high"] = inputs[HIGH] - np.float32(1.0)
    if MASK in inputs:
        found["ratio_mask"] = inputs[MASK]
    return found
