"""The wire format against the real client's: what it sends is read, what we answer it reads."""

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import tinker
import torch
import zstandard
from google.protobuf.descriptor import Descriptor
from tinker.proto import tinker_public_pb2 as theirs
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)
from tinker.types import ForwardBackwardRequest, ModelInput, TensorData

from marlaas.errors import InvalidRequest, TooLarge
from marlaas.loop.operations import ForwardBackward
from marlaas.service.tinker import bodies, losses, schema
from marlaas.service.tinker.bodies import read_json
from marlaas.service.tinker.passes import (
    MAX_SPARSE_CELLS,
    MAX_TARGETS,
    Bounds,
    encode_outputs,
    parse,
    read_pass,
    unpack,
    unpacked_bytes,
)
from marlaas.service.tinker.samples import encode_samples, read_sample
from marlaas.types import Completion, Datum, DatumOutput, StopReason

CONTEXT = 64
BOUNDS = Bounds(max_context=CONTEXT, vocab_size=100)


def flat(found: dict, message: Descriptor) -> dict:
    """Return the fields of a message and of all it holds."""
    if message.name not in found:
        found[message.name] = [
            (
                field.name, field.number, field.type, field.is_repeated, field.has_presence,
                field.message_type.name if field.message_type else None,
                [(v.name, v.number) for v in field.enum_type.values] if field.enum_type else None,
                field.containing_oneof.name if field.containing_oneof else None,
            )
            for field in message.fields
        ]  # fmt: skip
        for field in message.fields:
            if field.message_type:
                flat(found, field.message_type)
    return found


@pytest.mark.parametrize(
    "name", ["ForwardBackwardRequest", "ForwardBackwardOutput", "SampleResponse"]
)
def test_the_schema_is_the_clients(name: str) -> None:
    ours = flat({}, getattr(schema, name).DESCRIPTOR)
    assert ours == flat({}, getattr(theirs, name).DESCRIPTOR)


# ---------------------------------------------------------------------------------------------
# Passes


def sent(
    data: Sequence[tinker.Datum],
    loss: str = "cross_entropy",
    config: Mapping[str, float] | None = None,
    *,
    is_forward_only: bool = False,
) -> bytes:
    """Return what the client sends for a pass."""
    request = ForwardBackwardRequest(
        model_id="s-1:train:0",
        seq_id=3,
        forward_backward_input=tinker.types.ForwardBackwardInput(
            data=list(data), loss_fn=loss, loss_fn_config=config
        ),
    )
    message = forward_backward_request_to_proto(request)
    message.forward_only = is_forward_only
    return message.SerializeToString()


def taken(body: bytes) -> ForwardBackward:
    return read_pass(parse(body), BOUNDS)


def datum(tokens: Sequence[int], **inputs: object) -> tinker.Datum:
    return tinker.Datum(model_input=ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)


def problems(body: bytes) -> str:
    with pytest.raises((InvalidRequest, TooLarge)) as refused:
        taken(body)
    return str(refused.value)


def test_shifted_targets_are_the_tokens_themselves() -> None:
    body = sent([datum([5, 6, 7], target_tokens=[6, 7, 8], weights=[0.0, 1.0, -0.5])])
    request = parse(body)
    assert (request.run_id, request.seq) == ("s-1:train:0", 3)
    (read,) = taken(body).data
    assert read.tokens.tolist() == [5, 6, 7, 8]
    assert read.weights.tolist() == [0, 0, 1, -0.5]
    assert read.targets is None and read.is_scored_everywhere
    assert read.tokens.dtype == np.int32 and read.weights.dtype == np.float32


def test_other_targets_travel_beside_the_tokens() -> None:
    (read,) = taken(sent([datum([5, 6], target_tokens=[9, 8], weights=[1.0, 1.0])])).data
    assert read.tokens.tolist() == [5, 6, 0]
    assert read.targets is not None and read.targets.tolist() == [0, 9, 8]


def test_several_chunks_are_one_sequence_and_spans_are_passed_over() -> None:
    chunks = [
        tinker.types.EncodedTextChunk(tokens=[1, 2]),
        tinker.types.EncodedTextChunk(tokens=[3]),
    ]
    span = tinker.types.SampledProvenanceSpan(sequence_id="smp:x", offset=0, length=2)
    body = sent([
        tinker.Datum(
            model_input=ModelInput(chunks=chunks),
            loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
            model_input_spans=[span], loss_fn_input_spans=[span],
        )
    ])  # fmt: skip
    assert taken(body).data[0].tokens.tolist() == [1, 2, 3, 4]


def test_sparse_matrices_are_read_as_what_they_stand_for() -> None:
    targets = torch.zeros((4, 8), dtype=torch.int64)
    weights = torch.zeros((4, 8))
    targets[1, 2], weights[1, 2], weights[3, 7] = 7, 0.25, 0.5
    inputs = {
        "target_tokens": TensorData.from_torch_sparse(targets),
        "weights": TensorData.from_torch_sparse(weights),
    }
    assert inputs["weights"].sparse_crow_indices is not None
    (read,) = taken(sent([datum([1, 2, 3, 4], **inputs)])).data
    assert read.targets is not None and read.targets.shape == (5, 8)
    assert (read.targets[1:] == targets.numpy()).all() and not read.targets[0].any()
    assert (read.weights[1:] == weights.numpy()).all() and not read.weights[0].any()


REINFORCE = {"target_tokens": [2, 3, 4], "logprobs": [0.0, -1.0, -2.0],
             "advantages": [0.0, 0.0, 2.0]}  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "config", "objective", "params", "trained"),
    [
        ("importance_sampling", {}, "importance_sampling", {}, [0, 0, 0, 1]),
        ("ppo", {}, "ppo", {"clip_low": 0.2, "clip_high": 0.2}, [0, 0, 0, 1]),
        ("ppo", {"clip_low_threshold": 1.1, "clip_high_threshold": 1.5}, "ppo",
         {"clip_low": -0.1, "clip_high": 0.5}, [0, 0, 0, 1]),
        ("cispo", {}, "cispo", {"clip_low": 1.0, "clip_high": 3.0}, [0, 0, 0, 1]),
        ("gspo", {}, "gspo", {"clip_low": 3e-4, "clip_high": 4e-4}, [0, 0, 0, 1]),
        ("dro", {"beta": 0.2}, "dro", {"beta": 0.2}, [0, 0, 1, 1]),
        ("stable_reinforce", {}, "dppo_tis", {}, [0, 0, 1, 1]),
    ],
)  # fmt: skip
def test_losses_are_our_objectives(
    loss: str, config: dict, objective: str, params: dict, trained: list
) -> None:
    read = taken(sent([datum([1, 2, 3], **REINFORCE)], loss, config))
    assert read.objective.name == objective
    assert dict(read.objective.params) == pytest.approx(params)
    assert read.data[0].weights.tolist() == trained
    assert read.data[0].sampling_logprobs.tolist() == [0, 0, -1, -2]
    assert read.data[0].advantages.tolist() == [0, 0, 0, 2]


def test_thresholds_and_the_mask_may_be_given_token_by_token() -> None:
    more = {"clip_low_threshold": [0.5, 0.5, 0.5], "clip_high_threshold": [2.0, 2.0, 3.0],
            "sequence_ratio_mask": [0.0, 1.0, 1.0]}  # fmt: skip
    body = sent([datum([1, 2, 3], **REINFORCE, **more)], "gspo")
    (read,) = taken(body).data
    assert read.loss_inputs["clip_low"].tolist() == [0, 0.5, 0.5, 0.5]
    assert read.loss_inputs["clip_high"].tolist() == [0, 1, 1, 2]
    assert read.loss_inputs["ratio_mask"].tolist() == [0, 0, 1, 1]
    assert read.weights.tolist() == [0, 0, 1, 1]


def test_a_forward_pass_says_so() -> None:
    body = sent([datum([1], target_tokens=[2], weights=[0.0])], is_forward_only=True)
    assert taken(body).is_forward_only and parse(body).kind == "forward"


GOOD = {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}
NAN = float("nan")


