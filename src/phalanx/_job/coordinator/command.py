"""Run the coordinator as a command: print one line with its address, then serve until a signal."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable

from phalanx._base.loss_detection import MEMBER_TIMEOUT_S
from phalanx._comm.control.address import Address
from phalanx._comm.control.key_file import ask_for_key, find_key
from phalanx._job.coordinator.service import Service


def run_coordinator(
    bind: str,
    key_file: str | None,
    *,
    job: str = "",
    lost_after_s: float = MEMBER_TIMEOUT_S,
    log: Callable[[str], None],
) -> None:
    """Serve at `bind` until Ctrl-C or SIGTERM.

    Raises:
        AuthenticationError: there is no key, or it may not be used.
        CoordinationError: the address cannot be bound.
        ValueError: `bind` is not an address.
    """
    Address.parse(bind)
    key = find_key(key_file) or ask_for_key()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Service(
        bind, key, job=job, lost_after_s=lost_after_s, log=lambda line: log(f"coordinator: {line}")
    ) as service:
        assert service.address is not None
        assert key is not None
        place = Address(advertised_host(service.address.host), service.address.port)
        with contextlib.suppress(KeyboardInterrupt):
            log(f"coordinator: listening at {place} (key {key.fingerprint}). To join: phalanx join {place}")
            while service.problem is None:
                time.sleep(1.0)
    if service.problem is not None:
        raise service.problem
    log("coordinator: ended.")


def advertised_host(host: str) -> str:
    """Return the address to publish for a listener on `host`: `host`, or this host's name if it listens everywhere."""
    return host if host not in ("", "*", "::", "0.0.0.0") else socket.gethostname()
