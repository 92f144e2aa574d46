"""Schemas of completions, in the shapes of OpenAI's API."""

from typing import ClassVar, Literal

from pydantic import Field

from marlaas.service.wire.common import Answer, Body
from marlaas.service.wire.groups import MessageInfo


class ChatMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class SamplingBody(Body):
    """How to sample. What cannot be honoured is refused, never ignored."""

    not_supported: ClassVar[frozenset[str]] = frozenset(
        {
            "logprobs",
            "top_logprobs",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "functions",
            "function_call",
            "response_format",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "best_of",
            "echo",
            "suffix",
            "stream_options",
            "modalities",
            "audio",
            "prediction",
            "reasoning_effort",
            "verbosity",
            "service_tier",
            "store",
            "metadata",
            "web_search_options",
            "prompt_cache_key",
            "safety_identifier",
        }
    )
    """What OpenAI's routes take besides."""

    model: str = Field(max_length=300)
    """`base`, `JOB`, `JOB@VERSION`, `JOB@latest`, `JOB@best` or `JOB@promoted`."""
    temperature: float = Field(default=1.0, ge=0, le=10, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0, le=10**6)
    min_p: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    n: int = Field(default=1, ge=1, le=64)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: str | list[str] | None = None
    stream: bool = False
    user: str | None = None
    """Taken and not used, as OpenAI's clients send it."""


class ChatBody(SamplingBody):
    messages: list[ChatMessage] = Field(min_length=1, max_length=10_000)
    max_tokens: int | None = Field(default=None, ge=1, le=10**6)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=10**6)


class CompletionBody(SamplingBody):
    prompt: str | list[int]
    """Text, or token ids."""
    max_tokens: int = Field(default=16, ge=1, le=10**6)


class ModelInfo(Answer):
    """Something that can be named as `model`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Unix seconds; 0 for the base."""
    owned_by: str


class ModelList(Answer):
    object: Literal["list"] = "list"
    data: list[ModelInfo]


class TokenCounts(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatChoice(Answer):
    index: int
    message: MessageInfo
    finish_reason: Literal["stop", "length"]


class ChatAnswer(Answer):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenCounts


class CompletionChoice(Answer):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]


class CompletionAnswer(Answer):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenCounts
