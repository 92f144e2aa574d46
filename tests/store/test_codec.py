"""What is encoded comes back equal, and only as the type that the reader asked for."""

import subprocess
import sys
from dataclasses import fields

import msgspec
import numpy as np
import pytest

from marlaas.store import codec
from marlaas.types import (
    Datum,
    Group,
    JobSpec,
    Latency,
    Message,
    StopReason,
    Trajectory,
    TrajectoryEnd,
    Turn,
)


def trajectory(index: int = 0) -> Trajectory:
    return Trajectory(
        index=index,
        tokens=np.arange(5, dtype=np.int32),
        loss_mask=np.array([False, False, True, True, False]),
        sampling_logprobs=np.array([0, 0, -0.25, -np.inf, np.nan], dtype=np.float32),
        versions=np.array([-1, -1, 3, 3, -1], dtype=np.int32),
        turns=(Turn(start=2, end=4, version=3, adapter_hash="ab", stop_reason=StopReason.LENGTH),),
        messages=(Message("user", "hi"), Message("assistant", "\N{SNOWMAN}")),
        reward=0.5,
        is_success=True,
        end=TrajectoryEnd.DONE,
        metrics={"format": float("nan")},
    )


def assert_same(left: object, right: object) -> None:
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    elif hasattr(left, "__dataclass_fields__"):
        for field in fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, tuple | list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, float):
        np.testing.assert_equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    else:
        assert left == right


def test_a_group_comes_back_equal() -> None:
    group = Group(index=7, prompt_index=7, version=3, trajectories=(trajectory(0), trajectory(1)))
    assert_same(codec.decode(codec.encode(group), Group), group)


def test_a_job_spec_with_free_settings_comes_back_equal() -> None:
    spec = JobSpec(
        tenant="acme",
        name="sums",
        env={"family": "math", "terms": [2, 3], "nested": {"x": None, "y": 1.5}},
        latency=Latency(median_s=0.5, sigma=1.0),
    )
    assert_same(codec.decode(codec.encode(spec), JobSpec), spec)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int32", "int64", "f2", "f4", "f8", ">f4"]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_arrays_of_every_shape_survive(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    back = codec.decode(codec.encode(array), np.ndarray)
    assert back.shape == shape
    assert back.dtype == np.dtype(dtype).newbyteorder("<")
    np.testing.assert_array_equal(back, array)


def test_arrays_that_are_not_contiguous_survive() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]
    np.testing.assert_array_equal(codec.decode(codec.encode(array), np.ndarray), array)


def test_decoded_arrays_are_aligned_writable_and_independent_of_the_message() -> None:
    message = bytearray(codec.encode({"pad": b"x", "array": np.arange(4, dtype=np.float64)}))
    array = codec.decode(bytes(message), dict)["array"]
    assert array.flags.writeable and array.flags.aligned and array.base is None


def test_optional_arrays_may_be_absent() -> None:
    ones = np.ones(2, dtype=np.float32)
    datum = Datum(tokens=np.arange(2, dtype=np.int32), weights=ones, advantages=ones,
                  sampling_logprobs=ones)  # fmt: skip
    assert codec.decode(codec.encode(datum), Datum).reference_logprobs is None


def test_objects_do_not_travel() -> None:
    with pytest.raises(TypeError, match="dtype object"):
        codec.encode(np.array([object()]))
    with pytest.raises(TypeError, match="is not encoded"):
        codec.encode(object())


def test_the_reader_decides_the_type() -> None:
    with pytest.raises(msgspec.ValidationError):
        codec.decode(codec.encode(trajectory()), Group)
    with pytest.raises(msgspec.ValidationError, match="expected an array"):
        codec.decode(codec.encode([1, 2]), np.ndarray)


def test_the_codec_stands_alone() -> None:
    code = (
        "import sys, marlaas.store.codec; "
        "print([m for m in ('torch', 'sqlite3', 'marlaas.store.db') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
