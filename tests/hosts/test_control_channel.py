"""What members of a job post to its agents: nobody speaks as the coordinator, and rubbish does no harm."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx._comm.control.client import Client
from phalanx._comm.control.wire import MAX_VALUE_BYTES
from phalanx._comm.diagnostics.observer import GroupLog
from phalanx._job.agent.attempt import Attempt
from phalanx._job.agent.host_resources import HostResources
from phalanx._job.agent.plan import JobPlan, Pinning
from phalanx._job.agent.settings import Settings
from phalanx._job.agent.target import JobTarget
from phalanx._job.coordinator.service import Service
from phalanx._job.hosts.control_channel import Change, ControlChannel, ControlMessage, decode_lines
from phalanx._job.hosts.follower import FollowerLink
from phalanx._job.hosts.gather import Gathering, JoinedHost
from phalanx._job.hosts.join_job import FollowedJob
from phalanx._job.hosts.leader import LeaderLink
from phalanx._job.hosts.line_forwarder import LineForwarder
from phalanx._job.hosts.node_plan import HostFacts, plan_nodes
from phalanx._job.hosts.peer_hosts import PeerHosts
from phalanx._job.hosts.reach import ReachAnswers
from phalanx.errors import LaunchError

_NONE = cast(Any, None)
_AGENT = {
    "kind": "agent", "host": "b", "pid": 1, "num_ranks": 2, "role": "default", "address": "10.0.0.2",
    "node_rank": None, "run_id": "job", "reached": "10.0.0.1",
}  # fmt: skip


@contextmanager
def _two() -> Iterator[tuple[ControlChannel, Client]]:
    """The channel of the first host, and another member, which posts what it likes."""
    with Service() as service:
        first = Client(service.local)
        first.join({"kind": "first", "host": "a"})
        channel = ControlChannel(first)
        with Client(service.local) as other:
            other.join(_AGENT)
            try:
                yield channel, other
            finally:
                channel.close()


def _take(channel: ControlChannel, wanted: str) -> list[ControlMessage | Change]:
    """All that comes, up to a message or change of that kind."""
    taken: list[ControlMessage | Change] = []
    while not any(each.kind == wanted for each in taken):
        assert select.select([channel], [], [], 30.0)[0], f"{wanted} has not come: {taken}"
        taken += channel.receive()
    return taken


def _leader(channel: ControlChannel, other: int) -> tuple[LeaderLink, PeerHosts, list[Any]]:
    """The first host's link, with what it did."""
    done: list[Any] = []
    facts = [HostFacts(channel.member, "a", 1, 1, "", "10.0.0.1"), HostFacts(other, "b", 1, 2, "", "10.0.0.2")]
    nodes = plan_nodes(facts)
    peers = PeerHosts(channel, nodes, nodes[0], 10.0)
    plan = JobPlan(Settings(JobTarget("script", "train.py", ())), 1, cast(Pinning, None), 0, {}, {}, "job")
    host = cast(Any, SimpleNamespace(display=SimpleNamespace(), zygote=SimpleNamespace(wake=lambda: None)))
    leader = LeaderLink(plan, host, 0, peers, ("", ""))
    attempt = Attempt(plan, host, 0, leader)
    attempt.ranks.close()
    vars(leader).update(_lose=lambda member, why: done.append(("lose", member)))
    vars(attempt).update(on_signal=lambda signum, where: done.append(signum))
    return leader, peers, done


