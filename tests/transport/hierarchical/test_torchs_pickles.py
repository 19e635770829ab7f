"""Pickles of PyTorch's own features between hosts: forged ones are refused unread, and honest ones arrive."""

import contextlib
import dataclasses
import os
import pickle
import subprocess
import sys
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.system.hosts_jobs import on_hosts
from tests.transport.hierarchical.code import Code
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from phalanx._comm.backend.torch_integration import pickles_in_tensors
from phalanx._comm.backend.torch_integration.pickles_in_tensors import _Pickle
from phalanx._comm.transport.authentication import PickleAuthenticator
from phalanx.errors import PhalanxError
from phalanx.testing import why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())


def _consolidate(group, rank, value, path):
    """torch's ZeroRedundancyOptimizer; rank 0's part of the state has `value` in it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if rank == 0:
        for state in optimizer.optim.state.values():
            state["value"] = value
    optimizer.consolidate_state_dict(to=1)
    if rank == 0:
        return value
    states = optimizer.state_dict()["state"]
    assert all(torch.is_tensor(state["exp_avg"]) for state in states.values())
    assert len(states) == 2
    return next(state["value"] for state in states.values() if "value" in state)


def _transport(group, rank, value, path):
    """PGTransport, the way of torch's checkpoints from one worker to another."""
    from torch.distributed.checkpoint._pg_transport import PGTransport

    transport = PGTransport(group, timedelta(seconds=30), torch.device("cpu"))
    if rank == 0:
        transport.send_checkpoint([1], {"tensor": torch.arange(5.0), "value": value})
        return value
    state = transport.recv_checkpoint(0)
    assert state["tensor"].tolist() == [0, 1, 2, 3, 4]
    return state["value"]


class SavePlanner(dcp.DefaultSavePlanner):
    """Rank 0, where plans are gathered, gives the last rank a value with the plan that it makes for it."""

    value = None

    def create_global_plan(self, all_plans):
        *plans, last = super().create_global_plan(all_plans)[0]
        return [*plans, dataclasses.replace(last, planner_data=self.value)], self.metadata

    def finish_plan(self, new_plan):
        self.value = new_plan.planner_data
        return super().finish_plan(new_plan)


class LoadPlanner(dcp.DefaultLoadPlanner):
    """The same, as a checkpoint is loaded."""

    value = None

    def create_global_plan(self, global_plan):
        *plans, last = super().create_global_plan(global_plan)
        return [*plans, dataclasses.replace(last, planner_data=self.value)]

    def finish_plan(self, new_plan):
        self.value = new_plan.planner_data
        return super().finish_plan(new_plan)


def _save(group, rank, value, path):
    planner = SavePlanner()
    planner.value = value
    dcp.save(
        {"weight": torch.arange(3.0)}, checkpoint_id=os.path.join(path, "saved"), planner=planner, process_group=group
    )
    return value if rank == 0 else planner.value


def _load(group, rank, value, path):
    place = os.path.join(path, "to_load")
    if rank == 0:
        dcp.save({"weight": torch.arange(3.0)}, checkpoint_id=place, no_dist=True)
    dist.barrier()
    planner, state = LoadPlanner(), {"weight": torch.zeros(3)}
    planner.value = value
    dcp.load(state, checkpoint_id=place, planner=planner, process_group=group)
    assert state["weight"].tolist() == [0, 1, 2]
    return value if rank == 0 else planner.value


def _pipelining(group, rank, value, path):
    """torch.distributed.pipelining: the first stage sends the second one what its outputs look like."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    layers = [nn.Linear(4, 3), nn.Linear(3, 2)]
    batch = torch.rand(6, 4)
    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, 2)
    if isinstance(value, Code):
        send_meta = stage._send_meta
        stage._send_meta = lambda meta, stage: send_meta(value, stage)
    if rank == 0:
        schedule.step(batch)
    else:
        with torch.no_grad():
            expected = layers[1](layers[0](batch))
        torch.testing.assert_close(schedule.step(), expected)
    return value


def _of_torch(number, group, rank, value, path):
    """Use a feature of torch's; what torch warns of in its own code is no concern of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return WAYS[number](group, rank, value, path)


WAYS = [_consolidate, _transport, _save, _load, _pipelining]


@pytest.fixture(params=range(len(WAYS)), ids=[way.__name__.strip("_") for way in WAYS])
def number(request):
    return request.param


def _exchange(rank, world_size, machines, path, number):
    group = dist.new_group(backend="phalanx")
    pickles = group.transport.pickles
    messages, sign = [], pickles.sign

    def note(*args):
        messages.append(sign(*args))
        return messages[-1]

    pickles.sign = note
    found = [_of_torch(number, group, rank, {"told by": 0} if rank == 0 else None, path) for _ in range(2)]
    dist.destroy_process_group(group)
    return found, len(messages)


@pytest.mark.slow(but=("save",))
def test_honest_ones_arrive_time_after_time_and_are_authenticated(number, tmp_path):
    (sent, messages), (received, _) = on_hosts((1, 1), _exchange, str(tmp_path), number)
    assert messages >= 2
    assert sent == [{"told by": 0}] * 2
    assert WAYS[number] is _pipelining or received == sent


