import socket

from phalanx._base.host_addresses import interface_addresses, is_public


def test_every_address_of_this_host_is_found_with_its_interface():
    found = interface_addresses()
    assert "127.0.0.1" in found["lo"]
    assert set(found) <= {name for _, name in socket.if_nameindex()}


def test_public_is_what_the_internet_routes():
    assert all(map(is_public, ["8.8.8.8", "2a00:1450:4001::1"]))
    private = [
        "127.0.0.1",
        "::1",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "fd00::2",
        "fe80::1%eth0",
        "100.64.0.1",
        "",
        "x",
    ]
    assert not any(map(is_public, private))
