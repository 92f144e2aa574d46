"""Token objectives: from logprobs and advantages to one loss value per trained token.

Each objective is a function of the trained tokens of one or many data, flat. Normalisation is not
its business: the trainer sums weight x token loss, and the weights of a datum hold the normaliser.
All symbols are those of `docs/algorithms.md`, which names formula, source and test of each:

    lp = log pi_theta(token)      trained policy, carries the gradient
    q  = log mu(token)            recorded when the token was sampled
    r  = exp(lp - q)              off-policy ratio
    A  = advantage,   sg(.) = no gradient flows through

Shape suffixes: M trained tokens, B data.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from marlaas.errors import InvalidRequest
from marlaas.types import OBJECTIVE_PARAMS, Objective

BOUNDS = ("clip_low", "clip_high")
"""Parameters that are distances from 1, to either side."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before exp: e^20 = 5e8 still multiplies in fp32 without
overflow, and a token that far off carries no usable signal (its gradient through r is 0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """The tokens that a loss falls on, those of one datum next to each other."""

    logprobs_M: Tensor
    """lp, at the temperature that the tokens were sampled at."""
    sampling_logprobs_M: Tensor
    """q."""
    advantages_M: Tensor
    """A."""
    datum_M: Tensor
    """int64. Which datum a token belongs to, 0 .. num_data - 1."""
    num_data: int
    reference_logprobs_M: Tensor | None = None
    """Under the frozen base; needed when `kl_coef` is not 0."""
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """[M] each. What data give token by token, see `LOSS_INPUTS`."""

    def clip(self, r_M: Tensor, params: "Params") -> Tensor:
        """Return the ratios within the bounds, each token's own where it has some."""
        low, high = (self.inputs.get(name, params[name]) for name in BOUNDS)
        return r_M.clamp(min=1.0 - low).clamp(max=1.0 + high)

    def log_ratio(self) -> Tensor:
        """Return log r [M], clamped."""
        log_r_M = self.logprobs_M - self.sampling_logprobs_M
        return log_r_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What an objective says of each token."""

    loss_M: Tensor
    counts: Mapping[str, Tensor]
    """Per token [M], to be summed over a datum, e.g. `clipped`."""


Params = Mapping[str, float]


def cross_entropy(tokens: TrainedTokens, params: Params) -> TokenLoss:
    """loss = -lp. Supervised learning; advantages and sampling logprobs are not read."""
    return TokenLoss(-tokens.logprobs_M, {})


def importance_sampling(tokens: TrainedTokens, params: Params) -> TokenLoss:
    """loss = -r A, the policy gradient corrected for who sampled, with nothing bounded."""
    r_M = tokens.log_ratio().exp()
    return TokenLoss(-r_M * tokens.advantages_M, {})


def ppo(tokens: TrainedTokens, params: Params) -> TokenLoss:
    """loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Source: PPO, arXiv 1707.06347, eq. 7; unequal bounds as in DAPO, arXiv 2503.14476, eq. 8.
    """
    r_M = tokens.log_ratio().exp()
    return _clipped_surrogate(r_M, tokens, params)


def gspo(tokens: TrainedTokens, params: Params) -> TokenLoss:
    """loss = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) with one ratio per sequence.

        s = exp(mean over the datum's tokens of log r),   s_t = sg(s) exp(lp - sg(lp))

    The mean is over the trained tokens, or weighted by `ratio_mask`; over nothing it is 0.

    The token form: s_t has the value of s and the gradient of its own token. For one advantage and
    one weight per sequence its gradient is that of the sequence form.

    Source: GSPO, arXiv 2507.18071, eq. 5-7 (sequence form), eq. 13-14 (token form).
    """
    lp_M, datum_M = tokens.logprobs_M, tokens.datum_M
    log_r_M = tokens.log_ratio().detach()
    mask_M = tokens.inputs.get("ratio_mask", torch.ones_like(log_r_M))
    nothing_B = log_r_M.new_zeros(tokens.num_data)
    sum_B = nothing_B.index_add(0, datum_M, mask_M * log_r_M)
    mass_B = nothing_B.index_add(0, datum_M, mask_M)
    mean_B = torch.where(mass_B > 0, sum_B / mass_B, 0.0)
    s_M = mean_B.exp()[datum_M] * (lp_M - lp_M.detach()).exp()
    return _clipped_surrogate(s_M, tokens, params)


def _clipped_surrogate(r_M: Tensor, tokens: TrainedTokens, params: Params) -> TokenLoss:
    a_M = tokens.advantages_M
    free_M, clipped_M = r_M * a_M, tokens.clip(r_M, params) * a_M
    return TokenLoss(-torch.minimum(free_M, clipped_M), {"clipped": clipped_M < free_M})


def cispo(tokens: TrainedTokens, params: Params) -> TokenLoss:
    """loss = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A lp: every token keeps a gradient.

    Source: CISPO in MiniMax-M1, arXiv 2506.13585, eq. 4-5. As there, the lower bound is off by
    default (clip_low = 1).
    """
    r_M = tokens.log_ratio().detach().exp()
    w_M = tokens.clip(r_M, params)
    return TokenLoss(-w_M * tokens.advantages_M * tokens.logprobs_M, {"clipped": w_M != r_M})


def dppo_tis(tokens: TrainedTokens, params: Params) -> TokenLoss:
    """loss = -keep w A lp + log_ratio_penalty log^2 r: truncated weight, trust region by mask.

        w    = sg(min(r, cap))
        keep = not (A > 0 and pi_theta - mu > delta) and not (A < 0 and mu - pi_theta > delta)

    A token is left alone once its probability has moved by more than delta to where A pushes it:
    a bound on total variation, which a bound on the ratio is not for rare and frequent tokens. The
    penalty falls on masked tokens, too, and draws them back.

    Source: DPPO with binary total variation, arXiv 2602.04879; truncated importance sampling,
    Espeholt et al., arXiv 1802.01561, eq. 1 (one-step case).
    """
    lp_M, a_M = tokens.logprobs_M, tokens.advantages_M
    log_r_M = tokens.log_ratio()
    r_M = log_r_M.detach().exp()
    w_M = r_M.clamp(max=params["cap"])
    moved_M = lp_M.detach().exp() - tokens.sampling_logprobs_M.exp()
    masked_M = moved_M * a_M.sign() > params["delta"]
    gain_M = torch.where(masked_M, 0.0, w_M * a_M) * lp_M
    loss_M = params["log_ratio_penalty"] * log_r_M.square() - gain_M
    return TokenLoss(loss_M, {"masked": masked_M, "capped": r_M > params["cap"]})


def dro(tokens: TrainedTokens, params: Params) -> TokenLoss:
    """loss = -(A lp - beta / 2 (lp - q)^2): a quadratic pull towards the sampling policy, nothing
    clamped.

    Source: the policy's loss of DRO, arXiv 2405.19107, with the value taken off in A.
    """
    lp_M, q_M = tokens.logprobs_M, tokens.sampling_logprobs_M
    pull_M = params["beta"] / 2 * (lp_M - q_M).square()
    return TokenLoss(pull_M - tokens.advantages_M * lp_M, {})


def kl_to_reference(tokens: TrainedTokens) -> Tensor:
    """Return k3 = exp(d) - d - 1 [M] with d = lp_reference - lp, an estimate of KL(pi | reference).

    Never negative, unbiased for samples of pi_theta.

    Source: the KL term of GRPO, arXiv 2402.03300, eq. 4.
    """
    assert tokens.reference_logprobs_M is not None, "checked when the data were submitted"
    d_M = tokens.reference_logprobs_M - tokens.logprobs_M
    d_M = d_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d_M.exp() - d_M - 1.0


_FUNCTIONS: Mapping[str, Callable[[TrainedTokens, Params], TokenLoss]] = {
    function.__name__: function
    for function in (cross_entropy, importance_sampling, ppo, gspo, cispo, dppo_tis, dro)
}
assert _FUNCTIONS.keys() == OBJECTIVE_PARAMS.keys()


def token_loss(objective: Objective, tokens: TrainedTokens) -> TokenLoss:
    """Return the loss of each token under a checked objective, its KL term included."""
    params = resolve_params(objective)
    out = _FUNCTIONS[objective.name](tokens, params)
    if params["kl_coef"] == 0.0:
        return out
    kl_M = kl_to_reference(tokens)
    return TokenLoss(
        out.loss_M + params["kl_coef"] * kl_M, {**out.counts, "reference_kl": kl_M.detach()}
    )


def resolve_params(objective: Objective) -> dict[str, float]:
    """Return every parameter of a checked objective, defaults filled in."""
    return {**OBJECTIVE_PARAMS[objective.name], **objective.params}


def check_objective(objective: Objective) -> None:
    """Refuse an unknown objective or parameter.

    Raises:
        InvalidRequest: naming every fault and what would be right.
    """
    known = OBJECTIVE_PARAMS.get(objective.name)
    if known is None:
        raise InvalidRequest(
            f"objective {objective.name!r} is unknown{_closest(objective.name, OBJECTIVE_PARAMS)}; "
            f"expected one of {', '.join(OBJECTIVE_PARAMS)}"
        )
    problems = []
    for name, value in objective.params.items():
        if name not in known:
            problems.append(
                f"objective {objective.name}: parameter {name!r} is unknown"
                f"{_closest(name, known)}; expected any of {', '.join(known)}"
            )
        elif not _is_number(value):
            problems.append(
                f"objective {objective.name}: {name} = {value!r}; expected a finite number"
            )
        elif value < 0 and name not in BOUNDS:
            problems.append(
                f"objective {objective.name}: {name} = {value!r}; expected a number >= 0"
            )
    if not problems and known.keys() >= set(BOUNDS):
        params = resolve_params(objective)
        low, high = 1.0 - params["clip_low"], 1.0 + params["clip_high"]
        if low > high:
            problems.append(
                f"objective {objective.name}: ratios in [{low:g}, {high:g}]; expected bounds "
                "1 - clip_low <= 1 + clip_high"
            )
    if problems:
        raise InvalidRequest(*problems)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def _closest(name: str, known: Mapping[str, object]) -> str:
    matches = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
