"""What several ranks of a host ask is asked once, and each gets the answer that the coordinator would have given it."""

from __future__ import annotations

import contextlib
import random

import pytest
from tests.coordination.random_frames import random_frame

from phalanx._comm.control.pending_call import RESEND_PARKED_S
from phalanx._comm.control.wire import VERSION, WRITE_ONCE, AnswerStatus, Op, WireError, pack, pack_number, unpack
from phalanx._job.coordinator.coordinator import UNPARKED_AFTER_S, Coordinator
from phalanx._job.coordinator.host_requests import KEPT_S, OWN, HostRequests
from phalanx._job.coordinator.session import DirectRoute

RELAY = DirectRoute(1, b"relay")
KEY = f"facts{WRITE_ONCE}".encode()


class Host:
    """Ranks of a host, what they ask together, and a coordinator that is asked when `pass_on` is called."""

    def __init__(self):
        self.coordinator = Coordinator(job="job 1")
        self.requests = HostRequests()
        self.now = 0.0
        self.asked = []  # what reached the coordinator: the operations
        self.answers = {}  # (rank, number): status and fields
        self.outgoing = []

    def ask(self, rank, number, what, *fields):
        self.requests.receive_requests(b"rank %d" % rank, pack(what, number, *fields))

    def pass_on(self):
        """What was asked goes to the coordinator, and what it says comes back, until nothing is on its way."""
        while envelopes := self.requests.pop_outgoing(self.now):
            for envelope in envelopes:
                (message,) = unpack(envelope)
                for _, frame in zip(message.fields[::2], message.fields[1::2], strict=True):
                    self.asked += [Op(one.what) for one in unpack(frame) if one.what != Op.HELLO]
                assert self.coordinator.handle(RELAY, envelope, self.now)
            self.hear()
        for route, answer in self.requests.pop_answers():
            for status, number, fields in unpack(answer):
                self.answers[int(route.split()[1]), number] = status, fields

    def hear(self):
        """What the coordinator says comes back."""
        for session, answers in self.coordinator.pop_outgoing():
            self.requests.receive_answers(
                pack(AnswerStatus.RELAYED, 0, session.route.route, b"".join(answers)), self.now
            )


@pytest.fixture
def host():
    made = Host()
    made.pass_on()
    return made


def test_a_greeting_is_answered_here(host):
    host.ask(3, 1, Op.HELLO, pack_number(VERSION))
    host.pass_on()
    assert host.answers[3, 1] == (AnswerStatus.OK, [b"job 1", b"10.0"])
    assert len(host.coordinator.sessions) == 2, "the relay itself, and what it asks for several"
    host.ask(3, 2, Op.HELLO, b"77")
    host.pass_on()
    assert host.answers[3, 2][0] == AnswerStatus.WRONG_CALL


def test_the_same_question_of_several_is_one_and_who_asks_later_is_answered_by_the_next(host):
    for rank in range(8):
        host.ask(rank, 1, Op.CHECK, b"a", b"b")
        host.ask(rank, 2, Op.COMPARE_SET, b"start", b"", b"")
    sent = host.requests.pop_outgoing(host.now)
    for rank in range(8):
        host.ask(rank, 3, Op.CHECK, b"a", b"b")
    assert not host.requests.pop_outgoing(host.now), "the first is under way, and may be out of date"
    host.requests._outgoing += [(OWN, frame) for frame in unpack(sent[0])[0].fields[1::2]]  # it arrives
    host.pass_on()
    assert sorted(host.asked) == sorted([Op.CHECK] * 2 + [Op.COMPARE_SET])
    for rank in range(8):
        assert host.answers[rank, 1] == host.answers[rank, 3] == (AnswerStatus.OK, [b"0"])
        assert host.answers[rank, 2] == (AnswerStatus.OK, [b""])


def test_who_changes_something_does_it_in_its_own_name(host):
    for rank in range(3):
        host.ask(rank, 1, Op.COMPARE_SET, b"a", b"", b"%d" % rank)
        host.ask(rank, 2, Op.ADD, b"n", b"1")
        host.ask(rank, 3, Op.GET, b"a")
    host.pass_on()
    assert host.asked.count(Op.COMPARE_SET) == host.asked.count(Op.ADD) == host.asked.count(Op.GET) == 3
    assert {host.answers[rank, 2][1][0] for rank in range(3)} == {b"1", b"2", b"3"}


