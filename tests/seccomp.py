"""Forbid a process system calls, as a container's seccomp profile does: the kernel itself answers with an error.

A filter of classic BPF, installed for good in the calling thread and all that it starts:

    load architecture ─ not ours ─▶ allow
    load number       ─ forbidden ─▶ errno        (for `UNIX_SOCKETS` the first argument is compared as well)
                      ─ else ─────▶ allow
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence

# The numbers are by machine: (AUDIT_ARCH, {name: number}).
_MACHINES = {
    "x86_64": (
        0xC000003E,
        {"memfd_create": 319, "pidfd_open": 434, "process_vm_readv": 310, "process_vm_writev": 311, "socket": 41},
    ),
    "aarch64": (
        0xC00000B7,
        {"memfd_create": 279, "pidfd_open": 434, "process_vm_readv": 270, "process_vm_writev": 271, "socket": 198},
    ),
}
UNIX_SOCKETS = "socket(AF_UNIX)"
_AF_UNIX = 1

_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data; the low half of a little-endian argument
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_INSTRUCTION = struct.Struct("=HBBI")
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def why_no_seccomp() -> str:
    """Return why `forbid` cannot work here, or "": for `pytest.mark.skipif`."""
    if sys.platform != "linux":
        return "seccomp is Linux's"
    if platform.machine() not in _MACHINES:
        return f"the system calls' numbers on {platform.machine()} are not known here"
    return ""


def forbid(*calls: str, error: int = errno.EPERM) -> None:
    """Let each of `calls` fail with `error` from now on, in this thread and in what it starts; there is no way back.

    `calls` are memfd_create, pidfd_open, process_vm_readv, process_vm_writev, socket, and `UNIX_SOCKETS`, which is
    `socket` for that family alone. Docker's profile answers EPERM, newer ones ENOSYS.

    Raises:
        ValueError: a call is none of these.
        OSError: this machine cannot do it.
    """
    if reason := why_no_seccomp():
        raise OSError(errno.ENOSYS, f"forbid: {reason}")
    arch, numbers = _MACHINES[platform.machine()]
    if unknown := [call for call in calls if call != UNIX_SOCKETS and call not in numbers]:
        raise ValueError(f"forbid: {unknown} are unknown; there are {[*numbers, UNIX_SOCKETS]}")
    code = b"".join(_INSTRUCTION.pack(*step) for step in _filter(calls, arch, numbers, error))
    program = _Program(len(code) // _INSTRUCTION.size, code)
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"forbid: prctl: {os.strerror(ctypes.get_errno())}")


def _filter(calls: Sequence[str], arch: int, numbers: dict[str, int], error: int) -> list[tuple[int, int, int, int]]:
    """Return instructions as (code, steps to skip if equal, if not, operand)."""
    steps = [(_LOAD, 0, 0, _ARCH_AT), (_JUMP_IF_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _ALLOW)]
    for call in calls:
        steps.append((_LOAD, 0, 0, _NUMBER_AT))
        if call == UNIX_SOCKETS:
            steps += [(_JUMP_IF_EQUAL, 0, 3, numbers["socket"]), (_LOAD, 0, 0, _FIRST_ARGUMENT_AT)]
            steps.append((_JUMP_IF_EQUAL, 0, 1, _AF_UNIX))
        else:
            steps.append((_JUMP_IF_EQUAL, 0, 1, numbers[call]))
        steps.append((_RETURN, 0, 0, _ERRNO | error))
    return [*steps, (_RETURN, 0, 0, _ALLOW)]
