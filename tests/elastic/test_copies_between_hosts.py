"""Copies of an elastic job on other hosts are read after a loss: nothing is that no rank of the group has sent."""

import pytest
import torch.distributed as dist
from tests.system.hosts_jobs import on_hosts
from torch import nn

from phalanx.elastic.generator_states import GeneratorStates
from phalanx.elastic.records import RankRecords
from phalanx.errors import PhalanxError
from phalanx.testing import why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())


def _copy_record(group):
    records = RankRecords(group, {"layer": nn.BatchNorm1d(3)}, GeneratorStates())
    _forget_key(group)
    records.prepare(0)
    dist.barrier(group=group)


def _forget_key(group):
    """From here on rank 0 is somebody on the way between the hosts."""
    if group.rank() == 0:
        group.transport.pickles.key = bytes(32)


def _forge(rank, world_size, machines):
    group = dist.new_group(backend="phalanx")
    told = ""
    try:
        _copy_record(group)
    except PhalanxError as error:
        told = str(error)
    dist.destroy_process_group(group)
    return told


@pytest.mark.slow
def test_a_copy_that_no_rank_has_sent_is_refused_before_it_is_read():
    """Records were taken as they came: after a loss, whoever got into a connection of Gloo's ran code."""
    _, told = on_hosts((1, 1), _forge)
    assert "arrived from another host with a wrong MAC" in told
