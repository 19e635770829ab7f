"""A `Standby` keeps a copy of another host's coordinator, with all granted changes, so that it can take over.

    the coordinator ──the whole state, then its changes──► thread ──► copy
                  ◄────────FOLLOWED: the last batch here─────┘

After an interruption the whole state is sent again; until it has arrived, the standby keeps the old copy.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import zmq

from phalanx._base.ipc.wakeup import Wakeup
from phalanx._comm.control.connection_guard import cut
from phalanx._comm.control.dealer import EPOCH_BYTES, EVENTS, open_dealer
from phalanx._comm.control.key import Key
from phalanx._comm.control.wire import AnswerStatus, Op, WireError, WireMessage, pack, unpack
from phalanx._job.coordinator.coordinator import Coordinator
from phalanx._job.coordinator.journal import unpack_entries

_NOBLOCK, _POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)
_AGAIN_S = 0.5  # a missing part of the state is requested again after this time


class Standby:
    """A `Standby` is a thread that follows the coordinator at `endpoint` until `stop`.

    Arguments:
        ticket: identifies this standby at the coordinator.
        on_whole: called once, in the thread, when the whole state has arrived.
    """

    def __init__(self, endpoint: str, key: Key | None, ticket: bytes, on_whole: Callable[[], object]) -> None:
        self._ticket = ticket
        self._on_whole = on_whole
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._dealer = open_dealer(self._context, key)
        self._monitor = self._dealer.get_monitor_socket(EVENTS)
        self._dealer.connect(endpoint)
        self._wakeup = Wakeup()
        self._copy: Coordinator | None = None
        self._next_copy: Coordinator | None = None  # the copy that is being received
        self._expected = 1  # the number of the next message; 0: a part is missing
        self._asked_at = 0.0
        self._was_connected = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="phalanx-standby", daemon=True)
        self._thread.start()

    def stop(self) -> Coordinator | None:
        """Stop following; return the copy, or None if there is no complete one. A second call returns the same."""
        if not self._stopping:
            self._stopping = True
            self._wakeup.ring()
            self._thread.join()
            self._wakeup.close()
        return self._copy

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (self._dealer, self._monitor, self._wakeup):
            poller.register(each, _POLLIN)
        try:
            self._ask()
            while not self._stopping:
                ready = {each for each, _ in poller.poll(int(_AGAIN_S * 1000))}
                if self._monitor in ready:
                    self._read_events()
                if self._dealer in ready:
                    self._read()
                if not self._expected and time.monotonic() - self._asked_at > _AGAIN_S:
                    self._ask()
        finally:
            self._dealer.disable_monitor()
            self._monitor.close(0)
            self._context.destroy(linger=0)

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        self._put(pack(Op.FOLLOW, 0, self._ticket))

    def _put(self, message: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # the connection is interrupted: `_read_events` asks again once it is back
            self._dealer.send_multipart(cut(message), _NOBLOCK)

    def _read_events(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = int.from_bytes(self._monitor.recv_multipart(_NOBLOCK)[0][:2], "little")
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    if self._was_connected:  # reconnected: messages in flight are lost
                        self._ask()
                    self._was_connected = True

    def _read(self) -> None:
        followed = b""
        with contextlib.suppress(zmq.Again):
            while True:
                frame = b"".join(self._dealer.recv_multipart(_NOBLOCK))
                try:
                    for message in unpack(frame[EPOCH_BYTES:]):
                        if message.what == AnswerStatus.JOURNAL:
                            followed = self._replay(message) or followed
                except (WireError, IndexError):
                    self._expected, self._next_copy = 0, None
        if followed:
            self._put(pack(Op.FOLLOWED, 0, self._ticket, followed))

    def _replay(self, message: WireMessage) -> bytes:
        """Apply a message; return the number of the batch that the message ends, or b"" if more messages follow."""
        _, number, (batch, entries) = message
        if number == 1:
            self._next_copy, self._expected = Coordinator(), 1
        copy = self._next_copy or self._copy
        if copy is None or number != self._expected:
            self._expected, self._next_copy = 0, None
            return b""
        self._expected += 1
        now = time.monotonic()
        for entry in unpack_entries(entries):
            copy.replay(entry, now)
        if batch and copy is self._next_copy:
            is_first = self._copy is None
            self._copy, self._next_copy = copy, None
            if is_first:
                self._on_whole()
        return batch
