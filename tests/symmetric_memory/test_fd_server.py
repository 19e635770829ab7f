"""File descriptors change hands between processes that know one token; whoever does not gets nothing."""

import multiprocessing
import os
import resource
import signal
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from phalanx._base.deadline import Deadline
from phalanx._base.ipc import private
from phalanx._base.ipc.channel import Channel
from phalanx._base.ipc.local_listener import LocalAddress, new_token
from phalanx._comm.symmetric_memory import fd_server
from phalanx._comm.symmetric_memory.fd_server import FdServer, receive_fds
from phalanx._comm.symmetric_memory.memfd import memory
from phalanx.errors import DeadlineError, PhalanxError


class Leader:
    """A counter that serves in a thread: `with Leader(...) as token`."""

    def __init__(self, ranks, fds, timeout=10.0):
        self.token, self.missing, self.notices = new_token(), None, []
        self._ranks, self._fds, self._timeout = ranks, fds, timeout

    def __enter__(self):
        self._counter = FdServer(self.token)
        self.address = self._counter.address
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def _serve(self):
        try:
            self._counter.serve(self._ranks, self._fds, Deadline.after(self._timeout), self.notices.append)
        except DeadlineError as error:
            self.missing = error.missing

    def __exit__(self, *_):
        self._thread.join()
        self._counter.__exit__(None, None, None)


def connect(address):
    s = socket.socket(socket.AF_UNIX)
    s.connect(address.socket_address)
    return s


def test_each_rank_gets_the_same_memory_under_numbers_of_its_own():
    with memory("test", 4096) as fd, memory("other", 100) as other, Leader([1, 2], [fd, other]) as leader:
        os.pwrite(fd, b"hello", 0)
        got = [receive_fds(leader.address, rank, 2, Deadline.after(10)) for rank in (2, 1)]
        for mine, second in got:
            assert mine != fd
            assert os.pread(mine, 5, 0) == b"hello"
            assert os.fstat(second).st_size == 100
            assert not os.get_inheritable(mine)
            os.close(mine)
            os.close(second)
    assert leader.missing is None


def test_a_rank_also_gets_what_is_its_own():
    with memory("test", 1) as fd, memory("first", 10) as first, memory("second", 20) as second:
        server = FdServer(new_token())
        with server:
            own = {1: first, 2: second}
            thread = threading.Thread(
                target=lambda: server.serve([1, 2], [fd], Deadline.after(10), lambda missing: None, own=own)
            )
            thread.start()
            for rank, size in ((2, 20), (1, 10)):
                fds = receive_fds(server.address, rank, 2, Deadline.after(10))
                assert [os.fstat(f).st_size for f in fds] == [1, size]
                for f in fds:
                    os.close(f)
            thread.join()


def test_a_process_that_may_open_no_more_files_says_so():
    # The kernel drops descriptors that have no place, and "0 of 2 came" sent people looking for a leader that was well.
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with memory("test", 4096) as fd, Leader([1], [fd, fd, fd]) as leader:
        kept = set(os.listdir("/proc/self/fd"))
        lowest = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 2, before[1]))
        try:
            with pytest.raises(PhalanxError, match=rf"at most {lowest + 2} open files, but .* needs 3 more .*ulimit"):
                receive_fds(leader.address, 1, 3, Deadline.after(10))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        leader._thread.join()
        assert set(os.listdir("/proc/self/fd")) <= kept


def test_a_connection_without_the_token_gets_nothing_and_holds_nobody_up():
    with memory("test", 4096) as fd, Leader([1], [fd]) as leader:
        with connect(leader.address) as other:
            Channel(other).send({"token": new_token(), "rank": 1})
            other.settimeout(30)
            assert other.recv(10) == b""
        with connect(leader.address) as hasty:
            hasty.sendall(b"short")
        with connect(leader.address) as unknown:  # knows the token, but is not expected
            Channel(unknown).send({"token": leader.token, "rank": 7})
            unknown.settimeout(30)
            assert unknown.recv(10) == b""
        (mine,) = receive_fds(leader.address, 1, 1, Deadline.after(10))
        os.close(mine)
    assert leader.missing is None


