"""Block networks for a while from which one connection after another has failed.

    64 failures within 10 s, and no member has ever come from there ──► blocked for 10 s ──► counted anew

It is purely data: `connection_guard` tells it what happens, and tells the kernel whom to keep out.
"""

from __future__ import annotations

from collections import OrderedDict

FAILURES = 64  # a host that begins again and again, and one with many ranks and another key, fail less often
_WITHIN_S = 10.0
BLOCKED_S = 10.0
_MOST_BLOCKED = 512  # the kernel compares each packet with all of them
_MOST_KNOWN = 4096


class BlockedNetworks:
    """Who has failed how often of late, who is blocked, and from where members have come, who never are."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()  # since when, and how often
        self._blocked: OrderedDict[str, float] = OrderedDict()  # until when
        self._members: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocked)

    @property
    def networks(self) -> list[str]:
        """The networks that are blocked."""
        return list(self._blocked)

    def note_member(self, network: str) -> None:
        """Note that somebody with the key has come from there."""
        self._failures.pop(network, None)
        self._members[network] = None
        self._members.move_to_end(network)
        if len(self._members) > _MOST_KNOWN:
            self._members.popitem(last=False)

    def note_failure(self, network: str, now: float) -> bool:
        """Note that a connection from there has failed; return whether that network is blocked from now on."""
        if network in self._members or network in self._blocked:
            return False
        since, number = self._failures.pop(network, (now, 0))
        if now - since > _WITHIN_S:
            since, number = now, 0
        if number + 1 < FAILURES:
            self._failures[network] = since, number + 1
            if len(self._failures) > _MOST_KNOWN:
                self._failures.popitem(last=False)
            return False
        self._blocked[network] = now + BLOCKED_S
        if len(self._blocked) > _MOST_BLOCKED:
            self._blocked.popitem(last=False)
        return True

    def expire(self, now: float) -> bool:
        """Let go of those that have been blocked long enough; return whether there were any."""
        before = len(self._blocked)
        while self._blocked and next(iter(self._blocked.values())) <= now:
            self._blocked.popitem(last=False)
        return len(self._blocked) < before
