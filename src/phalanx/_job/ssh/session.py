"""A `Session` is the host's end of an ssh connection: it checks the host, and runs the agent until the connection ends.

from the terminal                         to the terminal
  check   the job                           facts     the host's facts, and its address if it is the first
  reach   addresses of the first host       reached   the result of each
  start   the endpoint, the key             output    the agent's output
  signal, size, alive                       ended     the agent's exit code; alive
  detach  continue without the connection   started, detached

With --detach the agent writes its output to a file, `host-N.log` in --log-dir. The session stays the agent's parent
until the agent exits, and writes the exit code as the file's last line.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import sys
import termios
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, replace
from threading import Thread
from typing import Any, NoReturn

from phalanx._base.ipc.event_loop import EventLoop, Source
from phalanx._base.ipc.signals import caught_signals, read_signals
from phalanx._base.ipc.wakeup import Mailbox
from phalanx._base.processes import adopt_orphans, die_with_parent, kill_descendants
from phalanx._job.agent.plan import JobPlan, read_terminal_columns
from phalanx._job.coordinator.rendezvous import Rendezvous
from phalanx._job.hosts.reach import ReachTarget, Responder, try_all
from phalanx._job.inspect.stacks.job_snapshot import ask
from phalanx._job.inspect.stacks.jobs import find_jobs
from phalanx._job.launch.command import report_errors, run_job
from phalanx._job.ssh.facts import collect_facts
from phalanx._job.ssh.pipes import AS_TEXT, PipeChannel
from phalanx.errors import LaunchError

ALIVE_S = 1.0  # between two "alive" messages from each end
END_S = 5.0  # for the agent to end its ranks after the connection is lost
_READ_BYTES = 1 << 16
_MOST_DESCRIPTORS = 1 << 16
_FLUSH_S = 5.0
_CHECK_START_S = 0.1  # between two checks whether all ranks have started
_ANSWER_S = 0.2  # for the agent to answer such a check
_LAST_BYTES = 1 << 16  # how much of the log is shown if the job ends before it has detached
_CHECK_S = 60.0  # before the start, a terminal that is silent for this long counts as lost
_CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def main() -> int:
    """Serve the connection on stdin and stdout until the connection or the job has ended."""
    channel = PipeChannel(os.dup(0), os.dup(1), marks=True)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # no output may mix with the messages
    os.close(null)
    adopt_orphans()
    with caught_signals(_CAUGHT) as signals:
        session = Session(channel, signals)
        try:
            session.run()
        finally:
            session.close()
    return 0


class Session:
    """A `Session` runs the agent as a child process, so that it serves the connection whatever the agent does."""

    def __init__(self, channel: PipeChannel, signals: int) -> None:
        self._channel = channel
        self._signals = signals
        self._environ = dict(os.environ)
        self._plan: JobPlan | None = None
        self._responder: Responder | None = None
        self._trial: Thread | None = None
        self._reached: Mailbox[Mapping[int, str]] = Mailbox()
        self._agent = 0
        self._code: int | None = None
        self._log = -1  # with --detach, the file for the agent's output
        self._check_start_at: float | None = None  # when to check whether all ranks have started
        self._is_detached = False
        self._outputs: dict[int, int] = {}  # descriptor -> 1 or 2
        self._silence_s = _CHECK_S
        self._received_at = self._sent_at = time.monotonic()
        self._kill_at: float | None = None
        self._is_ending = False
        self._loop = EventLoop(
            Source(self._receive_signals, lambda: (signals,)),
            channel.make_source(self._process, lambda: True),
            Source(self._send_reached, lambda: (self._reached.fileno(),)),
            # the agent's output is read only as fast as it can be sent
            Source(self._read_output, lambda: () if channel.is_waiting else tuple(self._outputs)),
            Source(self._watch_start, due=lambda: self._check_start_at),
            Source(self._watch_time, due=self._find_due),
        )

    def run(self) -> None:
        """Run until the job or the connection has ended, and no process of the job is left on this host."""
        while not (self._code is not None or (self._is_ending and not self._agent)):
            self._loop.turn()
        kill_descendants()  # daemons of ranks would keep the output pipes open
        while self._outputs and not (self._is_ending and self._channel.is_waiting):  # a broken connection never drains
            self._loop.turn()
        if self._code is not None:
            if self._log >= 0:
                self._end_log(self._code)
            self._channel.put("ended", code=self._code)
        end = time.monotonic() + _FLUSH_S
        while self._channel.is_waiting and not self._channel.is_at_end and (left := end - time.monotonic()) > 0:
            self._loop.turn(left)

    def close(self) -> None:
        kill_descendants([self._agent] if self._agent else [])
        if self._responder is not None:
            self._responder.close()
        self._channel.close()

    # -- messages from the terminal -------------------------------------------------------------------------------

    def _process(self, message: Mapping[str, Any]) -> None:
        self._received_at = time.monotonic()
        do = message["do"]
        if do == "check":
            self._check(message)
        elif do == "reach":
            targets = [ReachTarget(int(n), "", str(at), int(port)) for n, at, port in message["targets"]]
            self._trial = try_all(targets, bytes.fromhex(message["secret"]), self._reached.put)
        elif do == "start":
            self._start(message)
        elif do == "detach":
            os.dup2(self._log, 1)
            os.dup2(self._log, 2)
            self._is_detached = True
            self._channel.put("detached")
        elif do == "signal" and self._agent:
            os.kill(self._agent, message["number"])
        elif do == "size" and self._outputs:
            for fd in self._outputs:
                _set_size(fd, message["size"])
            if self._agent:
                os.kill(self._agent, signal.SIGWINCH)

    def _check(self, message: Mapping[str, Any]) -> None:
        facts, self._plan = collect_facts(message, self._environ)
        port = 0
        if self._plan is not None and message["log"]:
            folder = self._plan.settings.log_dir or ""
            try:
                os.makedirs(folder, exist_ok=True)
                path = os.path.join(folder, message["log"])
                self._log = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            except OSError as error:
                problem = f"--log-dir {folder}: {error.filename} cannot be written: {error.strerror}"
                facts, self._plan = replace(facts, problem=problem), None
        if self._plan is not None and message["secret"]:
            self._responder = Responder("", bytes.fromhex(message["secret"]))
            port = self._responder.port
        self._channel.put("facts", facts=asdict(facts), port=port)

    def _send_reached(self, ready: set[int]) -> None:
        for results in self._reached.receive_all() if self._reached.fileno() in ready else ():
            self._channel.put("reached", results=list(results.items()))

    # -- the agent -------------------------------------------------------------------------------------------------

    def _start(self, message: Mapping[str, Any]) -> None:
        """Fork the agent, which inherits all code and data that it needs; the job's data is in no file."""
        plan = self._plan
        assert plan is not None, "a host whose check has failed is not started"
        if self._responder is not None:  # the coordinator may need its port
            self._responder.close()
            self._responder = None
        if self._trial is not None:
            self._trial.join()
        rendezvous = plan.settings.rendezvous
        if rendezvous is not None:
            rendezvous = _place(rendezvous, message)
        plan = replace(plan, settings=replace(plan.settings, rendezvous=rendezvous))
        self._silence_s = message["silence_s"]
        ends = {}
        if self._log >= 0:
            os.ftruncate(self._log, 0)
            self._check_start_at = time.monotonic()
        else:
            ends = _open_outputs(message["terminal"])
        parent = os.getpid()
        self._agent = os.fork()
        if self._agent == 0:
            outputs = {stream: theirs for stream, (_, theirs) in ends.items()} or {1: self._log, 2: self._log}
            _become_agent(plan, parent, outputs, self._environ)
        for theirs in {theirs for _, theirs in ends.values()}:
            os.close(theirs)
        self._outputs = {ours: stream for stream, (ours, _) in reversed(ends.items())}

    def _watch_start(self, ready: set[int]) -> None:
        """Report when all ranks of this host have started; query the agent for its ranks, as `phalanx top` does."""
        if self._check_start_at is None or time.monotonic() < self._check_start_at:
            return
        self._check_start_at = time.monotonic() + _CHECK_START_S
        assert self._plan is not None
        for job in find_jobs() if self._agent else ():
            with contextlib.suppress(LaunchError):  # the agent has no ranks yet, and answers no client
                if job.pid == self._agent:
                    with ask(job.name, job.pid, _ANSWER_S, stacks=False) as answer:
                        if len(answer.snapshot.ranks) + len(answer.snapshot.ended) >= self._plan.num_ranks:
                            self._check_start_at = None
                            self._channel.put("started", agent=self._agent)

    def _end_log(self, code: int) -> None:
        """Write the exit code to the log; send the end of the log to a terminal that is still waiting for the start."""
        with contextlib.suppress(OSError):  # the disk is full
            os.write(self._log, b"phalanx run: ended with exit code %d\n" % code)
        if not self._is_detached:
            size = os.fstat(self._log).st_size
            data = os.pread(self._log, _LAST_BYTES, max(0, size - _LAST_BYTES))
            self._channel.put("output", stream=2, text=data.decode(AS_TEXT))

    def _read_output(self, ready: set[int]) -> None:
        for fd in [fd for fd in self._outputs if fd in ready]:
            try:
                data = os.read(fd, _READ_BYTES)
            except OSError:  # the other end of a terminal is closed
                data = b""
            if data:
                self._channel.put("output", stream=self._outputs[fd], text=data.decode(AS_TEXT))
            else:
                del self._outputs[fd]
                os.close(fd)

    def _receive_signals(self, ready: set[int]) -> None:
        for number in read_signals(self._signals) if self._signals in ready else ():
            if number != signal.SIGCHLD:
                self._end()
        if self._agent:
            found, status = os.waitpid(self._agent, os.WNOHANG)
            if found:
                code = os.waitstatus_to_exitcode(status)
                self._agent, self._code = 0, code if code >= 0 else 128 - code

    # -- time, and the end -----------------------------------------------------------------------------------------

    def _find_due(self) -> float | None:
        times = [] if self._is_detached else [self._sent_at + ALIVE_S]
        if not (self._is_ending or self._is_detached):
            times.append(self._received_at + self._silence_s)
        if self._kill_at is not None:
            times.append(self._kill_at)
        return min(times, default=None)

    def _watch_time(self, ready: set[int]) -> None:
        now = time.monotonic()
        if now >= self._sent_at + ALIVE_S:
            self._sent_at = now
            if not self._channel.is_waiting:
                self._channel.put("alive")
        if (self._channel.is_at_end or now >= self._received_at + self._silence_s) and not self._is_detached:
            self._end()
        if self._kill_at is not None and now >= self._kill_at and self._agent:
            self._kill_at = None
            os.kill(self._agent, signal.SIGKILL)  # the ranks die with the agent

    def _end(self) -> None:
        """End the job on this host, because the connection is lost or this process has received a signal."""
        if self._is_ending:
            return
        self._is_ending = True
        if self._agent:
            self._kill_at = time.monotonic() + END_S
            os.kill(self._agent, signal.SIGTERM)


