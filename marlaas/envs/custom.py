"""Family `custom`: a tenant's own prompts, judged by the tenant's own Python file in a sandbox.

One turn:        def reward(prompt, reply): ...          -> a number, or a dict with one
Several turns:   def start(prompt): ...                  -> the state of an episode
                 def step(state, reply, is_last): ...    -> new state and messages, or a reward

- The file runs in the sandbox only: imported once per container, each call in a copy of its own.
- State travels as JSON, so any container can take an episode's next call, also after a crash.
- What the file prints or raises goes to the tenant's log and nowhere else. What it returns is read
  strictly; failures of the file end a trajectory with a typed reason, never with a reward of 0.
- Starting the family reads the uploads, checks the file again and imports it.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from weakref import WeakValueDictionary

from marlaas.envs.base import EnvStep, Log, ReadUpload
from marlaas.envs.container import SandboxLimits
from marlaas.envs.custom_answer import read_reward, read_step
from marlaas.envs.print_log import CALL_CHARACTERS, PrintLog
from marlaas.envs.prompts import PromptSet
from marlaas.envs.sandbox import CallReport, Limit, Sandbox, SourceFile, failure_kind
from marlaas.envs.sandbox_child import START_AND_STEP
from marlaas.envs.settings import in_range, one_of
from marlaas.errors import EnvironmentFailure, FailureKind, InvalidRequest
from marlaas.types import Prompt

MAX_FILE_BYTES = 1 << 20

IMPORT_LIMIT_S = 10.0
"""CPU seconds of the file's import; four times that in wall time."""
CHECK_LIMIT_S = 5.0
"""CPU seconds for looking at the file's functions, and the most for a trial call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomSettings:
    """What a job of the family `custom` runs, and how much each call may take."""

    environment: str = ""
    """The Python file: name or digest of an upload. Required."""
    prompts: str = ""
    """The JSONL file: name or digest of an upload. Required."""
    eval_share: float = in_range(0.1, 0.0, 0.9)
    """Share of the distinct prompts that is held out."""
    split_by: str = one_of("prompt", "line")
    """What decides whether a line is held out: what the policy is shown of it, or all of it."""
    max_turns: int = in_range(1, 1, 64)
    """Most assistant turns; more than one needs `start` and `step`."""
    time_limit_s: float = in_range(5.0, 0.1, 300.0)
    """CPU seconds of one call; four times that in wall time."""
    memory_mb: int = in_range(256, 64, 4096)
    """Address space of each process, the interpreter's 40 MB included."""
    max_processes: int = in_range(1, 1, 64)
    """Processes and threads of one call. With more than one, the file is imported for each call."""
    max_open_files: int = in_range(32, 16, 1024)
    tmp_mb: int = in_range(4, 1, 1024)
    """Size of /tmp, which every call finds empty."""
    output_kb: int = in_range(64, 1, 4096)
    """Most that a call may return, and most that it may print."""

    def faults(self) -> list[str]:
        return [
            f"{name} is required: the name of an uploaded file"
            for name in ("environment", "prompts")
            if not getattr(self, name)
        ]

    @property
    def limits(self) -> SandboxLimits:
        """The bounds of the job's sandbox."""
        return SandboxLimits(
            memory_bytes=self.memory_mb << 20,
            max_processes=self.max_processes,
            max_open_files=self.max_open_files,
            tmp_bytes=self.tmp_mb << 20,
            output_bytes=self.output_kb << 10,
            max_printed=CALL_CHARACTERS,
        )


class CustomFamily:
    """A tenant's prompts and file: `new -> started -> stopped`. Prompts can be had once started."""

    name = "custom"

    def __init__(
        self,
        settings: CustomSettings,
        *,
        read_upload: ReadUpload | None = None,
        log: Log | None = None,
    ) -> None:
        self.max_turns = settings.max_turns
        self._settings = settings
        self._read_upload = read_upload
        self._log = PrintLog(log)
        self._prompts: PromptSet | None = None
        self._file: EnvironmentFile | None = None

    def prompt(self, index: int, *, seed: int, split: str) -> Prompt:
        """Return item `index` of a split."""
        assert self._prompts is not None, "start() comes first"
        return self._prompts.prompt(index, seed=seed, split=split)

    def make(self, prompt: Prompt, num_envs: int) -> "Sequence[CustomEnv]":
        """Return fresh environments for one group."""
        assert self._file is not None, "start() comes first"
        return [CustomEnv(self._file, prompt.reference) for _ in range(num_envs)]

    async def start(self) -> None:
        """Read the uploads, import the file and look at its functions.

        Raises:
            InvalidRequest: a file is not right; names every fault.
            EnvironmentFailure: this machine cannot contain code, or the file cannot be imported.
        """
        settings = self._settings
        content = await self._upload(settings.prompts)
        # Reading a million lines takes seconds, in which other jobs go on.
        self._prompts = await asyncio.to_thread(split_prompts, content, settings)
        source = source_text(await self._upload(settings.environment))
        self._file = EnvironmentFile(source, settings.limits, settings.time_limit_s, self._log)
        await self._file.start()
        self._file.check_turns(settings.max_turns)

    async def stop(self) -> None:
        """End the sandbox."""
        if self._file is not None:
            await self._file.stop()

    def cpu_s(self) -> float:
        """Return CPU seconds that the sandbox has used so far."""
        return self._file.cpu_s() if self._file is not None else 0.0

    async def _upload(self, digest: str) -> bytes:
        if self._read_upload is None:
            raise InvalidRequest("family custom needs uploads: submit the job to a service")
        content = self._read_upload(digest)
        return await content if isawaitable(content) else content


