"""A `ZygoteProcess` is the agent's handle to the zygote: the child process, and the socket for messages."""

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
_MAX_SPARES = 20  # per zygote, because the cause of their deaths may persist


class Spare:
    """A `Spare` is a fork of the zygote that replaces a killed zygote. `pid` is 0 until the fork is reported."""

    def __init__(self, control: Channel) -> None:
        self.control = control
        self.pid = 0


class _ForkedProcess:
    """A child that this process did not start, with the methods of `subprocess.Popen` that a zygote needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            try:
                found, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # it was reaped elsewhere
                self.returncode = -signal.SIGKILL
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode

    def wait(self) -> int:
        code = self.poll(0)
        assert code is not None
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ZygoteProcess:
    """A `ZygoteProcess` sends commands to the zygote.

    No method blocks, except `wait_exit` and `restart`. Commands to a dead zygote do not raise; `control.gone` is set.
    """

    def __init__(
        self,
        plan: JobPlan,
        *,
        sessions: Sequence[int] = (),
        spare: Spare | None = None,
    ) -> None:
        """Start a zygote for the ranks of `plan`.

        Arguments:
            sessions: the sessions of earlier zygotes that still have live ranks.
            spare: the spare of the previous zygote, to be used instead of starting a process.
        """
        settings = plan.settings
        self.has_forked = False  # whether a fork was requested
        self._plan = plan
        self._preload = settings.preload and settings.target.kind != "program"
        # Ranks that train, or that may be restarted, need more modules, which the zygote imports once.
        self._warm = self._preload and (bool(settings.max_restarts) or may_train(settings.target))
        self._sent: list[dict[str, Any]] = []  # messages to repeat to a replacement of this zygote
        self._spare: Spare | None = None
        self._num_spares = 0
        self._process: subprocess.Popen[bytes] | _ForkedProcess
        self.was_spare = spare is not None
        if spare is not None:
            self.control, self._process = spare.control, _ForkedProcess(spare.pid)
            self.guard(sessions)
            return
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
            # Only a program runs there, to which the interpreter's flags do not apply.
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
        """Return a replacement of this zygote, which receives the same messages.

        The replacement is the spare, if there is one. `sessions` are the sessions that still have live ranks.

        Raises:
            OSError: no process could be started.
        """
        another = ZygoteProcess(self._plan, sessions=sessions, spare=self._release_spare())
        another._warm = self._warm
        for message in self._sent:
            another._send(message)
        return another

    def restart(self, plan: JobPlan) -> ZygoteProcess:
        """Kill this zygote, which has forked no ranks, and return a zygote for `plan`, whose environment differs.

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

    def keep_spare(self) -> None:
        """Have the zygote fork a spare, if it has none."""
        if self._spare is None and self._num_spares < _MAX_SPARES and not self.control.gone:
            self._num_spares += 1
            ours, theirs = socket.socketpair()
            self._spare = Spare(Channel(ours))
            with theirs:
                self.control.put({"command": "spare"}, [theirs.fileno()])

    def on_spare(self, pid: int) -> None:
        """Record the process of the spare; 0 means that it could not be forked, or has exited."""
        if pid and self._spare is not None:
            self._spare.pid = pid
        elif (spare := self._release_spare()) is not None:
            spare.control.close()

    def _release_spare(self) -> Spare | None:
        """Return the spare and transfer its ownership to the caller; None if there is none, or it has exited."""
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        spare.control.receive_available()  # the spare sends nothing: this only detects its exit
        if spare.pid and not spare.control.gone:
            return spare
        spare.control.close()
        return None

    def _send(self, message: dict[str, Any]) -> None:
        self._sent.append(message)
        self.control.put(message)

    def fork(self, setup: RankSetup, fds: Sequence[int]) -> None:
        """Fork a rank with the descriptors `fds`: stdout, stderr, reports, dump, stacks."""
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
        """Relay a signal that this process has received, unless every process of the job receives it.

        The zygote waits `delay_s` to detect whether it receives the signal itself. It sends an event `relay` for those
        of `ranks` that are not its children.
        """
        message = {"command": "relay", "signum": signum, "ranks": ranks, "group": group, "delay_s": delay_s}
        self.control.put(message)

    def sweep(self) -> None:
        """Have the zygote kill all its descendants; it then sends `swept`."""
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
        """Close the socket. `reaped` are the wait statuses of children that the caller has reaped."""
        self.on_spare(0)
        self.control.close()
        if self._process.returncode is None and self.pid in reaped:
            self._process.returncode = os.waitstatus_to_exitcode(reaped[self.pid])