def _place(rendezvous: Rendezvous, message: Mapping[str, Any]) -> Rendezvous:
    is_numbered = rendezvous.min_nodes == rendezvous.max_nodes
    return replace(
        rendezvous,
        endpoint=message["endpoint"],
        leads=message["node"] == 0,
        node_rank=message["node"] if is_numbered else None,
        key=message["key"],
    )


def _open_outputs(terminal: Mapping[str, Any] | None) -> dict[int, tuple[int, int]]:
    """Return, by stream, our end and the agent's end of a pipe or terminal; both streams may share one terminal."""
    if terminal is None:
        return {1: os.pipe(), 2: os.pipe()}
    ours, theirs = os.openpty()
    _set_size(ours, terminal["size"])
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST  # the user's terminal processes the output
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    return {1: (ours, theirs), 2: (ours, theirs) if terminal["has_stderr"] else os.pipe()}


def _set_size(fd: int, size: tuple[int, int]) -> None:
    if os.isatty(fd):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


def _become_agent(plan: JobPlan, parent: int, outputs: Mapping[int, int], environ: Mapping[str, str]) -> NoReturn:
    """Run the agent in this process, a fork of the session, and end it with the job's exit code."""
    code = 1
    try:
        os.setsid()  # signals to the session's process group must not reach the ranks
        for stream, fd in outputs.items():
            os.dup2(fd, stream)
        os.closerange(3, _MOST_DESCRIPTORS)
        signal.set_wakeup_fd(-1)
        for number in _CAUGHT:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        die_with_parent(parent)
        os.environ.clear()
        os.environ.update(environ)
        own = replace(plan, columns=read_terminal_columns(), command_environment=dict(environ))
        code = report_errors(lambda: run_job(own))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
