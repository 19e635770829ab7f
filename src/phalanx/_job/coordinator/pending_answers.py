"""Keep the answers that the coordinator owes: to requests that wait for something, and on their way to the clients.

request ──► park ──► what it waits for has come: wake ──► outgoing ──► delivered
                                                             ▲             │ it did not get there: what it was to
                                                             └── rewind ◄──┘ have is there again for others
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from phalanx._comm.control.wire import Message, Op, Status, pack, unpack
from phalanx._job.coordinator.journal import Journal, Kind
from phalanx._job.coordinator.key_value import KeyValueStore, RefusedError, Waiter
from phalanx._job.coordinator.session import Answer, Session, SharedAnswer

MAX_PARKED = 1024  # so many requests of one session may wait
MAX_PARKED_KEYS = 1 << 16  # so many keys may they wait for, all together


class PendingAnswers(ABC):
    """`PendingAnswers` knows which requests wait for what in `store`, and which answers are to be sent.

    `outgoing` holds the sessions for which there is something to send; the service takes it from there. A copy
    (`is_copy`) sends nothing: it does what is in the journal of another one, which has granted it.
    """

    def __init__(self, store: KeyValueStore) -> None:
        self.store = store
        self.journal = Journal()
        self.is_copy = False
        self.outgoing: dict[Session, None] = {}

    @abstractmethod
    def _handle(self, session: Session, message: Message) -> bool:
        """Do what a message asks for; return False if it is malformed."""

    def take_outgoing(self) -> Iterator[tuple[Session, list[Answer]]]:
        """Yield what is to be sent, one session after another."""
        outgoing, self.outgoing = self.outgoing, {}
        for session in outgoing:
            answers, session.outgoing, session.outgoing_bytes = session.outgoing, [], 0
            if session.member is not None:
                answers.extend(session.member.unsent())
            if answers:
                yield session, answers

    def undelivered(self, session: Session, answers: Iterable[Answer]) -> None:
        """Undo what these answers gave to the session, since they did not reach it."""
        for answer in answers:
            if not isinstance(answer, SharedAnswer):  # which takes nothing away
                for message in unpack(answer):
                    if message.what == Status.OK:
                        self.take_back(session, message.number)
        if session.member is not None:
            session.member.rewind(0)

    def take_back(self, session: Session, number: int) -> None:
        """Give the item that a request has taken from a queue, if any, to another request that waits for it."""
        popped = session.take_popped(number)
        if popped is not None:
            self.journal.add(Kind.UNPOP, session.route, number)
            session.unanswer(number)
            self._wake(self.store.push_back(*popped))

    def put_back(self, session: Session, answers: list[Answer]) -> None:
        """Put answers back that were taken by `take_outgoing` and could not be sent yet."""
        session.outgoing[:0] = answers
        session.outgoing_bytes += sum(map(len, answers))
        self.outgoing[session] = None

    def _park(self, session: Session, message: Message, waiter: Waiter) -> bool:
        self._check_room_to_park(session, len(waiter.keys))
        waiter.owner = (session, message)
        if not self.store.wait(waiter):
            return False
        session.parked[message.number] = waiter
        session.num_parked_keys += len(waiter.keys)
        return True

    def _check_room_to_park(self, session: Session, num_keys: int) -> None:
        if self.is_copy:
            return
        if len(session.parked) >= MAX_PARKED or session.num_parked_keys + num_keys > MAX_PARKED_KEYS:
            raise RefusedError(f"{len(session.parked)} calls of this process wait already")

    def _unpark(self, session: Session, number: int) -> Waiter | None:
        waiter = session.parked.pop(number, None)
        if waiter is not None:
            session.num_parked_keys -= len(waiter.keys)
            self.store.forget(waiter)
        return waiter

    def _unpark_repeatable(self, session: Session) -> None:
        """Forget the requests that the client repeats by asking again. A barrier stays: it would count twice."""
        for number, waiter in list(session.parked.items()):
            if waiter.owner[1].what != Op.BARRIER:
                self._unpark(session, number)

    def _wake(self, ready: list[Waiter]) -> None:
        for waiter in ready:
            session, message = waiter.owner
            self._unpark(session, message.number)
            if message.what == Op.BARRIER:  # it has been counted
                session.remember(message.number, answer := pack(Status.OK, message.number))
                self._send(session, answer)
            else:
                self._handle(session, message)

    def _send(self, session: Session, answer: Answer) -> None:
        if self.is_copy:
            return
        session.outgoing.append(answer)
        session.outgoing_bytes += len(answer)
        self.outgoing[session] = None
