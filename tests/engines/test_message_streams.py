"""Short messages over connections of their own: whole, in order, only between ranks of the group."""

import os
import random
import signal
import socket
import struct
import threading

import pytest
from tests.threads import map_in_threads

from phalanx._base.deadline import Deadline
from phalanx._comm.engines.message_streams import StreamBroken, StreamListener

SECRET = "the group's secret"
LONG_S = 20.0


def connect_all(graph, secrets=None, before=lambda rank, place: None):
    """Return each rank's streams, or its error; `graph` has each rank's peers."""
    listeners = [StreamListener("127.0.0.1") for _ in graph]
    places = {rank: listener.place for rank, listener in enumerate(listeners)}

    def connect(rank):
        before(rank, places[rank])
        try:
            secret = secrets[rank] if secrets else SECRET
            return listeners[rank].connect(rank, graph[rank], places, secret, Deadline.after(LONG_S))
        except RuntimeError as error:
            return error

    return map_in_threads(connect, range(len(graph)))


def pair():
    return connect_all([[1], [0]])


def close_all(streams):
    for one in streams:
        one.shut_down()
        one.close()


def receive(streams, peer, nbytes=1 << 20, within_s=LONG_S):
    buffer = memoryview(bytearray(nbytes))
    return bytes(buffer[: streams.receive(peer, buffer, Deadline.after(within_s))])


@pytest.mark.parametrize("seed", range(8))
def test_messages_of_any_length_arrive_whole_and_in_order_whatever_the_kernel_accepts_at_once(seed):
    rng = random.Random(seed)
    size = rng.randrange(2, 6)
    edges = [(a, b) for a in range(size) for b in range(a) if rng.random() < 0.7 or b == 0]
    graph = [[b if a == rank else a for a, b in edges if rank in (a, b)] for rank in range(size)]
    streams = connect_all(graph)
    lengths = [rng.choice([0, 1, 300, 5_000, 200_000, 900_000]) for _ in range(12)]
    for one in streams:
        for connection in one._connections.values():
            if rng.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    def message(src, dst, number):
        return random.Random(f"{src} {dst} {number}").randbytes(lengths[(number + src) % len(lengths)])

    def talk(rank):
        deadline = Deadline.after(LONG_S)
        own = random.Random(rank)
        received = {peer: [] for peer in graph[rank]}
        for number in range(len(lengths)):
            for peer in own.sample(graph[rank], len(graph[rank])):
                data = bytearray(message(rank, peer, number))
                streams[rank].send(peer, memoryview(data))
                data[:] = bytes(len(data))  # its memory may be reused
            for peer in graph[rank]:
                received[peer].append(receive(streams[rank], peer))
            streams[rank].flush(deadline)
        return received

    for rank, received in enumerate(map_in_threads(talk, range(size))):
        for peer, messages in received.items():
            assert messages == [message(peer, rank, number) for number in range(len(lengths))]
    close_all(streams)


def is_closed(stranger):
    stranger.settimeout(LONG_S)
    try:
        return stranger.recv(1) == b""
    except ConnectionError:
        return True


