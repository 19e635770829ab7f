"""Explain why a client's handshake with the coordinator fails."""

from __future__ import annotations

from phalanx.coordination.address import Address
from phalanx.coordination.key import Key
from phalanx.coordination.route import Route, who_answers
from phalanx.errors import AuthenticationError, CoordinationError


def explain_refusal(
    address: Address, route: Route, key: Key | None, timeout_s: float
) -> AuthenticationError | CoordinationError | None:
    """Return an error that says it, after a look at who answers there; None if nobody does within `timeout_s`."""
    answer = who_answers(route.address, timeout_s)
    if answer == "coordinator":
        assert key is not None
        return AuthenticationError(
            f"the coordinator at {address} ({route.address}) does not accept our key: it has another one than ours "
            f"(fingerprint {key.fingerprint}).\n`phalanx key --fingerprint` shows that of a host; "
            "copy the key from the coordinator's host."
        )
    if answer:
        return CoordinationError(
            f"at {address} ({route.address}) is no coordinator, but {answer}.\nCheck the port.",
            reason="stranger",
        )
    return None
