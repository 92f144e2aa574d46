"""The protocol by hand, for what no well-behaved SDK sends: ids of others, gaps, nonsense."""

import time
from collections.abc import Sequence
from typing import Any, Self

import httpx
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

PROTOBUF = "application/x-protobuf"


class Wire:
    """A plain HTTP client with a tenant's key."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(
            base_url=f"{url}/api/v1/", headers={"X-API-Key": key}, timeout=60.0
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        return self._http.post(path, json=body)

    def send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        return self._http.request(method, path, **arguments)

    # -- what a client does on the way to a model

    def new_session(self) -> str:
        answer = self.post(
            "create_session", type="create_session", tags=[], user_metadata={}, sdk_version="0.38.0"
        )
        return answer.raise_for_status().json()["session_id"]

    def new_model(self, session_id: str, model_seq_id: int = 0, **lora: Any) -> str:
        """Create a model and wait until it is there."""
        answer = self.post(
            "create_model",
            type="create_model",
            session_id=session_id,
            model_seq_id=model_seq_id,
            base_model="tiny",
            lora_config={
                "rank": 8,
                "seed": 7,
                "train_unembed": True,
                "train_mlp": True,
                "train_attn": True,
                **lora,
            },
            optimizer_config={"type": "adamw"},
        )
        return self.result(answer.raise_for_status().json()["request_id"])["model_id"]

    # -- training by number

    def forward_backward(
        self,
        model_id: str,
        seq_id: int,
        data: Sequence[types.Datum],
        loss_fn: Any = "cross_entropy",
    ) -> httpx.Response:
        request = types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(data=list(data), loss_fn=loss_fn),
            model_id=model_id,
            seq_id=seq_id,
        )
        return self.forward_backward_bytes(
            forward_backward_request_to_proto(request).SerializeToString()
        )

    def forward_backward_bytes(self, body: bytes, **headers: str) -> httpx.Response:
        return self._http.post(
            "forward_backward", content=body, headers={"Content-Type": PROTOBUF, **headers}
        )

    def optim_step(self, model_id: str, seq_id: int, **adam: float) -> httpx.Response:
        return self.post(
            "optim_step",
            type="optim_step",
            model_id=model_id,
            seq_id=seq_id,
            adam_params={"learning_rate": 1e-3, **adam},
        )

    # -- futures

    def poll(self, request_id: str) -> httpx.Response:
        return self.post("retrieve_future", request_id=request_id, allow_metadata_only=False)

    def result(self, request_id: str, within_s: float = 60.0) -> Any:
        """Return what a future holds: JSON as it is, protobuf as the SDK reads it."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            answer = self.poll(request_id)
            if answer.status_code == 408:
                continue
            answer.raise_for_status()
            if answer.headers["content-type"].startswith(PROTOBUF):
                if request_id.startswith("smp:"):
                    return deserialize_sample_response(answer.content)
                return deserialize_forward_backward_output(answer.content)
            body = answer.json()
            if body.get("type") != "try_again":
                return body
        raise AssertionError(f"{request_id} has no result after {within_s} s")