@pytest.mark.parametrize(
    ("tokens", "inputs", "loss", "words"),
    [
        ([1, 2, 3], {**REINFORCE, "advantages": [0.0, NAN, 1.0]}, "ppo",
         r"data[1].loss_fn_inputs.advantages: entry [1] is nan; expected a finite number"),
        ([1, 2, 3], {**GOOD, "weights": [1.0, 1.0]}, "cross_entropy",
         r"data[1].loss_fn_inputs.weights: shape [2]; expected [3]"),
        ([1, 2, 3], {"target_tokens": [2], "weights": [1.0]}, "cross_entropy",
         r"expected [3] or [3, K], one row for each input token"),
        ([1, 2, 3], {"weights": [1.0, 1.0, 1.0]}, "cross_entropy",
         r"data[1].loss_fn_inputs.target_tokens: is missing"),
        ([1, 2, 3], {**GOOD, "mask": TensorData.from_numpy(np.ones(3, np.float32))},
         "cross_entropy", "no such input"),
        ([1, 2, 3], {**GOOD, "target_tokens": TensorData.from_numpy(np.ones(3, np.float32))},
         "cross_entropy", "expected int64"),
        ([1, 2, 3], {**GOOD, "target_tokens": [2, -1, 4]}, "cross_entropy", "has no target"),
        ([1, 2, 3], {**GOOD, "target_tokens": [2, -2, 4]}, "cross_entropy",
         "is -2; expected 0 to 99"),
        ([1, -2, 3], GOOD, "cross_entropy", "token 1 is -2; expected 0 to 99"),
        ([], {"target_tokens": [], "weights": []}, "cross_entropy", "0 input tokens"),
        ([1] * CONTEXT, {"target_tokens": [1] * CONTEXT, "weights": [0.0] * CONTEXT},
         "cross_entropy", "64 input tokens; expected 1 to 63"),
        ([1, 2, 3], GOOD, "custom", "custom"),
        ([1, 2, 3], {**REINFORCE, "sequence_ratio_mask": [0.0, -1.0, 1.0]}, "gspo", "is negative"),
    ],
)  # fmt: skip
def test_faults_are_named_with_datum_and_place(
    tokens: list, inputs: dict, loss: str, words: str
) -> None:
    good = REINFORCE if loss in ("ppo", "gspo") else GOOD
    inputs = {
        name: TensorData(data=value, dtype="float32" if name != "target_tokens" else "int64")
        if isinstance(value, list) else value
        for name, value in inputs.items()
    }  # fmt: skip
    assert words in problems(sent([datum([1, 2, 3], **good), datum(tokens, **inputs)], loss))


@pytest.mark.parametrize(
    ("loss", "config", "words"),
    [
        ("ppo", {"clip_low_threshold": 2.0}, "is over"),
        ("ppo", {"beta": 2.0}, "has no such option here"),
        ("dro", {"beta": NAN}, "finite"),
        ("dro", {"beta": -1.0}, "expected 0 or more"),
        ("stable_reinforce", {"kl_coeff": 0.1}, "only 0 is supported"),
        ("importance_sampling", {"alpha": 0.1}, "expected none"),
        ("nonsense", {}, "expected one of cross_entropy"),
    ],
)
def test_options_are_those_of_the_loss(loss: str, config: dict, words: str) -> None:
    body = sent([datum([1, 2, 3], **REINFORCE)], config=config)
    request = parse(body)
    request.message.loss_fn = loss
    with pytest.raises(InvalidRequest, match=words):
        read_pass(request, BOUNDS)


def test_pictures_are_refused_as_what_they_are() -> None:
    request = parse(sent([datum([1, 2, 3], **GOOD)]))
    request.message.data[0].model_input.add().image.data = b"x"
    with pytest.raises(InvalidRequest, match=r"model_input\[1\]: image chunks"):
        read_pass(request, BOUNDS)


def broken(change: object) -> str:
    """Return what is said of a datum whose `weights` tensor was changed."""
    request = parse(sent([datum([1, 2, 3], **GOOD)]))
    tensor = request.message.data[0].loss_fn_inputs["weights"]
    change(tensor)
    with pytest.raises((InvalidRequest, TooLarge)) as refused:
        read_pass(parse(request.message.SerializeToString()), BOUNDS)
    return str(refused.value)


