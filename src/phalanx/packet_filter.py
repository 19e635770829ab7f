"""Tell the kernel whose packets a listening socket takes, by programs of Linux's packet filter.

A packet that is dropped costs the process nothing, and its sender cannot tell. A filter of a socket needs no right. A
connection that is accepted has the filter that the listening socket had when it was made.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterable

# <asm-generic/socket.h> and <linux/filter.h>; Python's socket module does not name them.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_LOAD, _LOAD_BYTE = 0x20, 0x30  # BPF_LD|BPF_W|BPF_ABS, BPF_LD|BPF_B|BPF_ABS
_JUMP, _JUMP_IF_EQUAL, _JUMP_UNLESS_LESS = 0x05, 0x15, 0x35  # BPF_JMP with BPF_JA, BPF_JEQ|BPF_K, BPF_JGE|BPF_K
_RETURN = 0x06  # BPF_RET|BPF_K
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF
_SOURCE = {4: 12, 6: 8}  # a header of IPv4 or IPv6 has the sender's address there
_FIRST_BYTE_OF_IPV6 = 0x60  # and a header of IPv4 begins with 0x45 or a little more
_TAKE, _DROP = 0xFFFFFFFF, 0
_MOST_INSTRUCTIONS = 4096

Instruction = tuple[int, int, int, int]  # the operation, how many to skip if true and if false, a number
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def take_only(addresses: Iterable[str]) -> bytes | None:
    """Return a program that takes what comes from `addresses` alone; None if there is none: a name, or too many."""
    return _program(addresses, _TAKE, _DROP)


def drop_from(networks: Iterable[str]) -> bytes | None:
    """Return a program that drops what comes from `networks`, and takes all else; None if there are too many.

    A network is an address, or an address with a length: of IPv4 32 bits, of IPv6 32, 64, 96 or 128.
    """
    return _program(networks, _DROP, _TAKE)


def _program(networks: Iterable[str], for_these: int, for_others: int) -> bytes | None:
    sections: dict[int, list[Instruction]] = {4: [], 6: []}
    for text in sorted(networks):
        try:
            network = ipaddress.ip_network(text.partition("%")[0])
        except ValueError:  # it is a name
            return None
        sections[network.version] += _compare(network, for_these)
    for section in sections.values():
        section.append((_RETURN, 0, 0, for_others))
    code: list[Instruction] = [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_JUMP_UNLESS_LESS, 0, 1, _FIRST_BYTE_OF_IPV6),
        (_JUMP, 0, 0, len(sections[4])),
        *sections[4],
        *sections[6],
    ]
    if len(code) > _MOST_INSTRUCTIONS:
        return None
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _compare(network: Network, found: int) -> list[Instruction]:
    """Return `found` for packets from `network`; the others go on to what follows."""
    num_words = network.prefixlen // 32
    words = struct.unpack(f">{num_words}I", network.network_address.packed[: 4 * num_words])
    code: list[Instruction] = []
    for number, word in enumerate(words):
        # so many instructions are skipped if one word differs, the return included
        left = 2 * (num_words - number - 1) + 1
        code.append((_LOAD, 0, 0, _NETWORK_HEADER + _SOURCE[network.version] + 4 * number))
        code.append((_JUMP_IF_EQUAL, 0, left, word))
    return [*code, (_RETURN, 0, 0, found)]


def attach(one: socket.socket, program: bytes | None) -> None:
    """Let the kernel ask `program` what to take for this socket; None takes all, as where there is no such filter."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # none was set, or this is a sandbox
        if program is None:
            one.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            return
        instructions = ctypes.create_string_buffer(program, len(program))
        pointer = struct.pack("HL", len(program) // 8, ctypes.addressof(instructions))
        one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)
