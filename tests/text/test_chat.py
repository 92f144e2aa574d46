"""Chat rendering without torch: openings, continuations, and templates that are not safe."""

import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from marlaas.errors import InvalidRequest
from marlaas.text.bases import resolve_base
from marlaas.text.chat import ChatTemplate, ChatTokenizer, check_template
from marlaas.types import Message

SYSTEM = Message("system", "You can look things up with <search>words</search>.")
QUESTION = Message("user", "Where does Orlan live?\nAnd why? äöü 12")
SEARCH = "<search>Orlan</search>"
FOUND = Message("tool", "Orlan lives in Veskar and works as a baker.")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tiny() -> ChatTokenizer:
    return ChatTokenizer.load(resolve_base("tiny"))


def tokenizer_with(template: str | None) -> ChatTokenizer:
    """A tokenizer of one id per byte, `<|im_start|>`, `<|im_end|>`, with any template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return ChatTokenizer(tokenizer, ChatTemplate(template, {}) if template else None, [])


def as_dicts(messages: list[Message]) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in messages]


def test_an_opening_equals_what_transformers_renders(tiny):
    theirs = AutoTokenizer.from_pretrained(resolve_base("tiny"))
    for messages in (
        [QUESTION],
        [SYSTEM, QUESTION],
        [SYSTEM, QUESTION, Message("assistant", "x"), FOUND],
    ):
        wanted = theirs.apply_chat_template(
            as_dicts(messages), add_generation_prompt=True, return_dict=False
        )
        assert tiny.render_opening(messages) == wanted


def test_turn_by_turn_ids_equal_the_whole_rendering_when_replies_end_cleanly(tiny):
    theirs = AutoTokenizer.from_pretrained(resolve_base("tiny"))
    ids = tiny.render_opening([SYSTEM, QUESTION])
    for _ in range(2):
        sampled = [*tiny.encode(SEARCH), *tiny.encode("<|im_end|>")]
        ids += sampled + tiny.render_continuation(sampled, [FOUND])
    whole = [SYSTEM, QUESTION, *[Message("assistant", SEARCH), FOUND] * 2]
    assert ids == theirs.apply_chat_template(
        as_dicts(whole), add_generation_prompt=True, return_dict=False
    )


def test_a_reply_cut_before_its_end_gets_the_missing_marker(tiny):
    cut = tiny.encode(SEARCH)
    clean = [*cut, *tiny.encode("<|im_end|>")]
    overlong = [*clean, *tiny.encode("\n")]
    wholes = [ids + tiny.render_continuation(ids, [FOUND]) for ids in (cut, clean, overlong)]
    assert wholes[0] == wholes[1] == wholes[2]


def test_a_message_that_looks_like_the_end_of_the_reply_is_not_swallowed(tiny):
    sampled = tiny.encode("Orlan")
    more = tiny.render_continuation(sampled, [Message("tool", "Orlan")])
    assert tiny.decode(more, keep_special=True) == (
        "<|im_end|>\n<|im_start|>tool\nOrlan<|im_end|>\n<|im_start|>assistant\n"
    )


def test_sampled_ids_are_kept_even_if_no_tokenizer_would_have_made_them(tiny):
    odd = [tiny.encode(char)[0] for char in "Answer"]
    assert odd != tiny.encode("Answer")
    assert tiny.render_continuation(odd, [FOUND]) == tiny.render_continuation(
        tiny.encode("Answer"), [FOUND]
    )


def test_text_survives_encoding_and_special_tokens_are_left_out_of_text(tiny):
    text = "12 + 30 = 42, äöü\n    return x"
    assert tiny.decode(tiny.encode(text)) == text
    assert tiny.decode(tiny.encode(text + "<|im_end|>")) == text
    assert tiny.decode(tiny.encode("<|im_end|>"), keep_special=True) == "<|im_end|>"


def test_digits_are_single_tokens(tiny):
    assert len(tiny.encode("90210")) == 5
    assert len(tiny.encode(" 90210")) == 5


@pytest.mark.parametrize(
    "text", ["", "spam ", "programming ", "é😀\n\n", "<|endoftext|>" * 9, "    "]
)
def test_messages_take_at_least_what_their_length_says(tiny, text):
    messages = [Message("user", text * 500), Message("tool", text)]
    assert tiny.least_tokens(messages) <= len(tiny.encode(text * 501))


def test_long_texts_have_the_ids_that_they_would_have_if_they_were_short(tiny, monkeypatch):
    text = "Seven is 7.\n" * 2000
    ids = tiny.encode(text)
    monkeypatch.setattr("marlaas.text.chat.LONG_TEXT_CHARS", 10**9)
    assert tiny.encode(text) == ids


def test_stop_tokens_are_those_of_the_generation_config(tiny):
    assert set(tiny.stop_token_ids) == {
        *tiny.encode("<|im_end|>"),
        *tiny.encode("<|endoftext|>"),
    }


def test_the_end_of_turn_token_stops_even_if_the_config_forgets_it():
    tokenizer = tokenizer_with(CHATML)
    assert list(tokenizer.stop_token_ids) == tokenizer.encode("<|im_end|>")


def test_an_appending_template_is_safe():
    assert check_template(ChatTemplate(CHATML, {})) == ("", {})


HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}"
    "<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
INSTRUCTIONS = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
TURNS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}<turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}</turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)


def test_common_ways_of_writing_templates_are_safe():
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    for template, missing in (
        (HEADERS, set()),
        (INSTRUCTIONS, {"system", "tool"}),
        (TURNS, {"system"}),
    ):
        reason, roles = check_template(ChatTemplate(template, special))
        assert (reason, set(roles)) == ("", missing)


def test_a_template_that_starts_replies_with_a_thought_it_later_drops_is_refused():
    thinks = CHATML.replace("assistant\n{%", "assistant\n<think>\n{%")
    reason, _ = check_template(ChatTemplate(thinks, {}))
    assert "earlier turns" in reason


def test_a_template_that_strips_earlier_thinking_is_refused_for_several_turns():
    strips = CHATML.replace(
        "{{ m.content }}",
        "{% if loop.last or m.role != 'assistant' %}{{ m.content }}"
        "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}",
    )
    tokenizer = tokenizer_with(strips)
    assert not tokenizer.is_multi_turn_safe
    assert "thinking" in tokenizer.unsafe_reason
    assert tokenizer.render_opening([QUESTION])
    with pytest.raises(InvalidRequest, match="thinking of earlier turns"):
        tokenizer.render_continuation([1], [FOUND])


def test_a_template_that_keeps_only_the_newest_messages_is_refused_for_several_turns():
    tokenizer = tokenizer_with(CHATML.replace("in messages %}", "in messages[-3:] %}"))
    with pytest.raises(InvalidRequest, match="rewrites earlier turns"):
        tokenizer.render_continuation([1], [FOUND])


def test_a_template_that_numbers_its_turns_is_refused_for_several_turns():
    tokenizer = tokenizer_with(CHATML.replace("{{ m.role }}", "{{ loop.index }} {{ m.role }}"))
    assert not tokenizer.is_multi_turn_safe


def test_a_template_without_tool_role_serves_user_messages_and_names_the_missing_role():
    drops = CHATML.replace("in messages %}", "in messages if m.role != 'tool' %}")
    raises = CHATML.replace(
        "in messages %}",
        "in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}",
    )
    for template in (drops, raises):
        tokenizer = tokenizer_with(template)
        assert tokenizer.is_multi_turn_safe
        assert tokenizer.render_continuation([1], [Message("user", "Too low")])
        with pytest.raises(InvalidRequest, match="tool messages"):
            tokenizer.render_continuation([1], [FOUND])


def test_a_bare_template_without_special_tokens_works_over_turns():
    bare = (
        "{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}\n\n"
        "{% else %}Assistant:{{ m.content }}\n\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    )
    tokenizer = tokenizer_with(bare)
    for reply in (" 50", " 50\n", " 50\n\n"):
        ids = tokenizer.encode(reply)
        ids += tokenizer.render_continuation(ids, [Message("user", "Too low")])
        assert tokenizer.decode(ids) == " 50\n\nUser: Too low\n\nAssistant:"


def test_a_base_without_template_has_tokens_but_no_chat():
    tokenizer = tokenizer_with(None)
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_opening([QUESTION])


def test_a_template_cannot_reach_python():
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidRequest):
        ChatTemplate(escape, {}).render([QUESTION], opens_reply=True)


def test_a_template_file_wins_over_the_config_and_may_mark_generations(tmp_path):
    source = resolve_base("tiny")
    (tmp_path / "tokenizer.json").write_text((source / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "old", "eos_token": {"content": "<|im_end|>"}})
    )
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% endfor %}"
    )
    tokenizer = ChatTokenizer.load(tmp_path)
    assert tokenizer.render_opening([QUESTION]) == tokenizer.encode(QUESTION.content + "<|im_end|>")


def test_a_folder_without_fast_tokenizer_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        ChatTokenizer.load(tmp_path)


def test_rendering_loads_neither_torch_nor_transformers():
    code = (
        "import sys; from marlaas.text.chat import ChatTokenizer; "
        "from marlaas.text.bases import resolve_base; ChatTokenizer.load(resolve_base('tiny')); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_remembered_continuations_equal_fresh_ones_whatever_was_asked_before(tiny):
    words = ["Orlan", "<|im_end|>", "", "äöü 12", "lives in Veskar.\n"]
    asked = [
        [Message(role, f"{first} {second}"), *rest]
        for role in ("tool", "user")
        for first in words
        for second in words
        for rest in ([], [Message("user", first)])
    ]
    replies = [tiny.encode(text) for text in ("Orlan", "Orlan<|im_end|>", "Orlan<|im_end|>\n", "")]
    fresh = ChatTokenizer.load(resolve_base("tiny"))
    for messages in [*asked, *reversed(asked)]:  # the second time every one is remembered
        for ids in replies:
            more = tiny.render_continuation(ids, messages)
            fresh._after_reply.cache_clear()
            assert more == fresh.render_continuation(ids, messages)
            more.append(-1)  # what a caller does with its ids is its own affair