def csr(tensor: object, *, shape: Sequence[int], crow: Sequence[int], col: Sequence[int]) -> None:
    tensor.shape[:] = shape
    tensor.sparse_csr.values = np.ones(len(col), "<f4").tobytes()
    tensor.sparse_csr.crow_indices = np.asarray(crow, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.asarray(col, "<i8").tobytes()


def test_tensors_are_no_larger_than_their_bytes() -> None:
    assert "expected as many" in broken(lambda t: t.shape.__setitem__(0, 4))
    assert "expected one or two axes" in broken(lambda t: t.shape.extend([1, 1]))
    assert "multiple of 4" in broken(lambda t: setattr(t, "dense", b"12345"))
    assert "dtype 0" in broken(lambda t: setattr(t, "dtype", 0))
    assert "has no values" in broken(lambda t: t.ClearField("dense"))
    huge = broken(lambda t: csr(t, shape=[3, 1 << 40], crow=[0, 0, 0, 0], col=[]))
    assert "sparse tensors of more than" in huge
    assert "row pointers" in broken(lambda t: csr(t, shape=[3, 2], crow=[0, 2, 1, 1], col=[0]))
    assert "row pointers" in broken(lambda t: csr(t, shape=[3, 2], crow=[0, 1], col=[0]))
    assert "column index" in broken(lambda t: csr(t, shape=[3, 2], crow=[0, 0, 0, 1], col=[2]))
    assert "expected one or two axes" in broken(
        lambda t: csr(t, shape=[3, -2], crow=[0, 0, 0, 0], col=[])
    )


def with_sparse_weights(*shapes: Sequence[int]) -> bytes:
    """Return a request of one datum a shape, with weights that list no cell."""
    message = schema.ForwardBackwardRequest(model_id="run", seq_id=1, loss_fn="cross_entropy")
    message.ParseFromString(sent([datum([1, 2, 3], **GOOD) for _ in shapes]))
    for each, shape in zip(message.data, shapes, strict=True):
        csr(each.loss_fn_inputs["weights"], shape=shape, crow=[0, 0, 0, 0], col=[])
    return message.SerializeToString()


def test_a_shape_that_would_take_hours_to_multiply_is_never_multiplied() -> None:
    request = parse(with_sparse_weights([(1 << 62) + 1] * 300_000))  # some 200 s
    with pytest.raises(InvalidRequest, match="expected one or two axes"):
        read_pass(request, BOUNDS)


def test_a_negative_shape_makes_no_room_for_others() -> None:
    large = [3, MAX_SPARSE_CELLS // 3]
    request = parse(with_sparse_weights(large, large, [-(1 << 40), 1 << 20]))
    assert request.unfolded_bytes >= 4 * MAX_SPARSE_CELLS
    with pytest.raises(TooLarge, match="sparse tensors of more than"):
        read_pass(request, BOUNDS)


def test_targets_of_a_token_are_no_more_than_the_engine_has() -> None:
    inputs = {
        "target_tokens": TensorData.from_torch_sparse(torch.zeros((3, 300), dtype=torch.int64)),
        "weights": TensorData.from_torch_sparse(torch.zeros((3, 300))),
    }
    with pytest.raises(InvalidRequest, match=rf"\[3, 300\]; expected at most {MAX_TARGETS}"):
        taken(sent([datum([1, 2, 3], **inputs)]))


def test_room_is_taken_for_what_a_body_is_decompressed() -> None:
    body = bytes(1 << 20)
    packed = zstandard.ZstdCompressor().compress(body)
    assert unpacked_bytes(packed, len(packed), "zstd", 1 << 24) == len(body)
    assert unpacked_bytes(packed, len(packed), "zstd", 1 << 16) == 1 << 16
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(body)
    assert unpacked_bytes(silent, len(silent), "zstd", 1 << 24) == 1 << 24
    assert unpacked_bytes(b"nonsense", 8, "zstd", 1 << 24) == 8
    assert unpacked_bytes(body, len(body), "", 1 << 24) == len(body)


def test_bodies_are_unpacked_up_to_a_limit() -> None:
    body = sent([datum([1, 2, 3], **GOOD)])
    packed = zstandard.ZstdCompressor().compress(body)
    assert unpack(packed, "zstd", 1 << 20) == body == unpack(body, "", 10)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    with pytest.raises(TooLarge):
        unpack(bomb, "zstd", 1 << 20)
    with pytest.raises(InvalidRequest):
        unpack(b"nonsense", "zstd", 1 << 20)
    with pytest.raises(InvalidRequest):
        unpack(body, "br", 1 << 20)
    with pytest.raises(InvalidRequest):
        parse(b"\xff\xff\xff")


def test_outputs_come_back_in_order_in_the_shape_of_the_targets() -> None:
    outputs = [
        DatumOutput(logprobs=np.array([0, -1, -2], np.float32), loss=1.0),
        DatumOutput(logprobs=np.array([0, -3], np.float32), loss=1.0),
        DatumOutput(logprobs=-np.arange(9, dtype=np.float32).reshape(3, 3), loss=1.0),
        DatumOutput(logprobs=np.array([0, -5], np.float32), loss=1.0),
    ]
    data = encode_outputs(outputs, {"loss:sum": 4.0})
    read = deserialize_forward_backward_output(data)
    assert read.metrics == {"loss:sum": 4.0}
    found = [one["logprobs"].to_numpy().tolist() for one in read.loss_fn_outputs]
    assert found == [[-1, -2], [-3], [[-3, -4, -5], [-6, -7, -8]], [-5]]


# ---------------------------------------------------------------------------------------------
# Samples


def asked(**changes: object) -> dict:
    return {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, **changes.pop("params", {})},
        "sampling_session_id": "s-1:sample:0", "seq_id": 0, "num_samples": 2, "type": "sample",
        **changes,
    }  # fmt: skip


def sample(**changes: object) -> object:
    return read_sample(
        read_json(json.dumps(asked(**changes)).encode(), bodies.SampleBody), vocab_size=100
    )


@pytest.mark.parametrize(
    ("stop", "ids", "strings"),
    [
        (None, None, ()),
        ([], (), ()),
        ("x", (), ("x",)),
        (["x", "yy"], (), ("x", "yy")),
        ([7, 8], (7, 8), ()),
    ],
)
def test_stops_are_what_the_client_says(stop: object, ids: object, strings: tuple) -> None:
    read = sample(params={} if stop is None else {"stop": stop})
    assert (read.stop_token_ids, read.stop_strings) == (ids, strings)


def test_a_request_to_sample_is_read() -> None:
    read = sample(
        params={"temperature": 0.5, "top_k": -1, "top_p": 0.9, "seed": (1 << 64) - 1},
        prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=2,
    )  # fmt: skip
    assert read.tokens.tolist() == [1, 2, 3] and read.n == 2 and read.max_tokens == 4
    assert (read.temperature, read.top_k, read.top_p) == (0.5, 0, 0.9)
    assert read.seed == (1 << 63) - 1
    assert read.extras.prompt_logprobs_from == 1 and read.extras.topk_prompt_logprobs == 2
    assert sample().seed is None


def test_targets_of_a_prompt_begin_at_its_second_token() -> None:
    dense = {"data": [5, -1, 6, 7], "dtype": "int64", "shape": [2, 2]}
    read = sample(target_prompt_logprobs=dense)
    assert read.extras.target_prompt_ids.tolist() == [[-1, -1], [5, -1], [6, 7]]
    sparse = {"data": [5, 6], "dtype": "int64", "shape": [2, 2],
              "sparse_crow_indices": [0, 0, 2], "sparse_col_indices": [0, 1]}  # fmt: skip
    read = sample(target_prompt_logprobs=sparse)
    assert read.extras.target_prompt_ids.tolist() == [[-1, -1], [-1, -1], [5, 6]]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_samples": 0},
        {"params": {"max_tokens": 0}},
        {"params": {"top_k": -2}},
        {"params": {"seed": 1 << 70}},
        {"params": {"stop": ["a", 3]}},
        {"params": {"stop": [-3]}},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1 << 40]}]}},
        {"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}},
        {"prompt_logprobs_last_n": 1},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 3},
        {"topk_sample_logprobs": 1000},
        {"target_prompt_logprobs": {"data": [1.5], "dtype": "int64", "shape": [2, 2]}},
        {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [2, 1 << 40]}},
        {"target_prompt_logprobs": {"data": [1, 2], "dtype": "float32", "shape": [2, 1]}},
    ],
)
def test_faulty_requests_to_sample_are_refused(changes: dict) -> None:
    with pytest.raises(InvalidRequest):
        sample(**changes)