def test_a_connection_that_sends_nothing_costs_its_timeout_and_no_more(monkeypatch):
    monkeypatch.setattr(fd_server, "_HELLO_TIMEOUT_S", 0.1)
    with memory("test", 4096) as fd, Leader([1], [fd]) as leader, connect(leader.address):
        (mine,) = receive_fds(leader.address, 1, 1, Deadline.after(10))
        os.close(mine)
    assert leader.missing is None


def test_a_silent_connection_does_not_hold_the_leader_beyond_its_deadline():
    with memory("test", 4096) as fd, Leader([1, 3], [fd], timeout=0.2) as leader, connect(leader.address):
        pass
    assert leader.missing == (1, 3)
    with memory("test", 4096) as fd, Leader([1], [fd], timeout=0.2) as leader:
        silent = connect(leader.address)
        leader._thread.join(4.0)
        assert leader.missing == (1,)
        silent.close()


def test_a_wrong_number_of_descriptors_is_refused_and_none_is_kept():
    with memory("test", 4096) as fd, Leader([1], [fd]) as leader:
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(
            PhalanxError,
            match="local rank 0 of this host closed the connection after 1 of 2 file descriptors: read its log",
        ):
            receive_fds(leader.address, 1, 2, Deadline.after(10))
        leader._thread.join()
        assert set(os.listdir("/proc/self/fd")) <= before


def test_a_leader_that_is_gone_is_an_error_at_once():
    with FdServer(new_token()) as server:
        address = server.address
        assert LocalAddress.parse(str(address)) == address
    with pytest.raises(PhalanxError, match="local rank 0 of this host cannot be reached: "):
        receive_fds(address, 1, 1, Deadline.after(10))


def test_who_waits_for_a_leader_hears_that_it_has_ended():
    # An ordinary user may not read the /proc of a process that has ended: EACCES, as if it were in another container.
    # The other ranks then waited until time was up for a socket that nobody would open.
    def check():
        raise PhalanxError("rank 0 has ended")

    with pytest.raises(PhalanxError, match="rank 0 has ended"):
        receive_fds(LocalAddress(new_token()), 1, 1, Deadline.after(600), check=check)


def test_a_leader_that_does_not_answer_is_late():
    with FdServer(new_token()) as server, pytest.raises(DeadlineError, match="did not send the shared memory in"):
        receive_fds(server.address, 1, 1, Deadline.after(0.1))
    with pytest.raises(DeadlineError, match="in time"):
        receive_fds(LocalAddress(new_token()), 1, 1, Deadline.after(0.1))


def test_whoever_may_wait_for_the_leader_connects_again_until_it_listens():
    token, got, path = new_token(), [], str(private.folder() / new_token())
    address = LocalAddress(token, path)
    connection = threading.Thread(
        target=lambda: got.extend(receive_fds(address, 1, 1, Deadline.after(20), wait_for_leader=True))
    )
    connection.start()
    with memory("test", 4096) as fd, FdServer(token, at=path) as server:
        assert server.address == address
        server.serve([1], [fd], Deadline.after(20), lambda missing: None)
        connection.join()
    os.close(*got)
    assert not os.path.lexists(path)


def test_a_socket_that_a_killed_leader_has_left_makes_room_for_the_next():
    path = str(private.folder() / new_token())
    leader = os.fork()
    if leader == 0:
        FdServer(new_token(), at=path)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(leader, 0)
    assert os.path.lexists(path)
    with memory("test", 1) as fd, FdServer(new_token(), at=path) as server:
        thread = threading.Thread(target=lambda: server.serve([1], [fd], Deadline.after(20), lambda missing: None))
        thread.start()
        os.close(*receive_fds(server.address, 1, 1, Deadline.after(20)))
        with pytest.raises(OSError, match="in use"):  # of another job that took itself for this one
            FdServer(new_token(), at=path)
        thread.join()


