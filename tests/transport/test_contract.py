"""One contract for all transports: the checks of `contract`, with real processes over each."""

import os
import signal

import pytest
import torch.distributed as dist
from tests.system.hosts_jobs import on_hosts
from tests.transport import contract

from phalanx._comm.backend import create
from phalanx._comm.transport.hierarchical import bruck
from phalanx.testing import run_ranks, why_no_hosts

WORLD = 3


def _transport():
    return type(dist.group.WORLD.transport).__name__


def _all(rank, world_size, *_):
    return _transport() if contract.whole_contract(rank, world_size) else ""


def _killed(rank, world_size, *_):
    contract.killed(rank, world_size, lambda: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.slow
def test_shared_memory_keeps_the_contract():
    assert run_ranks(_all, WORLD) == ["SharedMemoryTransport"] * WORLD


@pytest.mark.slow
def test_gloo_keeps_the_contract(monkeypatch):
    """Without the C core a group was torch's own, which compares nothing and names nobody."""
    monkeypatch.setattr(create, "_core", None)
    assert run_ranks(_all, WORLD) == ["GlooTransport"] * WORLD


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
@pytest.mark.parametrize(("sizes", "most_direct"), [((2, 1), 5), ((1, 1, 1), 5), ((1, 1, 1), 2)], ids=str)
def test_several_hosts_keep_the_contract(monkeypatch, sizes, most_direct):
    monkeypatch.setattr(bruck, "MOST_DIRECT", most_direct)  # of more hosts leaders forward each other's messages
    assert on_hosts(sizes, _all, run_s=100) == ["HierarchicalTransport"] * WORLD


def test_shared_memory_names_a_rank_that_was_killed():
    run_ranks(_killed, WORLD, lost=(WORLD - 1,))


def test_gloo_names_a_rank_that_was_killed(monkeypatch):
    monkeypatch.setattr(create, "_core", None)
    run_ranks(_killed, WORLD, lost=(WORLD - 1,))


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_several_hosts_name_a_rank_that_was_killed():
    on_hosts((1, 2), _killed, lost=(WORLD - 1,))
