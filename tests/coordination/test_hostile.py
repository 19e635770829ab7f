"""Strangers, rubbish and floods: nobody gets in, and members go on working."""

import contextlib
import random
import socket
import struct
import threading
import time

import pytest
import zmq
from tests.coordination.random_frames import random_frame, random_message

from phalanx._comm.control.client import Client
from phalanx._comm.control.connection_guard import cut
from phalanx._comm.control.dealer import EPOCH_BYTES
from phalanx._comm.control.key import Key
from phalanx._comm.control.wire import MAX_FRAME_BYTES, AnswerStatus, Op, WireError, pack, pack_number, unpack
from phalanx._job.coordinator.coordinator import Coordinator
from phalanx._job.coordinator.service import Service
from phalanx._job.coordinator.session import DirectRoute

KEY = Key.generate()


def test_no_frame_ends_the_coordinator_or_costs_a_member_its_place(effort, seed):
    num_frames = 5_000 * effort
    rng = random.Random(seed)
    coordinator = Coordinator(max_bytes=1 << 20)
    route, strangers = DirectRoute(0, b"member"), [DirectRoute(1, bytes([n])) for n in range(8)]
    coordinator.handle(route, pack(Op.JOIN, 1, b'{"host": "anna"}', b"all"), 0.0)
    coordinator.handle(route, pack(Op.SET, 2, b"mine", b"kept"), 0.0)
    now = 0.0
    for step in range(num_frames):
        now += 0.001
        coordinator.handle(rng.choice(strangers), random_frame(rng), now)
        if step % 100 == 0:
            coordinator.handle(route, pack(Op.HEARTBEAT, 0, b"0", b"0"), now)
            coordinator.tick(now)
            for session, answers in coordinator.pop_outgoing():
                if rng.random() < 0.5:
                    coordinator.undelivered(session, answers)
    assert coordinator.num_malformed > num_frames // 10
    assert coordinator.store.num_bytes <= 1 << 20
    # What they took out, they took as members would; what they could not is the rest of it.
    member = coordinator.sessions[route]
    if member.member is None:
        assert "says:" in member.gone  # one of them had joined, and counted it out
    answers = []
    for step in range(3):
        coordinator.handle(route, pack(Op.DELETE_PREFIX, 1000 + step, b""), now)
        coordinator.handle(route, pack(Op.SET, 2000 + step, b"mine", b"%d" % step), now)
        coordinator.handle(route, pack(Op.GET, 3000 + step, b"mine"), now)
    for session, out in coordinator.pop_outgoing():
        if session is member:
            answers = [message for answer in out for message in unpack(answer)]
    assert [m.fields for m in answers if m.number >= 3000] == [[b"0"], [b"1"], [b"2"]]


@pytest.mark.parametrize("seed", range(3))
def test_a_frame_is_read_as_it_was_packed_and_a_cut_one_is_no_frame(seed):
    rng = random.Random(seed)
    for _ in range(300):
        said = [
            (
                rng.randrange(256),
                rng.randrange(1 << 64),
                [rng.randbytes(rng.randrange(30)) for _ in range(rng.randrange(6))],
            )
            for _ in range(rng.randrange(1, 5))
        ]
        frame = b"".join(pack(what, number, *fields) for what, number, fields in said)
        assert [tuple(message) for message in unpack(frame)] == said
        last = len(pack(said[-1][0], said[-1][1], *said[-1][2]))
        with pytest.raises(WireError):
            unpack(frame[: len(frame) - rng.randrange(1, last)])


