"""Recipes of `tinker-cookbook` 0.6.1, unmodified and offline, against a service with base `tiny`.

    python -m tests.tinker.cookbook --python COOKBOOK_VENV/bin/python [RECIPE ...]

starts a service, runs the recipes one after another and prints, for each, its metric over the
first and the last steps. The cookbook lives in an environment of its own (`docs/tinker.md` says
how it is made), so nothing of it is needed here. Recipes find tokenizer and data sets by name in
their working folder, where stand-ins lie:

    WORK/Qwen/Qwen3-8B-Base/            tokenizer of the base, under a name that the cookbook knows
    WORK/openai/gsm8k/                  sums, answered as that set does: "#### 7"
    WORK/HuggingFaceH4/no_robots/       the same sums as conversations, answered in \\boxed{}
    WORK/Anthropic/hh-rlhf/             pairs of a right and a wrong sum
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean

import numpy as np

from tests.client.running import Running
from tests.tinker.served import ALIAS, FOLDER, add_tenant, start

BOXED = " Provide a numerical answer without units, written inside \\boxed{}."
"""What `rl_loop` adds to every question."""
STRAWBERRY = [
    {"role": "user", "content": "How many r's are in strawberry?" + BOXED},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w "
        "6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
]
"""The example that `rl_loop` shows before every question."""

NUM_QUESTIONS = 6400
LIMIT_S = 3600


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One run of one recipe."""

    name: str
    module: str
    arguments: tuple[str, ...]
    metric: str
    """Key in the recipe's metrics.jsonl."""
    is_loss: bool = False
    """The metric should fall; else it should rise."""
    before: Callable[[Path], None] | None = None
    """Prepares the log folder, given the folder of all logs."""
    goes_on: str = ""
    """Name of the run whose log folder it resumes."""
    num_averaged: int = 4
    """Steps at either end that the table shows the mean of."""


MATH = (
    "env=arithmetic",
    "renderer_name=role_colon",
    "group_size=8",
    "groups_per_batch=32",
    "max_tokens=12",
    "learning_rate=1e-3",
    "eval_every=0",
)
REWARD = "env/all/reward/total"


def math_rl(name: str, *arguments: str, steps: int = 30, **fields: object) -> Recipe:
    steps_of = (*MATH, f"max_steps={steps}", *arguments)
    return Recipe(name, "recipes.math_rl.train", steps_of, REWARD, **fields)  # type: ignore[arg-type]


def _begin_at_boxed(logs: Path) -> None:
    """Let `rl_loop` begin where `sl_loop` ended: a base that never boxes is never rewarded."""
    lines = (logs / "sl_loop" / "checkpoints.jsonl").read_text().splitlines()
    record = {**json.loads(lines[-1]), "name": "start", "batch": 0}
    folder = logs / "rl_loop"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "checkpoints.jsonl").write_text(json.dumps(record) + "\n")


RECIPES = (
    Recipe(
        "chat_sl",
        "recipes.chat_sl.train",
        ("dataset={shipped}", "renderer_name=role_colon", "batch_size=32", "num_epochs=6",
         "learning_rate=2e-3", "max_length=1024", "save_every=10", "rolling_save_every=5"),
        "train_mean_nll",
        is_loss=True,
    ),
    math_rl("importance_sampling", "loss_fn=importance_sampling"),
    math_rl("ppo", "loss_fn=ppo", "num_substeps=2"),
    math_rl("cispo", "loss_fn=cispo", "compute_post_kl=True"),
    math_rl("stable_reinforce"),
    math_rl("importance_sampling, async", "loss_fn=importance_sampling", "max_steps_off_policy=2"),
    math_rl("ppo, async", "loss_fn=ppo", "max_steps_off_policy=2"),
    math_rl("cispo, async", "loss_fn=cispo", "max_steps_off_policy=2"),
    math_rl("interrupted", "loss_fn=ppo", "save_every=4", steps=10),
    math_rl("resumed", "loss_fn=ppo", "save_every=4", steps=30, goes_on="interrupted"),
    Recipe(
        "guess_number",
        "recipes.multiplayer_rl.guess_number.train",
        ("renderer_name=role_colon", "group_size=8", "batch_size=8", "learning_rate=1e-3",
         "max_tokens=16", "eval_every=0", "max_steps=12"),
        REWARD,
        num_averaged=2,
    ),
    Recipe(
        "dpo",
        "recipes.preference.dpo.train",
        ("dataset=hhh", "renderer_name=role_colon", "batch_size=32", "learning_rate=5e-4",
         "max_length=512", "max_steps=16", "reference_model_name={model}"),
        "dpo_loss",
        is_loss=True,
    ),
    Recipe(
        "sl_loop",
        "recipes.sl_loop",
        ("batch_size=32", "learning_rate=3e-3", "max_length=1024", "max_steps=190"),
        "train_mean_nll",
        is_loss=True,
    ),
    Recipe(
        "rl_loop",
        "recipes.rl_loop",
        ("batch_size=32", "group_size=8", "learning_rate=5e-4", "max_tokens=24",
         "loss_fn=importance_sampling", "max_steps=60"),
        "reward/total",
        before=_begin_at_boxed,
        num_averaged=10,
    ),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------
# The working folder


def prepare(work: Path) -> None:
    tokenizer = work / ALIAS
    tokenizer.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(Path(FOLDER) / name, tokenizer / name)
    sums = list(_sums(NUM_QUESTIONS))
    _dataset(
        work / "openai" / "gsm8k",
        [{"question": question, "answer": f"#### {answer}"} for question, answer, _ in sums],
        config="main",
    )
    _dataset(
        work / "HuggingFaceH4" / "no_robots",
        [
            {
                "messages": [
                    *STRAWBERRY,
                    {"role": "user", "content": question + BOXED},
                    {"role": "assistant", "content": f"\\boxed{{{answer}}}"},
                ]
            }
            for question, answer, _ in sums
        ],
    )
    _dataset(
        work / "Anthropic" / "hh-rlhf",
        [
            {
                "chosen": f"\n\nHuman: {question}\n\nAssistant: {answer}",
                "rejected": f"\n\nHuman: {question}\n\nAssistant: {wrong}",
            }
            for question, answer, wrong in sums
        ],
    )


def _sums(count: int) -> Iterator[tuple[str, int, int]]:
    """Yield question, answer and a wrong answer; few enough that the base can learn to box them."""
    rng = np.random.Generator(np.random.Philox(0))
    for _ in range(count):
        x, y = (int(number) for number in rng.integers(0, 5, 2))
        off = int(rng.integers(1, 10))
        yield f"What is {x} + {y}?", x + y, x + y + off


def _dataset(folder: Path, rows: list[dict], config: str = "default") -> None:
    """Write a data set that `datasets.load_dataset` reads by its folder's name."""
    folder.mkdir(parents=True, exist_ok=True)
    splits = {"train": rows[64:], "test": rows[:64]}
    for split, part in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    files = "".join(f"  - split: {name}\n    path: {name}.jsonl\n" for name in splits)
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
    )


