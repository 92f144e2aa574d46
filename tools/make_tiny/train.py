"""Train `tiny` on the synthetic corpus: one process, one thread, resumable.

    python -m tools.make_tiny.train --work /somewhere/tiny --tokens 12_500_000
    python -m tools.make_tiny.train --work /somewhere/tiny --export marlaas/assets/tiny

The first part of the budget uses the mixture `skills`, the rest `mixed` (see `corpus.py`). Weight
matrices are updated by Muon, everything else by AdamW; both follow one schedule: warm-up, cosine.
"""

import argparse
import itertools
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tools.make_tiny.corpus import Conversation, conversations
from tools.make_tiny.make_tokenizer import write_tokenizer

MICRO_TOKENS = 2048
"""Padded tokens of one forward pass."""
MICROS_PER_STEP = 2
POOL = 512
"""Conversations that are sorted by length together."""
SKILLS_SHARE = 0.6
"""Part of the token budget that is spent on the mixture `skills`."""
PEAK_LR = 4e-3
WARM_UP_STEPS = 60
SAVE_EVERY_S = 120
PAD_ID, START_ID, END_ID = 0, 1, 2

Example = tuple[np.ndarray, np.ndarray]
"""Token ids and their loss weights."""


def make_model(vocab_size: int) -> LlamaForCausalLM:
    """Return the untrained model."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.03,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[END_ID, PAD_ID], pad_token_id=PAD_ID, do_sample=True, temperature=1.0
    )
    return model


def encode(tokenizer: Tokenizer, chats: list[Conversation]) -> list[Example]:
    """Return ids and weights; a piece is encoded on its own, as it is when a policy writes it."""
    pieces = [text for chat in chats for text, _ in chat]
    encoded = iter(tokenizer.encode_batch_fast(pieces))
    examples = []
    for chat in chats:
        ids, weights = [], []
        for _, weight in chat:
            piece = next(encoded).ids
            ids += piece
            weights += [weight] * len(piece)
        examples.append((np.array(ids), np.array(weights, dtype=np.float32)))
    return examples


def micro_batches(
    tokenizer: Tokenizer, stream: Iterator[Conversation], seed: int
) -> Iterator[list[Example]]:
    """Yield batches of examples of like length, in random order, without end."""
    rng = np.random.default_rng(seed)
    while True:
        pool = encode(tokenizer, list(itertools.islice(stream, POOL)))
        pool.sort(key=lambda example: len(example[0]))
        batches: list[list[Example]] = [[]]
        for example in pool:
            if batches[-1] and (len(batches[-1]) + 1) * len(example[0]) > MICRO_TOKENS:
                batches.append([])
            batches[-1].append(example)
        for i in rng.permutation(len(batches)):
            yield batches[i]


def batch_loss(model: LlamaForCausalLM, batch: list[Example]) -> tuple[torch.Tensor, float]:
    """Return the weighted sum of token losses, and the sum of weights."""
    length = max(len(ids) for ids, _ in batch)
    tokens = np.full((len(batch), length), PAD_ID)
    weights = np.zeros((len(batch), length), dtype=np.float32)
    for row, (ids, ids_weights) in enumerate(batch):
        tokens[row, : len(ids)] = ids
        weights[row, : len(ids)] = ids_weights
    inputs = torch.from_numpy(tokens)
    target_weights = torch.from_numpy(weights[:, 1:]).flatten()
    rows = target_weights.nonzero().squeeze(1)
    # Padding is on the right, so causal attention alone keeps it out of sight.
    hidden = model.model(input_ids=inputs[:, :-1], use_cache=False).last_hidden_state
    logits = model.lm_head(hidden.flatten(0, 1)[rows])
    losses = functional.cross_entropy(logits, inputs[:, 1:].flatten()[rows], reduction="none")
    return (losses * target_weights[rows]).sum(), float(target_weights.sum())


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the weight matrices and AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=PEAK_LR, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def learning_rate(step: int, progress: float) -> float:
    """Return warm-up by steps, then a cosine over the share of the budget that is used."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    return PEAK_LR * warm_up * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def train(work: Path, token_budget: int, skills_share: float) -> None:
    """Train until the budget is used, from the last checkpoint if there is one."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))
    model = make_model(tokenizer.get_vocab_size())
    optimizers = make_optimizers(model)
    state = {"step": 0, "tokens": 0, "seconds": 0.0, "phase_micros": {"skills": 0, "mixed": 0}}
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(saved["model"])
        for optimizer, optimizer_state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        state = saved["state"]

    def save() -> None:
        part = checkpoint.with_suffix(".part")
        optimizer_states = [optimizer.state_dict() for optimizer in optimizers]
        saved = {"model": model.state_dict(), "optimizers": optimizer_states, "state": state}
        torch.save(saved, part)
        part.replace(checkpoint)

    streams = {}
    began = saved_at = time.perf_counter()
    seconds_before = state["seconds"]
    while state["tokens"] < token_budget:
        progress = state["tokens"] / token_budget
        phase = "skills" if progress < skills_share else "mixed"
        if phase not in streams:
            streams[phase] = micro_batches(tokenizer, conversations(phase, 1), 0)
            for _ in range(state["phase_micros"][phase]):
                next(streams[phase])
        batches = [next(streams[phase]) for _ in range(MICROS_PER_STEP)]
        state["phase_micros"][phase] += MICROS_PER_STEP
        total_weight = sum(float(weights[1:].sum()) for batch in batches for _, weights in batch)
        step_loss = 0.0
        for batch in batches:
            loss, _ = batch_loss(model, batch)
            (loss / total_weight).backward()
            step_loss += loss.item() / total_weight
            state["tokens"] += sum(len(ids) for ids, _ in batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        lr = learning_rate(state["step"], progress)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        state["step"] += 1
        now = time.perf_counter()
        state["seconds"] = seconds_before + now - began
        if state["step"] % 25 == 0:
            row = {"phase": phase, "loss": round(step_loss, 4), "lr": round(lr, 6)}
            row |= {key: state[key] for key in ("step", "tokens")}
            row["seconds"] = round(state["seconds"])
            with (work / "log.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
        if now - saved_at > SAVE_EVERY_S:
            save()
            saved_at = now
    save()


def export(work: Path, folder: Path) -> None:
    """Write the last checkpoint as a Hugging Face folder."""
    tokenizer = Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))
    model = make_model(tokenizer.get_vocab_size())
    model.load_state_dict(torch.load(work / "checkpoint.pt", weights_only=False)["model"])
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(work / "tokenizer" / name, folder / name)


def main() -> None:
    """Make what is missing in the work folder, then train or export."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for work files")
    parser.add_argument("--tokens", type=int, default=12_500_000, help="token budget in all")
    parser.add_argument("--skills-share", type=float, default=SKILLS_SHARE)
    parser.add_argument("--export", type=Path, help="write the last checkpoint there and end")
    options = parser.parse_args()
    if not (options.work / "tokenizer" / "tokenizer.json").exists():
        write_tokenizer(options.work / "tokenizer")
    if options.export:
        export(options.work, options.export)
    else:
        train(options.work, options.tokens, options.skills_share)


if __name__ == "__main__":
    main()