@contextlib.contextmanager
def insider(service, key=KEY):
    """A raw connection of somebody who knows the key, and what he may send with it."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    pair = key.member_pair()
    dealer.curve_publickey, dealer.curve_secretkey = pair.public, pair.secret
    dealer.curve_serverkey = key.coordinator_pair().public
    dealer.connect(service.address.endpoint)
    try:
        yield dealer
    finally:
        context.destroy(0)


def await_answer(dealer):
    """Wait until the coordinator has read all that was sent, and no connection ends any more.

    libzmq aborts its process where a connection ends in mid-message while the socket is being closed.
    """
    number, answers = 1 << 20, []
    while not any(message.number == number for answer in answers for message in unpack(answer[EPOCH_BYTES:])):
        with contextlib.suppress(zmq.Again):
            dealer.send(pack(Op.SET, number, b"x", b"y"), zmq.NOBLOCK)
        answers = [b"".join(dealer.recv_multipart())] if dealer.poll(100) else []


class Work:
    """A member that works while others do what they can; `steps` counts."""

    def __init__(self, service):
        self._client = Client(str(service.address), KEY)
        self._client.join({"host": "worker"})
        self._stop = False
        self.steps = 0
        self.slowest_s = 0.0
        self.problem = None
        self._thread = threading.Thread(target=self._run, name="work")
        self._thread.start()

    def _run(self):
        try:
            while not self._stop:
                begun = time.monotonic()
                assert self._client.add("steps", 1) == self.steps + 1
                self.steps += 1
                self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
        except BaseException as error:
            self.problem = error

    def end(self):
        self._stop = True
        self._thread.join()
        assert self.problem is None
        assert not [event for event in self._client.receive_events() if event.kind == "expelled"]
        assert self._client.members().keys() == {self._client.member}
        self._client.close()


def test_a_member_that_takes_no_events_is_lost_before_they_fill_the_memory():
    coordinator = Coordinator()
    coordinator.handle("idle", pack(Op.JOIN, 1, b'{"host": "idle"}', b"all"), 0.0)
    facts = b'{"host": "' + b"x" * 60000 + b'"}'
    said = []
    for n in range(3000):
        coordinator.handle("busy", pack(Op.JOIN, 2 * n, facts, b""), 0.0)
        coordinator.handle("busy", pack(Op.LEAVE, 2 * n + 1, b"-1", b"bye"), 0.0)
        said += coordinator.tick(0.0)
        list(coordinator.pop_outgoing())
    assert len(said) == 1
    assert said[0].startswith("member 0 (idle) is lost: 64 MiB of events are queued for it, and it does not read them")
    assert len(coordinator.members) == 0


def test_members_work_while_one_who_knows_the_key_sends_rubbish_and_floods(effort):
    num_frames = 1_500 * effort
    rng = random.Random(7)
    said = []
    with Service("127.0.0.1:0", KEY, log=said.append) as service:
        work = Work(service)
        with insider(service) as dealer:
            flood = pack(Op.SET, 1, b"x", b"y" * 1000) * 200
            for n in range(num_frames // 5):
                with contextlib.suppress(zmq.Again):
                    frame = rng.choice([random_message(rng)[:-1], b"", b"x" * 100, flood, flood])
                    dealer.send_multipart(rng.choice([cut(frame), [frame, b"more"], [b""] * 5]), zmq.NOBLOCK)
                if n == num_frames // 10:
                    before = work.steps
            while work.steps < before + 50:  # with the flood still in the pipes
                pass
            dealer.send(bytes(MAX_FRAME_BYTES + 1))  # its connection ends
            await_answer(dealer)
        work.end()
    assert any("a client with the job's key sends malformed messages" in line for line in said)


def rubbish(rng):
    """Return what a stranger sends: nothing, noise, or the beginning of a valid message with some bytes changed."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01"
    stranger = pack(Op.SET, 1, b"stranger", b"was here")
    old = b"\x00" + bytes([len(stranger)]) + stranger
    curve, null = b"CURVE".ljust(20, b"\0") + bytes(32), b"NULL".ljust(20, b"\0") + bytes(32)
    said = rng.choice(
        [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),  # TLS
            b"SSH-2.0-OpenSSH_9.6\r\n",
            rng.randbytes(rng.randrange(1, 300)),
            greeting[: rng.randrange(1, 12)],
            greeting + null + b"\x04\x26\x05READY" + rng.randbytes(32),
            greeting + curve + b"\x04\xc8\x05HELLO" + rng.randbytes(194),
            greeting + curve + b"\x06" + struct.pack(">Q", 1 << 62) + rng.randbytes(50),
            greeting + curve + b"\x02" + struct.pack(">Q", MAX_FRAME_BYTES * 4) + rng.randbytes(500),
            greeting + curve,
            greeting[:10] + b"\x01\x05\x00\x00" + old,  # ZMTP 2.0, which knew no keys
            greeting[:10] + b"\x00\x05\x00\x00" + old,
            b"\x01\x00" + bytes([len(stranger) + 1]) + b"\x00" + stranger,  # ZMTP 1.0
            b"",
        ]
    )
    data = bytearray(said)
    for _ in range(rng.choice([0, 0, 1, 5]) if said else 0):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def test_strangers_do_not_get_in_and_members_go_on(effort, seed):
    """No key, another key, half a handshake, silence, HTTP, noise; some hang up, some reset, most stay."""
    num_strangers = 200 * effort
    rng = random.Random(seed)
    said = []
    with Service("127.0.0.1:0", KEY, log=said.append) as service:
        work = Work(service)
        open_ones = []
        place = ("127.0.0.1", service.address.port)
        for n in range(num_strangers):
            stranger = socket.socket()
            stranger.settimeout(10.0)
            stranger.connect(place)
            with contextlib.suppress(OSError):
                for _ in range(rng.randrange(1, 5)):
                    stranger.sendall(rubbish(rng))
            if n % 3 == 0:
                if n % 2:
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                stranger.close()
            else:
                open_ones.append(stranger)
            if len(open_ones) > 200:
                open_ones.pop(rng.randrange(len(open_ones))).close()
            if n % 100 == 0:
                with insider(service, Key.generate()) as dealer:
                    dealer.send(pack(Op.SET, 1, b"stranger", b"was here"))
        steps = work.steps
        with Client(str(service.address), KEY) as late:  # a member that comes meanwhile gets in
            while int(late.get("steps")) < steps + 20:
                pass
            assert not late.check(["stranger"])
        work.end()
        for stranger in open_ones:
            stranger.close()
        while service.num_refused < num_strangers // 20:
            time.sleep(0.01)
        sessions = len(service.coordinator.sessions)
    assert sessions == 2
    assert any(line.startswith("refused a connection from 127.0.0.1: ") for line in said)
    assert len(said) <= 21 + num_strangers // 500  # a few lines, not one for each


@pytest.mark.slow
def test_a_client_that_asks_for_much_and_reads_nothing_is_told_so_and_keeps_nobody_waiting():
    with Service("127.0.0.1:0", KEY) as service:
        work = Work(service)
        with Client(service.local) as local, insider(service) as dealer:
            local.set("big", bytes(8 << 20))
            frame = b"".join(pack(Op.GET, n, b"big") for n in range(100))
            for _ in range(20):
                dealer.send_multipart(cut(frame))
            before = work.steps
            while work.steps < before + 100:
                pass
            dealer.rcvtimeo = 20000
            statuses = {message.what for message in unpack(b"".join(dealer.recv_multipart())[8:])}
            assert statuses <= {AnswerStatus.OK, AnswerStatus.WRONG_CALL}
        work.end()


def test_pack_number_is_read_back():
    assert int(pack_number(-5)) == -5
