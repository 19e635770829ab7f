"""`phalanx.Options`: checked at the door, all problems at once."""

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks

import phalanx
from phalanx._comm.transport.hierarchical.rails import plan
from phalanx.collectives import Link


def test_all_problems_are_told_at_once():
    with pytest.raises(ValueError, match=r"(?s)algorithm 'rings'.*wire_dtype must be.*engine 'ucx' is unknown"):
        phalanx.Options(algorithm="rings", wire_dtype=torch.int8, engine="ucx")


def test_nccl_needs_no_option():
    with pytest.raises(ValueError, match="engine applies to CPU tensors: gloo, mpi; CUDA tensors always use NCCL"):
        phalanx.Options(engine="nccl")


def test_error_feedback_needs_something_that_rounds():
    with pytest.raises(ValueError, match="error_feedback has no effect without wire_dtype"):
        phalanx.Options(error_feedback=True)


def test_the_interface_may_differ_from_rank_to_rank_and_nothing_else():
    assert phalanx.Options(interface="eth0").agreed() == phalanx.Options(interface="eth1").agreed()
    assert phalanx.Options(algorithm="ring").agreed() != phalanx.Options(algorithm="tree").agreed()


def test_a_link_must_be_one_and_the_same_on_every_rank():
    with pytest.raises(ValueError, match=r"link must be a phalanx\.collectives\.Link, got str"):
        phalanx.Options(link="1Gbit")
    assert phalanx.Options(link=Link(1e-4, 1e9)).agreed() != phalanx.Options(link=Link(1e-3, 1e9)).agreed()


def test_the_link_decides_between_few_steps_and_few_bytes():
    def chosen(link, algorithm=None):
        return plan("all_reduce", 4, 20, 0, algorithm, link).algorithm

    assert chosen(Link(latency_s=1.0, bytes_per_s=1e9)) == "doubling"
    assert chosen(Link(latency_s=0.0, bytes_per_s=1e6)) == "ring"
    assert chosen(Link(latency_s=1.0, bytes_per_s=1e9), "tree") == "tree"
    assert chosen(None) == chosen(Link(30e-6, 125e6))


@on_ranks(1)
def test_options_of_another_backend_are_refused():
    with pytest.raises(TypeError, match=r"takes pg_options=phalanx.Options\(...\), got dict"):
        dist.new_group([0], pg_options={"algorithm": "ring"})
