"""A network between clients and a coordinator that a test can cut."""

import contextlib
import select
import socket
import threading


class Cable:
    """A TCP relay in front of a coordinator, that can be cut: every connection ends, in the middle of what it says."""

    def __init__(self, port):
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs = {}
        self._num_doomed = 0
        self._doomed = {}  # how much of a greeting the coordinator's end has yet to say
        self._commands, self._command = socket.socketpair()
        self._done = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="cable")
        self._thread.start()

    def cut(self):
        self._command.send(b"c")
        self._done.acquire()

    def spoil(self, number):
        """Cut each of the next connections in the middle of its handshake."""
        self._num_doomed = number

    def close(self):
        self._command.send(b"x")
        self._thread.join()
        for end in (self._listener, self._commands, self._command):
            end.close()

    def _run(self):
        while True:
            ready, _, _ = select.select([self._listener, self._commands, *self._pairs], [], [])
            if self._commands in ready:
                word = self._commands.recv(1)
                for end in self._pairs:
                    end.close()
                self._pairs.clear()
                if word == b"x":
                    return
                self._done.release()
                continue
            for end in ready:
                if end is self._listener:
                    near, _ = end.accept()
                    try:
                        far = socket.create_connection(self._target)
                    except OSError:
                        near.close()
                        continue
                    self._pairs.update({near: far, far: near})
                    if self._num_doomed:
                        self._num_doomed -= 1
                        self._doomed[far] = 64
                elif end in self._pairs:
                    with contextlib.suppress(OSError):
                        if data := end.recv(1 << 16):
                            self._pairs[end].sendall(data)
                            if end not in self._doomed:
                                continue
                            self._doomed[end] -= len(data)
                            if self._doomed[end] > 0:
                                continue
                    self._doomed.pop(end, None)
                    other = self._pairs.pop(end)
                    self._pairs.pop(other, None)
                    end.close()
                    other.close()
