"""Train the byte-level BPE tokenizer of `tiny` and write its files."""

import itertools
import json
import re
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from marlaas.envs.search import HEADS, TAILS
from tools.make_tiny.corpus import conversations

VOCAB_SIZE = 1024
NUM_CONVERSATIONS = 12_000
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPLIT = r" ?\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+"
"""Single digits, words and runs of marks, each with the space before it; runs of white space."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

_NAME = re.compile(f"({'|'.join(HEADS)})({'|'.join(TAILS)})")


def training_text() -> list[str]:
    """Return corpus text in which invented names are cut in two.

    Their halves then become tokens and whole names do not, so every name looks alike to a model.
    The halves are added often enough to be merged before pairs of letters that cross them.
    """
    chats = itertools.chain(
        itertools.islice(conversations("mixed", 0), NUM_CONVERSATIONS),
        itertools.islice(conversations("skills", 0), NUM_CONVERSATIONS),
    )
    pieces = ("".join(text for text, _ in chat) for chat in chats)
    halves = "\n".join([*HEADS, *(f" {head}" for head in HEADS), *TAILS])
    return [_NAME.sub(r"\1\n\2", text) for text in pieces] + [halves] * NUM_CONVERSATIONS


def train_tokenizer() -> Tokenizer:
    """Return the trained tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
