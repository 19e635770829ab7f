"""Whose packets the kernel takes: tried with connections, and by running the programs on made-up packets."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import random
import socket
import struct
import sys

import pytest

from phalanx import packet_filter
from phalanx.packet_filter import attach, drop_from, take_only

_TAKE, _DROP = 0xFFFFFFFF, 0
_NETWORK_HEADER = 0xFFF00000


@functools.lru_cache(maxsize=4)
def instructions_of(program: bytes) -> list[tuple[int, int, int, int]]:
    return [(w[0], w[1], w[2], w[3]) for w in struct.iter_unpack("HBBI", program)]


def ask(program: bytes | None, address: str) -> bool:
    """Run a program on the header of a packet from `address`, as the kernel does; whether it takes it."""
    assert program is not None
    source = ipaddress.ip_address(address)
    if source.version == 4:
        header = b"\x45" + bytes(11) + source.packed + bytes(4)
    else:
        header = b"\x60" + bytes(7) + source.packed + bytes(16)
    code = instructions_of(program)
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
        elif operation in (0x15, 0x25, 0x35):
            is_true = {0x15: accumulator == number, 0x25: accumulator > number, 0x35: accumulator >= number}[operation]
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
    assert drop_from(["10.0.0.1", "a-name"]) is None
    assert take_only(["fe80::1%eth0"]) == take_only(["fe80::1"])


@pytest.mark.parametrize("bits", [0, 1, 7, 31, 32, 33, 47, 64, 65, 96, 127, 128])
def test_a_network_may_have_any_length(bits: int) -> None:
    for base in ("10.11.12.13", "fd12:3456::89ab:cdef:1"):
        length = min(bits, ipaddress.ip_address(base).max_prefixlen)
        network = ipaddress.ip_network((base, length), strict=False)
        program = take_only([str(network)])
        assert ask(program, str(network[0]))
        assert ask(program, str(network[-1]))
        for outside in (int(network[0]) - 1, int(network[-1]) + 1):
            with contextlib.suppress(ValueError):  # there is none
                assert not ask(program, str(type(network[0])(outside)))


def random_members(rng: random.Random) -> list[str]:
    """Addresses of a job's hosts: in a row, scattered over a network, or over many."""
    found = set()
    for _ in range(rng.randrange(1, 6)):
        if rng.random() < 0.5:
            base, spread = rng.randrange(1 << 32), 1 << rng.randrange(4, 32)
            some = {
                ipaddress.IPv4Address((base + rng.randrange(spread)) % (1 << 32)) for _ in range(rng.randrange(900))
            }
        else:
            base, spread = rng.randrange(1 << 128), 1 << rng.randrange(4, 128)
            some = {
                ipaddress.IPv6Address((base + rng.randrange(spread)) % (1 << 128)) for _ in range(rng.randrange(900))
            }
        found |= {str(address) for address in some}
    return sorted(found)


@pytest.mark.parametrize("memory", [20480, 131072])
@pytest.mark.parametrize("seed", range(6))
def test_of_many_addresses_a_program_takes_all_and_as_few_others_as_it_has_room_for(
    seed: int, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was no program for more than 1,360 addresses, and the port was open to everybody."""
    rng = random.Random(seed)
    monkeypatch.setattr(packet_filter, "_most_bytes", lambda: memory // 2)
    members = random_members(rng)
    program = take_only(members)
    assert program is not None
    assert len(program) <= 8 * 4096
    assert all(ask(program, address) for address in rng.sample(members, min(150, len(members))))
    strangers = [str(ipaddress.IPv4Address(rng.randrange(1 << 32))) for _ in range(100)]
    strangers += [str(ipaddress.IPv6Address(rng.randrange(1 << 128))) for _ in range(100)]
    dropped = [address for address in strangers if not ask(program, address)]
    is_tight = sum(":" in address for address in members) < 100  # IPv4 alone comes in ranges however many there are
    assert len(dropped) >= (190 if is_tight else 100)


def test_gaps_are_bridged_from_the_smallest_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packet_filter, "_most_bytes", lambda: 20480 // 2)
    near = [f"10.0.{n // 128}.{n % 128 * 2}" for n in range(600)]
    far = [f"10.{n}.0.1" for n in range(1, 200)]
    program = take_only([*near, *far])
    assert ask(program, "10.0.1.1")
    assert not any(ask(program, f"10.{n}.0.2") for n in range(1, 200))
    assert not ask(program, "10.250.0.1")


def test_where_more_networks_are_to_be_dropped_than_go_in_the_last_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packet_filter, "_most_bytes", lambda: 20480 // 2)
    networks = [f"10.{n % 250}.{n // 250}.1" for n in range(500)]
    program = drop_from(networks)
    kept = [network for network in networks if not ask(program, network)]
    assert kept == networks[-len(kept) :]
    assert len(kept) > 250
    assert ask(program, "10.0.0.2")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked to drop what comes to a port")
def test_the_kernel_takes_large_programs_one_after_another_and_decides_as_the_model_does() -> None:
    rng = random.Random(7)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        for _ in range(2):
            members = [f"127.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(1, 255)}" for _ in range(3000)]
            program = take_only(members)
            attach(listener, program)
            others = [f"127.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(1, 255)}" for _ in range(40)]
            strangers = [address for address in others if not ask(program, address)][:2]
            assert strangers
            taken = [connects(listener, address) for address in (*rng.sample(members, 20), *strangers)]
            assert taken == [True] * 20 + [False] * len(strangers)


def connects(listener: socket.socket, source: str) -> bool:
    with socket.socket() as stranger:
        stranger.settimeout(0.3)
        stranger.bind((source, 0))
        return stranger.connect_ex(("127.0.0.1", listener.getsockname()[1])) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked to drop what comes to a port")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_kernel_drops_what_it_is_told_to_and_takes_all_again(family: int) -> None:
    """A socket for both kinds of address gets packets of IPv4 with their own header."""

    with socket.socket(family) as listener:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("", 0))
        listener.listen(16)
        attach(listener, drop_from(["127.0.0.5", "fd00::/64", "127.0.0.7"]))
        assert [connects(listener, f"127.0.0.{n}") for n in (4, 5, 6, 7)] == [True, False, True, False]
        attach(listener, take_only(["127.0.0.5"]))
        assert [connects(listener, f"127.0.0.{n}") for n in (4, 5)] == [False, True]
        attach(listener, None)
        attach(listener, None)
        assert connects(listener, "127.0.0.4")
