"""Chat rendering and tokens of one base model, without torch: the loop and the service use it.

A conversation is token ids from the first moment on; text is rendered once and never re-tokenised:

    opening = tokenizer.render_opening(messages)            # system, user, "assistant starts here"
    sampled = ...                                           # the policy's ids, exactly
    more    = tokenizer.render_continuation(sampled, [Message("tool", "...")])
    opening + sampled + more                                # context of the next turn

What follows the sampled ids is read off the chat template by rendering a stand-in for the policy's
message. That is right only for templates that append: one that rewrites earlier turns (strips
their thinking, say) is found out at load and refused for conversations of several turns.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from marlaas.errors import InvalidRequest
from marlaas.types import Message

MAX_CONTINUATIONS = 256
"""Answers of environments whose ids are remembered."""

LONG_TEXT_CHARS = 20_000
"""From here on encoding takes 10 ms and more: worth a thread, which must not hold up the others."""

_STAND_IN = "Zq7Stand0In4Reply"
"""Text that no template contains and none would change."""


class ChatTokenizer:
    """The tokenizer of a base with its chat template.

    Example:
        tokenizer = ChatTokenizer.load(resolve_base("tiny"))
        ids = tokenizer.render_opening([Message("user", "Hello!")])
    """

    def __init__(
        self, tokenizer: Tokenizer, template: "ChatTemplate | None", stop_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        if template is None:
            self.unsafe_reason, self.unsupported_roles = "the base has no chat template", {}
            self._end_of_turn = ""
        else:
            self.unsafe_reason, self.unsupported_roles = check_template(template)
            self._end_of_turn = _end_of_turn(template)
        self.is_multi_turn_safe = not self.unsafe_reason
        """False when the template rewrites earlier turns; `unsafe_reason` says how."""
        self._max_token_chars = max(map(len, tokenizer.get_vocab()))
        self._num_end_ids = len(self.encode(self._end_of_turn))
        # Siblings of a group often get the same answer: the same search finds the same document.
        self._after_reply = lru_cache(maxsize=MAX_CONTINUATIONS)(self._encode_after_reply)
        self.stop_token_ids = self._with_end_of_turn(stop_token_ids)
        """Ids after which a turn is over."""

    @classmethod
    def load(cls, folder: str | Path) -> "ChatTokenizer":
        """Read a Hugging Face model folder.

        Raises:
            InvalidRequest: the folder has no `tokenizer.json`.
        """
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise InvalidRequest(f"{folder} has no tokenizer.json; a fast tokenizer is needed")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(config)
        source = _template_source(folder, config)
        template = ChatTemplate(source, special_tokens) if source else None
        return cls(tokenizer, template, _stop_token_ids(folder, tokenizer, special_tokens))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; the names of special tokens in it become those tokens."""
        if len(text) < LONG_TEXT_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        # Unlike `encode`, a batch lets other threads go on meanwhile.
        return self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids

    def least_tokens(self, messages: Sequence[Message]) -> int:
        """Return how many tokens messages take at the very least, from their length alone: what
        cannot fit need not be encoded, which takes a second per megabyte or two."""
        return sum(len(message.content) for message in messages) // self._max_token_chars

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of ids, by default without special tokens."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=not keep_special)

    def render_opening(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation up to where the assistant begins to write.

        Raises:
            InvalidRequest: the base has no template, or its template refuses these messages.
        """
        template = self._template_for(messages)
        return self.encode(template.render(messages, opens_reply=True))

    def render_continuation(
        self, sampled_ids: Sequence[int], messages: Sequence[Message]
    ) -> list[int]:
        """Return the ids to append to a reply: the rest of its end, the messages, the next start.

        `sampled_ids` are those of the reply that was just sampled. They may end with the
        end-of-turn marker, with a part of it, or (cut at a limit) without it.

        Raises:
            InvalidRequest: the template is not safe for several turns, or refuses the messages.
        """
        ids, most = self._after_reply(tuple(messages)), self._num_end_ids
        said = tuple(sampled_ids[-most:]) if most else ()
        return list(ids[_overlap(said, ids[:most]) :])

    def _encode_after_reply(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        template = self._template_for(messages)
        if not self.is_multi_turn_safe:
            raise InvalidRequest(
                f"conversations of several turns need another base: {self.unsafe_reason}"
            )
        return tuple(self.encode(template.render_after_reply(messages)))

    def _template_for(self, messages: Sequence[Message]) -> "ChatTemplate":
        if self._template is None:
            raise InvalidRequest("the base has no chat template; send token ids instead")
        problems = [
            f"the chat template of this base {self.unsupported_roles[role]}"
            for role in sorted({message.role for message in messages})
            if role in self.unsupported_roles
        ]
        if problems:
            raise InvalidRequest(*problems)
        return self._template

    def _with_end_of_turn(self, stop_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Add the token that the template puts behind a reply, if it is a special one."""
        ids = self.encode(self._end_of_turn)[:1]
        is_special = bool(ids) and not self.decode(ids)
        return tuple(dict.fromkeys([*stop_token_ids, *(ids if is_special else [])]))


class ChatTemplate:
    """A compiled chat template: messages in, text out."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InvalidRequest(f"the chat template cannot be read: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], *, opens_reply: bool) -> str:
        """Return the conversation as text, with the start of a reply if asked for.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=[{"role": m.role, "content": m.content} for m in messages],
                add_generation_prompt=opens_reply,
                **self._special_tokens,
            )
        except (TemplateError, TypeError) as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error

    def render_after_reply(self, messages: Sequence[Message]) -> str:
        """Return what stands between a reply and the next one, given the messages in between."""
        replied = [Message("user", "."), Message("assistant", _STAND_IN), *messages]
        return self.render(replied, opens_reply=True).rpartition(_STAND_IN)[2]