def test_a_member_cannot_speak_as_the_coordinator_and_rubbish_does_no_harm() -> None:
    """A message's kind shared one name space with the coordinator's events: "unreachable" from any member made the
    first host lose all others, "lost" without `why` was a KeyError out of its loop, an infinite number an OverflowError
    that lost the whole batch; and a member's SIGTSTP stopped the first host.
    """
    with _two() as (channel, other):
        leader, _, done = _leader(channel, other.member)
        kinds = ("unreachable", "expelled", "lost", "left", "joined")
        bodies = [json.dumps({"kind": kind, "number": 1 + n, "now": 0}) for n, kind in enumerate(kinds)]
        bodies += [
            '{"kind": "x", "number": Infinity, "now": 0}', '{"kind": "x", "number": 20, "now": 1e999}',
            '{"kind": "x", "number": 20, "now": NaN}', '{"kind": "x", "number": 20, "now": 1' + "0" * 400 + "}",
            '{"kind": "exit", "number": 20, "now": 0, "attempt": 0, "at": 1e999}', "[]", '"x"', "{", "[" * 100_000,
        ]  # fmt: skip
        for body in bodies:
            other.post(channel.member, body.encode())
        malformed: list[dict[str, Any]] = [
            {"kind": "exit", "rank": 1, "pid": 1, "status": 0, "at": 10**400, "dump": ""},
            {"kind": "report", "report": []}, {"kind": "report", "report": "x"}, {"kind": "lines", "items": [1]},
            {"kind": "swept", "rank": 9}, {"kind": "started", "rank": 0}, {"kind": "flight", "groups": 1},
            {"kind": "signal", "signum": int(signal.SIGTSTP)}, {"kind": "signal", "signum": int(signal.SIGSTOP)},
            {"kind": "rank message", "rank": 1, "pid": 1, "message": 7}, {"kind": "rank message", "rank": 0, "pid": 1},
            {"kind": "rank message", "rank": 1, "pid": 1, "message": {"kind": "lost", "generation": "x"}},
            {"kind": "signal", "signum": "x"}, {"kind": "signal"}, {"kind": "signal", "signum": int(signal.SIGINT)},
            {"kind": "done"},
        ]  # fmt: skip
        for number, message in enumerate(malformed):
            other.post(channel.member, json.dumps({"number": 30 + number, "now": 0, "attempt": 0, **message}).encode())
        taken = _take(channel, "done")
        for each in taken:
            leader._read(each)
    assert done == [signal.SIGINT]
    assert [each.kind for each in taken if isinstance(each, Change)] == ["joined"]


@pytest.mark.parametrize("wrong", [{"num_ranks": float("inf")}, {"num_ranks": -1}, {"pid": "x"}, {"node_rank": -1}])
def test_a_host_that_says_nonsense_of_itself_is_no_host(wrong: dict[str, Any]) -> None:
    assert HostFacts.from_json(1, {**_AGENT, **wrong}) is None


def test_a_late_host_that_leaves_again_is_not_counted_in_at_the_next_start() -> None:
    """It stayed among those who had come late: the next start waited for it in vain, and the job ended."""
    with _two() as (channel, other), Client(other.address) as late:
        leader, peers, _ = _leader(channel, other.member)
        _take(channel, "joined")
        for gone in (False, True):
            if gone:
                late.leave("stopped by SIGINT")
            else:
                late.join({**_AGENT, "host": "c"})
                member = late.member
            for each in _take(channel, "left" if gone else "joined"):
                leader._read(each)
            assert list(peers.late) == ([] if gone else [member])
        gathering = Gathering.__new__(Gathering)
        gathering._joined_hosts = {}
        for change in peers.late.values():
            gathering._read(change)
        assert not gathering._joined_hosts


def test_a_host_too_many_at_a_start_waits_like_one_that_comes_later() -> None:
    """It had waited for this start, and was thrown out at it: the job had all its hosts."""
    with _two() as (channel, other), Client(other.address) as spare:
        _take(channel, "joined")
        leader, peers, _ = _leader(channel, other.member)
        spare.join({**_AGENT, "host": "c"})
        _take(channel, "joined")
        gathering = Gathering.__new__(Gathering)
        gathering._channel = channel
        gathering._joined_hosts = {}
        for member in (other.member, spare.member):
            facts = HostFacts.from_json(member, _AGENT)
            assert facts is not None
            gathering._joined_hosts[member] = JoinedHost(facts, "10.0.0.1")
        gathering._make_rest_join_late(peers.nodes)
        assert channel.has_more
        for change in channel.receive():
            leader._read(change)
        assert list(gathering._joined_hosts) == [other.member]
        assert list(peers.late) == [spare.member]
        assert channel.flush(30.0)
        messages: list[ControlMessage] = []
        while not messages:
            assert select.select([spare.fileno()], [], [], 30.0)[0]
            messages = _taken(spare)
        assert messages[0].kind == "late"


