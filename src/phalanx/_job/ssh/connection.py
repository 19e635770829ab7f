"""An `SshConnection` is one ssh process and the message channel through it to a host."""

from __future__ import annotations

import enum
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx._base.host_addresses import own_addresses
from phalanx._job.ssh.facts import Facts
from phalanx._job.ssh.host_list import LOCAL_NAMES, HostEntry
from phalanx._job.ssh.pipes import PipeChannel
from phalanx._job.ssh.remote_command import make_command

_MAX_STDERR_BYTES = 1 << 14
_EXIT_S = 0.5


class Phase(enum.Enum):
    """CHECKING -> READY -> RUNNING -> ENDED; any of the first three -> LOST.

    READY: the host has reported its facts. ENDED: the host's agent has exited, with an exit code.
    """

    CHECKING = "checking"
    READY = "ready"
    RUNNING = "running"
    ENDED = "ended"
    LOST = "lost"


def is_this_machine(entry: HostEntry) -> bool:
    """Return whether `entry` needs no ssh, because it is localhost or an address of this machine."""
    return entry.host in LOCAL_NAMES or entry.host in {own.address for own in own_addresses()}


class SshConnection:
    """An `SshConnection` starts ssh when it is constructed; `process` calls `on_message` and `on_lost`.

    The ssh process has its own session: Ctrl-C does not reach ssh, and ssh has no terminal for a prompt.
    """

    def __init__(
        self,
        entry: HostEntry,
        ssh: Sequence[str],
        python: str,
        on_message: Callable[[SshConnection, Mapping[str, Any]], object],
        on_lost: Callable[[SshConnection], object],
        may_read: Callable[[], bool],
    ) -> None:
        self.entry = entry
        self.phase = Phase.CHECKING
        self.facts: Facts | None = None
        self.port = 0  # on the first host, the port at which it answers the other hosts' reachability tests
        self.reached: dict[int, str] | None = None
        self.code: int | None = None
        self.agent = 0  # with --detach: the agent's pid on the host, once all its ranks have started
        self.is_detached = False
        self.agent_stderr = b""  # output of the agent on stderr that is not shown yet
        self.began = self.received_at = time.monotonic()
        self._on_message, self._on_lost = on_message, on_lost
        self._error_output = b""
        self.is_here = is_this_machine(entry)
        command = [python, "-m", "phalanx._job.ssh"]
        if not self.is_here:
            command = make_command(ssh, ("-T", "-o", "BatchMode=yes"), entry.destination, command)
        folder, pipe = "/" if self.is_here else None, subprocess.PIPE  # the ssh command may be a relative path
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=folder, start_new_session=True
        )
        fds = []
        for file in (self._process.stdout, self._process.stdin, self._process.stderr):
            assert file is not None
            fds.append(os.dup(file.fileno()))
            file.close()
        self._stderr = fds.pop()
        os.set_blocking(self._stderr, False)
        self._channel = PipeChannel(*fds, marks=False)
        self._source = self._channel.make_source(self._receive, may_read)

    @property
    def name(self) -> str:
        return self.entry.destination

    @property
    def error_output(self) -> str:
        """Return the stderr of ssh, or of the shell on the host."""
        return self._error_output.decode(errors="replace").strip()

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of ssh, or of the command on the host; None while it runs."""
        return self._process.poll()

    @property
    def is_open(self) -> bool:
        return self.phase not in (Phase.ENDED, Phase.LOST)

    def put(self, do: str, **fields: Any) -> None:
        self._channel.put(do, **fields)

    @property
    def readable(self) -> tuple[int, ...]:
        """Return the descriptors to read from."""
        return (*self._source.readable(), *((self._stderr,) if self._stderr >= 0 else ()))

    @property
    def writable(self) -> tuple[int, ...]:
        """Return the descriptors to write to as soon as they accept data."""
        return tuple(self._source.writable())

    def process(self, ready: set[int]) -> None:
        """Read from and write to the descriptors in `ready`; detect the end of the connection."""
        self._source.handle(ready)
        self._read_stderr(ready)
        if self.is_open and self._channel.is_at_end:
            self.lose()

    def _receive(self, message: Mapping[str, Any]) -> None:
        self.received_at = time.monotonic()
        self._on_message(self, message)

    def _read_stderr(self, ready: set[int]) -> None:
        if self._stderr not in ready or self._stderr < 0:
            return
        try:
            data = os.read(self._stderr, _MAX_STDERR_BYTES)
        except BlockingIOError:
            return
        self._error_output = (self._error_output + data)[-_MAX_STDERR_BYTES:]
        if not data:
            os.close(self._stderr)
            self._stderr = -1

    def lose(self) -> None:
        """Close the connection, because it is broken or was silent for too long."""
        self._channel.close()
        self._wait_process(_EXIT_S)
        # Read only once: a ControlMaster process that ssh has left behind may keep the other end open.
        self._read_stderr({self._stderr})
        self.phase = Phase.LOST
        self._on_lost(self)

    def close(self, limit_s: float) -> None:
        """Close the connection, which ends the job on the host, and wait up to `limit_s` for ssh to exit.

        A detached job continues; ssh would wait for the job, and is terminated. On this machine there is no ssh.
        """
        self._channel.close()
        if self.is_detached and not self.is_here:
            self._process.terminate()
        if not (self.is_detached and self.is_here):
            self._wait_process(max(0.0, limit_s))
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1

    def _wait_process(self, limit_s: float) -> None:
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
