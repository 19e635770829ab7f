"""A copy of a coordinator that follows its journal is as the coordinator is, whatever clients ask for."""

import random

import pytest

from phalanx._comm.control.wire import AnswerStatus, Op, WireError, pack, pack_number, unpack
from phalanx._job.coordinator.coordinator import Coordinator
from phalanx._job.coordinator.journal import (
    EntryKind,
    JournalEntry,
    pack_entry,
    pack_route,
    unpack_entries,
    unpack_route,
)
from phalanx._job.coordinator.session import DirectRoute, RelayedRoute, split_answers

KEYS = [b"a", b"b", b"c", b"q", b"\0barrier/a"]


def state(coordinator):
    """All that a coordinator has, in an order that does not depend on who asked first; whom it suspects is its own."""
    entries = [entry for entry in coordinator.snapshot() if entry.kind != EntryKind.SUSPECTED]
    state = sorted(entries, key=lambda e: (e.kind, pack_route(e.route)) if e.route else (e.kind, b""))
    return [e._replace(fields=_pairs(e.fields)) if e.kind == EntryKind.ANSWERS else e for e in state]


def _pairs(fields):
    return sorted(zip(fields[::2], fields[1::2], strict=True))


def travel(entries):
    """The entries as another host reads them."""
    return list(unpack_entries(b"".join(map(pack_entry, entries))))