class CustomEnv:
    """One episode in a tenant's environment."""

    def __init__(self, file: "EnvironmentFile", prompt: Mapping[str, object]) -> None:
        self._file = file
        self._prompt = prompt
        self._state: object = None

    async def step(self, reply: str, *, is_last: bool) -> EnvStep:
        """Have the file judge or answer the reply.

        Raises:
            EnvironmentFailure: it raised, ran over a limit, or returned what it must not.
        """
        if not self._file.has_steps:
            return read_reward(await self._file.call("reward", self._prompt, reply))
        if self._state is None:
            value = await self._file.call(START_AND_STEP, self._prompt, reply, is_last)
        else:
            value = await self._file.call("step", self._state, reply, is_last)
        answer, state = read_step(value, is_last=is_last)
        self._state = state
        return answer

    async def close(self) -> None:
        """Nothing to free: an episode is its state."""


class EnvironmentFile:
    """A tenant's file in a sandbox: `new -> started -> call, call, ... -> stopped`."""

    def __init__(
        self, source: str, limits: SandboxLimits, time_limit_s: float, log: PrintLog
    ) -> None:
        self.has_steps = False
        """It has `start` and `step` instead of `reward`; known once started."""
        self.is_started = False
        self._time_limit_s = time_limit_s
        self._log = log
        file = SourceFile(text=source, load_limit_s=IMPORT_LIMIT_S, on_print=log.add)
        self._sandbox = Sandbox(limits, file)

    async def start(self) -> None:
        """Import the file and look at its functions.

        Raises:
            InvalidRequest: functions are missing or cannot be called as they will be.
            EnvironmentFailure: no sandbox can be had, or the import failed.
        """
        await self._sandbox.start()
        report = await self._sandbox.call(LOOK, "look", [[]], timeout_s=CHECK_LIMIT_S)
        if 0 not in report.values:
            fault = report.error or report.errors.get(0, "")
            raise EnvironmentFailure(
                failure_kind(report.limit), f"the environment file cannot be looked at: {fault}"
            )
        faults = report.values[0]
        if isinstance(faults, list):
            raise InvalidRequest(*map(str, faults))
        self.has_steps = faults == "steps"
        self.is_started = True

    def check_turns(self, max_turns: int) -> None:
        """Refuse turns that the file has no functions for.

        Raises:
            InvalidRequest: it has `reward` alone, which judges one turn.
        """
        if max_turns > 1 and not self.has_steps:
            raise InvalidRequest(
                f"max_turns is {max_turns}, but the environment file has only reward; "
                "several turns need start and step"
            )

    async def stop(self) -> None:
        """End the sandbox."""
        await self._sandbox.stop()

    def cpu_s(self) -> float:
        return self._sandbox.cpu_s()

    async def call(self, entry: str, *arguments: object) -> object:
        """Return what a function of the file returned; what it printed goes to the log.

        Raises:
            EnvironmentFailure: it returned nothing that can be read.
        """
        report = await self._sandbox.call(None, entry, [arguments], timeout_s=self._time_limit_s)
        self._log.add(report.printed)
        if report.limit is None and 0 in report.values:
            return report.values[0]
        raise EnvironmentFailure(failure_kind(report.limit), self._fault(entry, report))

    def _fault(self, entry: str, report: CallReport) -> str:
        function = "start or step" if entry == START_AND_STEP else entry
        if report.limit is Limit.TIME:
            return f"{function} took longer than {self._time_limit_s:g} s (time_limit_s)"
        if report.limit is not None:
            words = report.errors.get(0) or report.error
            return f"{function} ran over the limit on {report.limit.value}: {words}"
        if 0 in report.errors:
            return f"{function} failed: {report.errors[0]}"
        if report.error:
            return f"{function} gave no result: {report.error}"
        return f"{function} returned what cannot be read; expected JSON values, not nested deeply"


