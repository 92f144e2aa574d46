"""Measure how often sampled answers of a model folder are right, per family and setting.

python -m tools.make_tiny.evaluate marlaas/assets/tiny --prompts 256
"""

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from marlaas.envs.base import Env, EnvStep, Family
from marlaas.envs.code_problems import CodeSettings, extract_code, make_problem
from marlaas.envs.math import MathFamily, MathSettings
from marlaas.envs.search import SearchFamily, SearchSettings
from marlaas.text.chat import ChatTokenizer
from marlaas.types import Prompt

MAX_TOKENS = 64
BATCH = 64

CASES: dict[str, Callable[[], Family]] = {
    "math": lambda: MathFamily(MathSettings()),
    "math terms=2": lambda: MathFamily(MathSettings(terms=2)),
    "math kind=words": lambda: MathFamily(MathSettings(kind="words")),
    "math terms=4": lambda: MathFamily(MathSettings(terms=4)),
    "math terms=5": lambda: MathFamily(MathSettings(terms=5)),
    "math max_value=50": lambda: MathFamily(MathSettings(max_value=50)),
    "search": lambda: SearchFamily(SearchSettings()),
    "search hops=2": lambda: SearchFamily(SearchSettings(hops=2)),
    "code": lambda: TrustingCodeFamily(CodeSettings()),
    "code steps=1": lambda: TrustingCodeFamily(CodeSettings(steps=1)),
    "code steps=3": lambda: TrustingCodeFamily(CodeSettings(steps=3)),
    "code kind=function steps=1": lambda: TrustingCodeFamily(
        CodeSettings(kind="function", steps=1)
    ),
    "code kind=function": lambda: TrustingCodeFamily(CodeSettings(kind="function")),
}


class TrustingCodeFamily:
    """The problems of the family `code`; answers run in one plain child process at the end."""

    name = "code"
    max_turns = 1

    def __init__(self, settings: CodeSettings) -> None:
        self._settings = settings

    def prompt(self, index: int, *, seed: int, split: str) -> Prompt:
        return make_problem(self._settings, index, seed=seed, split=split)

    def make(self, prompt: Prompt, num_envs: int) -> list[Env]:
        return [TrustingCodeEnv(prompt) for _ in range(num_envs)]

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def cpu_s(self) -> float:
        return 0.0


class TrustingCodeEnv:
    """Runs the hidden tests without a sandbox: only for the answers of our own `tiny`."""

    def __init__(self, prompt: Prompt) -> None:
        self._reference = prompt.reference

    async def step(self, reply: str, *, is_last: bool) -> EnvStep:
        code, entry = extract_code(reply), self._reference["entry"]
        if code is None:
            return EnvStep(reward=0.0, metrics={"format": 0.0})
        body = f"{code}\n" if entry else f"f = lambda x: ({code}\n)\n"
        checks = (
            f"for args, wanted in {self._reference['tests']!r}:\n    assert f(*args) == wanted\n"
        )
        command = [sys.executable, "-I", "-S", "-c", body + checks]
        try:
            is_right = not subprocess.run(command, capture_output=True, timeout=5).returncode
        except subprocess.TimeoutExpired:
            is_right = False
        return EnvStep(reward=float(is_right), is_success=is_right, metrics={"format": 1.0})

    async def close(self) -> None: ...


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, contexts: list[list[int]], stops: set[int], temperature: float
) -> list[list[int]]:
    """Return sampled replies to contexts of one length."""
    tokens = torch.tensor(contexts)
    length = tokens.shape[1]
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=MAX_TOKENS,
        do_sample=temperature > 0,
        **({"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}),
        eos_token_id=sorted(stops),
        pad_token_id=0,
    )
    replies = []
    for row in out[:, length:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        replies.append(row[:end])
    return replies


def same_length_batches(contexts: dict[int, list[int]]) -> list[list[int]]:
    """Return keys in batches whose contexts have one length, so that none needs padding."""
    by_length: dict[int, list[int]] = {}
    for key, context in contexts.items():
        by_length.setdefault(len(context), []).append(key)
    return [keys[i : i + BATCH] for keys in by_length.values() for i in range(0, len(keys), BATCH)]


def success(
    model: LlamaForCausalLM,
    tokenizer: ChatTokenizer,
    family: Family,
    prompts: int,
    temperature: float,
) -> tuple[float, float]:
    """Return the shares of held-out prompts with a right and with a readable answer."""
    items = [family.prompt(i, seed=0, split="eval") for i in range(prompts)]
    envs = [family.make(item, 1)[0] for item in items]
    contexts = {i: tokenizer.render_opening(item.messages) for i, item in enumerate(items)}
    stops = set(tokenizer.stop_token_ids)
    ends: list[EnvStep] = []
    for turn in range(family.max_turns):
        following: dict[int, list[int]] = {}
        for keys in same_length_batches(contexts):
            replies = sample(model, [contexts[key] for key in keys], stops, temperature)
            for key, reply in zip(keys, replies, strict=True):
                is_last = turn + 1 == family.max_turns
                step = asyncio.run(envs[key].step(tokenizer.decode(reply), is_last=is_last))
                if step.is_done:
                    ends.append(step)
                else:
                    more = tokenizer.render_continuation(reply, step.messages)
                    following[key] = contexts[key] + reply + more
        contexts = following
    return (
        float(np.mean([step.is_success for step in ends])),
        float(np.mean([step.metrics["format"] for step in ends])),
    )


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32).eval()
    tokenizer = ChatTokenizer.load(options.folder)
    for name in options.cases:
        right, readable = success(
            model, tokenizer, CASES[name](), options.prompts, options.temperature
        )
        print(f"{name:28} success {right:.3f}  readable {readable:.3f}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
