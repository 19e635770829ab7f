"""`ShardCalls` makes a trainer's calls to the servers of all shards; a server that has taken over answers, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.futures import Future

from phalanx._comm.diagnostics.step_notes import waiting_for
from phalanx.errors import DeadlineError, PeerLostError, PhalanxError
from phalanx.parameter_server import requests
from phalanx.parameter_server.layout import ring
from phalanx.parameter_server.shard import NotHeldError, TrainerLostError
from phalanx.rpc import current, rpc_async

_ASK_S = 5.0  # so long is waited for what only makes an error's text better


class ShardCalls:
    """They are the calls of `trainer` to the `servers` of parameter server `name`; `first` is the first trainer."""

    def __init__(self, name: str, servers: Sequence[str], trainer: str, first: str) -> None:
        self._name = name
        self._servers = servers
        self._trainer = trainer
        self._first = first
        self._hosts = [self._ring(index) for index in range(len(servers))]  # the servers that are not known to be lost

    def _ring(self, index: int) -> list[str]:
        return ring(self._servers, index, current.agent().membership.host_of)

    def on_all(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], step: int) -> list[Any]:
        """Call it for every shard at once, each on the server that has it; `step` is the one that this trainer is at.

        Raises:
            PeerLostError: a shard is on no server any more, or a trainer is lost without which there is no answer.
            DeadlineError: an answer did not come in time; the message says which trainers it waited for.
        """
        sent = [self._send(index, function, request) for index, request in enumerate(arguments)]
        answers, problems = [], []
        with waiting_for("servers"):
            for index, (request, future) in enumerate(zip(arguments, sent, strict=True)):
                try:
                    answers.append(self._wait(index, function, request, future, step))
                except PhalanxError as error:  # the other answers are awaited first: they may have been given
                    problems.append(error)
        if problems:
            raise problems[0]
        return answers

    def _send(self, index: int, function: Callable[..., Any], request: tuple[Any, ...]) -> Future[Any] | PeerLostError:
        if not self._hosts[index]:
            return PeerLostError("")
        try:
            return rpc_async(self._hosts[index][0], function, (self._name, index, *request))
        except PeerLostError as error:
            return error

    def _wait(
        self,
        index: int,
        function: Callable[..., Any],
        request: tuple[Any, ...],
        future: Future[Any] | PeerLostError,
        step: int,
    ) -> Any:
        """Return the answer; if the server is lost, that of the server which has taken over."""
        cause: PhalanxError | None = None
        without: set[str] = set()  # the servers that have said that they have no copy
        while not without.issuperset(self._hosts[index]):
            host = self._hosts[index][0]
            try:
                if isinstance(future, PeerLostError):
                    raise future
                return future.wait()
            except TrainerLostError:
                raise
            except DeadlineError as error:
                raise self._explain_late(index, function, error, step) from error
            except (PeerLostError, NotHeldError) as error:
                cause = error
                hosts = self._hosts[index]
                if hosts and hosts[0] == host:
                    hosts.pop(0)
                if isinstance(error, NotHeldError):
                    without.add(host)
                    if host not in hosts:
                        hosts.append(host)  # it may have a copy later, and be asked when all before it are lost
                future = self._send(index, function, request)
        tried = self._ring(index)
        members = (current.agent().membership.find(one) for one in tried)
        raise PeerLostError(
            f"ParameterServer {self._name!r}: shard {index} is lost: none of the servers {', '.join(tried)} that "
            "could have it is there with a copy.\nGo on from a checkpoint.",
            ranks=tuple(one.info.id for one in members if one is not None),
        ) from cause

    def _explain_late(self, index: int, function: Callable[..., Any], error: DeadlineError, step: int) -> DeadlineError:
        """Return the error that says which trainer kept this one waiting, if the server can say it."""
        place = self._name, index
        try:
            host = self._hosts[index][0]
            if function is requests.create:
                return self._explain_held(rpc_async(host, requests.give_up, place, timeout=_ASK_S).wait(), error)
            clocks = rpc_async(host, requests.clocks, place, timeout=_ASK_S).wait()
        except PhalanxError:
            return error
        if function is requests.attach:
            return self._explain_held(list(clocks), error)
        if function is requests.add and self._trainer != (first := next(iter(clocks), self._trainer)):
            return DeadlineError(
                f"ParameterServer {self._name!r}: {self._trainer!r} waits for {first!r} to add the same group. "
                f"Call add_param_group on all trainers.\n{error}"
            )
        mine = step + (function is requests.norms)
        behind = {name: clock for name, clock in clocks.items() if clock < mine}
        if not behind:
            return error
        told = ", ".join(f"trainer {name!r} has pushed {clock} steps" for name, clock in behind.items())
        text = f"ParameterServer {self._name!r}: {self._trainer!r} has pushed {mine} and waits for the others: "
        return DeadlineError(f"{text}{told}.\n{error}")

    def _explain_held(self, holders: list[str], error: DeadlineError) -> DeadlineError:
        """Return the error if none could be made: others hold the one before, or the first trainer has not come."""
        if not holders:
            fact = f"trainer {self._first!r}, whose values it begins with, has not made it."
        elif self._trainer in holders:
            return error
        else:
            fact = (
                f"{self._trainer!r} has closed the one before of this name, and {', '.join(map(repr, holders))} "
                f"{'has' if len(holders) == 1 else 'have'} not. Close it in all trainers, or give this another name."
            )
        return DeadlineError(f"ParameterServer {self._name!r}: {fact}\n{error}")
