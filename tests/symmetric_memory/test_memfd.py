"""Memory without a name, from a memfd or, where that is forbidden, from a file that nobody can find."""

import fcntl
import os
import resource

import pytest
from tests.containers import contained, why_no_containers
from tests.leaks import files_in_shm
from tests.seccomp import forbid, why_no_seccomp

from phalanx._comm.symmetric_memory.memfd import memory, obstacle, sparse_memory
from phalanx.errors import PhalanxError
from phalanx.testing import run_ranks

needs_seccomp = pytest.mark.skipif(bool(why_no_seccomp()), reason=why_no_seccomp())
needs_containers = pytest.mark.skipif(bool(why_no_containers()), reason=why_no_containers())


def test_memory_is_nameless_sparse_and_closed_on_exit():
    with sparse_memory("test", 1 << 40) as sparse:
        assert os.fstat(sparse.fd).st_size == 1 << 40
        sparse.reserve(0, 1 << 39)  # only the machine limits a memfd
        assert os.fstat(sparse.fd).st_blocks == 0
        assert os.fstat(sparse.fd).st_nlink == 0
        assert not os.get_inheritable(sparse.fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(sparse.fd)
    assert obstacle() == ""


def _without_memfd(rank, world_size):
    forbid("memfd_create")
    before = files_in_shm()
    with memory("test", 10000) as fd, sparse_memory("other", 1 << 40) as sparse, memory("empty", 0) as empty:
        assert files_in_shm() == before
        sparse.reserve(1 << 39, 4096)
        sizes = [os.fstat(f).st_blocks * 512 for f in (fd, sparse.fd, empty)]
        os.pwrite(fd, b"hello", 9000)
        return sizes, sparse.in_folder, os.fstat(fd).st_nlink, os.get_inheritable(fd), obstacle()


@needs_seccomp
def test_without_memfd_it_is_an_unlinked_file_of_which_only_what_is_reserved_takes_room():
    sizes, folder, links, inheritable, reason = run_ranks(_without_memfd, 1, init=False)[0]
    assert sizes == [12288, 4096, 0]
    assert (folder, links, inheritable, reason) == ("/dev/shm", 0, False, "")


def test_a_python_of_an_old_c_library_has_no_memfd_either(monkeypatch):
    """Its os module lacks the names: an AttributeError ended the job, and the file was never tried."""
    for name in ("memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING"):
        monkeypatch.delattr(os, name)
    with sparse_memory("test", 4096) as sparse:
        assert sparse.in_folder == "/dev/shm"
    assert obstacle() == ""


def _in_a_small_folder(rank, world_size):
    def use():
        forbid("memfd_create")
        with sparse_memory("test", 1 << 30) as sparse:
            sparse.reserve(0, 1 << 19)
            with pytest.raises(PhalanxError, match=f"{1 << 20} bytes in /dev/shm: No space left on device"):
                sparse.reserve(1 << 20, 1 << 20)
            with memory("next", 1 << 20) as fd:  # the next folder has room
                return os.fstat(fd).st_dev != os.fstat(sparse.fd).st_dev

    return contained(use, shm_bytes=1 << 20)


@needs_seccomp
@needs_containers
def test_a_folder_that_is_full_is_told_before_anything_is_written():
    # Writing to a mapped file that has no room is a bus error, which ends a rank without a word.
    assert run_ranks(_in_a_small_folder, 1, init=False) == [True]


def _nowhere(rank, world_size):
    import tempfile

    forbid("memfd_create")
    tempfile.tempdir = "/proc/nowhere"

    def use():
        with pytest.raises(PhalanxError) as caught, memory("test", 1 << 20):
            pass
        return str(caught.value)

    return contained(use, shm_bytes=1 << 16)


@needs_seccomp
@needs_containers
def test_where_there_is_none_every_reason_is_told():
    assert run_ranks(_nowhere, 1, init=False) == [
        "no memory can be shared (memfd_create: Operation not permitted; "
        f"{1 << 20} bytes in /dev/shm: No space left on device; /proc/nowhere: No such file or directory)"
    ]


def test_nobody_who_holds_a_memfd_can_change_its_size():
    """A group's memory that another holder made smaller was a bus error for every rank that had it mapped."""
    with memory("test", 10000) as fd, sparse_memory("other", 1 << 30) as sparse, memory("grows", 0) as growing:
        for sealed, sizes in ((fd, (0, 9999, 20000)), (sparse.fd, (0, 1 << 31))):
            before = os.fstat(sealed).st_size
            for size in sizes:
                with pytest.raises(PermissionError):
                    os.ftruncate(sealed, size)
            assert os.fstat(sealed).st_size == before
        os.write(growing, b"the job's store grows as it is written")
        with pytest.raises(PermissionError):
            fcntl.fcntl(growing, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)  # nor seal it for the others


def _without_descriptors(rank, world_size):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull, "rb") as lowest:
        free = lowest.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        return free, obstacle()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_without_a_free_descriptor_is_told_its_limit_and_what_to_do():
    """It was "Too many open files" of memfd_create and of two folders, without advice."""
    limit, told = run_ranks(_without_descriptors, 1, backend=None)[0]
    assert told == (
        f"no memory can be shared: Too many open files. This process may have at most {limit} open files. Raise "
        "the limit (ulimit -n)."
    )
