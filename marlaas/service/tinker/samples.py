"""Requests to sample, from JSON to our records; and completions, to protobuf.

    | client's `stop` | ends a sample                                            |
    |-----------------|----------------------------------------------------------|
    | none            | the base's own stop tokens                               |
    | text, or a list | the base's own stop tokens never; a text of these, kept  |
    | token ids       | only one of these, kept                                  |
    | empty list      | nothing but `max_tokens`                                 |

- Positions: row i of a client's matrix over the prompt is about token i + 1; ours have a row for
  each token, of which the first is about nothing.
- A matrix of targets is answered in the layout in which it came, dense or sparse.
- `prompt_logprobs_last_n` is about the prompt's own and its most likely tokens. Given and drawn
  tokens are told of every position, so with these the whole prompt is computed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from marlaas.errors import InvalidRequest, UnsupportedFeature
from marlaas.loop.dispatch import Extras
from marlaas.loop.samplers import AnswerForm, SampleRequest
from marlaas.service.tinker import schema
from marlaas.service.tinker.bodies import PromptBody, SampleBody, TensorBody, number
from marlaas.service.tinker.tensors import (
    Csr,
    check_csr,
    pack,
    write_csr,
    write_tensor,
)
from marlaas.types import Completion, StopReason

MAX_TOP_K = 64
"""Most likely tokens, alternatives or targets at each position."""
MAX_SAMPLES = 1024
"""Of one request."""
_MAX_NUMBER = 1 << 31
_NO_CELL = -1
_EMPTY_LOGPROB = np.float32(-99999.0)
"""What a client takes for a cell without a token."""


def read_sample(body: SampleBody, vocab_size: int) -> SampleRequest:
    """Return what a client wants to have sampled. Whether it fits the base, its sampler says.

    Raises:
        InvalidRequest: says which field and what would be right.
    """
    # `record_stability_info` is taken and not needed: `losses.py` trains without.
    tokens = read_prompt(body.prompt, vocab_size)
    sampling = body.sampling_params
    stop_token_ids, stop_strings = _stops(sampling.stop, vocab_size)
    extras = _extras(body, len(tokens), vocab_size)
    form = AnswerForm(logprobs_from=_first_told(body, len(tokens)), is_sparse=_is_sparse(body))
    most = (
        None
        if sampling.max_tokens is None
        else number("sampling_params.max_tokens", sampling.max_tokens, 1, _MAX_NUMBER)
    )
    return SampleRequest(
        tokens=tokens,
        n=number("num_samples", body.num_samples, 1, MAX_SAMPLES),
        max_tokens=most,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(0, number("sampling_params.top_k", sampling.top_k, -1, _MAX_NUMBER)),
        seed=_seed(sampling.seed),
        stop_token_ids=stop_token_ids,
        stop_strings=stop_strings,
        extras=extras,
        form=form,
    )


def read_prompt(prompt: PromptBody, vocab_size: int) -> np.ndarray:
    """Return the ids of a prompt, its chunks joined.

    Raises:
        InvalidRequest: a chunk that is no text, or a number that is no id.
    """
    ids: list[int] = []
    for index, chunk in enumerate(prompt.chunks):
        if chunk.type != "encoded_text":
            raise UnsupportedFeature(
                f"prompt.chunks[{index}]: {chunk.type[:40]} chunks are not supported; expected "
                "encoded_text"
            )
        ids += chunk.tokens
    if not ids:
        raise InvalidRequest("prompt: is empty; expected at least one token")
    return _ids("prompt", ids, vocab_size)


def _ids(where: str, ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Return numbers as ids that the base has."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(id for id in ids if not 0 <= id < vocab_size)
        raise InvalidRequest(
            f"{where}: token {str(wrong)[:40]}; expected ids from 0 to {vocab_size - 1}"
        )
    return np.asarray(ids, dtype=np.int32)


def _seed(seed: int | None) -> int | None:
    """Return a seed of 63 bits: what is over that folds onto others."""
    if seed is None:
        return None
    return number("sampling_params.seed", seed, -(1 << 63), (1 << 64) - 1) & ((1 << 63) - 1)


def _stops(
    stop: str | list[str | int] | None, vocab_size: int
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Return ids (None: the base's own) and texts that end a sample."""
    if stop is None:
        return None, ()
    if isinstance(stop, str):
        return (), (stop,)
    ids = [each for each in stop if isinstance(each, int)]
    strings = [each for each in stop if isinstance(each, str)]
    if ids and strings:
        raise InvalidRequest("sampling_params.stop: expected texts or token ids, not both")
    return tuple(_ids("sampling_params.stop", ids, vocab_size).tolist()), tuple(strings)


