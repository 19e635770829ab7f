"""Calls that are forbidden fail as a container's profile makes them fail, and no others."""

import errno
import os
import socket

import pytest
from tests.seccomp import UNIX_SOCKETS, forbid, why_no_seccomp

from phalanx.testing import run_ranks

pytestmark = pytest.mark.skipif(bool(why_no_seccomp()), reason=why_no_seccomp())


def _tried(*calls):
    def number(call):
        try:
            fd = call()
        except OSError as error:
            return error.errno
        os.close(fd)
        return 0

    return [
        number(lambda: os.memfd_create("x")),
        number(lambda: os.pidfd_open(os.getpid())),
        number(lambda: socket.socket(socket.AF_UNIX).detach()),
        number(lambda: socket.socket(socket.AF_INET).detach()),
    ]


def _ranks(rank, world_size):
    before = _tried()
    if rank == 0:
        forbid("memfd_create", error=errno.ENOSYS)
        forbid("pidfd_open", UNIX_SOCKETS)
    else:
        forbid("socket")
    return before, _tried()


def test_what_is_forbidden_fails_and_all_else_works() -> None:
    first, second = run_ranks(_ranks, 2, init=False)
    assert first == ([0, 0, 0, 0], [errno.ENOSYS, errno.EPERM, errno.EPERM, 0])
    assert second == ([0, 0, 0, 0], [0, 0, errno.EPERM, errno.EPERM])
    assert _tried() == [0, 0, 0, 0]


def test_a_call_that_is_not_known_is_refused_before_anything_is_forbidden() -> None:
    with pytest.raises(ValueError, match=r"\['reboot'\] are unknown; there are \['memfd_create'"):
        forbid("memfd_create", "reboot")
    assert _tried() == [0, 0, 0, 0]
