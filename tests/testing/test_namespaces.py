"""Networks on one machine: what is made here is not seen there."""

from __future__ import annotations

import socket
import sys

import pytest

from phalanx.testing import run_ranks

if sys.platform != "linux":
    pytest.skip("network namespaces are Linux's", allow_module_level=True)

from phalanx.testing.namespaces import enter_own_network, why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())


def test_a_program_in_a_network_of_its_own_has_every_port_to_itself():
    with socket.create_server(("127.0.0.1", 0)) as outside:
        port = outside.getsockname()[1]

        def fn(rank, world_size):
            with socket.create_connection(("127.0.0.1", port), timeout=10):
                pass
            enter_own_network()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=10)
            with (
                socket.create_server(("127.0.0.1", port)) as inside,
                socket.create_connection(("127.0.0.1", port), timeout=10),
            ):
                inside.accept()[0].close()

        run_ranks(fn, 1, init=False)