def _first_told(body: SampleBody, num_tokens: int) -> int:
    """Return the first entry of the prompt whose logprob the client wants."""
    last_n = body.prompt_logprobs_last_n
    if last_n is None:
        return 0
    if not body.prompt_logprobs:
        raise InvalidRequest("prompt_logprobs_last_n: needs prompt_logprobs")
    return num_tokens - number("prompt_logprobs_last_n", last_n, 1, max(1, num_tokens - 1))


def _is_sparse(body: SampleBody) -> bool:
    targets = body.target_prompt_logprobs
    return targets is not None and targets.sparse_crow_indices is not None


def _extras(body: SampleBody, num_tokens: int, vocab_size: int) -> Extras:
    targets, num_drawn = body.target_prompt_logprobs, body.prompt_alt_tokens_k
    start = _first_told(body, num_tokens)
    return Extras(
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=number(
            "topk_prompt_logprobs", body.topk_prompt_logprobs, 0, MAX_TOP_K
        ),
        topk_sample_logprobs=number(
            "topk_sample_logprobs", body.topk_sample_logprobs, 0, MAX_TOP_K
        ),
        target_prompt_ids=None if targets is None else _targets(targets, num_tokens, vocab_size),
        prompt_logprobs_from=0 if targets is not None or num_drawn else start,
        prompt_alt_tokens_k=number("prompt_alt_tokens_k", num_drawn, 0, MAX_TOP_K),
    )


_TARGETS = "target_prompt_logprobs"


def _targets(body: TensorBody, num_tokens: int, vocab_size: int) -> np.ndarray:
    """Return the ids to score as int32 [T, K], -1 where there is no cell."""
    if body.dtype != "int64":
        raise InvalidRequest(f"{_TARGETS}.dtype: got {body.dtype[:40]!r}; expected int64")
    shape = [number(f"{_TARGETS}.shape", size, 0, _MAX_NUMBER) for size in body.shape or ()]
    if len(shape) != 2 or shape[0] != num_tokens - 1 or not 1 <= shape[1] <= MAX_TOP_K:
        raise InvalidRequest(
            f"{_TARGETS}.shape: got {shape[:4]}; expected [{num_tokens - 1}, K] with K from 1 to "
            f"{MAX_TOP_K}"
        )
    values = np.asarray(_checked_ids(body.data, vocab_size), dtype=np.int64)
    sparse = _sparse(body, values, (shape[0], shape[1]))
    if sparse is not None:
        cells = sparse.dense(_NO_CELL)
    elif values.size != shape[0] * shape[1]:
        raise InvalidRequest(f"{_TARGETS}.data: {values.size} values; expected the shape's number")
    else:
        cells = values.reshape(shape)
    first = np.full((1, shape[1]), _NO_CELL)
    return np.concatenate([first, cells]).astype(np.int32)


def _checked_ids(data: Sequence[int | float], vocab_size: int) -> list[int]:
    for value in data:
        if not isinstance(value, int) or not _NO_CELL <= value < vocab_size:
            raise InvalidRequest(
                f"{_TARGETS}.data: {str(value)[:40]}; expected ids up to {vocab_size - 1}, or -1"
            )
    return [int(value) for value in data]


