"""A standby has all that the coordinator has acknowledged, and clients go on at the one that its copy becomes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from phalanx._base.deadline import Deadline
from phalanx._comm.control.client import Client
from phalanx._comm.control.key import Key
from phalanx._comm.control.route import Route
from phalanx._job.coordinator.coordinator import Coordinator
from phalanx._job.coordinator.relay import Relay
from phalanx._job.coordinator.service import Service
from phalanx._job.hosts.succession.standby import Standby
from phalanx._job.hosts.succession.successor import prepare
from phalanx.errors import CoordinationError, DeadlineError

KEY = Key(bytes(32))
TICKET = b"ticket"


@pytest.fixture
def service() -> Iterator[Service]:
    with Service("127.0.0.1:0", KEY) as service:
        yield service


def follow(service: Service) -> Standby:
    """Return a standby that has the whole state, and without which nothing is answered."""
    assert service.address is not None
    whole = threading.Event()
    standby = Standby(service.address.endpoint, KEY, TICKET, whole.set)
    assert whole.wait(60.0)
    service.coordinator.replicas.required = frozenset([TICKET])
    return standby


def take_over(standby: Standby, leader: int, lost: int) -> Service:
    """Return the service of the coordinator that goes on from the standby's copy."""
    copy = standby.stop()
    assert isinstance(copy, Coordinator)
    prepare(copy, leader, lost)
    return Service("127.0.0.1:0", KEY, coordinator=copy)


@pytest.mark.slow
def test_a_standby_has_every_key_whose_set_was_answered(service: Service) -> None:
    with Client(str(service.address), KEY) as client:
        client.set("before", "1")
        standby = follow(service)
        for number in range(300):
            client.set(f"key-{number}", str(number))
        client.queue_push("queue", "item")
        client.set("large", bytes(3 << 20))
        copy = standby.stop()
    assert copy is not None
    assert copy.store.get(b"before") == b"1"
    assert [copy.store.get(b"key-%d" % number) for number in range(300)] == [b"%d" % number for number in range(300)]
    assert copy.store.get(b"large") == bytes(3 << 20)
    assert list(copy.store.queues()) == [(b"queue", [b"item"])]


def test_nothing_is_answered_that_a_required_standby_does_not_have_and_all_is_when_it_is_not_required(
    service: Service,
) -> None:
    replicas = service.coordinator.replicas
    stalled: list[bytes] = []
    told = threading.Event()

    def on_stalled(ticket: bytes) -> None:
        stalled.append(ticket)
        told.set()

    replicas.on_stalled = on_stalled
    with Client(str(service.address), KEY) as client, Client(service.local) as leader:
        replicas.leader = leader.join({"host": "leader"})
        standby = follow(service)
        client.set("a", "1")
        standby.stop()
        call = client._send_request(2, b"b", b"2", deadline=client._deadline(60.0))
        assert told.wait(60.0), "nobody was told that the standby holds answers up"
        assert stalled == [TICKET]
        assert not call.is_over
        assert leader.get("b", 60.0) == b"2"  # the leader's own agent is lost with the coordinator
        replicas.required = frozenset()
        client._await(call, client._deadline(60.0))
        client._release_call(call)
        assert client.get("b") == b"2"


def test_a_datagram_reaches_a_member_although_all_answers_are_held_back(service: Service) -> None:
    with Client(str(service.address), KEY) as client, Client(service.local) as leader:
        client.join({"host": "other"})
        service.coordinator.replicas.leader = leader.join({"host": "leader"})
        assert [event.kind for event in client.wait_event(60.0)] == ["joined"]
        service.coordinator.replicas.required = frozenset([b"nobody"])
        leader.set("changed", "1")
        leader.send_datagram(client.member, b"propose")
        (event,) = client.wait_event(60.0)
        assert (event.kind, event.member, event.body) == ("datagram", leader.member, b"propose")