def test_items_of_several_go_together_and_each_learns_its_own_place(host):
    for rank in range(8):
        host.ask(rank, 1, Op.ADD_ITEMS, b"came", b"rank/", b"words of %d" % rank)
    host.pass_on()
    assert host.asked == [Op.ADD_ITEMS]
    places = [int(host.answers[rank, 1][1][0]) for rank in range(8)]
    assert sorted(places) == list(range(8))
    for rank, place in enumerate(places):
        assert host.coordinator.store.get(b"rank/%d" % place) == b"words of %d" % rank
    host.ask(5, 1, Op.ADD_ITEMS, b"came", b"rank/", b"words of 5")  # it did not get the answer
    host.pass_on()
    assert int(host.answers[5, 1][1][0]) == places[5]
    assert host.coordinator.store.get(b"came") == b"8"


@pytest.mark.slow
def test_more_items_than_a_message_has_room_for_go_in_several(host):
    for rank in range(40):
        host.ask(rank, 1, Op.ADD_ITEMS, b"came", b"rank/", *[b""] * 4000)
    host.pass_on()
    places = sorted(int(host.answers[rank, 1][1][0]) for rank in range(40))
    assert places == [4000 * n for n in range(40)]


def test_items_that_the_store_refuses_are_refused_to_all_of_them(host):
    host.coordinator.store.set(b"came", b"no number")
    for rank in range(3):
        host.ask(rank, 1, Op.ADD_ITEMS, b"came", b"rank/", b"x")
    host.pass_on()
    assert {host.answers[rank, 1][0] for rank in range(3)} == {AnswerStatus.WRONG_CALL}
    assert len(host.coordinator.store) == 1


def test_a_value_that_never_changes_is_waited_for_and_fetched_once(host):
    for rank in range(8):
        host.ask(rank, 1, Op.GET, KEY)
        host.ask(rank, 2, Op.WAIT, KEY)
    host.pass_on()
    assert host.answers == {}
    host.ask(9, 1, Op.SET, KEY, b"value")
    host.pass_on()
    for rank in range(8):
        assert host.answers[rank, 1] == (AnswerStatus.OK, [b"value"])
        assert host.answers[rank, 2] == (AnswerStatus.OK, [])
    host.asked.clear()
    host.ask(1, 3, Op.CHECK, KEY)
    host.ask(1, 4, Op.GET, KEY)
    host.ask(1, 5, Op.WAIT, KEY)
    host.pass_on()
    assert [host.answers[1, number][1] for number in (3, 4, 5)] == [[b"1"], [b"value"], []]
    assert host.asked == []
    host.now += KEPT_S + 1
    host.requests.ask_again(host.now)
    host.ask(1, 6, Op.CHECK, KEY)
    host.pass_on()
    assert host.asked == [Op.CHECK]


def test_who_gives_up_is_answered_no_more_and_with_the_last_the_question_ends(host):
    for rank in range(3):
        host.ask(rank, 1, Op.WAIT, KEY)
    host.pass_on()
    host.ask(0, 1, Op.WAIT, KEY)  # again: it is told that it waits
    host.ask(1, 2, Op.CANCEL, b"1")
    host.ask(2, 2, Op.CANCEL, b"1")
    host.pass_on()
    assert host.answers == {(0, 1): (AnswerStatus.PARKED, [])}
    assert sum(len(session.parked) for session in host.coordinator.sessions.values()) == 1
    host.ask(0, 2, Op.CANCEL, b"1")
    host.pass_on()
    assert sum(len(session.parked) for session in host.coordinator.sessions.values()) == 0


