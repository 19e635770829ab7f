"""Copies of an elastic job on other hosts are read after a loss: nothing is that no rank of the group has sent."""

import os

import pytest
import torch
import torch.distributed as dist
from phalanx.elastic.stage_copies import StageCopies
from tests.system.hosts_jobs import on_hosts
from torch import nn

from phalanx.elastic.generator_states import GeneratorStates
from phalanx.elastic.records import RankRecords
from phalanx.errors import PhalanxError
from phalanx.optim.kept_state import KeptState
from phalanx.testing import why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())


class Code:
    """What runs where its pickle is read: it creates a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def _copy_record(group, value):
    records = RankRecords(group, {"layer": nn.BatchNorm1d(3)}, GeneratorStates())
    _forget_key(group)
    records.prepare(0)
    dist.barrier(group=group)


def _copy_stage(group, value):
    copies = StageCopies(group, [[0], [1]])
    kept = KeptState(group, 10, 1, copies.wards)
    _forget_key(group)
    kept.save(0, [value, torch.arange(10.0)])
    copies.exchange(kept, 0)
    kept.read_of(1 - group.rank(), 0)


def _forget_key(group):
    """From here on rank 0 is somebody on the way between the hosts."""
    if group.rank() == 0:
        group.transport.pickles.key = bytes(32)


def _forge(rank, world_size, machines, copy, path):
    group = dist.new_group(backend="phalanx")
    told = ""
    try:
        copy(group, Code(path) if rank == 0 else "a value")
    except PhalanxError as error:
        told = str(error)
    dist.destroy_process_group(group)
    return told


@pytest.mark.slow
@pytest.mark.parametrize("copy", [_copy_record, _copy_stage], ids=lambda copy: copy.__name__.strip("_"))
def test_a_copy_that_no_rank_has_sent_is_refused_before_it_is_read(copy, tmp_path):
    """Records were taken as they came: after a loss, whoever got into a connection of Gloo's ran code."""
    _, told = on_hosts((1, 1), _forge, copy, str(tmp_path / "made"))
    assert "came from another host with a wrong MAC" in told
    assert not (tmp_path / "made").exists()


def _copy(rank, world_size, machines):
    hosts_of_ranks = [[0], [1, 2], [3]]
    copies = StageCopies(dist.group.WORLD, hosts_of_ranks)
    kept = KeptState(dist.group.WORLD, 1000, 3, copies.wards)
    held = []
    for number in range(5):
        state = [{"rank": rank, "number": number}, torch.full((rank * 250,), number + rank / 8), torch.ones(3).half()]
        kept.save(number, state)
        copies.exchange(kept, number)
        dist.barrier()
        held.append([one for one in range(world_size) if kept.holds(one, number)])
        for one in held[-1]:
            value, large, half = kept.read_of(one, number)
            assert value == {"rank": one, "number": number}
            assert torch.equal(large, torch.full((one * 250,), number + one / 8))
            assert half.dtype == torch.float16
    return held[0] if all(one == held[0] for one in held) else held


def test_each_host_has_the_stages_of_its_ranks_and_of_the_host_before():
    """And every rank reads those that another rank of its host keeps."""
    assert on_hosts((1, 2, 1), _copy) == [[0, 3], [0, 1, 2], [0, 1, 2], [1, 2, 3]]


def _keep_too_much(rank, world_size, machines):
    copies = StageCopies(dist.group.WORLD, [[0], [1]])
    kept = KeptState(dist.group.WORLD, 10, 1, copies.wards)
    kept.save(0, [torch.ones(10)])
    copies.exchange(kept, 0)
    dist.barrier()
    kept.save(1, [torch.ones(10_000_000 if rank == 0 else 10)])
    copies.exchange(kept, 1)
    dist.barrier()
    return [[kept.holds(one, number) for one in range(2)] for number in (0, 1)]


@pytest.mark.filterwarnings("ignore:.*more state than is kept")
def test_a_stage_without_room_has_no_copy_and_the_one_before_it_stays():
    assert on_hosts((1, 1), _keep_too_much) == [[[True, True], [False, True]]] * 2
