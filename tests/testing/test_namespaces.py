"""Networks on one machine: what is made here is not seen there."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from phalanx.testing import run_ranks

if sys.platform != "linux":
    pytest.skip("network namespaces are Linux's", allow_module_level=True)

from phalanx.testing.namespaces import Host, enter_own_network, hosts, why_no_hosts

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


def hears(receiver: Host, sender: Host) -> bool:
    """Whether a datagram of `sender` reaches `receiver`, before a later one of its own does."""
    listen = (
        "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('', 5555)); s.settimeout(60)\n"
        "print('listens', flush=True); print(s.recv(9).decode())"
    )
    command = [*receiver.command, sys.executable, "-c", listen]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as listening:
        assert listening.stdout is not None
        assert listening.stdout.readline() == "listens\n"
        for host, word in ((sender, "word"), (receiver, "end")):
            speak = f"socket.socket(type=socket.SOCK_DGRAM).sendto(b'{word}', ('{receiver.address}', 5555))"
            subprocess.run([*host.command, sys.executable, "-c", f"import socket; {speak}"], check=True)
        return listening.stdout.read() == "word\n"


@pytest.mark.slow
@pytest.mark.parametrize("rate", [None, "2mbit"])
def test_a_host_is_cut_off_in_one_direction_and_plugged_in_again(rate):
    with hosts(2, rate=rate, both_ways=True) as (one, other):
        assert hears(one, other)
        other.cut_off("sent")
        assert (hears(one, other), hears(other, one)) == (False, True)
        other.plug_in()
        other.cut_off("received")
        assert (hears(one, other), hears(other, one)) == (True, False)
        other.plug_in()
        assert (hears(one, other), hears(other, one)) == (True, True)
        shown = subprocess.run(["tc", "-n", other.name, "qdisc", "show", "dev", "eth0"], capture_output=True, text=True)
        assert ("rate 2Mbit" in shown.stdout) == (rate is not None)


@pytest.mark.parametrize("one_clock", [True, False])
def test_each_host_has_a_clock_of_its_own_unless_all_shall_have_one(one_clock):
    if subprocess.run(["unshare", "--time", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this kernel, or unshare, has no time namespaces")
    with hosts(2, one_clock=one_clock) as made:
        now = [
            float(
                subprocess.check_output([*host.command, sys.executable, "-c", "import time; print(time.monotonic())"])
            )
            for host in made
        ]
    assert (now[1] - now[0] > 50_000) == (not one_clock)
    assert abs(now[0] - time.monotonic()) < 50_000
