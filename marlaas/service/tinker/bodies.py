"""The JSON that clients send, as typed records, and how it is read.

- Everything is checked by type as it is decoded, in one pass and off no framework: prompts of
  thousands of token ids come by here, hundreds a second.
- A newer client sends fields that are not known here. One whose value says "off" (null, false, 0,
  nothing) changes nothing and is passed over; any other would be silently left out, and is refused.
- What is only wrong in its value is told by who reads the record.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from marlaas.errors import InvalidRequest

B = TypeVar("B", bound=Struct)

MAX_METADATA = 64
MAX_TEXT_CHARS = 4096
"""Of a name, a tag, a value of metadata."""
MAX_METADATA_CHARS = 16 * 1024
"""Of all names and values of one thing's metadata together, or of all its tags."""
_MAX_UNKNOWN = 32
"""Unknown fields that are looked at."""

MAX_ALMOST_JSON_BYTES = 4 << 20
"""Larger bodies that cannot be read at first go are not looked at again."""

_TEXT = re.compile("[\ud800-\udfff]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$(.*)`)?", re.DOTALL)
_AT = re.compile(r"(.*) - at `(?:key in )?\$(.*)`", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")


class TinkerBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Something that comes in."""

    type: str | None = None
    """Says again what the path says."""


# Sessions -------------------------------------------------------------------------------------


class ConfigBody(TinkerBody):
    sdk_version: str | None = None


class CreateSession(TinkerBody):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None


class SessionId(TinkerBody):
    session_id: str


class FinishReason(Struct, forbid_unknown_fields=True):
    type: str


class Finish(TinkerBody):
    reason: FinishReason
    detail: str | None = None


class SearchOwner(Struct, forbid_unknown_fields=True):
    type: str = "own"
    owner_urns: list[str] = []


class StatusQuery(Struct, forbid_unknown_fields=True):
    type: str
    reasons: list[str] | None = None


class SearchCursor(Struct, forbid_unknown_fields=True):
    last_created_at: str
    last_session_id: str


class SearchSessions(TinkerBody):
    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    owner: SearchOwner = msgspec.field(default_factory=SearchOwner)
    statuses: list[StatusQuery] | None = None
    limit: int = 50
    cursor: SearchCursor | None = None


# Training -------------------------------------------------------------------------------------


class LoraConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(TinkerBody):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: dict[str, Any] | None = None


class ModelId(TinkerBody):
    model_id: str


class OperationBody(TinkerBody):
    """One operation of a run."""

    model_id: str
    seq_id: int


class LoadIntoBody(OperationBody):
    """Into a run that there is."""

    path: str
    optimizer: bool
    weights_access_token: str | None = None


class CreateFromBody(TinkerBody):
    """Makes a run."""

    path: str
    optimizer: bool
    session_id: str
    model_seq_id: int
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None


class AdamBody(Struct, forbid_unknown_fields=True, kw_only=True):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    type: str = "adamw"


class OptimStepBody(OperationBody):
    adam_params: AdamBody | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeightsBody(OperationBody):
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class SaveForSamplerBody(OperationBody):
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, Any] | None = None


class SaveExternalBody(OperationBody):
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None


# Sampling -------------------------------------------------------------------------------------


class CreateSamplingSession(TinkerBody):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class SamplerId(TinkerBody):
    sampling_session_id: str


class ChunkBody(Struct):
    """Of a kind that is not text, only the kind is read."""

    type: str = "encoded_text"
    tokens: list[int] = []


class PromptBody(Struct, forbid_unknown_fields=True):
    chunks: list[ChunkBody]


class SamplingBody(Struct, forbid_unknown_fields=True, kw_only=True):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class TensorBody(Struct, forbid_unknown_fields=True, kw_only=True):
    data: list[int | float]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleBody(TinkerBody):
    prompt: PromptBody
    sampling_params: SamplingBody
    sampling_session_id: str | None = None
    seq_id: int | None = None
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


# Futures --------------------------------------------------------------------------------------


class RetrieveFuture(TinkerBody):
    request_id: str
    allow_metadata_only: bool = False


class RequestId(TinkerBody):
    request_id: str


class FuturesTarget(Struct, forbid_unknown_fields=True, kw_only=True):
    sampling_session_id: str
    type: str = "sampling_session"
    cloned_sampler_id: int = 0


class RetrieveFutures(TinkerBody):
    target: FuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


# Records --------------------------------------------------------------------------------------


class TinkerPath(TinkerBody):
    tinker_path: str


class TtlBody(TinkerBody):
    ttl_seconds: int | None


class CopyWeights(TinkerBody):
    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


# ---------------------------------------------------------------------------------------------
# Reading


def read_json(body: bytes, kind: type[B]) -> B:
    """Return a body as a record.

    Raises:
        InvalidRequest: it is no JSON, or not this record; says where.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if "unknown field" not in str(error):
            raise InvalidRequest(_worded(str(error))) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return _without_unknown(_almost_json(body, error), kind)
    return _without_unknown(_almost_json(body, None), kind)


def _almost_json(body: bytes, error: Exception | None) -> Any:
    """Return a body as plain data. NaN and infinity are read: whoever looks at the number names the
    field, which a fault of the syntax does not."""
    try:
        if len(body) > MAX_ALMOST_JSON_BYTES:
            raise ValueError("malformed")
        raw = json.loads(body)
        has_bad_text = _TEXT.search(json.dumps(raw, ensure_ascii=False)) is not None
    except (ValueError, RecursionError):
        raise InvalidRequest(
            f"body: is no JSON ({str(error or 'nested too deep')[:200]})"
        ) from None
    if has_bad_text:
        raise InvalidRequest("body: has text that is not Unicode")
    return raw


def _without_unknown(raw: Any, kind: type[B]) -> B:
    """Return data as a record, once unknown fields that say nothing were left out."""
    for _ in range(_MAX_UNKNOWN):
        try:
            return msgspec.convert(raw, kind, strict=True)
        except RecursionError:
            raise InvalidRequest("body: nested too deep") from None
        except msgspec.ValidationError as error:
            found = _UNKNOWN.fullmatch(str(error))
            if found is None:
                raise InvalidRequest(_worded(str(error))) from None
            name, path = found[1], found[2] or ""
            _leave_out(raw, name, path)
    raise InvalidRequest(f"body: more than {_MAX_UNKNOWN} unknown fields")


def _leave_out(raw: Any, name: str, path: str) -> None:
    place = f"{path.removeprefix('.')}.{name}".removeprefix(".")[:200]
    holders = _holders(raw, path)
    for holder in holders:
        value = holder.get(name)
        if value not in (None, False, 0, "", [], {}):
            raise InvalidRequest(
                f"{place}: unknown field; this service would leave it out, so it takes only null "
                "or false there"
            )
        holder.pop(name, None)
    if not holders:
        raise InvalidRequest(f"{place}: unknown field")


def _holders(raw: Any, path: str) -> list[dict[str, Any]]:
    """Return the objects at a path; `[...]` in it is every entry of a list."""
    found = [raw]
    for key, index in _STEP.findall(path):
        if key:
            found = [each.get(key) for each in found if isinstance(each, dict)]
        elif index == "...":
            found = [entry for each in found if isinstance(each, list) for entry in each]
        else:
            lists = [each for each in found if isinstance(each, list)]
            found = [each[int(index)] for each in lists if int(index) < len(each)]
    return [each for each in found if isinstance(each, dict)]


def _worded(text: str) -> str:
    """Return a fault as the rest of the service words it: place first."""
    found = _AT.fullmatch(text)
    what, path = (found[1], found[2]) if found else (text, "")
    words = what.replace("`", "")
    return f"{path.removeprefix('.')[:200] or 'body'}: {words[:1].lower()}{words[1:]}"


def read_metadata(where: str, metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """Return metadata whose values are text.

    Raises:
        InvalidRequest: too much of it, or of another kind.
    """
    found = dict(metadata or {})
    if len(found) > MAX_METADATA:
        raise InvalidRequest(f"{where}: {len(found)} entries; expected at most {MAX_METADATA}")
    for name, value in found.items():
        if not isinstance(value, str):
            raise InvalidRequest(f"{where}.{name[:40]}: expected text")
        if max(len(name), len(value)) > MAX_TEXT_CHARS:
            raise InvalidRequest(
                f"{where}.{name[:40]}: expected at most {MAX_TEXT_CHARS} characters"
            )
    check_total(where, [*found, *found.values()])
    return found


def check_total(where: str, texts: Iterable[str]) -> None:
    """Refuse texts that are too long together: they are kept in rows, which count as nothing.

    Raises:
        InvalidRequest: they are.
    """
    num_chars = sum(map(len, texts))
    if num_chars > MAX_METADATA_CHARS:
        raise InvalidRequest(
            f"{where}: {num_chars} characters in all; expected at most {MAX_METADATA_CHARS}"
        )


def check_text(where: str, text: str) -> str:
    """Return a text that is not too long.

    Raises:
        InvalidRequest: it is.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequest(f"{where}: {len(text)} characters; expected at most {MAX_TEXT_CHARS}")
    return text


def number(where: str, value: int | None, least: int, most: int) -> int:
    """Return a number that is there and in a range.

    Raises:
        InvalidRequest: it is not.
    """
    if value is None or not least <= value <= most:
        got = "nothing" if value is None else str(value)[:40]
        raise InvalidRequest(f"{where}: got {got}; expected {least} to {most}")
    return value
