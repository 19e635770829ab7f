"""Explain why handshakes with the coordinator fail. Only its refusal of our key, and a stranger there, are errors."""

from __future__ import annotations

import zmq

from phalanx._base.deadline import Deadline
from phalanx._comm.control.address import Address
from phalanx._comm.control.dealer import EVENTS, open_dealer
from phalanx._comm.control.key import Key
from phalanx._comm.control.route import Route, who_answers
from phalanx.errors import AuthenticationError, CoordinationError

_FAILED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


def explain_refusal(
    address: Address, route: Route, key: Key | None, timeout_s: float
) -> AuthenticationError | CoordinationError | None:
    """Return an error that says why, after another try; None if the coordinator is only busy, or does not answer."""
    assert key is not None
    answer, refuses = who_answers(route.address, timeout_s, lambda deadline: _hangs_up(route, key, deadline))
    if refuses:
        return AuthenticationError(
            f"the coordinator at {address} ({route.address}) does not accept our key: it has another one than ours "
            f"(fingerprint {key.fingerprint}).\n`phalanx key --fingerprint` shows that of a host; "
            "copy the key from the coordinator's host."
        )
    if answer in ("", "coordinator"):
        return None
    return CoordinationError(
        f"at {address} ({route.address}) is no coordinator, but {answer}.\nCheck the port.", reason="stranger"
    )


def _hangs_up(route: Route, key: Key, deadline: Deadline) -> bool:
    """Return whether the coordinator ends a connection in the handshake with our key; False if it does not in time.

    It cannot say that the key is another one: what it would say is encrypted for whoever has the same key.
    """
    with zmq.Context() as context, open_dealer(context, key) as dealer:
        dealer.reconnect_ivl = -1
        monitor = dealer.get_monitor_socket(EVENTS)
        dealer.connect(route.address.endpoint)
        try:
            while monitor.poll(int(deadline.left_s * 1000)):
                event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
                if event & _FAILED:
                    return True
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    return False
        finally:
            dealer.disable_monitor()
            monitor.close(0)
    return False
