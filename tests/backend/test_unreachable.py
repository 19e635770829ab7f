"""A job whose ranks cannot meet: bounded time, and an error that names the place, who is missing and what to check."""

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from phalanx.backend.rendezvous import _place
from phalanx.backend.unreachable import Meeting, explain, look
from phalanx.testing import RankFailed, run_ranks

TEN_S = timedelta(seconds=10)


@pytest.fixture
def deaf_port():
    """A port that is taken, and at which nobody listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        yield s.getsockname()[1]


def test_a_look_tells_whether_anybody_listens(deaf_port) -> None:
    assert look("127.0.0.1", deaf_port) == "the host refuses connections to that port: nobody listens there"
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert look("127.0.0.1", server.getsockname()[1]) == ""
    assert look("127.0.0.1", 0).startswith("it cannot be reached (") or "refuses" in look("127.0.0.1", 0)


def test_the_message_of_each_side_says_who_waited_where() -> None:
    assert explain(Meeting("node1", 29500, 3, 8, TEN_S), "nothing answers at that address", "timed out\nframe #0") == (
        "init_process_group on rank 3 of 8: rank 0 did not answer at node1 port 29500 within 10.0 s: "
        "nothing answers at that address.\n"
        "torch said: timed out\n"
        "Check that rank 0 was started and still runs (its log comes first), that MASTER_ADDR names its host as seen "
        "from here, that MASTER_PORT is the same on every rank, and that no firewall closes it."
    )
    first = explain(Meeting("node1", 29500, 0, 8, TEN_S), "", "1/8 clients joined.")
    assert first.startswith("init_process_group on rank 0 of 8: some of ranks 1 to 7 never came to node1 port 29500")
    assert "torch said: 1/8 clients joined.\n" in first
    assert "rank 1 never came" in explain(Meeting("node1", 29500, 0, 2, TEN_S), "", "")
    assert "something answers there, but no store" in explain(Meeting("node1", 29500, -1, -1, TEN_S), "", "Ping failed")


def test_the_place_is_the_url_s_or_else_the_environment_s(monkeypatch) -> None:
    for name, value in {"MASTER_ADDR": "node1", "MASTER_PORT": "17", "RANK": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert _place("env://", TEN_S) == Meeting("node1", 17, 2, 4, TEN_S)
    assert _place("env://?rank=1&world_size=3", TEN_S) == Meeting("node1", 17, 1, 3, TEN_S)
    assert _place("tcp://[fe80::1]:99?rank=1&world_size=3", TEN_S) == Meeting("fe80::1", 99, 1, 3, TEN_S)
    assert _place("tcp://host:x?rank=y", TEN_S) == Meeting("host", 0, -1, 4, TEN_S)


def _meet(rank, world_size, port, number):
    dist.init_process_group(
        "phalanx",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=number,
        world_size=2,
        timeout=timedelta(seconds=1),
    )


def _error_of(port, number):
    with pytest.raises(RankFailed) as caught:
        run_ranks(_meet, 1, port, number, init=False)
    return caught.value.errors[0]


def test_a_master_that_is_not_there_is_told_with_its_place(deaf_port) -> None:
    error = _error_of(deaf_port, 1)
    assert isinstance(error, dist.DistNetworkError)
    assert f"on rank 1 of 2: rank 0 did not answer at 127.0.0.1 port {deaf_port} within 1.0 s: the host refuses" in str(
        error
    )


def test_a_master_alone_says_whom_it_waited_for() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    error = _error_of(port, 0)
    assert isinstance(error, dist.DistStoreError)
    assert f"on rank 0 of 2: rank 1 never came to 127.0.0.1 port {port} within 1.0 s.\ntorch said: " in str(error)
