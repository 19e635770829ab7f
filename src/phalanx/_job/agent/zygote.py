"""The zygote is the process that imports torch once and forks the ranks.

    agent ──control socket──▶ zygote ──fork──▶ rank 0, 1, 2 …        (each becomes `python script.py`)

The zygote has no CUDA context (if an import creates one, the zygote restarts without that import), has no other Python
thread when it forks, and never runs user code. It adopts all orphans among its descendants. When the agent's end of the
socket closes, for any reason, the zygote kills all its descendants and exits. When the zygote dies, the kernel kills
the ranks (by their parent-death signal), and the agent adopts and kills their children.

A signal may be sent to the agent alone (`docker stop`, Ctrl-C) or to every process of the job (systemd, `scancel`). The
zygote survives the signal, and so can distinguish the two: nobody signals the zygote alone. It relays the agent's
signal, unless it receives the same signal itself, because then the ranks do, too.

A rank is identified by its slot, the rank it was started with. In an elastic job the replacement of a lost rank has the
same slot, and the ranks survive the zygote: the agent adopts them, and a new zygote forks later ranks.

Commands:  target {target, local_rank_flag, folder}: what the ranks run; sent once, before the first fork;
           fork {setup: {rank, environment, cpus}}, with descriptors stdout, stderr, reports, dump, stacks;
           signal {signum, ranks, group};  sweep;
           relay {signum, ranks, group, delay_s}: send the agent's signal, unless the zygote receives it itself;
           elastic {rank}: the job survives the loss of this rank; kill the rest of its process group when it fails;
           warm: import the modules for training;
           guard {sessions}: the sessions of earlier zygotes, to be killed as well when the agent has exited;
           membership {membership}: to notify the first host if the agent is killed;
Events:    started {rank, pid};  unforked {rank, errno};  exit {rank, pid, status, at};  swept;
           relay {signum, ranks, group}: send the signal to these ranks, which the zygote has not forked
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from phalanx._base.ipc.channel import Channel
from phalanx._base.ipc.signals import caught_signals, read_signals
from phalanx._base.loss_detection import SAME_SIGTERM_S
from phalanx._base.processes import (
    RELAYED_SIGNALS,
    adopt_orphans,
    blocked_signals,
    die_with_parent,
    kill_descendants,
    kill_sessions,
    outlive_parent,
    reap_children,
    signal_children,
)
from phalanx._job.agent.cuda_context import close_devices, describe, find_own_cuda_use
from phalanx._job.agent.folder import remove
from phalanx._job.agent.target import JobTarget, RankSetup
from phalanx._job.agent.title import set_command
from phalanx._job.agent.worker import Assignment, fill_in_local_rank, run_worker
from phalanx._job.agent.zygote_command import plan_zygote_code

# The modules that a rank imports to train. Importing the first takes half a second or more, and every torch optimizer
# needs it. If the zygote did not import it, the other ranks would wait while a replacement does.
_TRAINING_MODULES = (
    "torch._dynamo", "torch.nn.parallel.distributed", "torch.utils.data", "phalanx.ddp.module", "phalanx.data.sampler",
    "phalanx.optim.zero", "phalanx.elastic.run",
)  # fmt: skip


def main(
    control: int,
    agent: int,
    preload: bool,
    warm: bool = False,
    sessions: Sequence[int] = (),
    reports_death: bool = False,
) -> None:
    """Serve the agent on descriptor `control` until the agent exits; return only in a rank, when its script has ended.

    Arguments:
        warm: also import the modules for training.
        sessions: the sessions of earlier zygotes that still have live ranks.
        reports_death: if the agent is killed, even during the import of torch, notify the first host.
    """
    # Nothing polls the socket during the import of torch. If there are no old sessions to kill, and no first host to
    # notify, the parent-death signal is enough.
    if not sessions and not reports_death:
        die_with_parent(agent)
    adopt_orphans()
    set_command([sys.executable, f"(phalanx run {agent}: the zygote, which forks the ranks)"])
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until a rank runs its script, Ctrl-C kills it without a traceback of ours. Python's handler would only set a
        # flag, which is lost when a rank executes a program.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # imported objects stay alive: collecting garbage would only take time
    if preload:
        _import_torch()
    if use := find_own_cuda_use():
        print(describe(use, preloads=preload), file=sys.stderr, flush=True)
        if preload:
            _restart(control, agent, sessions, reports_death, preload=False)
    elif warm:
        _import_for_training()
        if find_own_cuda_use():  # then each rank imports these modules itself, as under any other launcher
            _restart(control, agent, sessions, reports_death, preload=preload)
    gc.freeze()  # so that the ranks' garbage collection does not copy the shared pages
    gc.enable()
    assignment = _Zygote(Channel(socket.socket(fileno=control)), agent, sessions).serve(reports_death=reports_death)
    run_worker(assignment)


def _restart(control: int, agent: int, sessions: Sequence[int], reports_death: bool, *, preload: bool) -> None:
    """Restart this zygote with fewer imports: forks of a process with CUDA initialised cannot use a GPU."""
    close_devices()
    own, room = sys.orig_argv.index("-c"), sys.orig_argv[-1]
    code = plan_zygote_code(control, agent, preload=preload, warm=False, sessions=sessions, reports_death=reports_death)
    os.execv(sys.executable, [*sys.orig_argv[:own], "-c", code, room])


def _import_torch() -> None:
    """Import torch and our backend for the ranks."""
    importing = threading.Thread(target=_import_numpy, name="phalanx-numpy")
    importing.start()
    try:
        _load_torch_library()
        import torch  # noqa: F401

        import phalanx._comm.backend.preloaded  # noqa: F401
        from phalanx._comm.backend.torch_integration.launched_rank import patch_launched_rank

        patch_launched_rank()
    except Exception:
        pass  # a script without torch needs none; a script with torch fails at its own import, which reports the error
    finally:
        importing.join()  # nothing may be forked while a thread runs


def _import_for_training() -> None:
    before = set(os.environ)
    for name in _TRAINING_MODULES:
        try:
            importlib.import_module(name)
        except Exception:
            pass  # a script without torch needs none
    for name in os.environ.keys() - before:  # torch._dynamo sets its cache folder; it does so again in each rank
        del os.environ[name]


def _load_torch_library() -> None:
    """Load torch's largest library while another thread imports NumPy, which torch imports.

    The main thread loads it, because the library keeps that thread's identity: in another one torch.profiler prints an
    error.
    """
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        library = os.path.join(folder, "lib", "libtorch_cpu.so")
        if os.path.exists(library):
            try:
                ctypes.CDLL(library)
            except OSError:
                pass  # torch's own import loads it, or reports the error


def _import_numpy() -> None:
    if importlib.util.find_spec("torch"):
        with contextlib.suppress(Exception):  # torch does without it
            importlib.import_module("numpy")


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of threads that a library has started in C. Python's own threads have ended, and
        # `find_own_cuda_use` detects CUDA, which does not survive a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class _Zygote:
    def __init__(self, control: Channel, agent: int, sessions: Sequence[int]) -> None:
        self._control = control
        self._agent = agent
        self._sessions = tuple(sessions)  # the sessions of earlier zygotes
        self._elastic: set[int] = set()  # the processes of elastic ranks
        self._ranks: dict[int, int] = {}  # by process: its rank, until it is reaped
        self._target: JobTarget | None = None
        self._local_rank_flag = ""  # the option that passes the target its local rank
        self._folder = ""
        self._membership: dict[str, Any] = {}  # the agent's membership, in a job on several hosts
        self._caught = contextlib.ExitStack()  # while open, signals are read from a descriptor
        self._received: dict[int, float] = {}  # by signal: when this process last received it
        self._delayed: list[tuple[float, dict[str, Any]]] = []  # signals to relay, and when

    def serve(self, *, reports_death: bool = False) -> Assignment:
        """Serve the agent's commands; return only in a forked rank.

        `reports_death`: if the agent has been killed, still read its messages, which have the first host's address.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the agent may have inherited SIG_IGN
        signals = self._caught.enter_context(caught_signals([signal.SIGCHLD, *RELAYED_SIGNALS]))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, RELAYED_SIGNALS)
        outlive_parent()
        if not reports_death and os.getppid() != self._agent:  # the agent died before `outlive_parent`
            kill_sessions(self._sessions)
            os._exit(1)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(signals, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll(self._wait_ms())]
            # Read signals even if poll() has reported none: a signal sent before a command must be processed first.
            for number in read_signals(signals):
                self._on_signal(number)
            self._relay_due()
            if self._control.fileno() in ready:
                # Receive one message at a time: a forked rank would inherit the descriptors of later messages.
                for message in self._control.receive_available(limit=1):
                    assignment = self._execute(message.content, message.fds)
                    if assignment is not None:
                        return assignment
                if self._control.gone:
                    self._end_with_agent()

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
            return
        self._received[number] = time.monotonic()
        self._delayed = [delayed for delayed in self._delayed if delayed[1]["signum"] != number]

    def _delay(self, message: dict[str, Any]) -> None:
        """Delay a signal that the agent has received; drop the signal if this process has received it, too."""
        now = time.monotonic()
        at = self._received.get(message["signum"])
        if at is None or now > at + SAME_SIGTERM_S:
            self._delayed.append((now + message["delay_s"], message))

    def _wait_ms(self) -> int | None:
        """Return how many milliseconds to wait for an event; None for no limit."""
        due = min((at for at, _ in self._delayed), default=None)
        return None if due is None else max(0, math.ceil((due - time.monotonic()) * 1000))

    def _relay_due(self) -> None:
        now = time.monotonic()
        due = [message for at, message in self._delayed if at <= now]
        self._delayed = [delayed for delayed in self._delayed if delayed[0] > now]
        for message in due:
            self._send_signal(message)
            others = [rank for rank in message["ranks"] if rank not in self._ranks.values()]
            if others:
                event = {"signum": message["signum"], "ranks": others, "group": message["group"]}
                self._send_event({"event": "relay", **event})

    def _send_signal(self, message: dict[str, Any]) -> None:
        named = [pid for pid, rank in self._ranks.items() if rank in message["ranks"]]
        signal_children(named, message["signum"], group=message["group"])

    def _end_with_agent(self) -> NoReturn:
        """Kill all ranks and exit, because the agent has exited."""
        kill_sessions(self._sessions)
        kill_descendants(list(self._ranks))
        if self._folder:
            remove(self._folder)  # the agent removes it itself unless it was killed
        if self._membership:
            self._notify_first_host()
        os._exit(0)

    def _execute(self, message: dict[str, Any], fds: Sequence[int]) -> Assignment | None:
        command = message["command"]
        if command == "target":
            target = message["target"]
            self._target = JobTarget(target["kind"], target["name"], tuple(target["arguments"]))
            self._local_rank_flag, self._folder = message["local_rank_flag"], message["folder"]
            if self._target.kind != "program":
                from multiprocessing import process  # noqa: F401  once for all ranks, which set its folder
        elif command == "membership":
            self._membership = message["membership"]
        elif command == "warm":
            _import_for_training()
            gc.freeze()
        elif command == "guard":
            self._sessions = tuple(message["sessions"])
        elif command == "elastic":
            self._elastic |= {pid for pid, rank in self._ranks.items() if rank == message["rank"]}
        elif command == "signal":
            self._send_signal(message)
        elif command == "relay":
            self._delay(message)
        elif command == "sweep":
            self._report_exits(kill_descendants(list(self._ranks)))
            self._send_event({"event": "swept"})
        elif command == "fork":
            # Signals stay pending in the child until it has set its own handlers.
            with blocked_signals(RELAYED_SIGNALS):
                return self._fork(message, fds)
        return None

    def _notify_first_host(self) -> None:
        """Notify the first host that the agent was killed."""
        try:
            from phalanx._job.agent.orphaned import notify_first_host

            notify_first_host(self._membership, self._agent)
        except Exception:
            pass  # the first host detects the loss by a timeout

    def _fork(self, message: dict[str, Any], fds: Sequence[int]) -> Assignment | None:
        """Fork one rank; return its assignment in the child, None in the zygote."""
        setup, parent = RankSetup(**message["setup"]), os.getpid()
        try:
            pid = _fork()
        except OSError as error:
            for fd in fds:
                os.close(fd)
            self._send_event({"event": "unforked", "rank": setup.rank, "errno": error.errno})
            return None
        if pid == 0:
            self._undo_setup()
            stdout, stderr, reports, dump, stacks = fds
            assert self._target is not None
            target = fill_in_local_rank(self._target, setup.environment["LOCAL_RANK"], self._local_rank_flag)
            return Assignment(stdout, stderr, reports, dump, stacks, parent, setup, target, self._folder)
        self._ranks[pid] = setup.rank
        for fd in fds:
            os.close(fd)
        try:
            os.setpgid(pid, pid)  # the rank does this, too: signals must reach the group from now on
        except OSError:
            pass  # it has exited, or already runs another program
        self._send_event({"event": "started", "rank": setup.rank, "pid": pid})
        return None

    def _undo_setup(self) -> None:
        """Undo, in the child, the setup that made this process a zygote."""
        self._caught.close()
        self._control.close()

    def _reap(self) -> None:
        # Report before reaping: if this process is killed in between, the agent adopts the rank, and reports it again.
        for pid, status in reap_children():
            if pid in self._elastic and status != 0:  # its children (DataLoader workers) must not outlive it
                signal_children([pid], signal.SIGKILL, group=True)
            self._report_exit(pid, status)

    def _report_exits(self, exits: dict[int, int]) -> None:
        for pid, status in exits.items():
            self._report_exit(pid, os.waitstatus_to_exitcode(status))

    def _report_exit(self, pid: int, status: int) -> None:
        rank = self._ranks.pop(pid, None)  # None for an adopted orphan
        self._elastic.discard(pid)
        if rank is not None:
            self._send_event({"event": "exit", "rank": rank, "pid": pid, "status": status, "at": time.monotonic()})

    def _send_event(self, event: dict[str, Any]) -> None:
        try:
            self._control.send(event)
        except OSError:
            pass  # the agent has exited; the next receive detects this
