"""A group that knows no other member yet: `init_process_group(..., enable_reconfigure=True)` begins with it."""

from __future__ import annotations

from phalanx.errors import PhalanxError
from phalanx.transport.rehearsal import RehearsalTransport


class UnconnectedTransport(RehearsalTransport):
    """Nobody is reached: the first thing that an operation does, to tell its call site, is refused."""

    def call_site(self, place: tuple[str, int]) -> int:
        """Refuse the operation.

        Raises:
            PhalanxError: always.
        """
        where = f" at {place[0]}:{place[1]}" if place[0] else ""
        raise PhalanxError(
            f"group {self.group!r} on rank {self.rank}: an operation{where} before the group knows its members.\n"
            "With enable_reconfigure=True, or after a reconfiguration that failed, torch.distributed._reconfigure "
            "tells them: call it first, on all of them, with a new uuid."
        )