def check_template(template: ChatTemplate) -> tuple[str, dict[str, str]]:
    """Return why a template is unsafe over several turns ("" if it is safe), and which roles fail.

    Safe means: the rendering of a longer conversation is that of the shorter one plus text that
    depends on the new messages alone.
    """
    roles: dict[str, str] = {}
    for role in ("system", "user", "tool"):
        messages = [Message(role, _STAND_IN)]
        if role != "user":
            user = Message("user", ".")
            messages = [*messages, user] if role == "system" else [user, _reply("."), *messages]
        try:
            is_shown = _STAND_IN in template.render(messages, opens_reply=True)
        except InvalidRequest as error:
            roles[role] = f"has no place for {role} messages ({error})"
        else:
            if not is_shown:
                roles[role] = f"drops {role} messages"
    if "user" in roles:
        return f"its chat template {roles['user']}", roles
    asked = "tool" if "tool" not in roles else "user"
    for reply, fault in (
        (f"{_STAND_IN}.", "its chat template rewrites earlier turns"),
        (
            f"<think>\n{_STAND_IN}\n</think>\n\nYes.",
            "its chat template strips or changes the thinking of earlier turns",
        ),
    ):
        if not all(_appends(template, reply, role) for role in {"user", asked}):
            return fault, roles
    return "", roles


def _reply(content: str) -> Message:
    return Message("assistant", content)


def _appends(template: ChatTemplate, reply: str, role: str) -> bool:
    """Return whether two turns rendered piece by piece equal the whole conversation.

    White space that a template puts before a reply is left to the policy: it samples its own.
    """
    opening = [Message("user", "Is it so?")]
    between = [Message(role, "Look again.")]
    try:
        start = template.render(opening, opens_reply=True)
        begun = template.render([*opening, _reply(_STAND_IN)], opens_reply=True)
        space = begun.partition(_STAND_IN)[0].removeprefix(start)
        whole = template.render(
            [*opening, _reply(reply), *between, _reply(reply), *between], opens_reply=True
        )
        piece = space + reply + template.render_after_reply(between)
        return not space.strip() and whole == start + piece + piece
    except InvalidRequest:
        return False


def _end_of_turn(template: ChatTemplate) -> str:
    """Return the text that ends a reply whatever comes after it; "" if there is none."""
    try:
        last = template.render([Message("user", "."), _reply(_STAND_IN)], opens_reply=False)
        followed = template.render_after_reply([Message("user", ".")])
    except InvalidRequest:
        return ""
    ending = last.rpartition(_STAND_IN)[2]
    size = 0
    while size < min(len(ending), len(followed)) and ending[size] == followed[size]:
        size += 1
    return ending[:size]


def _overlap(ids: tuple[int, ...], following: tuple[int, ...]) -> int:
    """Return how many of the first ids of `following` already stand at the end of `ids`."""
    for size in range(min(len(ids), len(following)), 0, -1):
        if ids[-size:] == following[:size]:
            return size
    return 0


# ---------------------------------------------------------------------------------------------
# Files of a Hugging Face folder


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that templates may name, e.g. `bos_token`."""
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    tokens = {name: config.get(name) for name in names}
    as_text = {n: t["content"] if isinstance(t, dict) else t for n, t in tokens.items()}
    return {name: text for name, text in as_text.items() if text}


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template: its own file if there is one, else the tokenizer's config."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _stop_token_ids(
    folder: Path, tokenizer: Tokenizer, special_tokens: Mapping[str, str]
) -> list[int]:
    """Return the ids that end a generation, as the generation config or else the config says."""
    for name in ("generation_config.json", "config.json"):
        found = _read_json(folder / name).get("eos_token_id")
        if found is not None:
            return found if isinstance(found, list) else [found]
    eos = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    return [] if eos is None else [eos]


# ---------------------------------------------------------------------------------------------
# What chat templates expect of their environment


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's part in some templates: renders its body."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
