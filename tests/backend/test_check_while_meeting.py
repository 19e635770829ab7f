"""Whoever knows that a group will not be formed ends every wait for it, wherever its ranks have come to.

A rank that replaced another died inside Gloo's constructor. The ranks of the other hosts stayed in the exchange of
addresses of a superseded generation for the group's whole timeout: only the first wait asked for a newer one.
"""

import time

import pytest
import torch.distributed as dist
from tests.system.hosts_jobs import on_hosts

import phalanx._comm.backend.create as create
from phalanx._comm.engines.gloo import GlooEngine
from phalanx._comm.rendezvous.bootstrap import checked_while_forming
from phalanx.testing import why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())


class Superseded(Exception):
    """The group will not be formed."""


def form(rank, world_size, machines, folder, place, stuck):
    """Form a group, of which one rank stays at a place; return what ended the wait of the others."""

    def stay(*_, **__):
        (folder / "stays").touch()
        while not all((folder / f"ended-{other}").exists() for other in range(world_size) if other != rank):
            time.sleep(0.01)
        raise Superseded

    def check():
        if (folder / "stays").exists():
            raise Superseded

    if rank == stuck:
        if place == "memory":
            create.open_symmetric_memory = stay
        else:
            GlooEngine.__init__ = stay
    dist.barrier()  # nobody is behind where the others believe that it is
    try:
        with checked_while_forming(check):
            dist.new_group(list(range(world_size)))
    except Superseded:
        return "superseded"
    finally:
        (folder / f"ended-{rank}").touch()


@pytest.mark.slow(but=("memory-0",))
@pytest.mark.parametrize(
    ("place", "stuck"), [("memory", 0), ("memory", 1), pytest.param("memory", 2, marks=pytest.mark.slow), ("Gloo", 2)]
)
def test_a_rank_that_stays_behind_holds_nobody_up_who_knows_that_there_will_be_no_group(tmp_path, place, stuck):
    assert on_hosts([2, 1], form, tmp_path, place, stuck, timeout_s=600.0, run_s=300.0) == ["superseded"] * 3