def test_orders_that_come_together_with_the_start_are_for_the_ranks_that_it_starts() -> None:
    """Ctrl-C right after the start: "sweep" came in one batch with "start", was read with it, and dropped."""
    with _two() as (channel, _):
        _take(channel, "joined")
        follower = FollowedJob.__new__(FollowedJob)
        follower._channel = channel
        follower._reach_answers = ReachAnswers(channel, None, "")
        follower._succession = cast(Any, SimpleNamespace(process=lambda message: None))
        display = cast(Any, SimpleNamespace(writers=[], tick=lambda: None, next_due=None))
        read, write = os.pipe()
        try:
            follower._host = HostResources(_NONE, _NONE, display, _NONE, read, _NONE)
            channel.put_back([ControlMessage("start", 0, {"attempt": 0}), ControlMessage("sweep", 0, {"attempt": 0})])
            assert follower._await_orders().kind == "start"
        finally:
            os.close(read)
            os.close(write)
        attempt = FollowerLink.__new__(FollowerLink)
        attempt._channel = channel
        attempt._succession = cast(Any, SimpleNamespace(fds=(), receive=lambda ready: None))
        obeyed: list[str] = []
        vars(attempt).update(_read=lambda message: obeyed.append(message.kind))
        attempt._forward = cast(Any, SimpleNamespace(flush=lambda: None))
        assert attempt.due is not None
        attempt.receive(set())
    assert obeyed == ["sweep"]


def test_ctrl_c_on_a_host_whose_ranks_have_finished_is_for_the_leader() -> None:
    """That host left at once, with "stopped by SIGINT before the job began", and the job lost it."""
    with _two() as (channel, other):
        leader, _, done = _leader(channel, other.member)
        follower = FollowedJob.__new__(FollowedJob)
        follower._channel, follower._number, follower._was_signalled = ControlChannel(other), 0, False
        follower._has_begun = True
        follower._on_signal(signal.SIGINT)
        for message in _take(channel, "signal"):
            leader._read(message)
        assert done == [signal.SIGINT]
        with pytest.raises(LaunchError) as again:
            follower._on_signal(signal.SIGINT)
        assert (str(again.value), again.value.exit_code) == (
            "phalanx run: stopped by SIGINT (interrupted) before the job ended",
            130,
        )
        follower._channel.close()


def test_messages_that_wait_for_one_member_travel_together_and_in_order() -> None:
    """Eight ranks that have started were eight messages of their host, each sent when the one before had arrived."""
    with _two() as (channel, other), Client(channel._client.address.path) as third:
        third.join(_AGENT)
        with channel._lock:
            for number in range(100):
                channel.put(third.member if number == 50 else other.member, "x", value=number)
            channel.expel(third.member)
            channel.put(other.member, "x", value=100)
        assert channel.flush(30.0)
        values, num_events = [], 0
        while len(values) < 100:
            for event in (event for event in _events(other) if event.kind == "message"):
                num_events += 1
                values += [json.loads(line)["value"] for line in event.body.split(b"\n")]
        assert values == [*range(50), *range(51, 101)]
        assert num_events == 3
        heard: list[ControlMessage] = []
        while not heard:  # it may be told of its end at another moment
            assert select.select([third.fileno()], [], [], 30.0)[0]
            heard = _taken(third)
        assert [message.body["value"] for message in heard] == [50]


