"""Operations and their futures over HTTP, as the wire has them: order, repetition, refusals, long
polls, what happens at the end of the service. The real app on the real loop, with a fake worker."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard

from marlaas.service.tinker import futures, schema
from marlaas.types import Quotas
from tests.fakes import Speed
from tests.service.bench import Bench, bench

pytestmark = pytest.mark.asyncio

LETTERS = list(b"abcdef")


def pass_body(run: str, seq: int, tokens: list[int] = LETTERS, **changes: Any) -> bytes:
    """Return a pass over one datum whose targets are the shifted tokens."""
    message = schema.ForwardBackwardRequest(model_id=run, seq_id=seq, loss_fn="cross_entropy")
    message.forward_only = changes.get("forward_only", False)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], "<i4").tobytes()
    weights = changes.get("weights", np.ones(len(tokens) - 1))
    for name, dtype, values in (
        ("target_tokens", schema.INT64, np.array(tokens[1:], "<i8")),
        ("weights", schema.FLOAT32, np.array(weights, "<f4")),
    ):
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype, tensor.dense = dtype, values.tobytes()
    return message.SerializeToString()


class Client:
    """One session of acme with a run, by the wire."""

    def __init__(self, service: Bench, who: str = "acme") -> None:
        self._service, self._who = service, who
        self.session = self.run = ""

    async def post(self, name: str, body: object, **more: object) -> httpx.Response:
        kind = {"content": body} if isinstance(body, bytes) else {"json": body}
        return await self._service.call("POST", f"/api/v1/{name}", who=self._who, **kind, **more)

    async def ok(self, name: str, body: object, **more: object) -> dict:
        answer = await self.post(name, body, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def open(self) -> "Client":
        self.session = (await self.ok("create_session", {"tags": []}))["session_id"]
        made = await self.ok("create_model", {
            "session_id": self.session, "model_seq_id": 0, "base_model": "tiny",
            "lora_config": {"rank": 8},
        })  # fmt: skip
        assert await self.result(made) == {"model_id": made["model_id"]}
        self.run = made["model_id"]
        return self

    async def result(self, accepted: dict) -> Any:
        """Wait for what comes of a request: JSON, or protobuf as its message."""
        async with asyncio.timeout(20):
            while True:
                asked = {"request_id": accepted["request_id"], "allow_metadata_only": True}
                answer = await self.post("retrieve_future", asked)
                if answer.status_code != 408:
                    break
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"] != futures.PROTOBUF:
            return answer.json()
        is_sample = accepted["request_id"].startswith("smp:")
        message = schema.SampleResponse() if is_sample else schema.ForwardBackwardOutput()
        message.ParseFromString(answer.content)
        return message

    async def step(self, seq: int) -> dict:
        adam = {"learning_rate": 1.0}
        return await self.ok(
            "optim_step", {"model_id": self.run, "seq_id": seq, "adam_params": adam}
        )

    async def sampler(self, seq: int = 0, **of: str) -> str:
        made = await self.ok("create_sampling_session", {
            "session_id": self.session, "sampling_session_seq_id": seq,
            **(of or {"base_model": "tiny"}),
        })  # fmt: skip
        return made["sampling_session_id"]

    async def sample(self, sampler: str, seq: int = 0, **changes: object) -> httpx.Response:
        return await self.post("asample", {
            "sampling_session_id": sampler, "seq_id": seq, "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": LETTERS}]},
            "sampling_params": {"max_tokens": 4, "seed": 1, **changes.pop("params", {})},
            **changes,
        })  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Training


async def test_operations_run_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        client = await Client(service).open()
        step = await client.step(4)
        third = await client.ok("forward_backward", pass_body(client.run, 3))
        packed = zstandard.ZstdCompressor().compress(pass_body(client.run, 2))
        second = await client.ok("forward_backward", packed, headers={"Content-Encoding": "zstd"})
        asked = {"request_id": step["request_id"]}
        waiting = asyncio.create_task(client.post("retrieve_future", asked))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        first = await client.ok("forward_backward", pass_body(client.run, 1, forward_only=True))
        assert (await waiting).json()["metrics"]["grad_norm"] > 0
        for accepted in (first, second, third):
            output = await client.result(accepted)
            assert output.loss_fn_outputs[0].num_datums == 1
            assert all(name.count(":") == 1 for name in output.metrics)
            assert output.metrics["loss:sum"]


async def test_the_same_number_again_is_the_same_operation(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        client = await Client(service).open()
        body = pass_body(client.run, 1)
        first, again = [await client.ok("forward_backward", body) for _ in range(2)]
        assert first == again
        other = await client.post("forward_backward", pass_body(client.run, 1, LETTERS[:3]))
        assert other.status_code == 400 and other.json()["error"]["code"] == "conflict"
        one, two = await client.result(first), await client.result(first)
        assert one == two


async def test_what_is_refused_uses_up_its_number(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        client = await Client(service).open()
        bad = await client.post(
            "forward_backward", pass_body(client.run, 1, weights=[1, 1, float("nan"), 1, 1])
        )
        assert bad.status_code == 422
        assert "data[0].loss_fn_inputs.weights: entry [2] is nan" in bad.text
        step = await client.result(await client.step(2))
        assert step["category"] == "user" and "error" in step
        bad = await client.post("optim_step", {"model_id": client.run, "seq_id": 3,
                                "adam_params": {"learning_rate": "much"}})  # fmt: skip
        assert bad.status_code == 422 and "adam_params.learning_rate" in bad.text
        bad = await client.post("save_weights", {"model_id": client.run, "seq_id": 4,
                                                 "path": "../up"})  # fmt: skip
        assert bad.status_code == 422 and "path" in bad.text
        fine = await client.ok("forward_backward", pass_body(client.run, 5))
        assert (await client.result(fine)).loss_fn_outputs
        assert "metrics" in await client.result(await client.step(6))


async def test_an_unreadable_body_touches_nobody(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        client = await Client(service).open()
        for body, headers in (
            (b"\xff\xff\xff", {}),
            (b"nonsense", {"Content-Encoding": "zstd"}),
            (pass_body(client.run, 1), {"Content-Encoding": "br"}),
            (pass_body(client.run, 0), {}),
            (b"", {}),
        ):
            answer = await client.post("forward_backward", body, headers=headers)
            assert answer.status_code in (404, 422), answer.text
        bomb = zstandard.ZstdCompressor().compress(bytes(65 << 20))
        answer = await client.post("forward_backward", bomb, headers={"Content-Encoding": "zstd"})
        assert answer.status_code == 413
        fine = await client.ok("forward_backward", pass_body(client.run, 1))
        assert (await client.result(fine)).loss_fn_outputs


async def test_a_run_is_made_from_a_checkpoint_under_the_clients_id(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        client = await Client(service).open()
        await client.ok("forward_backward", pass_body(client.run, 1))
        await client.step(2)
        saved = await client.ok("save_weights", {"model_id": client.run, "seq_id": 3,
                                                 "path": "one", "ttl_seconds": 3600,
                                                 "user_metadata": {"a": "b"}})  # fmt: skip
        path = (await client.result(saved))["path"]
        assert path == f"tinker://{client.run}/weights/one"
        made = await client.ok("load_weights", {"session_id": client.session, "model_seq_id": 5,
                                                "path": path, "optimizer": True})  # fmt: skip
        assert made["model_id"] == f"{client.session}:train:5"
        assert (await client.result(made))["model_id"] == made["model_id"]
        legacy = await client.ok("load_weights", {"model_id": client.run, "seq_id": 4,
                                                  "path": path, "optimizer": False})  # fmt: skip
        assert (await client.result(legacy))["type"] == "load_weights"
        info = await client.ok("get_info", {"model_id": made["model_id"]})
        assert info["model_data"]["tokenizer_id"] == "/tiny" and info["lora_rank"] == 8
        listed = await service.get(f"/api/v1/training_runs/{client.run}/checkpoints")
        (row,) = listed["checkpoints"]
        assert row["checkpoint_id"] == "weights/one" and row["user_metadata"] == {"a": "b"}
        assert row["expires_at"] and not row["public"]


# ---------------------------------------------------------------------------------------------
# Sampling


async def test_one_run_too_many_is_refused_for_good(tmp_path: Path) -> None:
    """429 would have the client ask again for ten minutes before it says anything."""
    async with bench(tmp_path, quotas=Quotas(max_runs=1, requests_a_second=None)) as service:
        client = await Client(service).open()
        more = {
            "session_id": client.session, "model_seq_id": 1, "base_model": "tiny",
            "lora_config": {"rank": 8},
        }  # fmt: skip
        refused = await client.post("create_model", more)
        assert refused.status_code == 400 and "1 may be: finish a session" in refused.text


async def test_a_sample_has_a_name_for_each_sequence(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        client = await Client(service).open()
        sampler = await client.sampler()
        answer = await client.sample(sampler)
        accepted = answer.json()
        assert len(set(accepted["sample_sequence_ids"])) == 2
        assert (await client.sample(sampler)).json() == accepted
        message = await client.result(accepted)
        assert len(message.sequences) == 2 and len(message.sequences[0].tokens) >= 4
        shown = await service.get(f"/api/v1/samplers/{sampler}")
        assert shown == {"sampler_id": sampler, "base_model": "tiny"}


async def test_an_unnamed_save_is_a_sampler(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        client = await Client(service).open()
        saved = await client.ok("save_weights_for_sampler", {
            "model_id": client.run, "seq_id": 1, "sampling_session_seq_id": 3,
        })  # fmt: skip
        sampler = (await client.result(saved))["sampling_session_id"]
        assert sampler == f"{client.session}:sample:3"
        message = await client.result((await client.sample(sampler)).json())
        assert len(message.sequences) == 2
        assert (await service.get("/api/v1/checkpoints"))["checkpoints"] == []


async def test_a_sample_of_an_earlier_process_is_gone(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        client = await Client(service).open()
        request_id = f"smp:{await client.sampler()}:7"
        answer = await client.post("retrieve_future", {"request_id": request_id})
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "expired")


async def test_a_sampler_is_followed_from_a_cursor(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        client = await Client(service).open()
        sampler = await client.sampler()
        accepted = [(await client.sample(sampler, seq)).json() for seq in range(3)]
        for one in accepted:
            await client.result(one)
        target = {"type": "sampling_session", "sampling_session_id": sampler,
                  "cloned_sampler_id": 0}  # fmt: skip
        found = await client.ok("retrieve_futures", {"target": target, "prev_cursor": 0})
        assert {one["request_id"] for one in found["completions"]} == {
            one["request_id"] for one in accepted
        }
        assert {one["state"] for one in found["completions"]} == {"finished"}
        ids = [one["request_id"] for one in accepted]
        again = await client.ok("retrieve_futures", {
            "target": target, "prev_cursor": found["cursor"], "timeout": 0,
            "retrieved_request_ids": ids,
        })  # fmt: skip
        assert again == {"completions": [], "cursor": found["cursor"]}
        joined = [
            (await client.ok("join_sampling_session", {"sampling_session_id": sampler}))
            ["client_counter"] for _ in range(2)
        ]  # fmt: skip
        assert len(set(joined)) == 2 and 0 not in joined


async def test_a_sample_is_given_up_and_an_operation_is_not(tmp_path: Path) -> None:
    async with bench(tmp_path, speed=Speed(token_s=0.2)) as service:
        client = await Client(service).open()
        sampler = await client.sampler()
        slow = (await client.sample(sampler, params={"max_tokens": 300, "stop": []})).json()
        assert await client.ok("cancel_future", {"request_id": slow["request_id"]}) == {}
        assert "error" in await client.result(slow)
        operation = f"op:{client.run}:0"
        answer = await client.post("cancel_future", {"request_id": operation})
        assert answer.status_code == 422 and "executed once it was accepted" in answer.text


# ---------------------------------------------------------------------------------------------
# Polls


async def test_a_poll_without_an_outcome_says_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "POLL_S", 0.05)
    async with bench(tmp_path) as service:
        client = await Client(service).open()
        late = await client.ok("forward_backward", pass_body(client.run, 2))
        answer = await client.post("retrieve_future", {"request_id": late["request_id"]})
        assert answer.status_code == 408
        assert answer.json()["type"] == "try_again"
        assert answer.json()["request_id"] == late["request_id"]
        assert answer.json()["queue_state"] in ("active", "paused_capacity")


async def test_polls_are_answered_before_the_service_ends(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        client = await Client(service).open()
        late = await client.ok("forward_backward", pass_body(client.run, 2))
        asked = {"request_id": late["request_id"]}
        polling = asyncio.create_task(client.post("retrieve_future", asked))
        await asyncio.sleep(0.1)
        assert not polling.done()
        service.parts.draining.set()
        answer = await asyncio.wait_for(polling, 5)
        assert answer.status_code == 408 and answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    "request_id",
    ["", "op:", "op:x", "smp:x", "op:x:1", "op:s-1:train:0:99999999999999999999999", "smp:x:1",
     "op:../..:1", "smp:s:-1", "x\U0001f600", "x" * 10_000, "smp:a\0b:1"],
)  # fmt: skip
async def test_a_name_of_nothing_finds_nothing(tmp_path: Path, request_id: str) -> None:
    async with bench(tmp_path) as service:
        client = Client(service)
        answer = await client.post("retrieve_future", {"request_id": request_id})
        assert answer.status_code == 404, answer.text


async def test_polls_and_samples_are_not_paced_and_the_rest_is(tmp_path: Path) -> None:
    async with bench(tmp_path, quotas=Quotas(requests_a_second=5.0)) as service:
        client = await Client(service).open()
        request_id = f"op:{client.run}:0"
        for _ in range(30):
            await client.ok("retrieve_future", {"request_id": request_id})
        answers = [await service.call("GET", "/api/v1/healthz") for _ in range(30)]
        paced = [answer for answer in answers if answer.status_code == 429]
        assert paced and int(paced[0].headers["retry-after"]) >= 1
