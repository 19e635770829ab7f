"""Write lines to the agent's own stdout and stderr without ever blocking the agent."""

from __future__ import annotations

import errno
import os
import select
import stat

from phalanx._job.output.logs import explain_gap

_PIECE_BYTES = 4096  # PIPE_BUF: when poll says that a pipe is writable, this much goes in without blocking


class Writer:
    """A writer is a queue of bytes in front of a descriptor that may be a terminal, a pipe or a file.

    The descriptor is shared with the user's shell, so it can't be made non-blocking; instead no more is written at
    a time than is certain not to block. Thus Ctrl-C works while a pager holds up the output.
    """

    LIMIT_BYTES = 1 << 20

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.broken = False  # its reader has gone
        self.problem: OSError | None = None  # why something could not be written that others later can
        self._gap = False
        self._queue = bytearray()

    @property
    def waiting(self) -> bool:
        """Return whether something is still to be written."""
        return bool(self._queue)

    @property
    def full(self) -> bool:
        """Return whether so much is waiting that nothing more should be read from the ranks."""
        return len(self._queue) > self.LIMIT_BYTES

    def put(self, data: bytes) -> None:
        """Queue `data`; it is dropped when the reader has gone."""
        if self.broken:
            return
        if self._gap and not self._queue:
            self._queue += explain_gap(self.problem)
        self._queue += data

    def write_some(self) -> None:
        """Write what fits without blocking."""
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        while self._queue and poll.poll(0):
            try:
                written = os.write(self.fd, self._queue[:_PIECE_BYTES])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EPIPE, errno.EIO) and not stat.S_ISREG(os.fstat(self.fd).st_mode):
                    self.broken = True  # EPIPE: the reader has gone; EIO: the terminal has
                else:
                    self.problem, self._gap = error, True  # a full disk may have room later
                self._queue.clear()
                return
            self._gap = False
            del self._queue[:written]
