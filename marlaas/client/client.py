"""The way in: one service, seen by one key."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from marlaas.client.credentials import find_credentials
from marlaas.client.jobs import Jobs, Sweep, key_of
from marlaas.client.operating import Tenants
from marlaas.client.records import Machine, RunInfo, SweepInfo, UsageReport, WhoAmI, read
from marlaas.client.transport import Patience, Transport
from marlaas.types import Event, Message, Upload, UploadKind

CHAT_TIMEOUT_S = 600.0
"""A reply waits for its turn among all tenants' work, and for its tokens."""

Conversation = str | Sequence[Message | Mapping[str, str]]
"""What one says first, or all that was said."""


class Client:
    """A service and what a key may do there: constructed -> used -> closed, or a `with` block.

        with marlaas.Client() as client:
            job = client.jobs.create(name="sums", env={"family": "math"})

    Without arguments the address and the key come from MARLAAS_URL and MARLAAS_API_KEY, then from
    ~/.config/marlaas/credentials. `tenant` is for operators: on whose things to act. One client may
    be used by several threads.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        tenant: str | None = None,
        patience: Patience | None = None,
    ) -> None:
        found = find_credentials(base_url, api_key)
        self._use(Transport(found.url, found.api_key, tenant=tenant, patience=patience))

    def _use(self, transport: Transport) -> None:
        self._transport = transport
        self._operating = transport.acting_for(None)
        self.jobs = Jobs(transport)
        self.tenants = Tenants(self._operating)
        """For operators."""

    def acting_for(self, tenant: str) -> "Client":
        """Return a client of the same connections that acts on a tenant's things (operators)."""
        client = object.__new__(Client)
        client._use(self._transport.acting_for(tenant))
        return client

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return self._transport.url

    def whoami(self) -> WhoAmI:
        """Return whose key this is, its limits and what was used today."""
        return read(WhoAmI, self._operating.call("GET", "/v1/whoami"))

    def usage(self, *, days: int = 30) -> UsageReport:
        answer = self._transport.call("GET", "/v1/usage", params={"days": days})
        return read(UsageReport, answer)

    def runs(self) -> Iterator[RunInfo]:
        """Yield the tenant's runs of Tinker clients, newest first."""
        after: int | None = 0
        while after is not None:
            page = self._transport.call("GET", "/v1/runs", params={"after": after})
            yield from (read(RunInfo, row) for row in page["runs"])
            after = page["next"]

    def follow(self, *, after: int | None = None) -> Iterator[Event | None]:
        """Yield what happens to any job of the tenant from now on, or behind number `after`.

        There is no end to it. None comes when the stream stands, anew too, and now and then while
        nothing happens: a moment to look at what may have been missed.
        """
        for event in self._transport.stream("/v1/events", after=after):
            yield None if event is None else read(Event, event)

    # Uploads ----------------------------------------------------------------------------------

    def upload_prompts(
        self, name: str, prompts: str | Path | Iterable[Mapping[str, object]]
    ) -> Upload:
        """Upload prompts under a name: a JSONL file, or the prompts themselves.

        Jobs that were handed over keep the prompts they began with, whatever is uploaded later.

        Raises:
            InvalidRequest: with every line that is no prompt.
        """
        if isinstance(prompts, str | Path):
            return self._upload(UploadKind.PROMPTS, name, Path(prompts))
        lines = "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts)
        return self._upload(UploadKind.PROMPTS, name, lines.encode())

    def upload_environment(self, name: str, source: str | Path) -> Upload:
        """Upload the Python file of an environment under a name. It runs in a sandbox only.

        Raises:
            InvalidRequest: with what the file lacks.
        """
        return self._upload(UploadKind.ENVIRONMENT, name, Path(source))

    def uploads(self) -> list[Upload]:
        return [read(Upload, row) for row in self._transport.call("GET", "/v1/uploads")["uploads"]]

    def delete_upload(self, kind: UploadKind, name: str) -> None:
        """Forget a name; jobs that were handed over keep what they began with."""
        self._transport.call("DELETE", _upload_path(kind, name))

    def _upload(self, kind: UploadKind, name: str, content: bytes | Path) -> Upload:
        return read(Upload, self._transport.call("PUT", _upload_path(kind, name), body=content))

    # Sweeps -----------------------------------------------------------------------------------

    def sweep(
        self, name: str, job: Mapping[str, object], grid: Mapping[str, Sequence[object]]
    ) -> Sweep:
        """Hand over a job for every combination of the grid's values: NAME-001, NAME-002, ...

        Raises:
            InvalidRequest: with every problem of every combination.
        """
        body = {"name": name, "job": dict(job), "grid": {knob: list(v) for knob, v in grid.items()}}
        answer = self._transport.call(
            "POST",
            "/v1/sweeps",
            body=body,
            headers={"Idempotency-Key": key_of(body)},
            is_repeatable=True,
        )
        return Sweep(self._transport, read(SweepInfo, answer))

    def get_sweep(self, name: str) -> Sweep:
        answer = self._transport.call("GET", f"/v1/sweeps/{quote(name, safe='')}")
        return Sweep(self._transport, read(SweepInfo, answer))

    # Talking to a model -----------------------------------------------------------------------

    def chat(self, model: str, messages: Conversation, **sampling: object) -> str:
        """Return a model's reply: `base`, `JOB`, `JOB@VERSION`, `JOB@best` or `JOB@promoted`.

        `sampling` takes what OpenAI's chat route takes: max_tokens, temperature, top_p, seed, stop.
        """
        if isinstance(messages, str):
            messages = [Message("user", messages)]
        body = {"model": model, "messages": [_as_json(message) for message in messages], **sampling}
        answer = self._transport.call(
            "POST", "/v1/chat/completions", body=body, timeout_s=CHAT_TIMEOUT_S
        )
        return str(answer["choices"][0]["message"]["content"])

    # The machine (operators) ------------------------------------------------------------------

    def machine(self) -> Machine:
        """Return what the workers and the server are busy with, and what stands still."""
        return read(Machine, self._operating.call("GET", "/v1/workers"))

    def trace(self, *, seconds: float = 10.0) -> Any:
        """Return the stages of the last seconds as JSON for ui.perfetto.dev."""
        return self._operating.call("GET", "/v1/trace", params={"seconds": seconds})


def _upload_path(kind: UploadKind, name: str) -> str:
    folder = {UploadKind.PROMPTS: "prompts", UploadKind.ENVIRONMENT: "environments"}[kind]
    return f"/v1/{folder}/{quote(name, safe='')}"


def _as_json(message: Message | Mapping[str, str]) -> Mapping[str, str]:
    if isinstance(message, Message):
        return {"role": message.role, "content": message.content}
    return message
