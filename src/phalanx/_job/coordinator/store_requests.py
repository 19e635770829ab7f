"""Answer clients' requests for keys and queues: the operations of c10d's Store, and a few more.

Each handler returns the answer, or None if the request waits.

request ──► park ──► the key or the item exists: wake ──► outgoing ──► delivered
                                                   ▲                       │ not delivered
                                                   └────── requeue_item ◄──┘ the item is in its queue again
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from phalanx._comm.control.wire import (
    MAX_FIELDS,
    MAX_VALUE_BYTES,
    AnswerStatus,
    Op,
    WireMessage,
    pack,
    pack_number,
    unpack,
    unpack_number,
)
from phalanx._job.coordinator.journal import EntryKind, Journal
from phalanx._job.coordinator.key_value import KeyValueStore, RefusedError, Waiter
from phalanx._job.coordinator.session import Answer, ClientSession, SharedAnswer

MAX_PARKED = 1024  # maximum number of waiting requests of one session
MAX_PARKED_KEYS = 1 << 16  # maximum number of keys that these requests wait for in total
_LONG_BYTES = 1 << 14  # a longer value is not copied for each client, because thousands may wait for one value


class StoreRequestHandler(ABC):
    """`StoreRequestHandler` answers requests for keys and items of `store`, and keeps requests that wait.

    `outgoing` holds the sessions that have answers to send; the service sends them. A copy (`is_copy`) sends nothing:
    it replays the journal of another coordinator.
    """

    def __init__(self, store: KeyValueStore) -> None:
        self.store = store
        self.journal = Journal()
        self.is_copy = False
        self.outgoing: dict[ClientSession, None] = {}

    @abstractmethod
    def _handle(self, session: ClientSession, message: WireMessage) -> bool:
        """Execute a message's request; return False if it is malformed."""

    def pop_outgoing(self) -> Iterator[tuple[ClientSession, list[Answer]]]:
        """Yield the answers to send, one session after another."""
        outgoing, self.outgoing = self.outgoing, {}
        for session in outgoing:
            answers, session.outgoing, session.outgoing_bytes = session.outgoing, [], 0
            if session.member is not None:
                answers.extend(session.member.unsent())
            if answers:
                yield session, answers

    def undelivered(self, session: ClientSession, answers: Iterable[Answer]) -> None:
        """Undo the effects of answers that did not reach the session."""
        for answer in answers:
            if not isinstance(answer, SharedAnswer):  # a request with a shared answer has popped nothing
                for message in unpack(answer):
                    if message.what == AnswerStatus.OK:
                        self.requeue_item(session, message.number)
        if session.member is not None:
            session.member.rewind(0)

    def requeue_item(self, session: ClientSession, number: int) -> None:
        """Put the item that a request has popped, if any, back into its queue; another request may wait for it."""
        popped = session.withdraw_item(number)
        if popped is not None:
            self.journal.add(EntryKind.UNPOP, session.route, number)
            session.forget_answer(number)
            self._wake(self.store.push_back(*popped))

    def requeue_answers(self, session: ClientSession, answers: list[Answer]) -> None:
        """Put back answers returned by `pop_outgoing` that could not be sent yet."""
        session.outgoing[:0] = answers
        session.outgoing_bytes += sum(map(len, answers))
        self.outgoing[session] = None

    def _park(self, session: ClientSession, message: WireMessage, waiter: Waiter) -> bool:
        self._check_room_to_park(session, len(waiter.keys))
        waiter.owner = (session, message)
        if not self.store.wait(waiter):
            return False
        session.parked[message.number] = waiter
        session.num_parked_keys += len(waiter.keys)
        return True

    def _check_room_to_park(self, session: ClientSession, num_keys: int) -> None:
        if self.is_copy:
            return
        if len(session.parked) >= MAX_PARKED or session.num_parked_keys + num_keys > MAX_PARKED_KEYS:
            raise RefusedError(f"{len(session.parked)} calls of this process already wait")

    def _unpark(self, session: ClientSession, number: int) -> Waiter | None:
        waiter = session.parked.pop(number, None)
        if waiter is not None:
            session.num_parked_keys -= len(waiter.keys)
            self.store.forget(waiter)
        return waiter

    def _unpark_repeatable(self, session: ClientSession) -> None:
        """Forget the waiting requests that the client will repeat. A barrier call stays: it would count twice."""
        for number, waiter in list(session.parked.items()):
            if waiter.owner[1].what != Op.BARRIER:
                self._unpark(session, number)

    def _wake(self, ready: list[Waiter]) -> None:
        for waiter in ready:
            session, message = waiter.owner
            self._unpark(session, message.number)
            if message.what == Op.BARRIER:  # its call was counted before it waited
                session.remember(message.number, answer := pack(AnswerStatus.OK, message.number))
                self._send(session, answer)
            else:
                self._handle(session, message)

    def _send(self, session: ClientSession, answer: Answer) -> None:
        if self.is_copy:
            return
        session.outgoing.append(answer)
        session.outgoing_bytes += len(answer)
        self.outgoing[session] = None

    # Request handlers.

    def _set(self, session: ClientSession, message: WireMessage) -> Answer:
        key, value = message.fields
        self._wake(self.store.set(key, value))
        return pack(AnswerStatus.OK, message.number)

    def _get(self, session: ClientSession, message: WireMessage) -> Answer | None:
        (key,) = message.fields
        value = self.store.get(key)
        if value is not None:
            is_long = len(value) > _LONG_BYTES
            return (SharedAnswer if is_long else pack)(AnswerStatus.OK, message.number, value)
        self._park(session, message, Waiter(session, (key,)))
        return None

    def _add(self, session: ClientSession, message: WireMessage) -> Answer:
        key, amount = message.fields
        total, ready = self.store.add(key, unpack_number(amount))
        self._wake(ready)
        return pack(AnswerStatus.OK, message.number, pack_number(total))

    def _add_items(self, session: ClientSession, message: WireMessage) -> Answer:
        counter, prefix, *values = message.fields
        first, ready = self.store.add_items(counter, prefix, values)
        self._wake(ready)
        return pack(AnswerStatus.OK, message.number, pack_number(first))

    def _compare_set(self, session: ClientSession, message: WireMessage) -> Answer:
        key, expected, desired = message.fields
        value, ready = self.store.compare_set(key, expected, desired)
        self._wake(ready)
        return pack(AnswerStatus.OK, message.number, value)

    def _append(self, session: ClientSession, message: WireMessage) -> Answer:
        key, value = message.fields
        self._wake(self.store.append(key, value))
        return pack(AnswerStatus.OK, message.number)

    def _check(self, session: ClientSession, message: WireMessage) -> Answer:
        return pack(AnswerStatus.OK, message.number, b"1" if self.store.has(message.fields) else b"0")

    def _wait(self, session: ClientSession, message: WireMessage) -> Answer | None:
        if self._park(session, message, Waiter(session, message.fields, accepts_queues=True)):
            return None
        return pack(AnswerStatus.OK, message.number)

    def _delete(self, session: ClientSession, message: WireMessage) -> Answer:
        (key,) = message.fields
        return pack(AnswerStatus.OK, message.number, b"1" if self.store.delete(key) else b"0")

    def _num_keys(self, session: ClientSession, message: WireMessage) -> Answer:
        return pack(AnswerStatus.OK, message.number, pack_number(len(self.store)))

    def _multi_get(self, session: ClientSession, message: WireMessage) -> Answer | None:
        values = [self.store.get(key) for key in message.fields]
        found = [value for value in values if value is not None]
        if len(found) < len(values):
            self._park(session, message, Waiter(session, message.fields))
            return None
        size = 0
        for at, value in enumerate(found):  # return as many values as fit: the client requests the rest
            size += len(value)
            if at and size > MAX_VALUE_BYTES:
                del found[at:]
                break
        return pack(AnswerStatus.OK, message.number, *found)

    def _multi_set(self, session: ClientSession, message: WireMessage) -> Answer:
        self._wake(self.store.multi_set(message.fields[::2], message.fields[1::2]))
        return pack(AnswerStatus.OK, message.number)

    def _queue_push(self, session: ClientSession, message: WireMessage) -> Answer:
        queue, value = message.fields
        self._wake(self.store.push(queue, value))
        return pack(AnswerStatus.OK, message.number)

    def _queue_pop(self, session: ClientSession, message: WireMessage) -> Answer | None:
        queue, block = message.fields
        item = self.store.pop(queue)
        if item is not None:
            session.record_popped(message.number, queue, item)
            return pack(AnswerStatus.OK, message.number, item)
        if block != b"1":
            return pack(AnswerStatus.EMPTY, message.number)
        self._park(session, message, Waiter(session, queue=queue))
        return None

    def _queue_len(self, session: ClientSession, message: WireMessage) -> Answer:
        (queue,) = message.fields
        return pack(AnswerStatus.OK, message.number, pack_number(self.store.queue_len(queue)))

    def _list_keys(self, session: ClientSession, message: WireMessage) -> Answer:
        (prefix,) = message.fields
        keys = self.store.keys(prefix)
        if len(keys) > MAX_FIELDS or sum(map(len, keys)) > MAX_VALUE_BYTES:
            raise RefusedError(f"{len(keys)} keys have this prefix: too many for one answer; use a longer prefix")
        return pack(AnswerStatus.OK, message.number, *keys)

    def _delete_prefix(self, session: ClientSession, message: WireMessage) -> Answer:
        (prefix,) = message.fields
        keys = self.store.keys(prefix)
        for key in keys:
            self.store.delete(key)
        return pack(AnswerStatus.OK, message.number, pack_number(len(keys)))

    def _barrier(self, session: ClientSession, message: WireMessage) -> Answer | None:
        key, size = message.fields[0], unpack_number(message.fields[1])
        self._check_room_to_park(session, 1)  # before the call is counted
        count, ready = self.store.add(key, 1)
        self._wake(ready)
        barrier = barrier_key(key)
        if count < size and self._park(session, message, Waiter(session, (barrier,), accepts_queues=True)):
            return None
        self._wake(self.store.release(barrier))
        return pack(AnswerStatus.OK, message.number)


def barrier_key(key: bytes) -> bytes:
    """Return the key on which callers of the barrier `key` wait. It is never set; `release` wakes them."""
    return b"\0barrier/" + key
