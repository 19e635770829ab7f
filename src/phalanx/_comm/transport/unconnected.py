"""`UnconnectedTransport` is a group without peers; `init_process_group(..., enable_reconfigure=True)` uses it."""

from __future__ import annotations

from phalanx._comm.transport.rehearsal import RehearsalTransport
from phalanx.errors import PhalanxError


class UnconnectedTransport(RehearsalTransport):
    """It reaches nobody, and refuses the first thing that an operation does, which is to tell its call site."""

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
