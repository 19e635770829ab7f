"""Pickles between hosts: a forged one is refused before anything of it is read, an honest one arrives."""

import contextlib
import os
import random

import pytest
import torch
import torch.distributed as dist
from tests.system.hosts_jobs import on_hosts
from tests.threads import map_in_threads
from tests.transport.hierarchical.code import Code
from torch.distributed import recv_object_list, send_object_list  # before ours is asked for

from phalanx._comm.backend.torch_integration.groups import pickle_authenticator
from phalanx._comm.transport.authentication import PickleAuthenticator, PickleStream
from phalanx.elastic.state_transfer import transfer_state
from phalanx.errors import PhalanxError
from phalanx.mapreduce.team import Team
from phalanx.pipeline.wire import Edge, StepPlan, Wire
from phalanx.testing import why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())


class Shown:
    """A part of an elastic job's state, with an object in it."""

    def __init__(self, value):
        self.value = value

    def get_contents(self):
        return self.value

    def load_contents(self, value):
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
    transfer_state([part], 0, [1], group)
    return part.value


def _pipeline(group, rank, value):
    wire = Wire(group, [0, 1], torch.device("cpu"))
    edge, step = Edge(0, 1), StepPlan(1, 1, 1)
    if rank == 0:
        wire.send_values(edge, [value], [], step)
        wire.wait_sent()
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
    alone = dist.new_group([0], backend="phalanx")
    assert rank != 0 or pickle_authenticator(alone) is None
    key = pickle_authenticator(group).key
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
        group.transport.pickles.key = bytes(32)
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
    assert "It was not unpickled" in told


class Recorder:
    """Stands on the way between the hosts: it notes each message that rank 0 sends, and may put another in its place.

    It takes the place of `PickleAuthenticator.sign`, behind which the bytes leave the process.
    """

    def __init__(self, pickles):
        self.messages = []
        self._sign = pickles.sign
        self._instead = None
        pickles.sign = self._pass_on

    def play_back(self, word):
        """Let the last message with `word` travel again, once as many more are sent as were before it."""
        at = max(n for n, message in enumerate(self.messages) if word in message)
        self._instead = len(self.messages) + at, self.messages[at]

    def _pass_on(self, *args):
        self.messages.append(self._sign(*args))
        at, message = self._instead or (-1, b"")
        return message if at == len(self.messages) - 1 else self.messages[-1]


def _replay(rank, world_size, machines, path, number):
    """Rank 0's first message stands where its second one is due."""
    group = dist.new_group(backend="phalanx")
    way, told = WAYS[number], ""
    recorder = Recorder(group.transport.pickles) if rank == 0 else None
    way(group, rank, "first" if rank == 0 else "other")
    if rank == 0:
        recorder.play_back(b"first")
    try:
        way(group, rank, "later" if rank == 0 else "other")
    except PhalanxError as error:
        told = str(error)
    dist.destroy_process_group(group)
    return told


@pytest.mark.slow(but=("broadcast", "send"))
@pytest.mark.parametrize("number", range(len(WAYS)), ids=lambda n: WAYS[n].__name__.strip("_"))
def test_a_message_that_is_played_back_is_refused(number, tmp_path):
    """An object of an all_gather could be given again, with a valid MAC, as that of each later one."""
    _, told = on_hosts((1, 1), _replay, str(tmp_path), number)
    assert "has sequence number 1; 2 was expected. It was not unpickled" in told
    assert "replaying it" in told


def _move(rank, world_size, machines, first, second):
    """Rank 0's message of one kind stands where one of another kind is due."""
    group = dist.new_group(backend="phalanx")
    told = ""
    recorder = Recorder(group.transport.pickles) if rank == 0 else None
    WAYS[first](group, rank, "first" if rank == 0 else "other")
    if rank == 0:
        moved = next(m for m in recorder.messages if b"first" in m)
        group.transport.pickles.sign = lambda *args: moved
    try:
        WAYS[second](group, rank, "later" if rank == 0 else "other")
    except PhalanxError as error:
        told = str(error)
    dist.destroy_process_group(group)
    return told


COLLECTIVES = range(5)


@pytest.mark.slow(but=("0",))
@pytest.mark.parametrize("first", COLLECTIVES)
def test_a_message_of_one_kind_is_none_of_another(first):
    second = (first + 1) % len(COLLECTIVES)
    assert "wrong MAC" in on_hosts((1, 1), _move, first, second)[1]


def _from_threads(rank, world_size, machines):
    """A thread for each group sends objects, of overlapping groups."""
    members = [[0, 1], [1, 2], [0, 2], [0, 1, 2], [2, 1]]
    groups = [dist.new_group(ranks, backend="phalanx") for ranks in members]

    def exchange(number):
        group = groups[number]
        ways = [_broadcast, _all_gather, _send] if group.size() == 2 else [_broadcast, _all_gather]
        for turn in range(10 + number):
            for way in ways:
                value = (number, turn, way.__name__)
                assert way(group, group.rank(), value if group.rank() == 0 else None) == value

    map_in_threads(exchange, [number for number in range(len(groups)) if rank in members[number]])


@pytest.mark.slow
def test_overlapping_groups_count_their_objects_apart_in_threads_of_their_own():
    on_hosts((1, 1, 1), _from_threads)


class Unpicklable:
    def __reduce__(self):
        raise ValueError("it has no pickle")


class ReadError(Exception):
    """An object of this program could not be made from its pickle."""


class Unreadable:
    def __reduce__(self):
        return _fail_to_read, ()


def _fail_to_read():
    raise ReadError