class Job:
    """A coordinator with clients that ask at random, and copies of it."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.now = 0.0
        self.coordinator = Coordinator(job="drawn", max_bytes=1 << 16)
        self.coordinator.journal.is_kept = True
        relay = DirectRoute(1, b"relay")
        self.routes = [DirectRoute(0, b"x"), DirectRoute(1, b"x"), *(RelayedRoute(relay, bytes([n])) for n in range(3))]
        self.numbers = dict.fromkeys(self.routes, 0)
        self.asked = []  # route, number, frame
        self.answers = {}  # (route, number) -> what was granted
        self.copies = []

    def add_copy(self):
        self.follow()
        copy = Coordinator()
        for entry in travel(self.coordinator.snapshot()):
            copy.replay(entry, self.now)
        self.copies.append(copy)

    def follow(self):
        entries = travel(self.coordinator.journal.drain())
        for copy in self.copies:
            for entry in entries:
                copy.replay(entry, self.now)

    def draw_request(self, route):
        rng, key = self.rng, self.rng.choice(KEYS)
        word = rng.choice([b"", b"1", b"17", b"word"])
        member = pack_number(rng.choice([-1, -1, 0, 1, 2, 3]))
        return rng.choice([
            (Op.SET, key, word), (Op.GET, key), (Op.ADD, key, b"3"), (Op.COMPARE_SET, key, word, b"new"),
            (Op.APPEND, key, word), (Op.WAIT, key), (Op.DELETE, key), (Op.MULTI_SET, key, word, b"z", b"1"),
            (Op.QUEUE_PUSH, key, word), (Op.QUEUE_PUSH, b"q", word), (Op.QUEUE_POP, b"q", b"1"),
            (Op.QUEUE_POP, key, rng.choice([b"0", b"1"])), (Op.QUEUE_POP, b"q", b"1"), (Op.DELETE_PREFIX, key[:1]),
            (Op.JOIN, b'{"host": "h"}', rng.choice([b"all", b"", b"0,1"])), (Op.LEAVE, member, b"why"),
            (Op.POST, member, word), (Op.POST, b"-1", bytes(rng.choice([1, 9000]))),
            (Op.BARRIER, b"a", b"2"), (Op.BARRIER, b"a", b"5"), (Op.BARRIER, b"c", b"3"),
            (Op.SET, key, bytes(rng.choice([20, 30000]))), (Op.ADD_ITEMS, key, b"row/", word, b"x"),
            (Op.ADD_ITEMS, b"n", key, word, bytes(rng.choice([20, 30000]))),
        ])  # fmt: skip

    def turn(self):
        rng, coordinator = self.rng, self.coordinator
        self.now += rng.choice([0.0, 0.01, 0.01, 1.0])
        chance = rng.random()
        route = rng.choice(self.routes)
        if chance < 0.75:
            for _ in range(rng.choice([1, 1, 3])):
                self.numbers[route] += 1
                what, *fields = self.draw_request(route)
                frame = pack(what, self.numbers[route], *fields)
                self.asked.append((route, self.numbers[route], frame))
                coordinator.handle(route, frame, self.now)
        elif chance < 0.8 and self.asked:
            route, _, frame = rng.choice(self.asked[-20:])
            coordinator.handle(route, frame, self.now)  # once more
        elif chance < 0.88:
            number = max(0, self.numbers[route] - rng.randrange(4))
            coordinator.handle(route, pack(Op.CANCEL, 0, pack_number(number)), self.now)
        elif chance < 0.92:
            beat = (pack_number(rng.randrange(5)), b"0")
            coordinator.handle(route, pack(Op.HEARTBEAT, rng.randrange(5), *beat), self.now)
        elif chance < 0.95:
            coordinator.replicas.confirmed_members = frozenset(rng.sample(range(8), rng.randrange(8)))
            self.now += rng.choice([0.0, 4.0, 8.0, 70.0, 700.0])
            coordinator.tick(self.now)
        elif chance < 0.96 and len(self.copies) < 3:
            self.add_copy()
        self.send()

    def send(self):
        for session, answers in self.coordinator.pop_outgoing():
            if self.rng.random() < 0.1:
                self.coordinator.undelivered(session, answers)
                continue
            for message in unpack(b"".join(split_answers(answers))):
                if message.what == AnswerStatus.OK:
                    self.answers[session.route, message.number] = message

    def take_over(self):
        """The coordinator is lost: a copy goes on, and knows all that was granted."""
        self.coordinator.tick(self.now)  # what members have taken is told from time to time
        self.follow()
        suspects = {member.id: member.suspicion for member in self.coordinator.members.suspects}
        for copy in self.copies:
            assert {member.id: member.suspicion for member in copy.members.suspects} == suspects
        lost, self.coordinator = self.coordinator, self.copies.pop(self.rng.randrange(len(self.copies)))
        self.coordinator.take_over(self.now)
        for copy in self.copies:
            for member in copy.members:
                copy.members.restore_suspicion(member, "")  # standbys are sent the whole state by the next leader
        self.coordinator.journal.is_kept = True
        return lost


def test_a_copy_is_as_the_coordinator_is_and_can_go_on_in_its_place(effort, seed):
    for at in range(seed, seed + 40 * effort):
        job = Job(at)
        for _ in range(3):
            job.add_copy()
            for _ in range(job.rng.randrange(120)):
                job.turn()
            lost = job.take_over()
            assert state(job.coordinator) == state(lost)
            remembered = {
                (route, number): message
                for (route, number), message in job.answers.items()
                if route in job.coordinator.sessions
                and job.coordinator.sessions[route].answered(number) == pack(*message[:2], *message.fields)
            }
            for route, number, frame in job.asked:
                if (route, number) in remembered:
                    job.coordinator.handle(route, frame, job.now)
            told = {
                (session.route, message.number): message
                for session, answers in job.coordinator.pop_outgoing()
                for message in unpack(b"".join(split_answers(answers)))
                if message.what == AnswerStatus.OK
            }
            assert told == remembered
            assert state(job.coordinator) == state(lost)
            assert not job.coordinator.journal.drain()


def test_a_store_that_is_fuller_than_it_may_be_can_be_copied():
    """An item that its taker did not get is put back wherever others have taken the room: copies refused the state."""
    job = Job(0)
    one, other = job.routes[:2]
    handle = job.coordinator.handle
    handle(one, pack(Op.QUEUE_PUSH, 1, b"q", bytes(30_000)) + pack(Op.QUEUE_POP, 2, b"q", b"0"), 0.0)
    job.coordinator.pop_outgoing()
    handle(other, pack(Op.SET, 1, b"a", bytes(30_000)) + pack(Op.SET, 2, b"b", bytes(30_000)), 0.0)
    handle(one, pack(Op.CANCEL, 0, b"2"), 0.0)
    assert job.coordinator.store.num_bytes > job.coordinator.store.max_bytes
    job.add_copy()
    assert state(job.copies[0]) == state(job.coordinator)


@pytest.mark.parametrize(
    "entry",
    [
        JournalEntry(EntryKind.REQUEST, DirectRoute(1, b"x"), 1, [bytes((Op.ADD,)), b"word", b"3"]),
        JournalEntry(EntryKind.REQUEST, DirectRoute(1, b"x"), 1, [bytes((Op.LEAVE,)), b"-1", b"why"]),
        JournalEntry(EntryKind.REQUEST, DirectRoute(1, b"x"), 1, [b"", b"k"]),
        JournalEntry(EntryKind.REQUEST, None, 1, [bytes((Op.SET,)), b"k", b"v"]),
        JournalEntry(EntryKind.LOSE, None, 7, [b"why"]),
        JournalEntry(EntryKind.KEYS, None, 0, [b"k"]),
        JournalEntry(EntryKind.KEYS, DirectRoute(1, b"x"), 0, [b"k", b"v"]),
        JournalEntry(EntryKind.BEGIN, None, 0, [b"k", b"v"]),
        JournalEntry(EntryKind.ACKNOWLEDGED, None, 0, [b"1", b"no"]),
        JournalEntry(77, None, 0, []),
    ],
)
def test_an_entry_that_a_copy_cannot_follow_is_an_error_and_not_another_state(entry):
    copy = Coordinator()
    copy.replay(JournalEntry(EntryKind.REQUEST, DirectRoute(1, b"x"), 9, [bytes((Op.SET,)), b"word", b"none"]), 0.0)
    with pytest.raises(WireError):
        copy.replay(entry, 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_read_as_entries_or_refused_and_ends_nothing(seed):
    rng = random.Random(seed)
    job = Job(seed)
    job.add_copy()
    for _ in range(60):
        job.turn()
    packed = bytearray(b"".join(map(pack_entry, job.coordinator.snapshot())))
    for _ in range(300):
        noisy = bytearray(packed)
        for _ in range(rng.randrange(1, 5)):
            noisy[rng.randrange(len(noisy))] = rng.randrange(256)
        copy = Coordinator()
        try:
            for entry in unpack_entries(bytes(noisy)):
                copy.replay(entry, 0.0)
        except WireError:
            pass


@pytest.mark.parametrize(
    "route", [None, DirectRoute(0, b""), DirectRoute(1, bytes(255)), RelayedRoute(DirectRoute(1, b"x"), b"")]
)
def test_a_route_is_read_as_it_was_packed_and_what_is_none_is_refused(route):
    field = pack_route(route)
    assert unpack_route(field) == route
    for wrong in (b"\0", b"\1\5abc", b"\4\0", b"\0\1ab"):
        with pytest.raises(WireError):
            unpack_route(wrong)