def completion(**changes: object) -> Completion:
    fields = {
        "request_id": "r", "tokens": np.array([4, 5], np.int32),
        "logprobs": np.array([-0.5, -1.5], np.float32), "stop_reason": StopReason.STOP_TOKEN,
        "versions": np.zeros(2, np.int32), "adapter_hash": "",
    }  # fmt: skip
    return Completion(**{**fields, **changes})


def test_samples_come_back_as_they_were_drawn() -> None:
    nan = np.nan
    first = completion(
        prompt_logprobs=np.array([nan, -1.0, -2.0], np.float32),
        topk_prompt_ids=np.array([[-1, -1], [3, 4], [5, -1]], np.int32),
        topk_prompt_logprobs=np.array([[nan, nan], [-1, -2], [-3, nan]], np.float32),
        target_prompt_logprobs=np.array([[nan], [-4.0], [nan]], np.float32),
        prompt_alt_ids=np.array([[-1], [7], [8]], np.int32),
        prompt_alt_logprobs=np.array([[nan], [-1], [-2]], np.float32),
        topk_sample_ids=np.array([[4], [6]], np.int32),
        topk_sample_logprobs=np.array([[-0.5], [-0.1]], np.float32),
        num_cached_tokens=2,
    )
    second = completion(stop_reason=StopReason.CONTEXT_FULL)
    read = deserialize_sample_response(encode_samples([first, second]))
    assert [one.stop_reason for one in read.sequences] == ["stop", "length"]
    assert read.sequences[0].tokens == [4, 5] and read.sequences[0].logprobs == [-0.5, -1.5]
    assert read.prompt_logprobs == [None, -1.0, -2.0]
    assert read.topk_prompt_logprobs == [None, [(3, -1.0), (4, -2.0)], [(5, -3.0)]]
    assert read.target_prompt_logprobs.to_numpy().tolist() == [[-4.0], [0.0]]
    assert read.prompt_alt_tokens.tokens.to_numpy().tolist() == [[7], [8]]
    assert read.prompt_alt_tokens.logprobs.to_numpy().tolist() == [[-1.0], [-2.0]]
    assert [len(row) for row in read.sequences[0].topk_logprobs] == [1, 1]
    assert read.prompt_cache_hit_tokens == 2


