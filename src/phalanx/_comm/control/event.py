"""An `Event` reaches a client without a request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """An `Event` happened to a member or to this process; events come in the coordinator's order.

    kind: "joined" (facts), "left" or "lost" (why) of `member`; "message" (body) from `member`, or "datagram", which is
    not kept; or of this process itself: "expelled" (why), it no longer counts as a member; "unreachable", "reachable"
    (why), the coordinator has been silent for too long, or is back.
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
        """Return why a member left or was lost."""
        return self.body.decode(errors="replace")