def test_the_socket_has_no_file_and_no_name_that_others_could_connect_to(tmp_path, monkeypatch):
    long = tmp_path / ("long" * 30)  # a socket's path may have 107 bytes
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with FdServer(new_token()) as server:
        assert server.address.token not in Path("/proc/net/unix").read_text()
        assert os.listdir(long) == []
        assert oct(os.stat(f"/proc/{os.getpid()}/fd").st_mode & 0o077) == "0o0"


def test_a_folder_that_is_not_ours_alone_is_not_used(tmp_path, monkeypatch):
    taken, loose, free = (tmp_path / name for name in ("taken", "loose", "free"))
    for place in (taken, loose, free):
        place.mkdir()
    (taken / f"phalanx-{os.getuid()}").symlink_to(tmp_path)  # anybody may write to /tmp, and knows the name
    (loose / f"phalanx-{os.getuid()}").mkdir(mode=0o777)
    (loose / f"phalanx-{os.getuid()}").chmod(0o777)
    monkeypatch.setattr(private, "_PLACES", (str(taken), str(loose), str(free)))
    assert private.folder() == private.folder() == free / f"phalanx-{os.getuid()}"
    monkeypatch.setattr(private, "_PLACES", (str(taken), str(loose), str(tmp_path / "nowhere")))
    with pytest.raises(
        PhalanxError, match=r"not a folder that only this user can enter; .*No such file(.|\n)*MASTER_ADDR"
    ):
        private.folder()


class Flood:
    """Processes of another user (where the tests may become one) that connect to a name, over and over."""

    def __init__(self, address, num_processes=4):
        self._address = address
        context = multiprocessing.get_context("fork")
        self._processes = [context.Process(target=self._attack, daemon=True) for _ in range(num_processes)]

    def __enter__(self):
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_):
        for process in self._processes:
            process.kill()
            process.join()
            process.close()

    def _attack(self):
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        held = []
        while True:
            s = socket.socket(socket.AF_UNIX)
            s.settimeout(0.2)
            try:
                s.connect(self._address)
                held.append(s)
                if len(held) > 300:
                    held.pop(0).close()
            except OSError:
                s.close()


def test_another_user_who_fills_the_queue_keeps_nobody_out():
    """A full queue answered "try again", which was taken for the leader's end: 3 starts of 12 failed. Also processes
    of others that connect and say nothing stood before the others for five seconds each.
    """
    with memory("test", 4096) as fd, FdServer(new_token()) as server:
        server.open_to_containers()
        everybodys = LocalAddress(server.address.token)
        with Flood(everybodys.socket_address):
            while not _is_queue_full(everybodys.socket_address):
                pass
            ranks = range(1, 9)
            leader = threading.Thread(
                target=lambda: server.serve(ranks, [fd], Deadline.after(60), lambda missing: None)
            )
            got = []
            members = [
                threading.Thread(
                    target=lambda rank=rank, address=address: got.append(
                        receive_fds(address, rank, 1, Deadline.after(60))
                    )
                )
                for rank, address in zip(ranks, [everybodys, server.address] * 4, strict=True)
            ]
            for thread in (leader, *members):
                thread.start()
            for thread in (leader, *members):
                thread.join()
        assert len(got) == 8
        for (mine,) in got:
            os.close(mine)


def _is_queue_full(address):
    with socket.socket(socket.AF_UNIX) as s:
        s.setblocking(False)
        try:
            s.connect(address)
        except BlockingIOError:
            return True
    return False


def test_a_leader_says_who_is_missing_while_it_waits(monkeypatch):
    monkeypatch.setattr(fd_server, "_SLICE_S", 0.05)
    with memory("test", 4096) as fd, Leader([1, 2], [fd], timeout=1.5) as leader:
        pass
    assert leader.missing == (1, 2)
    assert leader.notices[0] == {1, 2}


def test_two_leaders_cannot_have_one_token():
    token = new_token()
    assert len(bytes.fromhex(token)) == 16
    with FdServer(token) as first, FdServer(token) as second:
        first.open_to_containers()
        with pytest.raises(OSError, match="in use"):
            second.open_to_containers()