def _sparse(body: TensorBody, values: np.ndarray, shape: tuple[int, int]) -> Csr | None:
    if body.sparse_crow_indices is None and body.sparse_col_indices is None:
        return None
    crow, col = (
        np.asarray(
            [number(f"{_TARGETS}.{name}", each, 0, _MAX_NUMBER) for each in indices or ()], np.int64
        )
        for name, indices in (
            ("sparse_crow_indices", body.sparse_crow_indices),
            ("sparse_col_indices", body.sparse_col_indices),
        )
    )
    return check_csr(_TARGETS, values, crow, col, shape)


# ---------------------------------------------------------------------------------------------
# Results


def encode_samples(completions: Sequence[Completion], form: AnswerForm | None = None) -> bytes:
    """Return completions of one prompt as protobuf; what is said of the prompt, the first says."""
    message = schema.SampleResponse()
    for completion in completions:
        sequence = message.sequences.add()
        sequence.stop_reason = _stop_reason(completion.stop_reason)
        sequence.tokens = pack(completion.tokens, "<i4")
        sequence.logprobs = pack(completion.logprobs, "<f4")
        if completion.topk_sample_ids is not None and completion.topk_sample_logprobs is not None:
            _write_topk(
                sequence.topk_sampled_logprobs,
                completion.topk_sample_ids,
                completion.topk_sample_logprobs,
            )
    _write_prompt(message, completions[0], form or AnswerForm())
    return message.SerializeToString()


def _stop_reason(reason: StopReason) -> int:
    is_stop = reason in (StopReason.STOP_TOKEN, StopReason.STOP_STRING)
    return schema.STOP if is_stop else schema.LENGTH


def _write_prompt(message: Any, completion: Completion, form: AnswerForm) -> None:
    first = form.logprobs_from
    message.prompt_cache_hit_tokens = completion.num_cached_tokens
    if completion.prompt_logprobs is not None:
        message.prompt_logprobs = pack(_from(first, completion.prompt_logprobs), "<f4")
    if completion.topk_prompt_ids is not None and completion.topk_prompt_logprobs is not None:
        _write_topk(
            message.topk_prompt_logprobs,
            completion.topk_prompt_ids,
            _from(first, completion.topk_prompt_logprobs),
        )
    if completion.target_prompt_logprobs is not None:
        scores = completion.target_prompt_logprobs[1:]
        if form.is_sparse:
            write_csr(message.target_prompt_logprobs, _listed(scores))
        else:
            write_tensor(message.target_prompt_logprobs, np.nan_to_num(scores, nan=0.0))
    if completion.prompt_alt_ids is not None and completion.prompt_alt_logprobs is not None:
        write_tensor(message.prompt_alt_tokens.tokens, completion.prompt_alt_ids[1:])
        write_tensor(message.prompt_alt_tokens.logprobs, completion.prompt_alt_logprobs[1:])


def _from(first: int, logprobs: np.ndarray) -> np.ndarray:
    """Return logprobs without those of the entries before one."""
    if not first:
        return logprobs
    told = logprobs.copy()
    told[:first] = np.nan
    return told


def _listed(scores: np.ndarray) -> Csr:
    """Return the cells that there are as a sparse matrix."""
    is_cell = ~np.isnan(scores)
    crow = np.concatenate([[0], is_cell.sum(axis=1).cumsum()])
    shape = (scores.shape[0], scores.shape[1])
    return Csr(scores[is_cell], crow, is_cell.nonzero()[1], shape)


def _write_topk(message: Any, ids: np.ndarray, logprobs: np.ndarray) -> None:
    is_empty = (ids < 0) | ~np.isfinite(logprobs)
    message.token_ids = pack(np.where(is_empty, 0, ids), "<i4")
    message.logprobs = pack(np.where(is_empty, _EMPTY_LOGPROB, logprobs), "<f4")
    message.length, message.k = ids.shape