async def check_job(settings: CustomSettings, prompts: bytes, source: bytes) -> None:
    """Find out, before a job is taken, what would end it at its start or fail its every call.

    Raises:
        InvalidRequest: names what is wrong with the prompts or the file.
        EnvironmentFailure: SANDBOX_LOST: this machine cannot contain code, so nobody knows.
    """
    split = await asyncio.to_thread(split_prompts, prompts, settings)
    await check_environment(
        source,
        settings.limits,
        prompt=split.item(0),
        max_turns=settings.max_turns,
        time_limit_s=settings.time_limit_s,
    )


async def check_environment(
    source: str | bytes,
    limits: SandboxLimits | None = None,
    *,
    prompt: Mapping[str, object] | None = None,
    max_turns: int = 1,
    time_limit_s: float = CHECK_LIMIT_S,
    log: Log | None = None,
) -> None:
    """Import a tenant's file in a sandbox, look at its functions, and try them on a first prompt.

    The trial gives an empty reply in a last turn, so its value must be a verdict. One that may take
    longer than `CHECK_LIMIT_S` and does is not waited for: its first trajectories will tell.

    Raises:
        InvalidRequest: names what is wrong with the file.
        EnvironmentFailure: SANDBOX_LOST: this machine cannot contain code, so nobody knows.
    """
    trial_s = min(time_limit_s, CHECK_LIMIT_S)
    file = EnvironmentFile(source_text(source), limits or SandboxLimits(), trial_s, PrintLog(log))
    try:
        await file.start()
        file.check_turns(max_turns)
        if prompt is not None:
            await CustomEnv(file, prompt).step("", is_last=True)
    except EnvironmentFailure as failure:
        if failure.kind is FailureKind.SANDBOX_LOST:
            raise
        is_slow = file.is_started and failure.kind is FailureKind.TIMEOUT
        if is_slow and time_limit_s > trial_s:
            return
        where = "on the first prompt with an empty reply: " if file.is_started else ""
        raise InvalidRequest(f"{where}{failure.reason}") from None
    finally:
        await file.stop()


def source_text(source: str | bytes) -> str:
    """Return a Python file as text.

    Raises:
        InvalidRequest: it is too long, or no UTF-8.
    """
    content = source.encode() if isinstance(source, str) else source
    if len(content) > MAX_FILE_BYTES:
        raise InvalidRequest(f"the environment file is over {MAX_FILE_BYTES >> 20} MiB long")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the environment file is not UTF-8 (byte {error.start + 1})"
        ) from None


def split_prompts(content: bytes, settings: CustomSettings) -> PromptSet:
    """Return the prompts of a file, of which some can be held out if some are to be.

    Raises:
        InvalidRequest: a line is not right, or none can be held out.
    """
    prompts = prompt_set(content, settings)
    if settings.eval_share > 0 and not prompts.size("eval"):
        raise InvalidRequest(
            "every line shows the policy the same, so no prompt can be held out: "
            "set split_by: line, or eval_share: 0"
        )
    return prompts


def prompt_set(content: bytes, settings: CustomSettings) -> PromptSet:
    """Return the prompts of a file; jobs with the same content, as in a sweep, share them."""
    by_line = settings.split_by == "line"
    key = (hashlib.sha256(content).hexdigest(), settings.eval_share, by_line)
    found = _prompt_sets.get(key)
    if found is None:
        found = PromptSet(content, settings.eval_share, by_line=by_line)
        _prompt_sets[key] = found
    return found


_prompt_sets: WeakValueDictionary[tuple[str, float, bool], PromptSet] = WeakValueDictionary()

LOOK = '''
import inspect

def look():
    """Return the faults of the file, or which of the two forms it has."""
    wanted = {"reward": ("prompt", "reply"), "start": ("prompt",),
              "step": ("state", "reply", "is_last")}
    found = {name: environment[name] for name in wanted if name in environment}
    faults = []
    if not ("reward" in found or {"start", "step"} <= set(found)):
        has = f"; it has only {next(iter(found))}" if found else ""
        faults.append(f"the file needs reward(prompt, reply), or start(prompt) and "
                      f"step(state, reply, is_last){has}")
    elif len(found) > 1 and "reward" in found:
        faults.append("the file has reward as well as start or step; keep one form")
    for name, function in found.items():
        call = f"{name}({', '.join(wanted[name])})"
        if not callable(function):
            faults.append(f"{name} must be a function, {call}")
            continue
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            faults.append(f"{name} must be a plain function, neither async nor a generator")
        try:
            signature = inspect.signature(function)
            signature.bind(*wanted[name])
        except TypeError:
            faults.append(f"{name} cannot be called as {call}: it is {name}{signature}")
        except ValueError:
            pass
    return faults or ("reward" if "reward" in found else "steps")
'''
"""Runs in the sandbox beside the tenant's file."""
