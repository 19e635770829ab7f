"""Open a local socket at which this user's processes on this host reach the coordinator or a relay."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile

import zmq

from phalanx._base.ipc.private import new_listener

BACKLOG = 4096


class LocalSocket:
    """A `LocalSocket` is a Unix socket at which `router` listens; on Linux a killed process leaves no file behind.

    Clients need no key: on Linux the kernel identifies the connecting user; elsewhere only this user can access the
    socket's directory.
    """

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self._folder, self._path_fd = "", -1
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if sys.platform == "linux":
                listener, self._path_fd = new_listener(BACKLOG)
                undo.enter_context(listener)
                self.path = f"/proc/{os.getpid()}/fd/{self._path_fd}"
                router.use_fd = listener.fileno()
                router.set(zmq.IPC_FILTER_UID, os.getuid())
                router.bind(f"ipc://{self.path}")
                listener.detach()  # ZeroMQ owns the descriptor only after `bind` has returned
            else:
                self._folder = tempfile.mkdtemp(prefix="phalanx-", dir="/tmp")  # 0700; a socket's path must be short
                self.path = os.path.join(self._folder, "coordinator")
                router.bind(f"ipc://{self.path}")
            undo.pop_all()

    def close(self) -> None:
        """Close the socket. A second call does nothing."""
        if self._path_fd != -1:
            os.close(self._path_fd)
            self._path_fd = -1
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""
