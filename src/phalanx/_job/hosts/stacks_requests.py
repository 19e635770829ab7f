"""Keep requests of `phalanx stacks` for all hosts' ranks, while the agents of other hosts have yet to answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from phalanx._job.hosts.peer_hosts import PeerHosts
from phalanx._job.inspect.agent_socket import Request
from phalanx._job.inspect.stacks.job_snapshot import Told, answer_others

_LIMIT_S = 6.0  # a rank that cannot answer is given up after a second


@dataclass
class _Pending:
    """One request: which hosts have yet to say, and what others said."""

    request: Request
    waiting: set[int]
    due: float
    told: dict[int, str] = field(default_factory=dict)


class StacksRequests:
    """`StacksRequests` keeps the requests of one attempt that wait."""

    def __init__(self, peers: PeerHosts, attempt: int) -> None:
        self._peers, self._attempt = peers, attempt
        self._pending: dict[int, _Pending] = {}
        self._num_asked = 0

    @property
    def due(self) -> float | None:
        """Return when to call `answer` although nobody has said anything."""
        return min((pending.due for pending in self._pending.values()), default=None)

    def ask(self, request: Request) -> None:
        """Ask the agents of the other hosts, and answer when they have."""
        self._num_asked += 1
        waiting = {node.facts.member for node in self._peers.present}
        self._pending[self._num_asked] = _Pending(request, waiting, time.monotonic() + _LIMIT_S)
        what = request.message.get("what", "stacks")
        self._peers.channel.put_many(waiting, "stacks", attempt=self._attempt, request=self._num_asked, what=what)
        self.answer()

    def hear(self, number: int, member: int, text: str) -> None:
        pending = self._pending.get(number)
        if pending is not None:
            pending.waiting.discard(member)
            pending.told[member] = text

    def answer(self) -> None:
        """Answer those for whom all hosts have said something, or time is up."""
        channel = self._peers.channel
        for number, pending in list(self._pending.items()):
            if pending.waiting and time.monotonic() < pending.due:
                continue
            silent = [Told(self._peers.others[member].where, "does not answer", 0.0) for member in pending.waiting]
            told = [
                Told(node.where, pending.told[m], channel.to_own_clock(m, 0.0))
                for m, node in self._peers.others.items()
                if m in pending.told
            ]
            answer_others(pending.request.channel, [*told, *silent])
            pending.request.close()
            del self._pending[number]

    def close(self) -> None:
        """Let go of those who wait."""
        for pending in self._pending.values():
            pending.request.close()
        self._pending.clear()
