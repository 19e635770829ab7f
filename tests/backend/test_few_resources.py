"""Limits of the process on descriptors and threads, told with the number and what to do, not as a raw error."""

import contextlib
import errno
import os
import resource
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from phalanx._base.deadline import Deadline
from phalanx._base.threads import start_thread
from phalanx._comm.backend.open_memory import _no_memory
from phalanx._comm.symmetric_memory.fd_server import FdServer
from phalanx.errors import PhalanxError
from phalanx.testing import run_ranks


def test_a_process_without_a_free_descriptor_is_told_the_limit(tmp_path):
    """It was "OSError: [Errno 24] Too many open files: '/proc/sys/kernel/random/boot_id'"."""

    def check(rank, world_size):
        store = dist.FileStore(str(tmp_path / "store"), 1)
        dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()  # all is imported: that needs descriptors, too
        limit = os.open(os.devnull, os.O_RDONLY)  # the lowest number that is free: the limit is one of numbers
        os.close(limit)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        with pytest.raises(PhalanxError) as caught:
            dist.init_process_group("phalanx", store=store, rank=0, world_size=1, timeout=timedelta(seconds=20))
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return limit, str(caught.value)

    limit, text = run_ranks(check, 1, init=False)[0]
    assert "init_process_group of group '0' on rank 0: Too many open files" in text
    assert f"This process may have at most {limit} open files" in text
    assert "ulimit -n" in text


def test_a_user_without_a_free_thread_is_told_the_limit():
    """It was "can't start new thread", in whatever call happened to be the first that needs one."""

    def check(rank, world_size):
        if os.getuid() == 0:  # for whom the limit does not hold
            os.setgid(65534)
            os.setuid(65534)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        with pytest.raises(PhalanxError) as caught:
            start_thread(lambda: None, "phalanx-test")
        return str(caught.value)

    def ask(rank, world_size):
        reader, writer = os.pipe()
        child = os.fork()  # as another user it could not write its outcome
        if child == 0:
            try:
                os.write(writer, check(rank, world_size).encode())
            except BaseException as error:
                os.write(writer, repr(error).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        return text

    text = run_ranks(ask, 1, init=False)[0]
    assert "at most 0 processes and threads (ulimit -u)" in text, text


def test_a_rank_that_leads_its_host_and_cannot_open_a_connection_is_told_the_limit():
    """It waited silently, a hundred times a second, until the timeout of the group."""

    def lead(rank, world_size):
        server = FdServer("00" * 16)
        with server, contextlib.closing(socket.socket(socket.AF_UNIX)) as other:
            other.connect(server.address.path)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            with open(os.devnull, "rb") as lowest:
                free = lowest.fileno()
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            try:
                server.serve([1], [0], Deadline.after(100), lambda missing: None)
            except OSError as error:
                return error.errno
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert run_ranks(lead, 1, backend=None) == [errno.EMFILE]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, None])
@pytest.mark.parametrize("rank", [0, 1])
def test_whatever_the_system_refuses_while_memory_is_opened_is_told_with_advice(number, rank):
    """Each OSError was an UnboundLocalError, and no memory a bare MemoryError."""
    error = MemoryError() if number is None else OSError(number, os.strerror(number))
    first, *advice = _no_memory(error, rank, [0, 1], "dp").split("\n")
    reason = os.strerror(number or errno.ENOMEM)
    assert first == f"init_process_group of group 'dp' on rank {rank}: {reason}."
    expected = {
        errno.EMFILE: "ulimit -n",
        errno.ENFILE: "fs.file-max",
        errno.ENOMEM: "Free memory",
        None: "Free memory",
    }
    expected = expected.get(number, "If rank 0, the leader of this host, has ended" if rank else "")
    assert expected in " ".join(advice)
