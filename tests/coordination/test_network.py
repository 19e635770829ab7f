"""Hosts that are real to the network: IPv4 and IPv6, a way that leads nowhere, a cable that is pulled."""

import contextlib
import errno
import os
import socket
import subprocess
import threading

import pytest

from phalanx._base.deadline import Deadline
from phalanx._comm.control.address import Address
from phalanx._comm.control.client import Client
from phalanx._comm.control.key import Key
from phalanx._comm.control.route import find_route
from phalanx._job.coordinator.service import Service
from phalanx.errors import CoordinationError
from phalanx.testing.namespaces import hosts, why_no_hosts

KEY = Key.generate()


def has_ipv6():
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
needs_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")


@pytest.mark.parametrize(
    ("text", "host", "port", "path"),
    [
        ("anna:29400", "anna", 29400, ""),
        ("10.0.0.1:1", "10.0.0.1", 1, ""),
        ("[::1]:80", "::1", 80, ""),
        ("tcp://[fe80::1%eth0]:80", "fe80::1%eth0", 80, ""),
        (":0", "", 0, ""),
        ("/tmp/x/coordinator", "", 0, "/tmp/x/coordinator"),
    ],
)
def test_an_address_is_read_as_people_write_it(text, host, port, path):
    address = Address.parse(text)
    assert address == Address(host, port, path)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize("text", ["anna", "anna:", "anna:x", "::1", "[::1]", "anna:99999", "", "anna:-1"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match="an address is HOST:PORT"):
        Address.parse(text)


@needs_ipv6
@pytest.mark.parametrize(("bind", "place"), [("[::1]:0", "::1"), (":0", "::1"), (":0", "127.0.0.1"), ("*:0", "::1")])
def test_it_listens_where_it_is_told_to_ipv6_and_both(bind, place):
    with Service(bind, KEY) as service:
        place = Address(place, service.address.port)
        with Client(place, KEY) as client:
            client.set("a", "1")
            assert client.own_host.removeprefix("::ffff:") == place.host


@needs_ipv6
def test_of_several_addresses_the_one_that_answers_is_taken(monkeypatch):
    """A name that has a dead IPv6 address and a live IPv4 one made people wait for minutes."""
    with Service("127.0.0.1:0", KEY) as service:
        port = service.address.port
        monkeypatch.setattr(
            socket,
            "getaddrinfo",
            lambda host, port, **_: [
                (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),  # refused
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
            ],
        )
        route = find_route(Address("anna", port), Deadline.after(30))
    assert str(route.address) == f"127.0.0.1:{port}"


def test_an_address_family_that_this_kernel_lacks_is_passed_over(monkeypatch):
    """A name with ::1 before 127.0.0.1 ended in "Address family not supported by protocol"."""
    made = socket.socket

    def without_ipv6(family=socket.AF_INET, *args, **options):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return made(family, *args, **options)

    with Service("127.0.0.1:0", KEY) as service:
        port = service.address.port
        both = [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **_: both)
        monkeypatch.setattr("phalanx._comm.control.route.socket.socket", without_ipv6)
        assert str(find_route(Address("anna", port), Deadline.after(30)).address) == f"127.0.0.1:{port}"


def on(host, function):
    """What `function` returns on another host of the network."""
    result = []

    def run():
        host.enter()
        try:
            result.append(function())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


@pytest.mark.slow
@needs_hosts
def test_hosts_meet_over_ipv4_and_ipv6_and_a_pulled_cable_is_named():
    with contextlib.ExitStack() as stack:
        anna, bert, carl = stack.enter_context(hosts(3))
        for number, host in enumerate((anna, bert, carl), start=1):
            words = ["ip", "-n", host.name, "address", "add", f"fd77::{number}/64", "dev", "eth0", "nodad"]
            subprocess.run(words, check=True)
        said = []
        service = on(anna, lambda: Service(":0", KEY, lost_after_s=3.0, log=said.append))
        stack.callback(service.close)
        port = service.address.port
        far = on(bert, lambda: Client(f"{anna.address}:{port}", KEY))
        stack.callback(far.close)
        assert far.own_host == bert.address
        six = on(carl, lambda: Client(f"[fd77::1]:{port}", KEY))
        stack.callback(six.close)
        assert six.own_host == "fd77::3"
        near = stack.enter_context(Client(service.local))
        near.join({"host": "anna"})
        far.join({"host": "bert"})
        six.join({"host": "carl"})
        six.post(1, b"hello")
        events = []
        while not any(event.kind == "message" for event in events):
            events += far.wait_event()
        assert events[-1].body == b"hello"
        wrong = on(carl, lambda: Client(f"[fd77::1]:{port}", Key.generate()))
        assert "does not accept this host's key" in str(wrong)
        nobody = on(carl, lambda: Client(f"10.77.0.9:{port}", KEY, timeout=5.0))
        assert isinstance(nobody, CoordinationError)
        assert f"Tried 10.77.0.9:{port}: " in str(nobody)

        bert.cut_off()
        events = []
        while not any(event.kind == "lost" for event in events):
            events += near.wait_event()
        assert [(event.kind, event.member) for event in events] == [("joined", 1), ("joined", 2), ("lost", 1)]
        kinds = []
        while "unreachable" not in kinds:  # and on the other side of the cut
            kinds += [event.kind for event in far.wait_event()]
        assert near.members().keys() == {0, 2}
        six.leave()
        near.leave()
    assert any("member 1 (bert) is lost" in line for line in said)
    assert any("refused a connection from fd77::3: " in line for line in said)


@needs_hosts
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_host_cannot_use_the_local_socket():
    with Service() as service, Client(service.local) as client:
        os.chmod(service.local, 0o777)
        child = os.fork()
        if child == 0:
            inherited = f"/proc/self/fd/{os.path.basename(service.local)}"  # even if he got that far
            try:
                os.setuid(12345)
                for path in (service.local, inherited):
                    with contextlib.suppress(Exception), Client(path, timeout=1.0) as other:
                        other.set("stranger", "was here")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert not client.check(["stranger"])
        assert client.num_keys() == 0
