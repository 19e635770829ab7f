import pytest
import torch

from phalanx.ddp.plan import ALIGN_BYTES, BucketPlan, ParameterSpec, plan_buckets

CPU = torch.device("cpu")


def _spec(name, *shape, dtype=torch.float32, sparse=False):
    return ParameterSpec(name, shape, dtype, CPU, "Linear", sparse=sparse)


def _names(plan):
    return [[slot.name for slot in bucket.slots] for bucket in plan.buckets]


MIB_FLOATS = 1024 * 256


def test_buckets_follow_the_reverse_of_registration():
    plan = plan_buckets([_spec("a", 4), _spec("b", 4), _spec("c", 4)], caps_mb=[1])
    assert _names(plan) == [["c", "b", "a"]]


def test_a_parameter_that_reaches_the_cap_closes_the_bucket():
    specs = [_spec("a", 3), _spec("b", MIB_FLOATS), _spec("c", 5), _spec("d", MIB_FLOATS)]
    assert _names(plan_buckets(specs, caps_mb=[1])) == [["d"], ["c", "b"], ["a"]]


def test_the_last_cap_serves_all_buckets_that_follow():
    specs = [_spec(f"p{i}", MIB_FLOATS) for i in range(5)]
    assert _names(plan_buckets(specs, caps_mb=[1, 2])) == [["p4"], ["p3", "p2"], ["p1", "p0"]]


def test_dtypes_have_buckets_of_their_own_numbered_by_when_they_are_complete():
    specs = [_spec("a", 4), _spec("h", 4, dtype=torch.bfloat16), _spec("b", 4)]
    plan = plan_buckets(specs, caps_mb=[1])
    assert _names(plan) == [["h"], ["b", "a"]]
    assert [bucket.index for bucket in plan.buckets] == [0, 1]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
def test_slots_are_aligned_and_do_not_overlap(dtype):
    specs = [_spec(f"p{size}", size, dtype=dtype) for size in (1, 0, 17, 64, 3)]
    (bucket,) = plan_buckets(specs, caps_mb=[1]).buckets
    end = 0
    for slot in bucket.slots:
        assert slot.offset * dtype.itemsize % ALIGN_BYTES == 0
        assert slot.offset >= end
        end = slot.offset + slot.numel
    assert end <= bucket.numel


def test_an_order_of_readiness_decides_over_registration():
    specs = [_spec("a", 4), _spec("b", 4), _spec("c", 4)]
    assert _names(plan_buckets(specs, caps_mb=[1], order=[1, 0, 2])) == [["b", "a", "c"]]


def test_an_order_that_is_no_permutation_is_refused():
    with pytest.raises(ValueError, match=r"order must name each of the 2 parameters once, got \[0, 0\]"):
        plan_buckets([_spec("a", 4), _spec("b", 4)], caps_mb=[1], order=[0, 0])


@pytest.mark.parametrize("caps", [[], [0], [1, -3], [float("nan")]])
def test_a_cap_that_is_not_above_zero_is_refused(caps):
    with pytest.raises(ValueError, match="bucket caps must be positive"):
        plan_buckets([_spec("a", 4)], caps_mb=caps)


def test_no_parameters_need_no_bucket():
    assert plan_buckets([], caps_mb=[1]) == BucketPlan(())


def test_a_sparse_parameter_travels_alone_and_takes_no_memory():
    plan = plan_buckets([_spec("a", 4), _spec("e", 100, 8, sparse=True), _spec("b", 4)], caps_mb=[1])
    assert _names(plan) == [["e"], ["b", "a"]]
    assert plan.buckets[0].num_bytes == 0


def test_a_plan_prints_what_lies_where():
    text = str(plan_buckets([_spec("fc.weight", 8, 4), _spec("fc.bias", 8)], caps_mb=[1]))
    assert text.splitlines() == [
        "2 gradients in 1 buckets, 0.00 MiB",
        "bucket 0: float32 on cpu, 0.00 MiB",
        "           0  fc.bias (8)",
        "          16  fc.weight (32)",
    ]