def test_long_lines_of_several_ranks_arrive_though_together_they_are_longer_than_a_message() -> None:
    """They were one message, which the coordinator refused: the lines of all ranks of that host were lost silently."""
    with _two() as (channel, other):
        forward = LineForwarder()
        forward.connect(channel)
        channel.first = other.member
        line = b"\xff" * (MAX_VALUE_BYTES // 8)  # JSON needs six bytes for each
        for rank in range(2):
            forward.show(rank, 1, [line], b"")
        forward.flush()
        items: list[Any] = []
        while len(items) < 2:
            assert select.select([other.fileno()], [], [], 30.0)[0], "they do not come"
            items += [item for message in _taken(other) for item in message.body["items"]]
        assert [(rank, decode_lines(lines)) for rank, _, lines, _, _ in items] == [(0, [line]), (1, [line])]


def test_a_message_that_is_printed_once_is_sent_once() -> None:
    """A full disk at a follower filled the first host's terminal."""
    with _two() as (channel, other):
        forward = LineForwarder()
        forward.connect(channel)
        channel.first = other.member
        for text in ("the log is full", "the log is still full"):
            forward.print_once("logs", text)
        forward.print_once("other", "the end")
        texts: list[str] = []
        while "the end" not in texts:
            assert select.select([other.fileno()], [], [], 30.0)[0], "they do not come"
            texts += [message.body["text"] for message in _taken(other)]
        assert texts == ["the log is full", "the end"]


def test_records_of_many_groups_are_a_message_for_each_group() -> None:
    """They were one message, which the coordinator refused if it was long: the report lacked that host's ranks."""
    with _two() as (channel, other):
        link = FollowerLink.__new__(FollowerLink)
        link._channel, link._number, link._records = channel, 0, []
        link._forward = LineForwarder()
        channel.first = other.member
        logs = [GroupLog(name, 2, ()) for name in ("a", "b")]
        ranks = SimpleNamespace(zygote_lost=False)
        link.end(cast(Any, SimpleNamespace(ranks=ranks, ended_ns={7: 1}, report_folder="", collect_logs=lambda: logs)))
        messages: list[ControlMessage] = []
        while not messages or messages[-1].kind != "swept":
            assert select.select([other.fileno()], [], [], 30.0)[0]
            messages += _taken(other)
        names = [[group["name"] for group in each.body["groups"]] for each in messages if each.kind == "flight"]
        assert names == [["a"], ["b"]]


def test_a_message_for_many_is_put_into_words_once_and_travels_in_one_frame() -> None:
    """To tell a thousand hosts that one is lost took a thousand round trips, one after another."""
    with _two() as (channel, other), Client(channel._client.address.path) as third:
        third.join(_AGENT)
        frames: list[list[int]] = []
        post_all = channel._client.post_all

        def count(messages: Any, timeout: Any = None) -> list[int]:
            frames.append([member for member, _ in messages])
            return post_all(messages, timeout)

        vars(channel._client).update(post_all=count)
        gone = 999
        channel.put_many((other.member, gone, third.member), "host lost", host="c")
        assert channel.flush(30.0)
        assert frames == [[other.member, gone, third.member]]
        for client in (other, third):
            heard: list[ControlMessage] = []
            while not heard:
                assert select.select([client.fileno()], [], [], 30.0)[0]
                heard = _taken(client)
            assert [(message.kind, message.body) for message in heard] == [("host lost", {"host": "c"})]


def test_a_member_whose_outbox_is_full_holds_up_nobody_else_and_gets_all_in_order() -> None:
    with _two() as (channel, other), Client(channel._client.address.path) as third:
        third.join(_AGENT)
        for number in range(12):  # more than an outbox holds
            channel.put(other.member, "x", value=number, long="x" * 1_000_000)
        channel.put(third.member, "x", value="third")
        heard: list[ControlMessage] = []
        while not heard:
            assert select.select([third.fileno()], [], [], 30.0)[0]
            heard = _taken(third)
        assert [message.body["value"] for message in heard] == ["third"]
        assert not channel.flush(0.0)
        values: list[int] = []
        while len(values) < 12:
            values += [json.loads(event.body)["value"] for event in _events(other) if event.kind == "message"]
        assert values == list(range(12))
        assert channel.flush(30.0)


def test_a_batch_under_way_while_another_coordinator_takes_over_is_sent_there_if_it_is_lines() -> None:
    is_posting, may_go_on, posted = threading.Event(), threading.Event(), []

    def post_all(messages: Any, timeout: Any) -> list[int]:
        is_posting.set()
        assert may_go_on.wait(30.0)
        posted.append([(member, json.loads(line)["kind"]) for member, data in messages for line in data.split(b"\n")])
        return []

    client = SimpleNamespace(member=5, post_all=post_all, follow_member=lambda *_: None, close=lambda: None)
    channel = ControlChannel(cast(Any, client))
    try:
        channel.survives = True
        channel.put(0, "lines", items=[])
        assert is_posting.wait(30.0)
        channel.put(0, "started", rank=1)
        channel.put(0, "lines", items=[])
        channel.redirect(3, cast(Any, None), b"", 1.0)
        may_go_on.set()
        assert channel.flush(30.0)
        assert posted == [[(0, "lines")], [(3, "lines"), (3, "lines")]]
    finally:
        channel.close()


def _taken(client: Client) -> list[ControlMessage]:
    channel = ControlChannel.__new__(ControlChannel)
    vars(channel).update(_client=client, _put_back=[], _received={}, _offsets={})
    return [message for message in channel.receive() if isinstance(message, ControlMessage)]


def test_a_member_that_is_given_up_is_told_so() -> None:
    """A host that did not end its ranks when told was counted as lost, and did not hear of it."""
    with _two() as (channel, other):
        channel.expel(other.member)
        assert channel.flush(10.0)
        _take(channel, "lost")
        assert other.member == -1 or any(event.kind == "expelled" for event in _events(other))


def _events(client: Client) -> list[Any]:
    assert select.select([client.fileno()], [], [], 30.0)[0]
    return client.receive_events()
