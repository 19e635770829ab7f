"""Block networks for a while from which one connection after another has failed.

    64 failures within 10 s, and no member has ever come from there ──► blocked for 10 s ──► counted anew

It is purely data: `connection_guard` tells it what happens, and tells the kernel whom to keep out.
"""

from __future__ import annotations

from collections import OrderedDict

FAILURES = 64  # hosts that start again and again, and hosts of many ranks with another key, fail less often than that
_WITHIN_S = 10.0
BLOCKED_S = 10.0
_MOST_BLOCKED = 512  # the kernel compares each packet with all of them
_MOST_KNOWN = 4096


class BlockedNetworks:
    """`BlockedNetworks` counts recent failures by network, and blocks networks; one from which a member has come is
    never blocked.
    """

    def __init__(self) -> None:
        # by network: when its first failure was, and how many there were
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._blocked: OrderedDict[str, float] = OrderedDict()  # by network: when it is blocked until
        self._members: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocked)

    @property
    def networks(self) -> list[str]:
        """Return the networks that are blocked."""
        return list(self._blocked)

    def note_member(self, network: str) -> None:
        """Note that a process with the key has come from this network."""
        self._failures.pop(network, None)
        self._members[network] = None
        self._members.move_to_end(network)
        if len(self._members) > _MOST_KNOWN:
            self._members.popitem(last=False)

    def note_failure(self, network: str, now: float) -> bool:
        """Note that a connection from this network has failed; return whether the network is blocked from now on."""
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
        """Unblock the networks that have been blocked long enough; return whether there were any."""
        before = len(self._blocked)
        while self._blocked and next(iter(self._blocked.values())) <= now:
            self._blocked.popitem(last=False)
        return len(self._blocked) < before
