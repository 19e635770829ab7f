"""Who is silent, and who does not take its events, is found without a look at each member."""

from __future__ import annotations

import random

import pytest

from phalanx._comm.control.wire import AnswerStatus, Op, pack, pack_number, unpack
from phalanx._job.coordinator.coordinator import MAX_WAITING_BYTES, Coordinator
from phalanx._job.coordinator.membership import Membership
from phalanx._job.coordinator.session import DirectRoute


@pytest.mark.parametrize("seed", range(10))
def test_those_are_silent_that_were_not_heard_for_too_long(seed):
    rng = random.Random(seed)
    members, now = Membership(10.0), 0.0
    for _ in range(500):
        now += rng.choice([0.0, 0.1, 0.5])
        present = list(members)
        chance = rng.random()
        if chance < 0.2 or not present:
            members.join(None, b"{}", frozenset(), now)
        elif chance < 0.9:
            members.record_message(rng.choice(present), now)
        elif chance < 0.97:
            members.remove(rng.choice(present), b"left", "")
        else:
            members.note_pause(rng.choice([1.0, 20.0]), now)
        expected = {member.id for member in members if now - member.received_at > members.lost_after_s}
        assert {member.id for member in members.silent(now)} == expected


def test_time_passes_without_a_look_at_each_member(monkeypatch):
    """A thousand members were looked at four times a second, twice."""
    coordinator = Coordinator()
    routes = [DirectRoute(1, b"%d" % number) for number in range(100)]
    for route in routes:
        coordinator.handle(route, pack(Op.JOIN, 1, b"{}", b""), 0.0)
    coordinator.tick(0.0)
    monkeypatch.setattr(Membership, "__iter__", None)
    for route in routes[1:]:
        coordinator.handle(route, pack(Op.HEARTBEAT, 0, b"0", b"0"), 8.0)
    coordinator.handle(routes[1], pack(Op.POST, 2, b"7", b"word"), 8.0)
    assert coordinator.tick(9.0) == []
    monkeypatch.undo()
    (line,) = coordinator.tick(11.0)
    assert "member 0" in line


@pytest.mark.parametrize(("num_members", "expected"), [(1, 2.0), (500, 2.0), (700, 2.8), (1000, 10 / 3)])
def test_each_of_many_members_is_told_to_say_less_often_that_it_is_there(num_members, expected):
    """A thousand of them filled a fifth of a core, in a job in which nothing happened."""
    coordinator = Coordinator(lost_after_s=10.0)
    for number in range(num_members):
        coordinator.handle(DirectRoute(1, b"%d" % number), pack(Op.JOIN, 1, b"{}", b""), 0.0)
    dict(coordinator.pop_outgoing())
    coordinator.handle(DirectRoute(1, b"0"), pack(Op.HEARTBEAT, 0, b"0", b"0"), 1.0)
    ((_, (answer,)),) = coordinator.pop_outgoing()
    (message,) = unpack(answer)
    assert message.what == AnswerStatus.HEARTBEAT
    assert float(message.fields[0]) == pytest.approx(expected, abs=0.001)


@pytest.mark.parametrize("received_at", [5.0, 10.0, 10.5])
def test_a_connection_that_ended_by_silence_is_judged_by_the_silence(received_at):
    """The kernel gives up a silent connection sooner than some jobs a silent host (--host-timeout 600)."""
    coordinator = Coordinator(lost_after_s=600.0)
    route = DirectRoute(1, b"member")
    coordinator.handle(route, pack(Op.JOIN, 1, b"{}", b""), received_at)
    assert coordinator.lose_disconnected(DirectRoute(1, b"somebody else"), 10.0) == []
    lines = coordinator.lose_disconnected(route, 10.0)
    assert (len(lines), len(coordinator.members)) == ((1, 0) if received_at > 10.0 else (0, 1))


def test_a_member_for_which_too_much_waits_is_lost():
    coordinator = Coordinator(lost_after_s=1e9)
    watching = DirectRoute(1, b"watching")
    coordinator.handle(watching, pack(Op.JOIN, 1, b"{}", b"all"), 0.0)
    facts = b'{"words": "%s"}' % bytes([ord("x")] * 60_000)
    number = 0
    while coordinator.members.get(0).num_bytes <= MAX_WAITING_BYTES:
        assert coordinator.tick(0.0) == []
        number += 1
        coordinator.handle(DirectRoute(1, pack_number(number)), pack(Op.JOIN, 1, facts, b""), 0.0)
    (line,) = coordinator.tick(0.0)
    assert "events are queued for it, and it does not read them" in line
    assert coordinator.members.get(0) is None
