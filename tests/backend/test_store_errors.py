"""A job whose ranks cannot meet: bounded time, and an error that names the place, who is missing and what to check."""

import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.logs import logged

from phalanx._comm.backend import tcp_store
from phalanx._comm.backend.rendezvous import _place
from phalanx._comm.backend.tcp_store import StoreAddress, explain, open_store, probe
from phalanx.errors import DeadlineError
from phalanx.testing import RankFailed, run_ranks, why_no_hosts
from phalanx.testing.namespaces import enter_own_network

TEN_S = timedelta(seconds=10)


@pytest.fixture
def deaf_port():
    """A port that is taken, and at which nobody listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        yield s.getsockname()[1]


def test_a_look_tells_whether_anybody_listens(deaf_port) -> None:
    assert probe("127.0.0.1", deaf_port) == "the host refuses connections to that port: no process listens there"
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert probe("127.0.0.1", server.getsockname()[1]) == ""
    assert probe("127.0.0.1", 0).startswith("it cannot be reached (") or "refuses" in probe("127.0.0.1", 0)


def test_the_message_of_each_side_says_who_waited_where() -> None:
    assert explain(
        StoreAddress("node1", 29500, 3, 8, TEN_S), "nothing answers at that address", "timed out\nframe #0"
    ) == (
        "init_process_group on rank 3 of 8: rank 0 did not answer at node1 port 29500 within 10.0 s: "
        "nothing answers at that address.\n"
        "torch said: timed out\n"
        "Check that rank 0 was started and still runs (read its log first), that MASTER_ADDR names its host as seen "
        "from here, that MASTER_PORT is the same on every rank, and that no firewall blocks it."
    )
    first = explain(
        StoreAddress("node1", 29500, 0, 8, TEN_S), "the name does not resolve on this host (x)", "no address\nframe #0"
    )
    assert first.startswith(
        "init_process_group on rank 0 of 8: the job's store cannot be opened at node1 port 29500: th"
    )
    assert "torch said: no address\nCheck that MASTER_ADDR names this host" in first
    assert "the program that answers there is not a store" in explain(
        StoreAddress("node1", 29500, -1, -1, TEN_S), "", "Ping failed"
    )


def test_a_late_rank_0_is_announced_once_and_torch_prints_nothing(monkeypatch, tmp_path, capfd) -> None:
    """torch's client printed its C++ stack every eight seconds until rank 0 had started."""
    monkeypatch.setattr(tcp_store, "NOTICE_S", 0.0)
    port, announced = _free_port(), tmp_path / "announced"

    def check(rank, world_size):
        place = StoreAddress("127.0.0.1", port, rank, world_size, TEN_S)
        if rank == 0:
            while not announced.exists():
                pass
            store = open_store(place, serve=True)
            store.wait(["connected"])
            return []
        with logged() as lines:
            thread = threading.Thread(target=lambda: open_store(place, serve=False).set("connected", "yes"))
            thread.start()
            while not lines:
                pass
            announced.touch()
            thread.join()
        return lines

    assert run_ranks(check, 2, init=False)[1] == [
        f"init_process_group on rank 1 of 2: waiting for rank 0 at 127.0.0.1 port {port} for 0 s (the host refuses "
        "connections to that port: no process listens there); giving up after 10 s."
    ]
    # torch's server has a line of its own for a client whose name a name service does not give at once.
    unnamed = "The hostname of the client socket cannot be retrieved"
    assert [line for line in capfd.readouterr().err.splitlines() if unnamed not in line] == []