def test_values_of_keys_that_may_change_are_asked_for_once_by_all_who_ask_in_a_moment(host):
    """Each rank that looked for the first, after half a minute, asked in its own name and had a session of its own."""
    host.coordinator.store.set(b"a", b"1")
    host.coordinator.store.set(b"b", b"2")
    for rank in range(8):
        host.ask(rank, 1, Op.MULTI_GET, b"a", b"b")
        host.ask(rank, 2, Op.MULTI_GET, b"a")
    sent = host.requests.pop_outgoing(host.now)
    host.ask(0, 3, Op.MULTI_GET, b"a")
    assert not host.requests.pop_outgoing(host.now), "the first is under way, and may be out of date"
    assert host.coordinator.handle(RELAY, sent[0], host.now)
    host.coordinator.store.set(b"a", b"3")
    host.hear()
    host.pass_on()
    for rank in range(8):
        assert host.answers[rank, 1] == (AnswerStatus.OK, [b"1", b"2"])
        assert host.answers[rank, 2] == (AnswerStatus.OK, [b"1"])
    assert host.answers[0, 3] == (AnswerStatus.OK, [b"3"])
    assert host.asked == [Op.MULTI_GET]
    assert len(host.coordinator.sessions) == 2


def test_who_waits_for_several_keys_may_give_up_and_those_who_came_later_go_on(host):
    host.ask(0, 1, Op.MULTI_GET, b"a", b"b")
    host.pass_on()
    host.ask(1, 1, Op.MULTI_GET, b"a", b"b")
    host.ask(2, 1, Op.MULTI_GET, b"a", b"b")
    host.ask(0, 2, Op.CANCEL, b"1")
    host.ask(2, 2, Op.CANCEL, b"1")
    host.pass_on()
    assert sum(len(session.parked) for session in host.coordinator.sessions.values()) == 1
    host.ask(3, 1, Op.MULTI_SET, b"a", b"1", b"b", b"2")
    host.pass_on()
    assert host.answers == {(1, 1): (AnswerStatus.OK, [b"1", b"2"]), (3, 1): (AnswerStatus.OK, [])}
    host.ask(1, 2, Op.MULTI_GET, b"c")
    host.ask(2, 3, Op.MULTI_GET, b"c")
    host.pass_on()
    for rank, number in ((1, b"2"), (2, b"3")):
        host.ask(rank, 9, Op.CANCEL, number)
    host.pass_on()
    assert not any(session.parked for session in host.coordinator.sessions.values())


def test_a_question_of_which_the_coordinator_has_said_that_it_waits_there_is_seldom_repeated(host):
    """It was repeated after 3, 9, 21 and 45 seconds, for each host of a job whose ranks waited for the last of them."""
    host.ask(0, 1, Op.GET, KEY)
    repeated_at = []
    for second in range(100):
        host.now = float(second)
        host.requests.ask_again(host.now)
        host.pass_on()
        host.coordinator.tick(host.now)
        repeated_at += [second] * len(host.asked)
        host.asked.clear()
    assert repeated_at == [0, 3, 23, 43, 63, 83]
    assert 2 * RESEND_PARKED_S < UNPARKED_AFTER_S, "it would be let go of if one repetition was lost"
    host.requests.resume()  # another connection, which may lead to another coordinator
    host.requests.ask_again(host.now)
    host.pass_on()
    assert host.asked == [Op.GET]


def test_the_question_of_a_process_that_has_ended_is_repeated_no_more(host):
    """It was repeated for ever; after a thousand lost ranks, a thousand questions were."""
    host.ask(0, 1, Op.MULTI_GET, b"a")
    host.ask(1, 1, Op.MULTI_GET, b"a")
    host.pass_on()
    host.now += RESEND_PARKED_S
    host.requests.ask_again(host.now)
    host.pass_on()
    assert host.answers == dict.fromkeys([(0, 1), (1, 1)], (AnswerStatus.PARKED, [])), "who has ended is found by this"
    for rank, num_parked in ((0, 1), (1, 0)):
        host.requests.drop(b"rank %d" % rank)
        host.pass_on()
        assert sum(len(session.parked) for session in host.coordinator.sessions.values()) == num_parked
    host.asked.clear()
    host.requests.resume()
    host.requests.ask_again(host.now)
    host.pass_on()
    assert not host.asked


