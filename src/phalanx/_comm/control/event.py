"""An `Event` is what a client is told without having asked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """Something that happened, in the order in which the coordinator saw it.

    kind: "joined" (facts), "left" or "lost" (why) of `member`; "message" (body) from `member`, or "datagram", which
    nobody keeps; or of this process itself: "expelled" (why): the coordinator does not count it as a member any more;
    "unreachable", "reachable" (why): the coordinator itself has been silent for too long, or is back.
    """

    kind: str
    member: int = -1
    body: bytes = b""

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts that a member which joined has told of itself."""
        return dict(json.loads(self.body))

    @property
    def why(self) -> str:
        """Return why a member has left or is lost."""
        return self.body.decode(errors="replace")