def _forge(rank, world_size, machines, path, number):
    """Rank 0 is somebody who is on the way between the hosts, and does not know the key."""
    group = dist.new_group(backend="phalanx")
    if rank == 0:
        forger = PickleAuthenticator("no secret of the group", "forged")
        sign = group.transport.pickles.sign

        def forge(data, stream, number, index=0):
            goes_nowhere = stream.kind == "gather_object" or (stream.kind == "scatter_object_list" and index == 0)
            return (sign if goes_nowhere else forger.sign)(data, stream, number, index)

        group.transport.pickles.sign = forge
    told = ""
    try:
        _of_torch(number, group, rank, Code(path) if rank == 0 else None, path)
    except (PhalanxError, CheckpointException, RuntimeError, FileExistsError) as error:
        told = "\n".join(map(str, (error, error.__cause__, getattr(error, "failures", ""))))
    dist.destroy_process_group(group)  # so that the other one waits for nothing
    return told, os.path.exists(os.path.join(path, str(os.getpid())))


def test_a_forged_one_is_refused_before_it_is_read(number, tmp_path):
    """torch's ZeroRedundancyOptimizer and PGTransport read pickles from plain tensors, whoever had sent them."""
    _, (told, has_run) = on_hosts((1, 1), _forge, str(tmp_path), number)
    assert not has_run
    assert "wrong MAC" in told
    assert "It was not unpickled" in told


def _replay(rank, world_size, machines, path):
    """The second checkpoint arrives with the metadata of the first."""
    group = dist.new_group(backend="phalanx")
    told = ""
    if rank == 0:
        sign, messages = group.transport.pickles.sign, []
        group.transport.pickles.sign = lambda *args: messages.append(sign(*args)) or messages[0]
    try:
        for _ in range(2):
            _of_torch(1, group, rank, "a value" if rank == 0 else None, path)
    except PhalanxError as error:
        told = str(error)
    dist.destroy_process_group(group)
    return told


def test_metadata_of_an_earlier_checkpoint_is_refused(tmp_path):
    assert "has sequence number 1; 2 was expected" in on_hosts((1, 1), _replay, str(tmp_path))[1]


class Metadata:
    """A group's end of PGTransport, in memory: what is sent there waits to be received, changed or not."""

    def __init__(self, rank):
        self.pickles = PickleAuthenticator("a secret", "g")
        self.rank = rank

    def make(self, value, dst_ranks):
        with transfer_of(self, dst_ranks=dst_ranks):
            return _Pickle().dumps(value)

    def read(self, data, src_rank=0):
        with transfer_of(self, src_rank=src_rank):
            return _Pickle().loads(data)


@contextlib.contextmanager
def transfer_of(end, dst_ranks=(), src_rank=-1):
    pickles_in_tensors._running.transfer = pickles_in_tensors._Transfer(end.pickles, end.rank, dst_ranks, src_rank)
    try:
        yield
    finally:
        pickles_in_tensors._running.transfer = None


def test_metadata_is_read_by_each_receiver_once_and_only_as_it_was_made(tmp_path):
    source, one, two, other = (Metadata(rank) for rank in range(4))
    data = source.make({"a": [1, 2]}, [2, 1])
    assert one.read(data) == {"a": [1, 2]}
    assert two.read(data) == {"a": [1, 2]}
    for receiver in (one, two, other):  # it was read here, or is not for it
        with pytest.raises(PhalanxError, match=r"number 1; 2 was expected|wrong MAC, or none"):
            receiver.read(data)
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with contextlib.suppress(PhalanxError):  # the head of the other receiver may change
            assert Metadata(1).read(changed) == {"a": [1, 2]}
            assert at < len(data) - len(pickle.dumps({"a": [1, 2]}))
        with pytest.raises(PhalanxError, match="wrong MAC"):
            Metadata(1).read(data[:at])
    with pytest.raises(PhalanxError, match="wrong MAC"):
        Metadata(1).read(data[: -len(pickle.dumps({"a": [1, 2]}))] + pickle.dumps(Code(str(tmp_path))))
    assert not os.path.exists(tmp_path / str(os.getpid()))


@pytest.mark.slow
def test_modules_that_are_imported_before_and_after_the_backend_is_asked_for_are_changed_once():
    program = """
import importlib.util, sys, torch.distributed as dist
name = "torch.distributed.optim.zero_redundancy_optimizer"
early = sys.argv[1] == "early"
if early:
    importlib.import_module(name)
finders = list(sys.meta_path)
dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
assert (name in sys.modules) is early
assert importlib.util.find_spec(name).name == name  # whoever only asks for it does not end the watch
module = importlib.import_module(name)
import torch.distributed.checkpoint._pg_transport as other
assert sys.meta_path == finders
print(module._broadcast_object.__wrapped__.__module__, type(other.pickle).__name__)
"""
    for when in ("early", "late"):
        run = subprocess.run([sys.executable, "-c", program, when], capture_output=True, text=True, check=True)
        assert run.stdout == "torch.distributed.optim.zero_redundancy_optimizer _Pickle\n"
