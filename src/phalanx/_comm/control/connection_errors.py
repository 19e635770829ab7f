"""The errors of a connection say what is known of the coordinator at its other end."""

from __future__ import annotations

import os
from collections.abc import Sequence

from phalanx._base.loss_detection import COORDINATOR_SILENT_S
from phalanx._comm.control.address import Address
from phalanx._comm.control.route import NoRouteError
from phalanx.errors import AuthenticationError, CoordinationError, DeadlineError


def without_key(address: Address) -> AuthenticationError:
    """Return the error of a client that was given no key."""
    return AuthenticationError(
        f"the coordinator at {address} lets in who knows the job's key, and there is none here.\n"
        "Give the key of the host where it runs: a file (PHALANX_KEY_FILE, or ~/.config/phalanx/key), or "
        "PHALANX_KEY."
    )


def unreachable(address: Address, tried: NoRouteError) -> CoordinationError:
    """Return the error of an address that leads nowhere from this host."""
    return CoordinationError(
        f"the coordinator at {address} cannot be reached from {os.uname().nodename}. Tried {tried}.\n"
        "Check that it runs there, that this host can route to it, and that no firewall is in between.",
        reason="unreachable",
    )


def cut_off(where: str, for_s: float) -> CoordinationError:
    """Return the error of a connection that was cut, and could not be made again."""
    return CoordinationError(
        f"{where} cannot be reached any more: the connection was cut {for_s:.0f} s ago, and nobody answers there.\n"
        "Either it has ended (read the output of its host first), or the network between the hosts is down.",
        reason="lost",
    )


def started_again(where: str) -> CoordinationError:
    """Return the error of a coordinator that does not know the job any more."""
    return CoordinationError(
        f"{where} is another one than before: it was started again, and the job's keys, members and queues are gone.\n"
        "Start the job again.",
        reason="lost",
    )


def ended(where: str) -> CoordinationError:
    """Return the error of a coordinator whose host is there, without it."""
    return CoordinationError(f"{where} has ended: its host answers, and nothing listens there any more", reason="lost")


def late(where: str, timeout_s: float, keys: Sequence[str], silent_s: float, *, is_cut: bool) -> DeadlineError:
    """Return the error of a request that was not answered in time: `keys` have not come, or nothing was heard."""
    if keys and silent_s < COORDINATOR_SILENT_S and not is_cut:
        shown = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
        return DeadlineError(f"wait timeout after {timeout_s * 1000:.0f}ms, keys: {shown}")
    return DeadlineError(
        f"{where} did not answer within {timeout_s:.1f} s; it was last heard {silent_s:.1f} s ago"
        f"{', and the connection is cut' if is_cut else ''}."
    )
