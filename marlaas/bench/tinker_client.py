"""A Tinker server as its clients see it: seconds and tokens a second, by the `tinker` SDK alone.

    python -m marlaas.bench.tinker_client --server URL --base-model NAME     with this package
    python PATH/TO/tinker_client.py --server URL --base-model NAME           with SDK and numpy only

    connect ─► create ─► train ─► publish ─► sample ─► save, load ─► whole RL loops ─► JSON

- It runs in an environment that has nothing but the SDK and numpy, so that servers which need
  different versions of the SDK can be measured by the same lines. It imports nothing of this
  package, and asks the SDK for what it has (0.9 to 0.38) in place of knowing versions.
- A tenant is a client of its own with a key and an adapter of its own. Where a server knows no
  keys, or one key is given, tenants are clients and adapters only.
- Everything is done once before it is measured; what that took is told apart (`first_s`), since
  some servers compile a program for every new shape. All batches of a run have the same shape.
- A verb that a server refuses is a row with the error; the others go on.
"""

import argparse
import importlib
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

TOKEN_IDS = range(10, 250)
"""What prompts are made of: in the vocabulary of every base. Only their number costs time."""

LEARNING_RATE = 1e-4
METADATA = {"purpose": "benchmark"}
"""Some servers refuse a client that sends none."""

NO_KEY = "tml-benchmark"
"""For servers that know no keys; the SDK wants this form."""

NO_SDK = (
    "the tinker SDK is not installed in {python}; run: {python} -m pip install tinker\n"
    "(where a server needs another version: pip install --no-deps --target FOLDER tinker==VERSION, "
    "then set PYTHONPATH, or --sdk of `marlaas bench tinker`, to FOLDER)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is done; every field is a flag of the same name."""

    tenants: int = 8
    samples: int = 4
    """Answers of a sampling request, and sequences of a training batch."""
    prompt_tokens: int = 32
    answer_tokens: int = 32
    """At most: a server that knows no empty list of stops may end one earlier."""
    rank: int = 8
    warmups: int = 1
    """How often everything is done before it is measured."""
    repeats: int = 3
    rl_steps: int = 3
    """Of a measured RL loop; one step before it is warm-up."""
    limit_s: float = 900.0
    """After which one call is given up."""

    @property
    def batch_tokens(self) -> int:
        return self.samples * (self.prompt_tokens + self.answer_tokens)


QUICK = Plan(samples=2, prompt_tokens=8, answer_tokens=8, repeats=1, rl_steps=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measure at one number of tenants."""

    name: str
    tenants: int
    first_s: float | None = None
    """Of all that was done before measuring, compilation included."""
    seconds: tuple[float, ...] = ()
    """Of each repetition, from the first submit to the last answer."""
    tokens: int = 0
    """Of one repetition: those that were sampled or trained."""
    error: str = ""

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.median_s if self.median_s and self.tokens else None

    def as_json(self) -> dict[str, object]:
        """Return the fields and what follows from them."""
        return {**asdict(self), "median_s": self.median_s, "tokens_per_s": self.tokens_per_s}


def run(argv: Sequence[str]) -> int:
    """Measure as the flags say; print the result as one line."""
    parser = argparse.ArgumentParser(prog="tinker_client", description=__doc__)
    parser.add_argument("--server", required=True, metavar="URL")
    add_flags(parser)
    args = parser.parse_args(argv)
    sdk = load_sdk()
    if sdk is None:
        print(NO_SDK.format(python=sys.executable), file=sys.stderr)
        return 2
    keys = args.key or [os.environ.get("TINKER_API_KEY") or NO_KEY]
    result = Measurement(sdk, args.server, keys, args.base_model, plan_of(args)).run()
    print(json.dumps(result), flush=True)
    # Threads of the SDK, and requests that were given up, must not hold up the end.
    sys.stderr.flush()
    os._exit(0)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what this script and `marlaas bench tinker` share."""
    parser.add_argument("--key", nargs="+", default=[], help="one for all tenants, or one for each")
    parser.add_argument("--base-model", default="", metavar="NAME", help="default: the only one")
    parser.add_argument("--quick", action="store_true", help="short texts, one repetition")
    for field in fields(Plan):
        kind = type(getattr(QUICK, field.name))
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, metavar="N")


def plan_of(args: argparse.Namespace) -> Plan:
    """Return the plan that the flags ask for."""
    given = {field.name: getattr(args, field.name) for field in fields(Plan)}
    known = {name: value for name, value in given.items() if value is not None}
    return replace(QUICK if args.quick else Plan(), **known)


def flags_of(plan: Plan) -> list[str]:
    """Return the flags that ask for a plan."""
    pairs = asdict(plan).items()
    return [text for name, value in pairs for text in (f"--{name.replace('_', '-')}", str(value))]


def load_sdk() -> Any:
    """Return the SDK of this environment, or None."""
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    warnings.simplefilter(
        "ignore"
    )  # what newer versions call deprecated is all that older ones have
    logging.disable(logging.ERROR)
    # A file that is run puts its folder first, and beside this one lies another `tinker.py`.
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != here]
    try:
        return importlib.import_module("tinker")
    except ModuleNotFoundError as error:
        if error.name != "tinker":
            raise
        return None