def test_a_member_goes_on_at_the_coordinator_that_takes_over_and_knows_what_it_was_granted(service: Service) -> None:
    with Client(str(service.address), KEY) as one, Client(str(service.address), KEY) as other:
        with Client(service.local) as first:
            lost = first.join({"host": "first"})
            members = one.join({"host": "one"}), other.join({"host": "other"})
            standby = follow(service)
            assert one.add("sum", 5) == 5
            one.post(members[1], b"read me later")
        with take_over(standby, members[0], lost) as second:
            assert second.address is not None
            for client, member in zip((one, other), members, strict=True):
                client.follow_member(member, second.address, second.coordinator.epoch)
            assert other.add("sum", 2) == 7
            assert set(one.members()) == set(members)
            kinds = [event.kind for event in one.wait_event(60.0)]
            assert "expelled" not in kinds
            found = [event for event in other.wait_event(60.0) if event.kind == "message"]
            assert [(event.member, event.body) for event in found] == [(members[0], b"read me later")]
            other.leave()
            gone = one.wait_event(60.0)
            while not any(event.kind == "left" for event in gone):
                gone += one.wait_event(60.0)


def test_a_member_that_hosts_vote_on_is_lost_to_its_watchers_only_until_they_have_agreed(service: Service) -> None:
    """A coordinator that heard nobody had its standbys lose all members; the next leader found none of them."""
    coordinator = service.coordinator
    with Client(str(service.address), KEY) as silent, Client(service.local) as first:
        leader, lost = first.join({"host": "first"}), silent.join({"host": "silent"}, watch=())
        assert [event.kind for event in first.wait_event(60.0)] == ["joined"]
        coordinator.replicas.confirmed_members = frozenset([leader, lost])
        standby = follow(service)
        silent._stop.set()  # its heart
        member = coordinator.members.get(lost)
        assert member is not None
        member.received_at -= 3600.0
        (event,) = first.wait_event(60.0)
        assert (event.kind, event.member) == ("lost", lost)
        assert set(first.members()) == {leader, lost}
        assert not silent.check(["key"])  # it is served
        copy = standby.stop()
        coordinator.replicas.required = frozenset()
        assert copy is not None
        assert {member.id for member in copy.members} == {leader, lost}
        coordinator.replicas.confirmed_members = frozenset([leader])
        while set(first.members()) != {leader}:
            pass
        assert first.receive_events() == []  # it has heard that once
        with pytest.raises(CoordinationError, match="received nothing from it"):
            silent.post(leader, b"")


def test_what_a_coordinator_says_as_another_one_takes_over_does_not_count(service: Service) -> None:
    """A member that the first one lost in that moment sent no heartbeats to the next one, and was lost there, too."""
    with Client(str(service.address), KEY) as one, Client(str(service.address), KEY) as first:
        lost, member = first.join({"host": "first"}), one.join({"host": "one"})
        standby = follow(service)
        with take_over(standby, member, lost) as second:
            assert second.address is not None
            find = one._find

            def find_late(deadline: Deadline) -> Route:
                one._expelled(b"the coordinator received nothing from it")
                return find(deadline)

            one._find = find_late  # type: ignore[method-assign]
            one.follow_member(member, second.address, second.coordinator.epoch)
            known = second.coordinator.members.get(member)
            assert known is not None
            known.received_at -= 5.0
            before = known.received_at
            while known.received_at == before:  # until its heartbeat comes
                time.sleep(0.01)
            assert not one.is_removed


def test_ranks_behind_a_relay_do_not_notice_that_another_coordinator_has_taken_over(service: Service) -> None:
    assert service.address is not None
    relay = Relay(service.address.endpoint, KEY)
    try:
        with Client(relay.path) as rank, Client(service.local) as first:
            lost = first.join({"host": "first"})
            standby = follow(service)
            rank.set("mine", "1")
            with pytest.raises(DeadlineError):
                rank.get("to come", 0.1)
            waits = rank.begin_get("to come")
            with take_over(standby, -1, lost) as second:
                service.close()
                assert second.address is not None
                relay.redirect(second.address.endpoint, second.coordinator.epoch)
                assert rank.get("mine", 60.0) == b"1"
                with Client(str(second.address), KEY) as other:
                    other.set("to come", "at last")
                assert rank.get("to come", 60.0) == b"at last"
                while waits.poll() is None:
                    pass
                waits.cancel()
    finally:
        relay.close()