def test_what_was_lost_is_asked_again_and_done_once(host):
    for rank in range(2):
        host.ask(rank, 1, Op.ADD_ITEMS, b"came", b"rank/", b"x")
    host.requests.pop_outgoing(host.now)  # lost on the way
    host.requests.ask_again(1.0)
    assert not host.requests.pop_outgoing(host.now)
    host.requests.resume()
    host.requests.ask_again(1.0)
    envelopes = host.requests.pop_outgoing(host.now)
    host.coordinator.handle(RELAY, envelopes[0], 0.0)  # it arrives, and the answer is lost
    host.coordinator.pop_outgoing()
    host.requests.ask_again(100.0)
    host.pass_on()
    assert [host.answers[rank, 1][1] for rank in range(2)] == [[b"0"], [b"1"]]
    assert host.coordinator.store.get(b"came") == b"2"


def test_what_is_asked_again_takes_nobody_with_it_who_came_meanwhile(host):
    """The coordinator has done it already, without the items of those who came later: they would have been lost."""
    host.ask(0, 1, Op.ADD_ITEMS, b"came", b"rank/", b"first")
    host.ask(0, 2, Op.CHECK, b"a")
    (envelope,) = host.requests.pop_outgoing(host.now)
    host.coordinator.handle(RELAY, envelope, 0.0)
    host.coordinator.pop_outgoing()  # the answers are lost
    host.coordinator.store.set(b"a", b"there")
    host.requests.ask_again(100.0)
    host.ask(1, 1, Op.ADD_ITEMS, b"came", b"rank/", b"second")
    host.ask(1, 2, Op.CHECK, b"a")
    host.pass_on()
    assert host.coordinator.store.get(b"rank/1") == b"second"
    assert [host.answers[rank, 1] for rank in range(2)] == [(AnswerStatus.OK, [b"0"]), (AnswerStatus.OK, [b"1"])]
    assert host.answers[1, 2] == (AnswerStatus.OK, [b"1"])


def test_any_calls_are_answered_as_without_others_that_ask_the_same(effort, seed):
    """Ranks of three hosts, in random order with random delays, beside a list of what the coordinator did."""
    rng = random.Random(seed)
    host = Host()
    row, number = [], 0
    for _ in range(200 * min(effort, 3)):
        calls = {}
        for _ in range(rng.randrange(1, 6)):
            number += 1
            rank, key = rng.randrange(3), b"k%d" % rng.randrange(3)
            what, fields = rng.choice([
                (Op.CHECK, (key,)), (Op.COMPARE_SET, (key, b"", b"")), (Op.ADD_ITEMS, (b"n", b"n/", b"%d" % number)),
            ])  # fmt: skip
            calls[rank, number] = what, fields
            host.ask(rank, number, what, *fields)
        before = dict(host.coordinator.store._values)
        host.pass_on()
        after = dict(host.coordinator.store._values)
        for caller, (what, fields) in calls.items():
            status, answer = host.answers.pop(caller)
            assert status == AnswerStatus.OK
            if what == Op.CHECK:
                assert answer[0] in {b"%d" % (fields[0] in store) for store in (before, after)}
            elif what == Op.COMPARE_SET:
                assert answer == [b""]
            else:
                assert after[b"n/%d" % int(answer[0])] == fields[2]
                row.append(int(answer[0]))
        assert host.answers == {}
    assert sorted(row) == list(range(len(row)))


def test_no_frame_of_a_rank_or_of_whoever_takes_the_coordinators_place_raises_another_error(effort, seed):
    rng = random.Random(seed)
    requests, now = HostRequests(), 0.0
    for _ in range(1000 * effort):
        now += 0.01
        requests.receive_requests(b"%d" % rng.randrange(4), random_frame(rng))
        own = pack(rng.choice([*AnswerStatus]), rng.randrange(60), *[b"7"] * rng.randrange(3))
        answer = rng.choice(
            [random_frame(rng), pack(AnswerStatus.RELAYED, 0, OWN, own), pack(AnswerStatus.RELAYED, 0, OWN)]
        )
        with contextlib.suppress(WireError, IndexError, ValueError):
            requests.receive_answers(answer, now)
        requests.ask_again(now)
        for envelope in requests.pop_outgoing(now):
            assert unpack(envelope)[0].what == Op.RELAY
        requests.pop_answers()