def test_the_last_logprobs_of_a_prompt_take_nothing_from_given_and_drawn_tokens() -> None:
    last = {"prompt_logprobs": True, "prompt_logprobs_last_n": 1, "topk_prompt_logprobs": 1}
    given = {"data": [5, 6], "dtype": "int64", "shape": [2, 1]}
    for more in ({"target_prompt_logprobs": given}, {"prompt_alt_tokens_k": 1}):
        read = sample(**last, **more)
        assert (read.extras.prompt_logprobs_from, read.form.logprobs_from) == (0, 2)
    whole = completion(
        prompt_logprobs=np.array([np.nan, -1.0, -2.0], np.float32),
        topk_prompt_ids=np.array([[-1], [3], [5]], np.int32),
        topk_prompt_logprobs=np.array([[np.nan], [-1], [-3]], np.float32),
        target_prompt_logprobs=np.array([[np.nan], [-4.0], [-5.0]], np.float32),
    )
    told = deserialize_sample_response(encode_samples([whole], read.form))
    assert told.prompt_logprobs == [None, None, -2.0]
    assert told.topk_prompt_logprobs == [None, None, [(5, -3.0)]]
    assert told.target_prompt_logprobs.tolist() == [[-4.0], [-5.0]]


def test_sparse_targets_of_a_prompt_are_answered_sparse() -> None:
    sparse = {"data": [5, 6], "dtype": "int64", "shape": [2, 2],
              "sparse_crow_indices": [0, 0, 2], "sparse_col_indices": [0, 1]}  # fmt: skip
    read = sample(target_prompt_logprobs=sparse)
    nan = np.nan
    scores = np.array([[nan, nan], [nan, nan], [-1.0, -2.0]], np.float32)
    scored = completion(target_prompt_logprobs=scores)
    told = deserialize_sample_response(encode_samples([scored], read.form)).target_prompt_logprobs
    assert (told.sparse_crow_indices, told.sparse_col_indices) == ([0, 0, 2], [0, 1])
    assert told.shape == [2, 2] and told.to_torch().tolist() == [[0, 0], [-1, -2]]


def test_metadata_is_small_as_a_whole() -> None:
    fits = {f"name {index}": "x" * 200 for index in range(64)}
    assert bodies.read_metadata("user_metadata", fits) == fits
    with pytest.raises(InvalidRequest, match="characters in all"):
        bodies.read_metadata("user_metadata", {name: text * 2 for name, text in fits.items()})


def test_every_loss_says_what_it_needs() -> None:
    assert set(losses.LOSSES) == {"cross_entropy", "importance_sampling", "ppo", "cispo", "gspo",
                                  "dro", "stable_reinforce"}  # fmt: skip
    for loss in losses.LOSSES.values():
        assert losses.TARGETS in loss.inputs
    assert isinstance(taken(sent([datum([1, 2, 3], **GOOD)])).data[0], Datum)