def sdk_version() -> str:
    """Return the version of the SDK that was loaded, which need not be the installed one."""
    return str(importlib.import_module("tinker._version").__version__)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------
# One tenant


class Tenant:
    """A client with a key and an adapter of its own: connected -> created -> published."""

    def __init__(self, sdk: Any, server: str, key: str, plan: Plan, *, number: int) -> None:
        self._sdk = sdk
        self._plan = plan
        self._number = number
        self._rng = np.random.Generator(np.random.Philox(number))
        self._num_saved = 0
        self._training: Any = None
        self._sampler: Any = None
        self._service = sdk.ServiceClient(base_url=server, api_key=key, user_metadata=METADATA)
        self.first_nll: float | None = None
        """Mean negative log-likelihood of the first batch, under the base: equal on all servers."""
        self.rewards: list[float] = []
        """Mean reward of every RL step."""

    def only_model(self) -> str:
        """Return the name of the first model that the server offers."""
        models = self._service.get_server_capabilities().supported_models
        return models[0].model_name

    def create(self, base_model: str) -> None:
        """Get an adapter."""
        self._training = self.new_adapter(base_model)

    def train(self, data: Sequence[Any] = (), loss: str = "cross_entropy") -> tuple[float, float]:
        """Make one optimizer step; return when gradients and weights were there.

        Both halves are submitted at once, as clients should.
        """
        data = data or [self._text_datum() for _ in range(self._plan.samples)]
        gradients = self._training.forward_backward(data, loss)
        weights = self._training.optim_step(self._sdk.types.AdamParams(learning_rate=LEARNING_RATE))
        passed = self._answer(gradients)
        passed_s = time.perf_counter()
        self._answer(weights)
        if self.first_nll is None:
            logprobs = [_array(output["logprobs"]) for output in passed.loss_fn_outputs]
            self.first_nll = -float(np.mean(np.concatenate(logprobs)))
        return passed_s, time.perf_counter()

    def publish(self) -> None:
        """Make the present weights those that are sampled."""
        self._sampler = self._answer(self._training.save_weights_and_get_sampling_client())

    def sample(self) -> "Answers":
        """Return answers to a new prompt."""
        prompt = self._tokens(self._plan.prompt_tokens)
        params = self._sdk.types.SamplingParams(
            max_tokens=self._plan.answer_tokens, temperature=1.0, stop=[]
        )
        response = self._answer(
            self._sampler.sample(
                prompt=self._sdk.types.ModelInput.from_ints(prompt),
                num_samples=self._plan.samples,
                sampling_params=params,
            )
        )
        return Answers(
            prompt=prompt,
            tokens=[list(sequence.tokens) for sequence in response.sequences],
            logprobs=[list(sequence.logprobs) for sequence in response.sequences],
        )

    def save(self) -> str:
        """Return the path of a new checkpoint, with the optimizer's state."""
        self._num_saved += 1
        return str(self._answer(self._training.save_state(f"bench-{self._num_saved}")).path)

    def new_adapter(self, base_model: str) -> Any:
        """Return a training client with one more adapter, which has done nothing yet."""
        return self._answer(
            self._service.create_lora_training_client(
                base_model=base_model,
                rank=self._plan.rank,
                seed=self._number,
                user_metadata=METADATA,
            )
        )

    def load(self, path: str, into: Any) -> None:
        """Load a checkpoint into a new adapter; some servers allow it to no other."""
        self._answer(into.load_state_with_optimizer(path))

    def rl_step(self) -> int:
        """Publish, sample a group, train on it; return how many tokens were sampled."""
        self.publish()
        answers = self.sample()
        rewards = answers.rewards()
        self.rewards.append(float(np.mean(rewards)))
        advantages = rewards - rewards.mean()
        data = [
            self._answer_datum(answers.prompt, *answer)
            for answer in zip(answers.tokens, answers.logprobs, advantages, strict=True)
        ]
        self.train(data, "importance_sampling")
        return answers.num_tokens

    def close(self) -> None:
        """End the session, where the SDK has a word for it."""
        if hasattr(self._service, "close"):
            self._answer(self._service.close("success"))

    def _answer(self, future: Any) -> Any:
        """Return the result of what may be a future: older versions of the SDK wait themselves."""
        return future.result(self._plan.limit_s) if hasattr(future, "result") else future

    def _tokens(self, number: int) -> list[int]:
        return self._rng.integers(TOKEN_IDS.start, TOKEN_IDS.stop, number).tolist()

    def _text_datum(self) -> Any:
        tokens = self._tokens(self._plan.prompt_tokens + self._plan.answer_tokens)
        return self._datum(tokens, weights=np.ones(len(tokens) - 1, np.float32))

    def _answer_datum(
        self, prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float
    ) -> Any:
        ahead = [0.0] * (len(prompt) - 1)
        return self._datum(
            prompt + tokens,
            logprobs=np.array(ahead + logprobs, np.float32),
            advantages=np.array(ahead + [advantage] * len(tokens), np.float32),
        )

    def _datum(self, tokens: list[int], **inputs: np.ndarray) -> Any:
        """Return all tokens but the last as input, all but the first as targets."""
        targets = np.array(tokens[1:], np.int64)
        return self._sdk.types.Datum(
            model_input=self._sdk.types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": targets, **inputs},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What one sampling request gave."""

    prompt: list[int]
    tokens: list[list[int]]
    logprobs: list[list[float]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    def rewards(self) -> np.ndarray:
        """Return the share of even token ids in each answer: a reward that needs no tokenizer."""
        return np.array([np.mean(np.array(tokens) % 2 == 0) for tokens in self.tokens])


def _array(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.to_numpy() if hasattr(tensor, "to_numpy") else tensor.data)


# ---------------------------------------------------------------------------------------------
# All of them


class Measurement:
    """One run against one server: `run`, once."""

    def __init__(
        self, sdk: Any, server: str, keys: Sequence[str], base_model: str, plan: Plan
    ) -> None:
        self._sdk = sdk
        self._server = server
        self._keys = keys
        self._base_model = base_model
        self._plan = plan
        self._tenants: list[Tenant] = []
        self._rows: list[Row] = []

    def run(self) -> dict[str, object]:
        """Return everything as JSON values."""
        connect_s, first = _timed(lambda: self._connect(0))
        base_model = self._base_model or first.only_model()
        self._create(first, base_model)
        everyone = self._tenants
        groups = [everyone[:1], everyone] if len(everyone) > 1 else [everyone[:1]]
        if everyone:
            for group in groups:
                self._train(group)
            self._measure("publish", everyone[:1], lambda tenant: tenant.publish())
            for group in groups:
                self._sample(group)
            self._save_and_load(everyone[0], base_model)
            for group in groups:
                self._rl(group)
        rewards = [tenant.rewards for tenant in everyone if tenant.rewards]
        result = {
            "bench": "tinker client",
            "sdk": sdk_version(),
            "server": self._server,
            "base_model": base_model,
            "plan": asdict(self._plan),
            "connect_s": connect_s,
            "nll": everyone[0].first_nll if everyone else None,
            "mean_reward": float(np.mean(np.concatenate(rewards))) if rewards else None,
            "client_cpu_s": time.process_time(),
            "rows": [row.as_json() for row in self._rows],
        }
        for tenant in everyone:
            self._attempt("close", 1, tenant.close)
        return result

    def _connect(self, number: int) -> Tenant:
        key = self._keys[number % len(self._keys)]
        return Tenant(self._sdk, self._server, key, self._plan, number=number)

    def _create(self, first: Tenant, base_model: str) -> None:
        """Create the adapters one after another; the first has waited for the server's start."""
        seconds: list[float] = []
        for number in range(self._plan.tenants):

            def create(number: int = number) -> Tenant:
                tenant = self._connect(number) if number else first
                tenant.create(base_model)
                return tenant

            created = self._attempt("create", number + 1, lambda make=create: _timed(make))
            if created is None:
                break
            seconds.append(created[0])
            self._tenants.append(created[1])
        if seconds:
            self._add(Row(name="create", tenants=1, first_s=seconds[0], seconds=tuple(seconds[1:])))

    def _train(self, group: Sequence[Tenant]) -> None:
        """Measure optimizer steps, and of one tenant their two halves."""
        ends: list[tuple[float, float, float]] = []

        def train(tenant: Tenant) -> None:
            ends.append((time.perf_counter(), *tenant.train()))

        tokens = len(group) * self._plan.batch_tokens
        step = self._measure("train step", group, train, tokens=tokens)
        if len(group) > 1 or step.error:
            return
        measured = ends[self._plan.warmups :]
        for name, parts, of in (
            ("forward_backward", [passed - began for began, passed, _ in measured], tokens),
            ("optim_step", [ended - passed for _, passed, ended in measured], 0),
        ):
            self._add(Row(name=name, tenants=1, seconds=tuple(parts), tokens=of))

    def _sample(self, group: Sequence[Tenant]) -> None:
        for tenant in group[1:]:
            self._attempt("publish", 1, tenant.publish)
        counts: list[int] = []
        row = self._measure(
            "sample", group, lambda tenant: counts.append(tenant.sample().num_tokens), is_kept=False
        )
        if not row.error:
            measured = counts[self._plan.warmups * len(group) :]
            row = replace(row, tokens=round(sum(measured) / len(row.seconds)))
        self._add(row)

    def _save_and_load(self, tenant: Tenant, base_model: str) -> None:
        paths: list[str] = []
        self._measure("save", [tenant], lambda one: paths.append(one.save()))
        if not paths:
            return
        number = self._plan.warmups + self._plan.repeats
        adapters = self._attempt(
            "load", 1, lambda: [tenant.new_adapter(base_model) for _ in range(number)]
        )
        if adapters is not None:
            self._measure("load", [tenant], lambda one: one.load(paths[0], adapters.pop()))

    def _rl(self, group: Sequence[Tenant]) -> None:
        """Measure whole loops that know nothing of each other, after one step of each."""
        counts: list[int] = []

        def loop(tenant: Tenant) -> None:
            for _ in range(self._plan.rl_steps):
                counts.append(tenant.rl_step())

        warmed = self._attempt(
            "rl loop", len(group), lambda: _timed(lambda: _side_by_side(group, Tenant.rl_step))
        )
        if warmed is None:
            return
        took = self._attempt(
            "rl loop", len(group), lambda: _timed(lambda: _side_by_side(group, loop))
        )
        if took is not None:
            self._add(
                Row(
                    name="rl loop",
                    tenants=len(group),
                    first_s=warmed[0],
                    seconds=(took[0],),
                    tokens=sum(counts),
                )
            )

    def _measure(
        self,
        name: str,
        group: Sequence[Tenant],
        work: Callable[[Tenant], object],
        *,
        tokens: int = 0,
        is_kept: bool = True,
    ) -> Row:
        """Let all of a group do the same at the same time: warm-ups, then repetitions."""
        row = Row(name=name, tenants=len(group), tokens=tokens)
        times: list[float] = []
        for _ in range(self._plan.warmups + self._plan.repeats):
            try:
                times.append(_timed(lambda: _side_by_side(group, work))[0])
            except Exception as error:  # what a server refuses is a result, and the rest goes on
                row = replace(row, error=_text(error))
                break
        first = times[: self._plan.warmups]
        row = replace(
            row,
            first_s=sum(first) if first else None,
            seconds=tuple(times[self._plan.warmups :]),
        )
        if is_kept:
            self._add(row)
        return row

    def _attempt(self, name: str, tenants: int, work: Callable[[], Any]) -> Any:
        """Return what the work returns; None, and a row with the error, if it fails."""
        try:
            return work()
        except Exception as error:  # as above
            self._add(Row(name=name, tenants=tenants, error=_text(error)))
            return None

    def _add(self, row: Row) -> None:
        self._rows.append(row)
        rate = f", {row.tokens_per_s:.1f} tokens/s" if row.tokens_per_s else ""
        median = f"{row.median_s:.3f} s" if row.median_s is not None else "-"
        first = f" (before: {row.first_s:.1f} s)" if row.first_s is not None else ""
        say(f"  {row.name}, {row.tenants}: {row.error or median + rate}{first}")


def _side_by_side(group: Sequence[Tenant], work: Callable[[Tenant], object]) -> None:
    """Let every tenant do it, each on a thread; return when the last one has."""
    if len(group) == 1:
        work(group[0])
        return
    with ThreadPoolExecutor(len(group)) as pool:
        for done in [pool.submit(work, tenant) for tenant in group]:
            done.result()


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.perf_counter()
    result = work()
    return time.perf_counter() - began_s, result


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
