"""Error feedback by parameter: it survives buckets that are planned anew, and a checkpoint."""

import pytest
import torch

from phalanx.ddp.bucket import DenseBucket
from phalanx.ddp.comm_hook import GradBucket
from phalanx.ddp.hooks.residual import Residual
from phalanx.ddp.plan import ParameterSpec, plan_buckets

SHAPES = {"a": (3, 5), "b": (), "c": (0, 2), "d": (7,)}


def _parameters(dtype=torch.float32):
    return {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}


def _buckets(parameters, cap_mb, order=None):
    specs = [ParameterSpec(name, tuple(p.shape), p.dtype, p.device) for name, p in parameters.items()]
    members = list(parameters.values())
    made = []
    for bucket in plan_buckets(specs, [cap_mb], order).buckets:
        buffer = torch.zeros(bucket.numel, dtype=bucket.dtype)
        dense = DenseBucket(bucket, [members[slot.parameter] for slot in bucket.slots], buffer, as_view=True)
        made.append(GradBucket(dense, is_last=False))
    return made


def _fill(residual, buckets):
    """Give each element of each parameter's residual a number of its own; by name of its place."""
    for bucket in buckets:
        flat = residual.of(bucket)
        for gradient in bucket.gradients():
            at = gradient.storage_offset()
            flat[at : at + gradient.numel()] = torch.arange(gradient.numel()) + 100.0 * gradient.numel()


@pytest.mark.parametrize(("cap_mb", "order"), [(1e-6, None), (25.0, [3, 1, 0, 2]), (5e-5, [2, 0, 3, 1])])
def test_each_parameter_takes_its_residual_into_a_new_plan(cap_mb, order):
    parameters, residual = _parameters(), Residual()
    _fill(residual, _buckets(parameters, 25.0))
    before = residual.state_dict(parameters.items())
    for bucket in _buckets(parameters, cap_mb, order):
        flat = residual.of(bucket)
        assert flat.shape == bucket.buffer().shape
        assert residual.of(bucket) is flat
    after = residual.state_dict(parameters.items())
    assert after["a"][3] == 1503.0
    assert before.keys() == after.keys() == SHAPES.keys()
    assert all(torch.equal(before[name], after[name]) for name in SHAPES)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.float32),
    ],
)
def test_half_types_keep_theirs_in_float32(dtype, kept):
    (bucket,) = _buckets(_parameters(dtype), 25.0)
    flat = Residual().of(bucket)
    assert (flat.dtype, flat.shape) == (kept, bucket.buffer().shape)


def test_state_goes_to_another_model_by_name():
    mine, residual = _parameters(), Residual()
    _fill(residual, _buckets(mine, 25.0))
    state = residual.state_dict(mine.items())
    theirs, other = _parameters(), Residual()
    other.load_state_dict(state, theirs.items())
    for bucket in _buckets(theirs, 1e-6):
        other.of(bucket)
    assert all(torch.equal(one, state[name]) for name, one in other.state_dict(theirs.items()).items())


def test_state_of_another_model_is_refused_and_changes_nothing():
    parameters, residual = _parameters(), Residual()
    _fill(residual, _buckets(parameters, 25.0))
    with pytest.raises(ValueError, match="there is no parameter 'z' in the model"):
        residual.load_state_dict({"z": torch.zeros(1)}, parameters.items())
    with pytest.raises(ValueError, match="the residual of 'd' has 3 elements, its gradient 7"):
        residual.load_state_dict({"a": torch.zeros(15), "d": torch.zeros(3)}, parameters.items())
    assert residual.state_dict(parameters.items())["a"][3] == 1503.0