# ---------------------------------------------------------------------------------------------
# A run


def run(recipe: Recipe, python: str, work: Path, env: dict[str, str]) -> Path:
    """Run a recipe to its end; return its log folder."""
    logs = work / "logs"
    if recipe.before is not None:
        recipe.before(logs)
    log = logs / (recipe.goes_on or recipe.name).replace(", ", "-").replace(" ", "-")
    arguments = [f"log_path={log}", f"model_name={ALIAS}", "lora_rank=32", *recipe.arguments]
    if recipe.module.endswith(("guess_number.train", "dpo.train")):
        arguments.remove("lora_rank=32")  # they have no such option
    if not recipe.module.endswith("_loop"):
        behavior = "resume" if recipe.goes_on else "delete"
        arguments.append(f"behavior_if_log_dir_exists={behavior}")
    filled = [one.format(shipped=_shipped(python), model=ALIAS) for one in arguments]
    output = work / f"{recipe.name.replace(', ', '-').replace(' ', '-')}.out"
    with output.open("w") as file:
        code = subprocess.run(
            [python, "-m", f"tinker_cookbook.{recipe.module}", *filled],
            cwd=work,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        ).returncode
    if code:
        raise SystemExit(f"{recipe.name} ended with {code}:\n{output.read_text()[-4000:]}")
    return log


def _shipped(python: str) -> Path:
    """Return the conversation file that the cookbook's wheel ships."""
    find = "import tinker_cookbook; print(tinker_cookbook.__path__[0])"
    package = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True)
    return Path(package.stdout.strip()) / "example_data" / "conversations.jsonl"


def metrics(log: Path, key: str) -> list[float]:
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if key in row]


def report(recipe: Recipe, log: Path, taken_s: float) -> bool:
    """Print a row of the table; return whether the metric moved as it should."""
    values = metrics(log, recipe.metric)
    first, last = mean(values[: recipe.num_averaged]), mean(values[-recipe.num_averaged :])
    moved = last < first if recipe.is_loss else last > first
    say(
        f"| {recipe.name} | {recipe.metric} | {len(values)} | {first:.3f} | {last:.3f} "
        f"| {taken_s:.0f} | {'yes' if moved else 'NO'} |"
    )
    return moved


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="*", help=f"some of: {', '.join(r.name for r in RECIPES)}")
    parser.add_argument("--python", default=sys.executable, help="interpreter with the cookbook")
    parser.add_argument("--work", type=Path, help="working folder, kept; else a temporary one")
    args = parser.parse_args()
    chosen = [recipe for recipe in RECIPES if not args.recipes or recipe.name in args.recipes]
    work = (args.work or Path(tempfile.mkdtemp(prefix="cookbook-"))).resolve()
    prepare(work)
    (work / "service").mkdir(exist_ok=True)
    running: Running = start(work / "service", "--workers", "2")
    try:
        tenant = add_tenant(running, "cook")
        env = {
            **os.environ,
            "TINKER_BASE_URL": running.url,
            "TINKER_API_KEY": tenant.key,
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(work / "hub"),
            "TINKER_COOKBOOK_RUNS_DIR": str(work / "logs"),
            "OMP_NUM_THREADS": "1",
        }
        env.pop("PYTHONPATH", None)
        say("| run | metric | steps | first | last | seconds | moved as it should |")
        say("|---|---|---|---|---|---|---|")
        moved = []
        for recipe in chosen:
            begun = time.monotonic()
            log = run(recipe, args.python, work, env)
            moved.append(report(recipe, log, time.monotonic() - begun))
    finally:
        running.stop()
    return 0 if all(moved) else 1


if __name__ == "__main__":
    sys.exit(main())
