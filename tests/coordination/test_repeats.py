"""Requests that are refused, or sent again after a pause: nothing is half done, and nothing is counted twice."""

import itertools

from phalanx._comm.control.pending_call import PendingCall
from phalanx._comm.control.wire import AnswerStatus, Op, pack, unpack
from phalanx._job.coordinator.coordinator import Coordinator
from phalanx._job.coordinator.key_value import MAX_KEY_BYTES


class Talk:
    """A coordinator without a network, and what it sends to whom."""

    def __init__(self):
        self.coordinator = Coordinator()

    def ask(self, who, what, number, *fields, now=0.0):
        self.coordinator.handle(who, pack(what, number, *fields), now)
        return self.sent()

    def sent(self):
        sent = {}
        for session, answers in self.coordinator.pop_outgoing():
            sent[session.route] = [(m.what, m.fields) for answer in answers for m in unpack(answer)]
        return sent


def test_a_multi_set_that_is_refused_sets_none_of_its_keys():
    """The first key was set and those who waited for it forgotten; then the second one was too long, so that nobody
    was woken, and the waiters slept beside a key that was there."""
    talk = Talk()
    assert talk.ask("waiter", Op.GET, 1, b"a") == {}
    for wrong in ((b"x" * (MAX_KEY_BYTES + 1), b"2"), (b"b", bytes((8 << 20) + 1))):
        sent = talk.ask("setter", Op.MULTI_SET, 1, b"a", b"1", *wrong)
        assert list(sent) == ["setter"]
        assert sent["setter"][0][0] == AnswerStatus.WRONG_CALL
        assert len(talk.coordinator.store) == 0
    assert talk.ask("setter", Op.MULTI_SET, 2, b"a", b"1", b"b", b"2")["waiter"] == [(AnswerStatus.OK, [b"1"])]


def test_items_that_are_refused_are_not_counted_and_leave_who_waits_waiting():
    talk = Talk()
    assert talk.ask("waiter", Op.GET, 1, b"came") == {}
    sent = talk.ask("adder", Op.ADD_ITEMS, 1, b"came", b"item/", b"1", bytes((8 << 20) + 1))
    assert list(sent) == ["adder"]
    assert sent["adder"][0][0] == AnswerStatus.WRONG_CALL
    assert len(talk.coordinator.store) == 0
    sent = talk.ask("adder", Op.ADD_ITEMS, 2, b"came", b"item/", b"1", b"2")
    assert sent == {"adder": [(AnswerStatus.OK, [b"0"])], "waiter": [(AnswerStatus.OK, [b"2"])]}
    assert talk.ask("adder", Op.ADD_ITEMS, 2, b"came", b"item/", b"1", b"2") == {"adder": [(AnswerStatus.OK, [b"0"])]}


def test_a_barrier_that_is_sent_again_after_a_long_silence_is_counted_once():
    """The coordinator was stopped for a minute: it let go of all who waited, each asked again and was counted again,
    and a barrier of three opened with two callers."""
    talk = Talk()
    talk.ask("r0", Op.BARRIER, 1, b"k", b"3")
    talk.coordinator.tick(61.0)
    assert talk.ask("r0", Op.BARRIER, 1, b"k", b"3", now=61.1) == {"r0": [(AnswerStatus.PARKED, [])]}
    assert talk.ask("r1", Op.BARRIER, 1, b"k", b"3", now=62.0) == {}
    assert talk.coordinator.store.get(b"k") == b"2"
    sent = talk.ask("r2", Op.BARRIER, 1, b"k", b"3", now=63.0)
    assert sent == {who: [(AnswerStatus.OK, [])] for who in ("r0", "r1", "r2")}
    assert talk.ask("r0", Op.BARRIER, 1, b"k", b"3", now=64.0) == {"r0": [(AnswerStatus.OK, [])]}
    assert talk.coordinator.store.get(b"k") == b"3"


def test_a_lost_member_that_asks_again_is_not_counted_at_a_barrier_again():
    """Whoever was counted out was let go of, too: back again, it asked again, and stood at the barrier twice."""
    talk = Talk()
    talk.ask("r0", Op.JOIN, 1, b"{}", b"all")
    talk.ask("r0", Op.BARRIER, 2, b"k", b"3")
    talk.coordinator.tick(11.0)
    assert [what for what, _ in talk.sent()["r0"]] == [AnswerStatus.UNKNOWN]
    assert talk.ask("r0", Op.BARRIER, 2, b"k", b"3", now=11.1) == {"r0": [(AnswerStatus.PARKED, [])]}
    assert talk.coordinator.store.get(b"k") == b"1"
    talk.coordinator.tick(700.0)  # its process has ended: nothing is kept for ever
    assert not talk.coordinator.sessions


def test_a_coordinator_that_was_stopped_forgets_no_answers():
    """It had heard of no client for ten minutes and forgot what it had answered: a sum was added to again."""
    talk = Talk()
    talk.ask("r0", Op.ADD, 1, b"k", b"1")
    talk.ask("r0", Op.JOIN, 2, b"{}", b"all")
    talk.coordinator.note_pause(3600.0, 3601.0)
    assert talk.coordinator.tick(3601.0) == []
    assert talk.ask("r0", Op.ADD, 1, b"k", b"1", now=3601.1) == {"r0": [(AnswerStatus.OK, [b"1"])]}
    assert talk.coordinator.store.get(b"k") == b"1"


def test_what_was_heard_after_a_pause_is_not_forgiven_twice():
    """Who was heard already when the pause was noticed was given the length of it again, and could be silent longer."""
    talk = Talk()
    talk.ask("r0", Op.JOIN, 1, b"{}", b"all", now=100.0)
    talk.coordinator.note_pause(99.0, 100.0)
    assert talk.coordinator.tick(109.0) == []
    assert len(talk.coordinator.tick(110.5)) == 1


def test_a_request_that_is_not_answered_is_sent_again_at_growing_pauses():
    """Each rank of a large job asked again every three seconds: the later a busy coordinator answered, the more it was
    asked, and each of these requests cost it the whole answer again."""
    call, sent = PendingCall(1, Op.GET, b""), []
    for tenth in range(600):
        now = tenth / 10
        if not sent or now > call.resend_at:
            call.note_sent(now)
            sent.append(now)
    pauses = [later - earlier for earlier, later in itertools.pairwise(sent)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 4.0
    assert 4 <= len(sent) <= 6
    call.num_sent = 0  # another connection
    call.note_sent(now)
    assert call.resend_at < now + 4.0
