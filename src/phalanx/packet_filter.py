"""Tell the kernel whose packets a listening socket takes, by programs of Linux's packet filter.

A packet that is dropped costs the process nothing, and its sender cannot tell. A filter of a socket needs no right. A
connection that is accepted has the filter that the listening socket had when it was made.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import itertools
import socket
import struct
import sys
from collections.abc import Iterable, Sequence

# <asm-generic/socket.h> and <linux/filter.h>; Python's socket module does not name them.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_LOAD, _LOAD_BYTE = 0x20, 0x30  # BPF_LD|BPF_W|BPF_ABS, BPF_LD|BPF_B|BPF_ABS
_JUMP, _JUMP_IF_EQUAL = 0x05, 0x15  # BPF_JMP with BPF_JA, BPF_JEQ|BPF_K
_JUMP_IF_GREATER, _JUMP_UNLESS_LESS = 0x25, 0x35  # BPF_JMP with BPF_JGT|BPF_K, BPF_JGE|BPF_K
_RETURN = 0x06  # BPF_RET|BPF_K
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF
_SOURCE = {4: 12, 6: 8}  # a header of IPv4 or IPv6 has the sender's address there
_FIRST_BYTE_OF_IPV6 = 0x60  # and a header of IPv4 begins with 0x45 or a little more
_TAKE, _DROP = 0xFFFFFFFF, 0
_MOST_INSTRUCTIONS = 4096
# The memory that the kernel gives a socket's options, and what it was before Linux 6.7 and is where nobody tells.
_MEMORY_FILE, _LEAST_MEMORY = "/proc/sys/net/core/optmem_max", 20480
_FEWEST_BYTES = 2048  # where the kernel grants less, no program is attached
# The bytes that the kernel makes of a program (Linux 6.18): its head, a word to load, one to compare as well, a range
_HEAD_BYTES, _LOAD_BYTES, _WORD_BYTES, _RANGE_BYTES = 512, 64, 80, 32

Instruction = tuple[int, int, int, int]  # the operation, how many to skip if true and if false, a number
Range = tuple[int, int]  # the first and the last of it
# Ranges of one word of 32 bits, by the version and by the words before it; the words after it may be any.
Ranges = dict[tuple[int, tuple[int, ...]], list[Range]]


def take_only(addresses: Iterable[str]) -> bytes | None:
    """Return a program that takes what comes from `addresses`; None if one of them is a name.

    Of more addresses than a program has room for it also takes those between neighbours, where the gaps are smallest:
    from about 300 ranges on before Linux 6.7, and 1,300 since.
    """
    ranges = _read(addresses)
    return None if ranges is None else _compile(_widen(ranges), _TAKE, _DROP)


def drop_from(networks: Sequence[str]) -> bytes | None:
    """Return a program that drops what comes from `networks`, and takes all else; None if one of them is a name.

    A network is an address, or an address with the length of its prefix. With more of them than a program has room for
    the first ones are left out.
    """
    while (ranges := _read(networks)) is not None and _room(ranges) < sum(map(len, ranges.values())):
        networks = networks[1 + len(networks) // 16 :]
    return None if ranges is None else _compile(ranges, _DROP, _TAKE)


def _read(networks: Iterable[str]) -> Ranges | None:
    """Return the ranges of words that these networks are; None if one of them is a name."""
    ranges: Ranges = {}
    for text in networks:
        try:
            network = ipaddress.ip_network(text.partition("%")[0])
        except ValueError:
            return None
        first, last = (struct.unpack(f">{len(one.packed) // 4}I", one.packed) for one in (network[0], network[-1]))
        at = max(network.prefixlen - 1, 0) // 32
        ranges.setdefault((network.version, first[:at]), []).append((first[at], last[at]))
    return {key: _joined(some) for key, some in ranges.items()}


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Return the same numbers in ascending ranges between which there are others."""
    joined: list[Range] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    return joined


def _room(ranges: Ranges) -> int:
    """Return how many ranges a program may have that compares these words before."""
    lengths = [len(words) for _, words in ranges]
    fixed_bytes = _HEAD_BYTES + _LOAD_BYTES * len(lengths) + _WORD_BYTES * sum(lengths)
    fixed_instructions = 5 + len(lengths) + 3 * sum(lengths)
    return min((_most_bytes() - fixed_bytes) // _RANGE_BYTES, (_MOST_INSTRUCTIONS - fixed_instructions) // 3)


def _most_bytes() -> int:
    """Return what a program may take: half of what a socket has, as the kernel takes a new one before it frees the
    old.
    """
    try:
        with open(_MEMORY_FILE) as file:
            return max(int(file.read()) // 2, _FEWEST_BYTES)
    except (OSError, ValueError):
        return _LEAST_MEMORY // 2


def _widen(ranges: Ranges) -> Ranges:
    """Return ranges for which a program has room, and which have all of these in them."""
    while _room(ranges) < len(ranges):
        longest = max(len(words) for _, words in ranges)
        shorter: Ranges = {}
        for (version, words), some in ranges.items():
            if len(words) < longest:
                shorter.setdefault((version, words), []).extend(some)
            else:
                shorter.setdefault((version, words[:-1]), []).append((words[-1], words[-1]))
        ranges = {key: _joined(some) for key, some in shorter.items()}
    gaps = [
        (after[0] - before[1], before[1], key)
        for key, some in ranges.items()
        for before, after in itertools.pairwise(some)
    ]
    gaps.sort(reverse=True)
    bridged = {(key, last): last + size for size, last, key in gaps[_room(ranges) - len(ranges) :]}
    return {
        key: _joined((first, bridged.get((key, last), last)) for first, last in some) for key, some in ranges.items()
    }


def _compile(ranges: Ranges, for_these: int, for_others: int) -> bytes:
    sections: dict[int, list[Instruction]] = {4: [], 6: []}
    for (version, words), some in sorted(ranges.items()):
        sections[version] += _compare(version, words, some, for_these)
    for section in sections.values():
        section.append((_RETURN, 0, 0, for_others))
    code: list[Instruction] = [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_JUMP_UNLESS_LESS, 0, 1, _FIRST_BYTE_OF_IPV6),
        (_JUMP, 0, 0, len(sections[4])),
        *sections[4],
        *sections[6],
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _compare(version: int, words: tuple[int, ...], ranges: Iterable[Range], found: int) -> list[Instruction]:
    """Return `found` for packets whose address has these words, and the next one in a range; others go on after it."""

    def load(number: int) -> Instruction:
        return (_LOAD, 0, 0, _NETWORK_HEADER + _SOURCE[version] + 4 * number)

    code = [load(len(words))]
    for first, last in ranges:
        code += [(_JUMP_UNLESS_LESS, 0, 2, first), (_JUMP_IF_GREATER, 1, 0, last), (_RETURN, 0, 0, found)]
    for number, word in reversed([*enumerate(words)]):
        code = [load(number), (_JUMP_IF_EQUAL, 1, 0, word), (_JUMP, 0, 0, len(code)), *code]
    return code


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
