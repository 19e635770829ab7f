"""An `SshJob` runs a job on several hosts over ssh, from the first ssh process to the job's exit code."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx._base.ipc.event_loop import EventLoop, Source
from phalanx._base.ipc.signals import caught_signals, read_signals
from phalanx._base.loss_detection import HOST_TIMEOUT_S
from phalanx._base.processes import ENDING_SIGNALS, name_signal
from phalanx._comm.control.key import Key
from phalanx._comm.control.key_file import find_key
from phalanx._comm.control.wire import MALFORMED
from phalanx._job.agent import limits
from phalanx._job.agent.plan import read_terminal_columns
from phalanx._job.agent.settings import USAGE_EXIT_CODE
from phalanx._job.coordinator.rendezvous import join_endpoint
from phalanx._job.hosts.reach import TRY_S
from phalanx._job.launch.command import main as run_here
from phalanx._job.launch.command import report_errors
from phalanx._job.output.display import Writer
from phalanx._job.output.standard import encode, open_standard_descriptors
from phalanx._job.ssh.check import Problem, choose_address, explain_ssh, find_problems, format_table
from phalanx._job.ssh.connection import Phase, SshConnection
from phalanx._job.ssh.facts import Facts, digest_source
from phalanx._job.ssh.host_list import HostEntry
from phalanx._job.ssh.pipes import AS_TEXT
from phalanx._job.ssh.request import Request, make_check, read_request
from phalanx._job.ssh.session import ALIVE_S, END_S
from phalanx.errors import AuthenticationError, LaunchError

_CHECK_S = 10.0
_RESTART_S = 3.0  # before each attempt to restart a lost host
_LEFT = (128 + signal.SIGTERM, 128 + signal.SIGINT)  # the host was asked to leave the job
_LEAVE_S = 10.0  # for all agents to exit, in addition to the ranks' shutdown timeout
_LAST_S = 2.0  # for the other hosts after the first host has ended: they may still wait for it, or import torch
_MAX_STDERR_BYTES = 1 << 16
_CLOSE_S = END_S + 3.0
_CAUGHT = (*ENDING_SIGNALS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGTSTP)
_MOST_INTERRUPTS = 3
_LEAST_MISSED = 3  # how many signs of life must be missing before a connection counts as lost
_SECRET_BYTES = 32


def main(words: Sequence[str]) -> int:
    """Run `phalanx run` with `words`, which name hosts; print problems on stderr, and return the exit code."""
    open_standard_descriptors()
    return report_errors(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    request = read_request(words, os.environ, os.getcwd())
    if request is None:
        return run_here(["--help"])
    key = None
    if request.settings.rendezvous is not None:
        try:
            key = find_key(request.settings.key_file, os.environ) or Key.generate()
        except AuthenticationError as error:
            raise LaunchError(f"phalanx run: {error}", exit_code=USAGE_EXIT_CODE) from None
    with caught_signals(_CAUGHT) as signals, contextlib.closing(SshJob(request, key, signals)) as job:
        return job.run()


class SshJob:
    """An `SshJob` checks all hosts, chooses an endpoint, starts the agents, and relays output and signals."""

    def __init__(self, request: Request, key: Key | None, signals: int) -> None:
        self._request = request
        self._key = key
        self._signals = signals
        self._secret = secrets.token_hex(_SECRET_BYTES) if len(request.hosts) > 1 else ""
        self._out = Writer(1)
        self._err = self._out if os.path.sameopenfile(1, 2) else Writer(2)
        rendezvous = request.settings.rendezvous
        timeout_s = rendezvous.host_timeout_s if rendezvous is not None else HOST_TIMEOUT_S
        self._silence_s = max(timeout_s, _LEAST_MISSED * ALIVE_S)
        self._alive_at = time.monotonic() + ALIVE_S
        self._stopped_by = 0  # the signal that ends this command at once, if any
        self._num_interrupts = 0
        self._is_stopping = False  # the user has asked to stop the job
        # whether this command restarts lost hosts
        self._is_elastic = request.is_elastic and not request.detach
        self._shows_all = False  # whether to show the stderr of every agent, not only that of the first host's agent
        self._connection_failed_first = False  # whether a connection was lost before any other failure
        self._last_code = 1
        self._endpoint = ""
        self._has_started = False
        self._restart_at: dict[int, float] = {}  # by a lost host's number: when to try it again
        self._num_restarts = 0
        self._connections: list[SshConnection] = []
        try:
            for entry in request.hosts:
                self._connections.append(self._connect(entry))
        except OSError as error:
            self.close()
            raise LaunchError(f"phalanx run: ssh cannot be started: {limits.explain(error)}") from error
        self._loop = EventLoop(
            Source(self._receive_signals, lambda: (signals,)),
            *map(self._make_source, range(len(self._connections))),
            Source(self._write, writable=self._find_writable),
            Source(self._keep_alive, due=lambda: self._alive_at),
            Source(self._restart, due=lambda: min(self._restart_at.values(), default=None)),
        )

    def run(self) -> int:
        """Return the job's exit code.

        Raises:
            LaunchError: nothing was started; the message lists all problems of all hosts.
        """
        self._check()
        self._endpoint = self._choose_endpoint()
        self._has_started = True
        for connection in self._connections:
            self._start(connection)
        if self._request.detach and self._detach():
            return 0
        self._watch()
        return self._decide_code()

    def close(self) -> None:
        """Stop everything that is still running on the hosts, and write the remaining output."""
        end = time.monotonic() + _CLOSE_S
        for connection in self._connections:
            connection.close(end - time.monotonic())
        interrupts: list[int] = []
        loop = EventLoop(
            Source(lambda ready: interrupts.extend(read_signals(self._signals)), lambda: (self._signals,)),
            Source(self._write, writable=self._find_writable),
        )
        while self._find_writable() and not interrupts:  # a terminal stopped by Ctrl-S never drains; Ctrl-C ends this
            loop.turn()
        for writer in {self._out, self._err}:
            writer.close()

    # -- before the start ------------------------------------------------------------------------------------------

    def _connect(self, entry: HostEntry) -> SshConnection:
        """Start ssh to a host, and request the host's facts."""
        request = self._request
        connection = SshConnection(entry, request.ssh, request.python, self._receive, self._on_lost, self._may_read)
        secret = self._secret if entry is request.hosts[0] and not self._has_started else ""
        connection.put("check", **make_check(request, entry, secret))
        return connection

    def _make_source(self, node: int) -> Source:
        """Return the event loop source for a host, whose connection is replaced when the host is restarted."""
        return Source(
            lambda ready: self._connections[node].process(ready),
            lambda: self._connections[node].readable,
            lambda: self._connections[node].writable,
        )

    def _check(self) -> None:
        self._turn_until(lambda: all(each.phase is not Phase.CHECKING for each in self._connections), _CHECK_S)
        problems = []
        for connection in self._connections:
            if connection.facts is None:
                what = explain_ssh(connection.name, connection.error_output, connection.exit_code, self._request.python)
                problems.append(what)
        facts = {each.name: each.facts for each in self._connections if each.facts is not None}
        problems += find_problems(facts, self._request.folder)
        self._raise_problems(problems)
        self._compare_script(next(iter(facts.values())).script)

    def _compare_script(self, theirs: str) -> None:
        """Print a line if the local script differs from the script on the hosts: the local one may be newer."""
        own = digest_source(self._request.settings.target) if self._request.folder == os.getcwd() else ""
        if own and theirs and own != theirs:
            name, path = self._request.settings.target.name, shlex.quote(self._request.folder)
            self._show(
                f"phalanx run: the hosts run their own copy of {name}, which differs from the one here. To copy it: "
                f"rsync -a {path}/ HOST:{path}/"
            )

    def _choose_endpoint(self) -> str:
        """Return the job's rendezvous endpoint: an address of the first host that all other hosts have reached."""
        if len(self._connections) == 1 and self._key is None:
            return ""
        assert self._first.facts is not None
        candidates = list(self._first.facts.addresses)
        if self._request.address:
            candidates = [(self._request.address, "", 0)]
        if not candidates:
            self._raise_problems(
                [Problem(self._first.name, "it has no address that others could reach", "Connect it.")]
            )
        others = self._connections[1:]
        targets = [[number, address, self._first.port] for number, (address, _, _) in enumerate(candidates)]
        for connection in others:
            connection.put("reach", targets=targets, secret=self._secret)
        self._turn_until(lambda: all(each.reached is not None for each in others), 2 * TRY_S)
        reached = {each.name: each.reached or {} for each in others}
        chosen, problems = choose_address(candidates, reached, self._first.name, self._first.port)
        self._raise_problems(problems)
        address, interface, _ = candidates[chosen]
        port = self._request.port or self._first.port
        where = f"{address} ({interface} of {self._first.name})" if interface else address
        self._show(f"phalanx run: {len(self._connections)} hosts over ssh; rendezvous at {where}")
        endpoint = join_endpoint(address, port)
        if self._request.is_elastic:  # also without a terminal
            self._show(f"phalanx run: a host that has the job's key may join by hand: phalanx join {endpoint}")
        return endpoint

    def _raise_problems(self, problems: Sequence[Problem]) -> None:
        if self._stopped_by:
            name = name_signal(self._stopped_by)
            raise LaunchError(f"phalanx run: stopped by {name} before the job began", exit_code=128 + self._stopped_by)
        if problems:
            order = [each.name for each in self._connections]
            rows = sorted(problems, key=lambda problem: order.index(problem.host))
            raise LaunchError(format_table(rows, len(order)), exit_code=USAGE_EXIT_CODE)

    def _start(self, connection: SshConnection) -> None:
        node = self._connections.index(connection)
        has_terminal = node == 0 and read_terminal_columns() > 0 and not self._request.detach
        connection.phase = Phase.RUNNING
        connection.put(
            "start",
            node=node,
            endpoint=self._endpoint,
            key=None if self._key is None else str(self._key),
            terminal={"size": _read_size(), "has_stderr": os.isatty(2)} if has_terminal else None,
            silence_s=self._silence_s,
        )

    def _detach(self) -> bool:
        """Wait until all ranks have started, and detach from the hosts; return whether the job continues.

        A host that has not confirmed ends its part of the job, and so the whole job, when the connection ends.
        """
        connections, rendezvous = self._connections, self._request.settings.rendezvous
        num_wanted = min(len(connections), rendezvous.max_nodes if rendezvous is not None else 1)  # others are spares

        def is_over() -> bool:
            return self._is_stopping or any(each.phase is not Phase.RUNNING for each in connections)

        self._turn_until(lambda: is_over() or sum(each.agent > 0 for each in connections) >= num_wanted, None)
        if not (is_over() or self._stopped_by):
            for connection in connections:
                connection.put("detach")
            self._turn_until(lambda: is_over() or all(each.is_detached for each in connections), None)
        if is_over() or self._stopped_by:
            is_lost = any(each.phase is Phase.LOST for each in connections)
            if (is_lost or self._request.is_elastic) and not self._is_stopping:
                self._relay_signal(signal.SIGTERM)  # hosts of an elastic job would continue without the others
            return False
        self._show(self._describe_detached())
        return True

    def _describe_detached(self) -> str:
        """Describe where the output is, how to inspect the job, and how to end it."""
        request, first = self._request, self._first
        logs = os.path.join(request.folder, request.settings.log_dir or "")
        place = []
        if not first.is_here:
            place = ["--host", first.name]
            place += ["--ssh", shlex.join(request.ssh)] if request.ssh != ("ssh",) else []
            place += ["--remote-python", request.python] if request.python != sys.executable else []
        end = [*(() if first.is_here else (*request.ssh, first.name)), "kill", "-INT", str(first.agent)]
        return "\n".join((
            "phalanx run: all ranks have started, and the job no longer needs this terminal",
            f"  output      {first.name}:{logs}/host-0.log; its last line will be the exit code",
            f"  inspect it  {shlex.join(['phalanx', 'top', *place])}",
            f"              {shlex.join(['phalanx', 'stacks', *place])}",
            f"  end it      {shlex.join(end)}",
        ))  # fmt: skip

    # -- while it runs ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Wait until the agents have ended. With a fixed number of hosts, the failure of one ends the others."""
        if not self._is_elastic:
            self._turn_until(lambda: not self._is_any_open or any(map(_has_failed, self._connections)), None)
            limit_s = self._silence_s + self._request.settings.shutdown_timeout_s + _LEAVE_S
            self._turn_until(lambda: not self._is_any_open or self._first.phase is Phase.ENDED, limit_s)
            self._turn_until(lambda: not self._is_any_open, _LAST_S)
        else:
            self._turn_until(lambda: not self._is_any_running, None)
        if self._first.phase is not Phase.ENDED:
            self._show_all()

    def _decide_code(self) -> int:
        """Return the exit code of the first failure. The agents agree on the code unless a connection was lost."""
        code = self._last_code if self._is_elastic or self._first.code is None else self._first.code
        if self._stopped_by:
            code = 128 + self._stopped_by
        elif self._connection_failed_first:
            code = 1
        if self._out.problem is not None:
            self._show(f"phalanx run: stdout cannot be written: {self._out.problem.strerror}; lines are lost")
            return code or 1
        return code

    @property
    def _first(self) -> SshConnection:
        return self._connections[0]

    @property
    def _is_any_open(self) -> bool:
        return any(each.is_open for each in self._connections)

    @property
    def _is_any_running(self) -> bool:
        return any(each.phase is Phase.RUNNING for each in self._connections)

    def _turn_until(self, is_so: Callable[[], bool], limit_s: float | None) -> None:
        """Run the event loop until `is_so()` is true, `limit_s` has passed, or a signal ends this command."""
        end = time.monotonic() + limit_s if limit_s is not None else float("inf")
        while not is_so() and not self._stopped_by and (left := end - time.monotonic()) > 0:
            self._loop.turn(left)

    def _receive(self, connection: SshConnection, message: Mapping[str, Any]) -> None:
        try:
            self._read(connection, message)
        except MALFORMED:  # the host runs another version of Phalanx
            connection.lose()

    def _read(self, connection: SshConnection, message: Mapping[str, Any]) -> None:
        do = message["do"]
        if do == "facts":
            connection.facts = Facts.from_json(message["facts"])
            connection.port = int(message["port"])
            connection.phase = Phase.READY
            if self._has_started:
                self._start_again(connection)
        elif do == "reached":
            connection.reached = {int(number): str(answer) for number, answer in message["results"]}
        elif do == "started":
            connection.agent = int(message["agent"])
        elif do == "detached":
            connection.is_detached = True
        elif do == "output":
            self._show_output(connection, message["stream"], message["text"].encode(AS_TEXT))
        elif do == "ended":
            connection.code = self._last_code = int(message["code"])
            connection.phase = Phase.ENDED
            if connection is self._first and self._is_elastic:
                self._show_all()
            if connection.code not in (0, *_LEFT):
                self._plan_restart(connection)

    def _show_output(self, connection: SshConnection, stream: int, data: bytes) -> None:
        """Show an agent's output. The first host's agent reports for all hosts; after its loss, another agent does."""
        if stream == 1:
            self._out.put(data)
        elif connection is self._first or self._shows_all:
            self._err.put(data)
        else:
            connection.agent_stderr = (connection.agent_stderr + data)[-_MAX_STDERR_BYTES:]

    def _show_all(self) -> None:
        """Show the stderr of all agents from now on: the first host has ended or is lost, and another may lead."""
        self._shows_all = True
        for connection in self._connections[1:]:
            self._err.put(connection.agent_stderr)
            connection.agent_stderr = b""

    def _on_lost(self, connection: SshConnection) -> None:
        if not self._has_started or self._is_stopping:
            return
        if connection.facts is not None:  # without facts, this was only a failed attempt to restart a lost host
            what = explain_ssh(
                connection.name, connection.error_output, connection.exit_code, self._request.python
            ).what
            self._show(f"phalanx run: the connection to {connection.name} is lost: {what}")
        self._plan_restart(connection)
        if not self._is_elastic and not any(each.code for each in self._connections):
            self._connection_failed_first = True
        if connection is self._first:
            self._show_all()

    # -- lost hosts of an elastic job ---------------------------------------------------------------------------

    def _plan_restart(self, connection: SshConnection) -> None:
        """Schedule a restart of a host that was lost or has failed, if the job may continue without the host."""
        most = self._request.settings.max_restarts
        if self._is_elastic and (most is None or self._num_restarts < most):
            self._restart_at[self._connections.index(connection)] = time.monotonic() + _RESTART_S

    def _restart(self, ready: set[int]) -> None:
        now = time.monotonic()
        for node in [node for node, at in self._restart_at.items() if at <= now]:
            del self._restart_at[node]
            if self._is_stopping or not self._is_any_running:
                continue
            self._connections[node].close(0.0)
            try:
                self._connections[node] = self._connect(self._request.hosts[node])
            except OSError as error:
                self._show(f"phalanx run: ssh cannot be started: {limits.explain(error)}")
                self._plan_restart(self._connections[node])

    def _start_again(self, connection: SshConnection) -> None:
        assert connection.facts is not None
        problems = find_problems({connection.name: connection.facts}, self._request.folder)
        if problems:
            self._show(f"phalanx run: {connection.name} does not rejoin: {problems[0].what}")
            connection.close(0.0)
            connection.phase = Phase.LOST
            return
        self._num_restarts += 1
        self._show(f"phalanx run: {connection.name} answers again; its ranks start again")
        self._start(connection)

    def _receive_signals(self, ready: set[int]) -> None:
        for number in read_signals(self._signals) if self._signals in ready else ():
            if number == signal.SIGWINCH:
                self._first.put("size", size=_read_size())
            elif number == signal.SIGTSTP:
                self._show("phalanx run: a job on several hosts cannot be suspended from here")
            elif number == signal.SIGHUP or not self._has_started:
                self._stopped_by = number
            else:
                self._relay_signal(number)

    def _relay_signal(self, number: int) -> None:
        """Relay a signal to the agents; Ctrl-C only to the first host, which decides for all."""
        running = [each for each in self._connections if each.phase is Phase.RUNNING]
        self._is_stopping = self._is_stopping or number in ENDING_SIGNALS
        if number in (signal.SIGINT, signal.SIGQUIT):
            self._num_interrupts += 1
            if self._num_interrupts > _MOST_INTERRUPTS:
                self._stopped_by = number
        for connection in running[:1] if number in (signal.SIGINT, signal.SIGQUIT) else running:
            connection.put("signal", number=number)

    def _keep_alive(self, ready: set[int]) -> None:
        now = time.monotonic()
        if now < self._alive_at:
            return
        self._alive_at = now + ALIVE_S
        for connection in self._connections:
            if connection.phase is Phase.CHECKING and self._has_started and now - connection.began > _CHECK_S:
                connection.lose()
            if connection.phase is not Phase.RUNNING:
                continue
            connection.put("alive")
            if not self._may_read():
                connection.received_at = now
            elif now - connection.received_at > self._silence_s:
                connection.lose()

    # -- the screen ------------------------------------------------------------------------------------------------

    def _may_read(self) -> bool:
        return not (self._out.full or self._err.full)

    def _show(self, text: str) -> None:
        self._err.put(encode(text) + b"\n")

    def _find_writable(self) -> tuple[int, ...]:
        return tuple(writer.fd for writer in {self._out, self._err} if writer.waiting)

    def _write(self, ready: set[int]) -> None:
        for writer in {self._out, self._err}:
            writer.write_some()
        if self._out.broken and not self._stopped_by:
            self._stopped_by = signal.SIGPIPE


def _has_failed(connection: SshConnection) -> bool:
    return connection.phase is Phase.LOST or bool(connection.code)


def _read_size() -> tuple[int, int]:
    try:
        columns, rows = os.get_terminal_size(1)
    except OSError:  # the terminal has just been closed
        columns, rows = 80, 24
    return rows, columns
