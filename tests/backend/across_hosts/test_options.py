"""`phalanx.Options`: checked at the door, all problems at once."""

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.testing import run_ranks


def test_all_problems_are_told_at_once():
    with pytest.raises(ValueError, match=r"(?s)algorithm 'rings'.*wire_dtype must be.*engine 'ucx' is unknown"):
        phalanx.Options(algorithm="rings", wire_dtype=torch.int8, engine="ucx")


def test_nccl_needs_no_option():
    with pytest.raises(ValueError, match="engine is for CPU tensors: gloo, mpi; CUDA tensors go through NCCL unasked"):
        phalanx.Options(engine="nccl")


def test_error_feedback_needs_something_that_rounds():
    with pytest.raises(ValueError, match="error_feedback has no meaning without wire_dtype"):
        phalanx.Options(error_feedback=True)


def test_the_interface_may_differ_from_rank_to_rank_and_nothing_else():
    assert phalanx.Options(interface="eth0").agreed() == phalanx.Options(interface="eth1").agreed()
    assert phalanx.Options(algorithm="ring").agreed() != phalanx.Options(algorithm="tree").agreed()


def test_options_of_another_backend_are_refused():
    def check(rank, world_size):
        with pytest.raises(TypeError, match=r"takes pg_options=phalanx.Options\(...\), got dict"):
            dist.new_group([0], pg_options={"algorithm": "ring"})
        return True

    assert run_ranks(check, 1) == [True]
