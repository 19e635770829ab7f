"""Answer requests for keys and queues in the coordinator: as c10d's Store has them, and a few more.

Each method returns its answer, or None where the request waits.
"""

from __future__ import annotations

from phalanx._comm.control.wire import MAX_FIELDS, MAX_VALUE_BYTES, Message, Status, pack, pack_number, unpack_number
from phalanx._job.coordinator.key_value import RefusedError, Waiter
from phalanx._job.coordinator.pending_answers import PendingAnswers
from phalanx._job.coordinator.session import Answer, Session, SharedAnswer

_LONG_BYTES = 1 << 14  # a value that is longer is not copied for each who asks: thousands may wait for one


class StoreRequests(PendingAnswers):
    """`StoreRequests` answers a session's requests for what is in `store`."""

    def _set(self, session: Session, message: Message) -> Answer:
        key, value = message.fields
        self._wake(self.store.set(key, value))
        return pack(Status.OK, message.number)

    def _get(self, session: Session, message: Message) -> Answer | None:
        (key,) = message.fields
        value = self.store.get(key)
        if value is not None:
            is_long = len(value) > _LONG_BYTES
            return (SharedAnswer if is_long else pack)(Status.OK, message.number, value)
        self._park(session, message, Waiter(session, (key,)))
        return None

    def _add(self, session: Session, message: Message) -> Answer:
        key, amount = message.fields
        total, ready = self.store.add(key, unpack_number(amount))
        self._wake(ready)
        return pack(Status.OK, message.number, pack_number(total))

    def _add_items(self, session: Session, message: Message) -> Answer:
        counter, prefix, *values = message.fields
        first, ready = self.store.add_items(counter, prefix, values)
        self._wake(ready)
        return pack(Status.OK, message.number, pack_number(first))

    def _compare_set(self, session: Session, message: Message) -> Answer:
        key, expected, desired = message.fields
        value, ready = self.store.compare_set(key, expected, desired)
        self._wake(ready)
        return pack(Status.OK, message.number, value)

    def _append(self, session: Session, message: Message) -> Answer:
        key, value = message.fields
        self._wake(self.store.append(key, value))
        return pack(Status.OK, message.number)

    def _check(self, session: Session, message: Message) -> Answer:
        return pack(Status.OK, message.number, b"1" if self.store.has(message.fields) else b"0")

    def _wait(self, session: Session, message: Message) -> Answer | None:
        if self._park(session, message, Waiter(session, message.fields, takes_queues=True)):
            return None
        return pack(Status.OK, message.number)

    def _delete(self, session: Session, message: Message) -> Answer:
        (key,) = message.fields
        return pack(Status.OK, message.number, b"1" if self.store.delete(key) else b"0")

    def _num_keys(self, session: Session, message: Message) -> Answer:
        return pack(Status.OK, message.number, pack_number(len(self.store)))

    def _multi_get(self, session: Session, message: Message) -> Answer | None:
        values = [self.store.get(key) for key in message.fields]
        found = [value for value in values if value is not None]
        if len(found) < len(values):
            self._park(session, message, Waiter(session, message.fields))
            return None
        size = 0
        for at, value in enumerate(found):  # the first ones, as many as fit: the client asks for the rest
            size += len(value)
            if at and size > MAX_VALUE_BYTES:
                del found[at:]
                break
        return pack(Status.OK, message.number, *found)

    def _multi_set(self, session: Session, message: Message) -> Answer:
        self._wake(self.store.multi_set(message.fields[::2], message.fields[1::2]))
        return pack(Status.OK, message.number)

    def _queue_push(self, session: Session, message: Message) -> Answer:
        queue, value = message.fields
        self._wake(self.store.push(queue, value))
        return pack(Status.OK, message.number)

    def _queue_pop(self, session: Session, message: Message) -> Answer | None:
        queue, block = message.fields
        item = self.store.pop(queue)
        if item is not None:
            session.note_popped(message.number, queue, item)
            return pack(Status.OK, message.number, item)
        if block != b"1":
            return pack(Status.EMPTY, message.number)
        self._park(session, message, Waiter(session, queue=queue))
        return None

    def _queue_len(self, session: Session, message: Message) -> Answer:
        (queue,) = message.fields
        return pack(Status.OK, message.number, pack_number(self.store.queue_len(queue)))

    def _list_keys(self, session: Session, message: Message) -> Answer:
        (prefix,) = message.fields
        keys = self.store.keys(prefix)
        if len(keys) > MAX_FIELDS or sum(map(len, keys)) > MAX_VALUE_BYTES:
            raise RefusedError(f"{len(keys)} keys start so: too many for one answer; ask with a longer prefix")
        return pack(Status.OK, message.number, *keys)

    def _delete_prefix(self, session: Session, message: Message) -> Answer:
        (prefix,) = message.fields
        keys = self.store.keys(prefix)
        for key in keys:
            self.store.delete(key)
        return pack(Status.OK, message.number, pack_number(len(keys)))

    def _barrier(self, session: Session, message: Message) -> Answer | None:
        key, size = message.fields[0], unpack_number(message.fields[1])
        self._check_room_to_park(session, 1)  # before it is counted
        count, ready = self.store.add(key, 1)
        self._wake(ready)
        barrier = barrier_key(key)
        if count < size and self._park(session, message, Waiter(session, (barrier,), takes_queues=True)):
            return None
        self._wake(self.store.release(barrier))
        return pack(Status.OK, message.number)


def barrier_key(key: bytes) -> bytes:
    """Return a key that never comes, for which the callers of the barrier `key` wait."""
    return b"\0barrier/" + key
