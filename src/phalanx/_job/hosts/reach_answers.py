"""`ReachAnswers` is a host's part in the trial of which hosts reach each other, before any rank starts."""

from __future__ import annotations

from typing import Any

from phalanx._comm.control.key import Key
from phalanx._job.hosts.control_channel import ControlChannel, ControlMessage
from phalanx._job.hosts.reach import ReachTarget, Responder, try_all


class ReachAnswers:
    """`ReachAnswers` opens a port when the first host requests it, and tries the ports of the other hosts.

    Arguments:
        key: of the job; without one all agents are on one host, and nothing is tried.
        own: the address under which other hosts reach this one.
    """

    def __init__(self, channel: ControlChannel, key: Key | None, own: str) -> None:
        self._channel = channel
        self._key = key
        self._own = own
        self._responder: Responder | None = None

    def hear(self, message: ControlMessage) -> None:
        """Process the first host's messages on the trial.

        Raises:
            KeyError, TypeError, ValueError: the message is invalid.
        """
        if message.kind in ("start", "end", "tried"):
            self.close()
        if self._key is None:
            return
        secret = self._key.reach_secret()
        if message.kind == "answer":
            self._answer(secret, message.body["trial"])
        elif message.kind == "reach":
            targets = [
                ReachTarget(int(n), str(label), str(at), int(port)) for n, label, at, port in message.body["targets"]
            ]
            trial, first = message.body["trial"], self._channel.first
            try_all(
                targets,
                secret,
                lambda results: self._channel.put(first, "reached", trial=trial, results=list(results.items())),
            )

    def _answer(self, secret: bytes, trial: Any) -> None:
        """Open the port, and send its address to the first host."""
        port, problem = 0, ""
        try:
            self._responder = self._responder or Responder(self._own, secret)
            port = self._responder.port
        except OSError as error:
            problem = error.strerror or str(error)
        self._channel.put(self._channel.first, "answering", trial=trial, port=port, problem=problem)

    def close(self) -> None:
        """Close the port at which other hosts have tried to reach this one, if it is open."""
        if self._responder is not None:
            self._responder.close()
            self._responder = None