def _fail_halfway(rank, world_size, machines):
    """Each call fails on some rank before its collective, or behind it, and what comes after is as if it had not."""
    group = dist.new_group(backend="phalanx")
    found = []
    for bad in (["fine", Unpicklable()], [Unpicklable()]):
        if rank == 0:  # the others are not told
            with pytest.raises(ValueError, match="no pickle"):
                dist.broadcast_object_list(bad, group=group, group_src=0)
            with pytest.raises(ValueError, match="no pickle"):
                dist.scatter_object_list([None], [*bad, None, None][:3], group=group, group_src=0)
            with pytest.raises(ValueError, match="no pickle"):
                dist.send_object_list(bad, group=group, group_dst=1)
            with pytest.raises(ValueError, match="no pickle"):
                dist.all_gather_object([None] * 3, bad, group=group)
        found += [way(group, rank, "next" if rank == 0 else "other") for way in WAYS[:4]]
        if rank < 2:
            found.append(_send(group, rank, "next"))
    for way in (_all_gather, _broadcast, _scatter, _gather):
        try:
            way(group, rank, Unreadable())
            assert (way, rank) in ((_broadcast, 0), (_gather, 0), (_gather, 2))
        except ReadError:
            pass
        found.append(way(group, rank, "next" if rank == 0 else "other"))
    told = [Unreadable(), "not read"] if rank == 0 else [None, None]
    with pytest.raises(ReadError) if rank else contextlib.nullcontext():
        dist.broadcast_object_list(told, group=group, group_src=0)
    found.append(_broadcast(group, rank, "next"))
    return [value for value in found if value != "other"]


def test_calls_after_one_that_failed_on_some_ranks_are_as_if_it_had_not():
    for found in on_hosts((2, 1), _fail_halfway):
        assert set(found) == {"next"}
        assert len(found) >= 10


def _drop(rank, world_size, machines):
    """An object from rank 0 is lost, as if rank 1 had left a call: the next one is refused, and those after it come."""
    group = dist.new_group(backend="phalanx")
    pickles, told = pickle_authenticator(group), []
    if rank == 0:
        for stream in (PickleStream("broadcast_object_list", 0), PickleStream("send_object_list", 0, 1)):
            pickles.count_sent(stream)
    for way in (_broadcast, _send):
        for _ in range(2):
            try:
                told.append(way(group, rank, "fine" if rank == 0 else "other"))
            except PhalanxError as error:
                told.append(str(error))
    return told


def test_where_an_object_is_missing_the_next_one_is_refused_with_the_reason():
    _, (first, second, third, fourth) = on_hosts((1, 1), _drop)
    for refused in (first, third):
        assert "has sequence number 2; 1 was expected. It was not unpickled; 3 is expected next." in refused
        assert "look for the first error on each" in refused
    assert (second, fourth) == ("fine", "fine")


def _imported_before(rank, world_size, machines):
    group = dist.new_group(backend="phalanx")
    recorder = Recorder(group.transport.pickles)
    for _ in range(2):
        if rank == 0:
            send_object_list(["here"], group=group, group_dst=1)
            if len(recorder.messages) == 1:
                recorder.play_back(b"here")
        else:
            told = [None]
            try:
                recv_object_list(told, group=group, group_src=0)
            except PhalanxError as error:
                told = str(error)
    dist.destroy_process_group(group)
    return told if rank else None


def test_functions_that_were_imported_before_the_backend_was_asked_for_number_their_objects():
    assert "has sequence number 1; 2 was expected" in on_hosts((1, 1), _imported_before)[1]


def test_each_changed_bit_is_found():
    stream = PickleStream("object", 0)
    sender, receiver = PickleAuthenticator("a secret", "g"), PickleAuthenticator("a secret", "g")
    sent = sender.sign(b"a pickle", stream, 1)
    assert receiver.verify(sent, stream, 1) == b"a pickle"
    for other, index in (
        (PickleStream("piece", 0), 0),
        (PickleStream("object", 1), 0),
        (PickleStream("object", 0, 1), 0),
        (stream, 1),
    ):
        with pytest.raises(PhalanxError, match="wrong MAC"):
            receiver.verify(sent, other, 1, index)
    with pytest.raises(PhalanxError, match="wrong MAC"):
        PickleAuthenticator("another secret", "g").verify(sent, stream, 1)
    for bit in range(8 * len(sent)):
        changed = bytearray(sent)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PhalanxError, match="wrong MAC"):
            receiver.verify(bytes(changed), stream, 1)
    for length in range(len(sent)):
        with pytest.raises(PhalanxError, match="wrong MAC"):
            receiver.verify(sent[:length], stream, 1)


def test_messages_of_a_stream_are_taken_once_and_in_order():
    stream = PickleStream("object", 3, 1)
    sender, receiver = PickleAuthenticator("a secret", "g"), PickleAuthenticator("a secret", "g")
    messages = [sender.send(str(n).encode(), stream) for n in range(6)]
    assert receiver.receive(messages[0], stream) == b"0"
    with pytest.raises(PhalanxError, match="has sequence number 1; 2 was expected"):
        receiver.receive(messages[0], stream)
    with pytest.raises(PhalanxError, match="has sequence number 2; 3 was expected"):
        receiver.receive(messages[1], stream)
    assert receiver.receive(messages[3], stream) == b"3"
    with pytest.raises(PhalanxError, match="has sequence number 6; 5 was expected"):
        receiver.receive(messages[5], stream)
    with pytest.raises(PhalanxError, match="has sequence number 5; 7 was expected"):
        receiver.receive(messages[4], stream)
    sender.take_back(stream)
    assert sender.send(b"5", stream) == messages[5]