def test_strangers_are_turned_away_and_hold_nobody_up():
    strangers = []

    def come_first(rank, place):
        if rank == 0:
            hellos = [b"", b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n" * 2, struct.pack("<I", 1) + bytes(32), b"\1"]
            for hello in hellos:
                strangers.append(socket.create_connection(place))
                strangers[-1].sendall(hello)

    first, second = connect_all([[1], [0]], before=come_first)
    assert len(strangers) == 4
    assert all(map(is_closed, strangers))
    second.send(0, memoryview(b"hello"))
    assert receive(first, 1) == b"hello"
    close_all([first, second])
    for stranger in strangers:
        stranger.close()


def test_more_strangers_than_may_wait_do_not_keep_a_peer_out():
    listeners = [StreamListener("127.0.0.1") for _ in range(2)]
    places = {rank: listener.place for rank, listener in enumerate(listeners)}
    have_come = threading.Barrier(99)

    def come(rank):
        if rank > 1:  # a stranger, who sends nothing
            stranger = socket.create_connection(places[0], LONG_S)
            have_come.wait()
            return stranger
        if rank == 1:
            have_come.wait()
        return listeners[rank].connect(rank, [1 - rank], places, SECRET, Deadline.after(LONG_S))

    first, second, *strangers = map_in_threads(come, range(100))
    second.send(0, memoryview(b"hello"))
    assert receive(first, 1) == b"hello"
    close_all([first, second])
    for stranger in strangers:
        stranger.close()


def test_ranks_with_different_secrets_do_not_connect():
    listeners = [StreamListener("127.0.0.1") for _ in range(2)]
    places = {rank: listener.place for rank, listener in enumerate(listeners)}

    def connect(rank):
        within = Deadline.after(1.0 if rank == 0 else LONG_S)
        with pytest.raises(RuntimeError) as caught:
            listeners[rank].connect(rank, [1 - rank], places, f"secret {rank}", within)
        return str(caught.value)

    waits, answered = map_in_threads(connect, range(2))
    assert waits == "rank 1 did not connect in time"
    assert answered == "rank 0 at 127.0.0.1 closed the connection at once" or "reset" in answered


def test_a_process_without_the_secret_cannot_take_the_place_of_a_rank():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend():
            with server.accept()[0] as one:
                one.sendall(bytes(32))
                one.recv(100)

        def connect():
            with pytest.raises(RuntimeError, match="did not answer as a rank of this group"):
                StreamListener("127.0.0.1").connect(1, [0], {0: server.getsockname()}, SECRET, Deadline.after(LONG_S))

        map_in_threads(lambda role: role(), [pretend, connect])


def test_an_unknown_address_is_refused_because_it_would_mean_every_address():
    with pytest.raises(RuntimeError, match="the address of this host is unknown"):
        StreamListener("")


def test_a_peer_that_does_not_listen_is_named():
    listener = StreamListener("127.0.0.1")
    gone = StreamListener("127.0.0.1")
    gone.close()
    with pytest.raises(RuntimeError, match=r"no connection with rank 0 at 127\.0\.0\.1: Connection refused"):
        listener.connect(1, [0], {0: gone.place}, SECRET, Deadline.after(LONG_S))
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(listener.place)


def test_what_was_sent_before_the_end_still_arrives_and_then_the_peer_knows_that_it_has_ended():
    first, second = pair()
    second.send(0, memoryview(bytes(10_000)))
    second.flush(Deadline.after(LONG_S))
    second.shut_down()
    second.close()
    assert receive(first, 1) == bytes(10_000)
    with pytest.raises(RuntimeError, match="closed by the peer"):
        receive(first, 1)
    close_all([first])


def test_shutting_down_wakes_the_thread_that_waits_here():
    first, second = pair()
    threading.Timer(0.2, first.shut_down).start()
    with pytest.raises(RuntimeError, match="closed"):
        receive(first, 1)
    close_all([first, second])


def test_a_late_message_and_one_that_nobody_reads_end_at_the_deadline():
    first, second = pair()
    with pytest.raises(RuntimeError, match="in time"):
        receive(first, 1, within_s=0.2)
    first.send(1, memoryview(bytes(50_000_000)))
    with pytest.raises(RuntimeError, match="in time"):
        first.flush(Deadline.after(0.2))
    close_all([first, second])


def test_a_message_that_is_longer_than_its_memory_is_refused():
    first, second = pair()
    second.send(0, memoryview(bytes(11)))
    with pytest.raises(RuntimeError, match="a message of 11 bytes arrived, but at most 10 were expected"):
        receive(first, 1, nbytes=10)
    close_all([first, second])


def test_a_signal_handler_interrupts_the_wait():
    first, second = pair()

    def stop(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            receive(first, 1)
    finally:
        signal.signal(signal.SIGALRM, before)
    close_all([first, second])


@pytest.mark.parametrize("nbytes", [1, 50_000_000])
def test_a_lost_connection_is_an_error_even_where_sigpipe_ends_the_program(nbytes):
    """Programs that write to `head` restore SIGPIPE, which Python ignores; Gloo never raises it."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        first, _second = pair()
        try:
            first.send(1, memoryview(bytes(nbytes)))
            first.shut_down()
            first.flush(Deadline.after(LONG_S))
            first.send(1, memoryview(b"more"))
        except StreamBroken:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_of_a_dead_rank_does_not_keep_its_connections_open():
    """A worker of a DataLoader may outlive its parent by seconds."""
    first, second = pair()
    told, tell = os.pipe()
    parent = os.fork()
    if parent == 0:  # this process has `second`, and its child would inherit it
        child = os.fork()
        if child == 0:
            os.write(tell, b"%d\n" % os.getpid())
        signal.pause()
    child = int(os.read(told, 20))
    close_all([second])
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        with pytest.raises(RuntimeError, match="closed by the peer"):
            receive(first, 1)
        os.kill(child, 0)  # it still runs
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(told)
        os.close(tell)
        first.close()


@pytest.mark.parametrize("within_s", [None, 90 * 24 * 3600.0])
def test_the_time_may_be_longer_than_the_system_s_calls_accept(within_s):
    """A group's timeout of a month or more ended in OverflowError."""
    listeners = [StreamListener("127.0.0.1") for _ in range(2)]
    places = {rank: listener.place for rank, listener in enumerate(listeners)}

    def connect(rank):
        return listeners[rank].connect(rank, [1 - rank], places, SECRET, Deadline.after(within_s))

    first, second = map_in_threads(connect, range(2))
    threading.Timer(0.2, second.send, (0, memoryview(b"hello"))).start()
    assert receive(first, 1, within_s=within_s) == b"hello"
    close_all([first, second])


def test_an_error_names_the_peer_whose_connection_is_lost_not_the_one_that_is_waited_for():
    """A rank sends the rest of a message while it waits for another rank, and blamed that one for a failure to send."""
    streams = connect_all([[1, 2], [0], [0]])
    streams[0].send(2, memoryview(bytes(50_000_000)))
    streams[2].shut_down()
    streams[2].close()
    with pytest.raises(StreamBroken) as caught:
        receive(streams[0], 1)
    assert caught.value.peer == 2
    close_all(streams[:2])
