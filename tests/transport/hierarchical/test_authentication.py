"""Pickles between hosts: a forged one is refused before anything of it is read, an honest one arrives."""

import contextlib
import os
import pickle
import random

import pytest
import torch
import torch.distributed as dist
from tests.system.hosts_jobs import on_hosts

import phalanx.mapreduce.team as team_module
from phalanx.backend.torch_integration.object_collectives import pickle_key
from phalanx.elastic.hand_over import hand_over
from phalanx.errors import PhalanxError
from phalanx.mapreduce.team import Team
from phalanx.pipeline.wire import Edge, Step, Wire
from phalanx.testing import why_no_hosts
from phalanx.transport.authentication import authenticate, derive_pickle_key, verify

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())


class Code:
    """What runs where its pickle is read: it creates a folder that is named after the process."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return _make_folder, (self.path,)


def _make_folder(path):
    os.makedirs(os.path.join(path, str(os.getpid())))


class Shown:
    """A part of an elastic job's state, with an object in it."""

    def __init__(self, value):
        self.value = value

    def show(self):
        return self.value

    def take(self, value):
        self.value = value


def _all_gather(group, rank, value):
    found = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found[0]


def _gather(group, rank, value):
    found = [None] * group.size() if rank == 1 else None
    dist.gather_object(value, found, group=group, group_dst=1)
    return found[0] if found else value


def _broadcast(group, rank, value):
    told = [value if rank == 0 else None]
    dist.broadcast_object_list(told, group=group, group_src=0)
    return told[0]


def _scatter(group, rank, value):
    got = [None]
    dist.scatter_object_list(got, [value] * group.size() if rank == 0 else None, group=group, group_src=0)
    return got[0]


def _send(group, rank, value):
    if rank == 0:
        dist.send_object_list([value], group=group, group_dst=1)
        return value
    got = [None]
    dist.recv_object_list(got, group=group, group_src=0)
    return got[0]


def _team(group, rank, value):
    return Team.of(group).gather(value)[0]


def _hand_over(group, rank, value):
    part = Shown(value if rank == 0 else None)
    hand_over([part], 0, [1], group)
    return part.value


def _pipeline(group, rank, value):
    wire = Wire(group, [0, 1], torch.device("cpu"))
    edge, step = Edge(0, 1), Step(1, 1, 1)
    if rank == 0:
        wire.send_values(edge, [value], [], step)
        wire.settle()
        return value
    return wire.receive_values(edge)[0][0]


WAYS = [_all_gather, _gather, _broadcast, _scatter, _send, _team, _hand_over, _pipeline]


def _exchange(rank, world_size, machines, seeds):
    group = dist.new_group(backend="phalanx")
    for seed in range(seeds):
        random_ = random.Random(seed)
        value = {random_.random(): random_.randbytes(random_.choice((0, 1, 100, 100_000))), "seed": [seed, None, ()]}
        for way in WAYS:
            assert way(group, rank, value if rank == 0 else "another") == value, way.__name__
    key, _ = pickle_key(group)
    alone = dist.new_group([0], backend="phalanx")
    assert rank != 0 or pickle_key(alone) == (b"", alone.transport.group)
    dist.destroy_process_group(group)
    return key


def test_honest_objects_arrive_and_all_ranks_have_one_key():
    first, second = on_hosts((1, 1), _exchange, 10)
    assert first == second
    assert len(first) == 32


def _forge(rank, world_size, machines, path, number):
    """Rank 0 is somebody who is on the way between the hosts, and does not know the key."""
    group = dist.new_group(backend="phalanx")
    if rank == 0:
        group.transport.pickle_key = bytes(32)
    told = ""
    try:
        WAYS[number](group, rank, Code(path) if rank == 0 else "another")
    except (PhalanxError, FileExistsError) as error:  # rank 0 reads what it has sent itself, too
        told = str(error)
    dist.destroy_process_group(group)  # so that the other one waits for nothing
    return told, os.path.exists(os.path.join(path, str(os.getpid())))


@pytest.mark.parametrize("number", range(len(WAYS)), ids=lambda n: WAYS[n].__name__.strip("_"))
def test_a_forged_pickle_is_refused_before_it_is_read(number, tmp_path):
    """Whoever got into a connection of Gloo's could run code: the receiver made the folder that a pickle asks for."""
    _, (told, has_run) = on_hosts((1, 1), _forge, str(tmp_path), number)
    assert not has_run
    assert "wrong MAC" in told
    assert "nothing of it was read" in told


def _replay(rank, world_size, machines, path):
    """Rank 0 plays what a record of `map_reduce` holds back where an object, or an earlier piece, is read."""
    group = dist.new_group(backend="phalanx")
    team = Team.of(group)
    pieces, told = [], []
    take = team_module.authenticate

    def note(sent, key, purpose):
        pieces.append(take(sent, key, purpose))
        return pieces[-1]

    team_module.authenticate = note
    record = pickle.dumps(Code(path)) if rank == 0 else b""
    size = len(pickle.dumps(Code(path)))
    team.all_to_all([b"", record if rank == 0 else b""], [0, 0] if rank == 0 else [size, 0])
    if rank == 0:
        piece = pieces[1]
        team_module.authenticate = lambda sent, key, purpose: piece
        dist.send(torch.tensor([len(piece)]), group=group, group_dst=1)
        dist.send(torch.frombuffer(bytearray(piece), dtype=torch.uint8), group=group, group_dst=1)
    else:
        with pytest.raises(PhalanxError, match="wrong MAC"):
            dist.recv_object_list([None], group=group, group_src=0)
        told.append("object")
    dist.barrier()
    if rank == 0:
        team_module.authenticate = lambda sent, key, purpose: piece if sent else take(sent, key, purpose)
        with contextlib.suppress(PhalanxError):
            team.all_to_all([b"", record], [0, 0])
    else:
        with pytest.raises(PhalanxError, match="wrong MAC"):
            team.all_to_all([b"", b""], [size, 0])
        told.append("piece")
    return told, os.path.exists(os.path.join(path, str(os.getpid())))


def test_a_piece_of_a_shuffle_is_no_message_of_another_kind_and_of_no_other_exchange(tmp_path):
    """Whoever wrote a record could have it read as a pickle: a piece carried the MAC of any pickle of the group."""
    assert on_hosts((1, 1), _replay, str(tmp_path))[1] == (["object", "piece"], False)


def test_each_changed_bit_is_found():
    key = derive_pickle_key("a secret of the group")
    sent = authenticate(b"a pickle", key, "object")
    assert verify(sent, key, "object", "0") == b"a pickle"
    with pytest.raises(PhalanxError, match="wrong MAC"):
        verify(sent, key, "piece", "0")
    for bit in range(8 * len(sent)):
        changed = bytearray(sent)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PhalanxError, match="wrong MAC"):
            verify(bytes(changed), key, "object", "0")
    for length in range(len(sent)):
        with pytest.raises(PhalanxError, match="wrong MAC"):
            verify(sent[:length], key, "object", "0")
