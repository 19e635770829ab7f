"""An `Event` notifies a client of a member's arrival, loss or message, or of the coordinator's silence."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """An `Event` is about a member or about this process. Events arrive in the coordinator's order, except datagrams.

    "joined"                      `member` has joined, and has published `facts`
    "left", "lost"                `member` has left or was lost; `why` is the reason
    "message"                     `body` is a message from `member`
    "datagram"                    the same, but unreliable: it may be lost
    "expelled"                    this process is no longer a member; `why` is the reason
    "unreachable", "reachable"    the coordinator has been silent for too long (`why`), or is back
    """

    kind: str
    member: int = -1
    body: bytes = b""

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts that a member published when it joined."""
        return dict(json.loads(self.body))

    @property
    def why(self) -> str:
        """Return the reason for a departure, a loss, an expulsion or the coordinator's silence."""
        return self.body.decode(errors="replace")
