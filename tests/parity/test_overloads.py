"""Whoever holds a group calls its methods as PyTorch's: every overload, keyword and default of the installed torch.

Of 39 such calls that Gloo takes, 16 were a TypeError here: `allreduce(x, op=...)`, `broadcast(x, root=1)`,
`send(tensors=..., dstRank=..., tag=...)`, `barrier(timeout=...)`. torchft and DeepSpeed make them. The list of calls is
torch's own; what Gloo makes of each is what ours must make of it.
"""

import pytest
import torch
import torch.distributed as dist
from tests.backend.staged import join_staged
from tests.parity.overload_calls import LEFT_OUT, every_call, overloads

from phalanx.testing import run_ranks


def _every_call(rank, world_size, *_):
    return every_call(rank, world_size)


def _staged(rank, world_size, path):
    join_staged(rank, world_size, path)
    dist.all_reduce(torch.ones(1, dtype=torch.float64))  # at which the ranks agree how they carry such
    return every_call(rank, world_size, torch.float64)


_gloos = {}


def _gloo(world_size):
    if world_size not in _gloos:
        _gloos[world_size] = run_ranks(_every_call, world_size, backend="gloo")
    return _gloos[world_size]


def _assert_as_gloo(ours, world_size):
    different = [
        (rank, *mine, theirs[1:])
        for rank, (told, reference) in enumerate(zip(ours, _gloo(world_size), strict=True))
        for mine, theirs in zip(told, reference, strict=True)
        if tuple(mine) != tuple(theirs)
    ]
    assert not different, (len(different), different[:5])


def test_the_list_is_torchs_own():
    found = overloads()
    assert len(found) > 50
    assert {"allreduce", "broadcast", "barrier", "send", "recv_anysource", "alltoall_base"} <= {o.method for o in found}
    assert all(o.parameters for o in found if o.method not in LEFT_OUT)


@pytest.mark.slow
def test_gloo_itself_takes_what_torch_says_it_takes():
    """Else the comparison below would compare refusals."""
    told = _gloo(2)[0]
    done = [name for name, outcome, _ in told if outcome == "done"]
    assert len(done) > 200
    refused = {name for name, outcome, _ in told if outcome != "done" and "given" in name}
    assert not refused


@pytest.mark.slow(but=("2",))
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_overload_does_what_it_does_with_gloo(world_size):
    _assert_as_gloo(run_ranks(_every_call, world_size), world_size)


@pytest.mark.slow
def test_every_overload_with_tensors_of_a_device_through_the_host(tmp_path):
    _assert_as_gloo(run_ranks(_staged, 2, str(tmp_path / "s"), init=False), 2)