def test_the_place_is_the_url_s_or_else_the_environment_s(monkeypatch) -> None:
    for name, value in {"MASTER_ADDR": "node1", "MASTER_PORT": "17", "RANK": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert _place("env://", TEN_S) == StoreAddress("node1", 17, 2, 4, TEN_S)
    assert _place("env://?rank=1&world_size=3", TEN_S) == StoreAddress("node1", 17, 1, 3, TEN_S)
    assert _place("tcp://[fe80::1]:99?rank=1&world_size=3", TEN_S) == StoreAddress("fe80::1", 99, 1, 3, TEN_S)
    assert _place("tcp://host:x?rank=y", TEN_S) == StoreAddress("host", 0, -1, 4, TEN_S)


def _meet(rank, world_size, port, number):
    dist.init_process_group(
        "phalanx", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2, timeout=timedelta(seconds=1)
    )


def _error_of(port, number):
    with pytest.raises(RankFailed) as caught:
        run_ranks(_meet, 1, port, number, init=False)
    return caught.value.errors[0]


@pytest.mark.slow
def test_a_master_that_is_not_there_is_told_with_its_place(deaf_port) -> None:
    error = _error_of(deaf_port, 1)
    assert isinstance(error, dist.DistNetworkError)
    assert f"on rank 1 of 2: rank 0 did not answer at 127.0.0.1 port {deaf_port} within 1.0 s: the host refuses" in str(
        error
    )
    assert "torch said" not in str(error)


def test_a_master_alone_says_whom_it_waited_for() -> None:
    """Our error, not torch's any more: rank 0 does not wait in torch, which only counts who comes."""
    error = _error_of(_free_port(), 0)
    assert isinstance(error, DeadlineError)
    assert "rank 1 of 2 never joined at 127.0.0.1 port " in str(error)
    assert "within 1.0 s." in str(error)
    assert "(MASTER_ADDR, MASTER_PORT)" in str(error)


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _start(port, rank, world_size):
    # As long a time as a job has: nothing here may wait for it.
    dist.init_process_group(
        "phalanx", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size, timeout=timedelta(minutes=5)
    )


def _numbers(rank, _, port, numbers, sizes):
    with pytest.raises((RuntimeError, ValueError)) as caught:
        _start(port, numbers[rank], sizes[rank])
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("numbers", "sizes", "said"),
    [
        ((0, 1), (3, 2), "the ranks were given different world sizes.\n  rank 0 (pid "),
        ((0, 1, 1), (3, 3, 3), "two processes are rank 1 of 3:\n  pid "),
        ((0, 5, 1), (3, 3, 3), " is rank 5 of 3, whose ranks are 0 to 2.\n"),
    ],
)
def test_numbers_that_do_not_fit_are_told_at_once_on_all_ranks_at_an_address_too(numbers, sizes, said) -> None:
    """torch's rank 0 waits in its store until as many have come as it believes in: the whole timeout."""
    results = run_ranks(_numbers, len(numbers), _free_port(), numbers, sizes, init=False)
    for number, (kind, message) in zip(numbers, results, strict=True):
        assert kind == ("ValueError" if number == 5 else "MismatchError")
        assert said in message


def test_two_processes_that_are_rank_0_hear_of_each_other_and_so_does_rank_1() -> None:
    """The second said that the others never came, for it could not have the port; the others waited for it."""

    def check(rank, world_size, port):
        if rank == 2:  # only when the first has the port
            while probe("127.0.0.1", port):
                pass
        return _numbers(rank, world_size, port, (0, 1, 0), (3, 3, 3))

    (_, first), (_, one), (kind, second) = run_ranks(check, 3, _free_port(), init=False)
    assert "two processes are rank 0 of 3:\n  " in first
    assert "two processes are rank 0 of 3:\n  " in one
    assert kind == "DistNetworkError"
    assert (
        "by another process of this host, so rank 0 cannot serve the job's store there.\ntwo processes are rank 0"
        in second
    )


@pytest.mark.slow(but=("silent",))
@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None], ids=["web", "closes", "silent"])
def test_a_port_of_another_program_is_told_as_such(answer, monkeypatch) -> None:
    """It was told as a rank that never came, at the end of the timeout; torch's client waits for ever for one that
    takes connections and says nothing.
    """
    monkeypatch.setattr(tcp_store, "_ANSWER_S", 0.5)
    monkeypatch.setattr(tcp_store, "_GRACE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_serve, args=(server, answer), daemon=True)
        thread.start()
        port = server.getsockname()[1]
        (kind, first), (other_kind, second) = run_ranks(_numbers, 2, port, (0, 1), (2, 2), init=False, start="fork")
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert kind == other_kind == "DistNetworkError"
    assert f"on rank 0 of 2: port {port} is in use by another process of this host" in first
    assert "That process is another program, or a job that is still running." in first
    assert "Choose another MASTER_PORT" in first
    assert "on rank 1 of 2: rank 0 did not answer at 127.0.0.1" in second
    assert "the program that answers there is not a store" in second


def _serve(server, answer):
    kept = []
    while True:
        try:
            client = server.accept()[0]
        except OSError:
            break
        if answer is None:
            kept.append(client)
            continue
        client.sendall(answer)
        client.close()
    for client in kept:
        client.close()


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_a_port_that_is_connected_to_itself_is_one_where_nobody_listens():
    def fn(rank, world_size):
        enter_own_network()
        Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("29600 29600")
        return probe("127.0.0.1", 29600)

    assert run_ranks(fn, 1, init=False) == ["the host refuses connections to that port: no process listens there"]
