"""Whose packets the kernel takes: tried with connections, and by running the programs on made-up packets."""

from __future__ import annotations

import ipaddress
import random
import socket
import struct
import sys

import pytest

from phalanx.packet_filter import attach, drop_from, take_only

_TAKE, _DROP = 0xFFFFFFFF, 0
_NETWORK_HEADER = 0xFFF00000


def ask(program: bytes | None, address: str) -> bool:
    """Run a program on the header of a packet from `address`, as the kernel does; whether it takes it."""
    assert program is not None
    source = ipaddress.ip_address(address)
    if source.version == 4:
        header = b"\x45" + bytes(11) + source.packed + bytes(4)
    else:
        header = b"\x60" + bytes(7) + source.packed + bytes(16)
    code = [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]
    at = accumulator = 0
    for _ in range(len(code)):
        operation, if_true, if_false, number = code[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from(">I", header, number - _NETWORK_HEADER)
        elif operation == 0x30:
            accumulator = header[number - _NETWORK_HEADER]
        elif operation == 0x05:
            at += number
        elif operation in (0x15, 0x35):
            is_true = accumulator == number if operation == 0x15 else accumulator >= number
            at += if_true if is_true else if_false
        else:
            assert (operation, number in (_TAKE, _DROP)) == (0x06, True)
            return number == _TAKE
    raise AssertionError("the program does not end")


def random_network(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return f"10.{rng.randrange(2)}.0.{rng.randrange(4)}"
    address = f"fd00::{rng.randrange(2)}:0:0:{rng.randrange(2)}"
    return rng.choice([address, str(ipaddress.ip_network((address, 64), strict=False))])


@pytest.mark.parametrize("seed", range(30))
def test_programs_decide_as_the_list_of_networks_does(seed: int) -> None:
    rng = random.Random(seed)
    networks = [random_network(rng) for _ in range(rng.randrange(6))]
    for _ in range(50):
        address = random_network(rng).partition("/")[0]
        is_among = any(ipaddress.ip_address(address) in ipaddress.ip_network(one) for one in networks)
        assert ask(take_only(networks), address) == is_among
        assert ask(drop_from(networks), address) != is_among


def test_what_cannot_be_a_program_is_none() -> None:
    assert take_only(["a-name"]) is None
    assert drop_from([f"10.0.{n // 250}.{n % 250}" for n in range(2000)]) is None
    assert drop_from([f"10.0.{n // 250}.{n % 250}" for n in range(512)]) is not None
    assert take_only(["fe80::1%eth0"]) == take_only(["fe80::1"])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked to drop what comes to a port")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_kernel_drops_what_it_is_told_to_and_takes_all_again(family: int) -> None:
    """A socket for both kinds of address gets packets of IPv4 with their own header."""

    def connects(source: str) -> bool:
        with socket.socket() as stranger:
            stranger.settimeout(0.3)
            stranger.bind((source, 0))
            return stranger.connect_ex(("127.0.0.1", listener.getsockname()[1])) == 0

    with socket.socket(family) as listener:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("", 0))
        listener.listen(16)
        attach(listener, drop_from(["127.0.0.5", "fd00::/64", "127.0.0.7"]))
        assert [connects(f"127.0.0.{n}") for n in (4, 5, 6, 7)] == [True, False, True, False]
        attach(listener, take_only(["127.0.0.5"]))
        assert [connects(f"127.0.0.{n}") for n in (4, 5)] == [False, True]
        attach(listener, None)
        attach(listener, None)
        assert connects("127.0.0.4")
