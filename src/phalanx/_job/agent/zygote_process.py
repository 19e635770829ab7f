"""A `ZygoteProcess` is the agent's handle to the zygote: the child process, and the socket to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from phalanx._base.ipc.channel import Channel
from phalanx._base.processes import RELAYED_SIGNALS, SUPPORTED, blocked_signals, has_working_directory
from phalanx._job.agent.environment import plan_zygote_environment
from phalanx._job.agent.plan import JobPlan
from phalanx._job.agent.target import RankSetup, find_local_rank_flag, may_train
from phalanx._job.agent.title import count_room
from phalanx._job.agent.zygote_command import plan_zygote_code

_MAX_ROOM = 1 << 14


class ZygoteProcess:
    """A `ZygoteProcess` sends commands to the zygote.

    No method blocks, except `wait_exit` and `restart`. Commands to a dead zygote do not raise; `control.gone` is set.
    """

    def __init__(
        self,
        plan: JobPlan,
        *,
        sessions: Sequence[int] = (),
    ) -> None:
        """Start a zygote for the ranks of `plan`.

        Arguments:
            sessions: the sessions of earlier zygotes that still have live ranks.
        """
        settings = plan.settings
        self.has_forked = False  # whether a fork was requested
        self._plan = plan
        self._preload = settings.preload and settings.target.kind != "program"
        # Ranks that train, or that may be restarted, need more modules, which the zygote imports once.
        self._warm = self._preload and (bool(settings.max_restarts) or may_train(settings.target))
        self._sent: list[dict[str, Any]] = []  # messages that a replacement of this zygote needs, too
        ours, theirs = socket.socketpair()
        self.control = Channel(ours)
        code = plan_zygote_code(
            theirs.fileno(),
            os.getpid(),
            preload=self._preload,
            warm=self._warm,
            sessions=sessions,
            reports_death=settings.rendezvous is not None,
        )
        # the ranks use this interpreter's flags, such as -O, -X and -W
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        if not has_working_directory() and sys.version_info >= (3, 11):
            # Python 3.13.0 looks for a missing attribute in the folder of `-c`, and dies if the folder was removed.
            # In a removed folder, only a program can be started, to which the interpreter's flags do not apply.
            flags.append("-P")
        # Reading a terminal would stop a rank, because its process group is in the background.
        stdin = subprocess.DEVNULL if os.isatty(0) else None
        with theirs, blocked_signals(RELAYED_SIGNALS):  # the zygote unblocks them once it handles them
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", code, " " * min(count_room(settings.target.command), _MAX_ROOM)],
                env=plan_zygote_environment(plan.environment, plan.pinning.threads),
                pass_fds=[theirs.fileno()],
                stdin=stdin,
                stdout=2,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def assign(self, folder: str) -> None:
        """Send the zygote the ranks' target and the job's temporary `folder`; call this once, before `fork`."""
        settings = self._plan.settings
        target = settings.target
        self._send(
            {
                "command": "target",
                "target": {"kind": target.kind, "name": target.name, "arguments": target.arguments},
                "local_rank_flag": find_local_rank_flag(target) if settings.local_rank_argument else "",
                "folder": folder,
            }
        )

    def start_another(self, sessions: Sequence[int]) -> ZygoteProcess:
        """Start a replacement of this zygote, send it the same messages, and return it.

        `sessions` are the sessions that still have live ranks.

        Raises:
            OSError: no process could be started.
        """
        another = ZygoteProcess(self._plan, sessions=sessions)
        for message in self._sent:
            another._send(message)
        if self._warm:
            another.warm_up()
        return another

    def restart(self, plan: JobPlan) -> ZygoteProcess:
        """Kill this zygote, which has forked no ranks, and start one for `plan`, whose environment differs; return it.

        Raises:
            OSError: no process could be started.
        """
        self.kill()
        self.wait_exit()
        self.control.close()
        another = ZygoteProcess(plan)
        for message in self._sent:
            another._send(message)
        return another

    def _send(self, message: dict[str, Any]) -> None:
        self._sent.append(message)
        self.control.put(message)

    def fork(self, setup: RankSetup, fds: Sequence[int]) -> None:
        """Have the zygote fork a rank with the descriptors `fds`: stdout, stderr, reports, dump, stacks."""
        self.has_forked = True
        self.control.put({"command": "fork", "setup": asdict(setup)}, fds)

    def send_membership(self, membership: Mapping[str, Any]) -> None:
        """Send the zygote the membership with which it notifies the first host if this process is killed."""
        self._send({"command": "membership", "membership": membership})

    def warm_up(self) -> None:
        """Have the zygote import the modules for training, so that a replacement starts sooner."""
        if self._preload and not self._warm:
            self._warm = True
            self.control.put({"command": "warm"})

    def continue_without(self, rank: int) -> None:
        """Have the zygote kill the process group of `rank` when the rank is lost, because the job continues."""
        self.control.put({"command": "elastic", "rank": rank})

    def guard(self, sessions: Sequence[int]) -> None:
        """Have the zygote kill the processes of these sessions when this process has exited."""
        self.control.put({"command": "guard", "sessions": list(sessions)})

    def signal(self, signum: int, ranks: Sequence[int], *, group: bool) -> None:
        self.control.put({"command": "signal", "signum": signum, "ranks": ranks, "group": group})

    def relay(self, signum: int, ranks: Sequence[int], *, group: bool, delay_s: float) -> None:
        """Have the zygote relay a signal that this process has received, unless the whole job receives it.

        The zygote waits `delay_s` to detect whether it receives the signal itself. It sends an event `relay` for those
        of `ranks` that are not its children.
        """
        message = {"command": "relay", "signum": signum, "ranks": ranks, "group": group, "delay_s": delay_s}
        self.control.put(message)

    def sweep(self) -> None:
        """Have the zygote kill all its descendants, and then send `swept`."""
        self.control.put({"command": "sweep"})

    def wake(self) -> None:
        """Send SIGCONT to the zygote, in case it was stopped."""
        self._process.send_signal(signal.SIGCONT)

    def was_stopped(self) -> bool:
        """Return whether the zygote has been stopped since the last call."""
        if not SUPPORTED or self._process.returncode is not None:
            return False
        try:
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG) is not None
        except ChildProcessError:
            return False

    def kill(self) -> None:
        """Kill the zygote, and with it the ranks, by their parent-death signal."""
        self._process.kill()

    def wait_exit(self) -> int:
        """Wait for the zygote, whose socket has closed; return its exit code, or minus the signal that killed it."""
        return self._process.wait()

    def close(self, reaped: Mapping[int, int]) -> None:
        """Close the socket. `reaped` are the wait statuses, by pid, of children that the caller has reaped."""
        self.control.close()
        if self._process.returncode is None and self.pid in reaped:
            self._process.returncode = os.waitstatus_to_exitcode(reaped[self.pid])
