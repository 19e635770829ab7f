"""`AgentChannel` connects a rank to the agent of `phalanx run`, which decides who is in each generation."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from typing import Any

from phalanx._base.deadline import Deadline
from phalanx._base.descriptors import wait_readable
from phalanx._base.ipc.agent import connect, split
from phalanx._base.loss_detection import SILENT_AGENT_S
from phalanx.elastic.generations import GenerationNotice, JobEndedError, LeaveError, NoGenerationError, RankLoss
from phalanx.errors import DeadlineError, PhalanxError

_ENDS = ("end", "no generation", "leave")
_CONNECT_TIMEOUT_S = 30.0
_RETRY_AFTER_S = 0.01
_POLL_EVERY_S = 0.02  # how often a commit checks for messages
_REQUEST_EVERY_S = 5.0  # how often the rank asks the agent for the next generation


class AgentChannel:
    """`AgentChannel` implements `Generations` with messages to and from the agent of this host.

    Only the main thread uses it. Once connected, only a recovery waits for messages.
    """

    def __init__(self, agent: str, rank: int, generation: int, *, min_ranks: int, wait_s: float) -> None:
        name, token = split(agent)
        self._arrived: deque[dict[str, Any]] = deque()
        self._next_poll = 0.0
        self._pid = os.getpid()
        hello = {
            "kind": "elastic",
            "token": token,
            "rank": rank,
            "pid": self._pid,
            "generation": generation,
            "min_ranks": min_ranks,
            "wait_s": wait_s,
        }
        deadline = Deadline.after(_CONNECT_TIMEOUT_S)
        while not self._connect(name, hello, deadline):
            if deadline.passed:
                raise ConnectionError("the agent closed the connection")
            time.sleep(_RETRY_AFTER_S)

    def _connect(self, name: str, hello: dict[str, Any], deadline: Deadline) -> bool:
        """Return whether the agent accepted the connection; an agent with too many connections closes it.

        Raises:
            OSError: there is no agent, it does not answer, or it refuses.
        """
        self._channel = connect(name, max(deadline.left_s, 0.001))
        try:
            self._send(**hello)
            if self._wait_accepted(deadline):
                return True
        except ConnectionResetError:
            pass
        except BaseException:
            self._channel.close()
            raise
        self._channel.close()
        return False

    def _wait_accepted(self, deadline: Deadline) -> bool:
        message = self._channel.receive(deadline)
        if message is None:
            return False
        if message.fds and outlive_zygote(message.fds[0]):
            self._send(kind="outlives")
        if message.content.get("kind") == "refused":
            raise ConnectionRefusedError(str(message.content.get("why", "")))
        return True

    # -- messages to the agent -----------------------------------------------------------------------------------

    def _send(self, **message: Any) -> None:
        if os.getpid() == self._pid:  # a forked child of the rank sends nothing
            with contextlib.suppress(OSError):  # the agent has exited, so the kernel is about to kill this process
                self._channel.send(message)

    def _request_generation(self, after: int) -> None:
        """Ask the agent for the next generation, unless the agent has stopped reading."""
        if not self._channel.waiting:
            self._channel.put({"kind": "waiting", "generation": after})

    @property
    def _agent_pid(self) -> int:
        return self._channel.peer.pid

    def report(self, loss: RankLoss) -> None:
        self._send(
            kind="lost",
            generation=loss.generation,
            ranks=list(loss.ranks),
            step=loss.step,
            error=loss.error[:2000],
            disagrees=loss.disagrees,
        )

    def regrouped(self, number: int) -> None:
        """Report that this rank has joined the group of generation `number`, and holds the state."""
        self._send(kind="regrouped", generation=number)

    def failed(self, step: int, error: str) -> None:
        self._send(kind="failed", step=step, error=error[:2000])

    def finished(self) -> None:
        self._send(kind="finished")

    def close(self) -> None:
        self._channel.close()

    # -- messages from the agent ---------------------------------------------------------------------------------

    def next_generation(self, after: int, timeout_s: float) -> GenerationNotice:
        """Wait for a generation later than `after`, asking the agent repeatedly, and return the latest one.

        Raises:
            JobEndedError: there will be no later generation, and this rank should save its state.
            LeaveError: the next generation does not include this rank.
            NoGenerationError: there will be no later generation, and this rank fails with the loss that it reported.
            DeadlineError: the agent does not answer.
            PhalanxError: the agent has exited.
        """
        limit_s = max(timeout_s, SILENT_AGENT_S)
        deadline = Deadline.after(limit_s)
        while True:
            self._receive(wait_s=0.0)
            if (latest := self._latest(after)) is not None:
                return latest
            if self._receive(wait_s=min(_REQUEST_EVERY_S, deadline.left_s)):
                deadline = Deadline.after(limit_s)
            elif deadline.passed:
                raise DeadlineError(
                    f"phalanx.elastic, after generation {after}: this rank has left its group, and `phalanx run` on "
                    f"{socket.gethostname()} (pid {self._agent_pid}), which starts the next generation, has not "
                    f"answered within {limit_s:g} s.\nCheck whether that process is stopped, or the host is overloaded."
                )
            else:
                self._request_generation(after)

    def newer_than(self, number: int) -> bool:
        now = time.monotonic()
        if now < self._next_poll and not self._arrived:
            return False
        self._next_poll = now + _POLL_EVERY_S
        self._receive(wait_s=0.0)
        if not self._arrived:
            return False
        return any(m["kind"] in _ENDS or int(m.get("generation", 0)) > number for m in self._arrived)

    def _latest(self, after: int) -> GenerationNotice | None:
        latest = None
        for message in self._arrived:
            if message.get("kind") == "end":
                raise JobEndedError(str(message.get("why", "")), exit_code=int(message.get("code", 75)))
            if message.get("kind") == "leave":
                raise LeaveError("phalanx.elastic: the host of this rank is leaving the job")
            if message.get("kind") == "no generation":
                raise NoGenerationError(f"phalanx.elastic: the group is not formed again: {message.get('why', '')}")
            if message.get("kind") == "generation" and int(message["generation"]) > after:
                latest = GenerationNotice.of_message(message)
        if latest is not None:
            self._arrived.clear()
        return latest

    def _receive(self, *, wait_s: float) -> bool:
        """Read all messages that have arrived; return whether there were any."""
        has_come = False
        while wait_readable([self._channel], 0.0 if has_come else wait_s):
            for message in self._channel.receive_available():
                message.close()
                if message.content.get("kind") in ("generation", "joining", *_ENDS):
                    self._arrived.append(message.content)
            if self._channel.gone:
                if wait_s:
                    raise PhalanxError("elastic: the agent of this host has ended, so the group is not formed again")
                return has_come
            has_come = True
        return has_come


# Let a rank of an elastic job survive its zygote, and still die with its agent.
#
# The kernel kills a rank when its parent, the zygote, dies, so that no process is left behind. A rank that can continue
# without the zygote requests a signal on the agent's death instead. The agent owns the only write end of a pipe to
# which nothing is ever written, and sends the rank the read end. When the agent exits, for any reason, the kernel
# closes the write end, and sends the rank the signal, here SIGKILL. No code of the rank runs, so this works in a hang.

_PR_SET_PDEATHSIG = 1
_F_SETSIG = 10  # fcntl.F_SETSIG exists from Python 3.13 on


def outlive_zygote(pipe: int) -> bool:
    """Have the kernel kill this process when the owner of `pipe`'s write end exits, and no longer when its parent does.

    This process owns `pipe` from now on, and never closes it. Return False, with the parent-death signal unchanged, if
    the system has no such signal, or if the caller is not the main thread, to which the parent-death signal belongs.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return False
    try:
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        return False
    # Both death signals are requested now; if the agent has died before, the pipe is at end of file.
    os.set_blocking(pipe, False)
    try:
        if os.read(pipe, 1) == b"":
            os.kill(os.getpid(), signal.SIGKILL)
    except BlockingIOError:
        pass
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0) == 0)
