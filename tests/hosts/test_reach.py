"""Whether an address leads to another host of the job: the port at which that is tried, and who learns what there."""

import hashlib
import hmac
import os
import random
import socket

import pytest

from phalanx._comm.control.key import Key
from phalanx._job.hosts.reach import ReachTarget, Responder, check_own, choose_targets, try_all

KEY = Key(bytes(range(32)))


def _try(port: int, key: Key = KEY) -> str:
    results: dict[int, str] = {}
    try_all([ReachTarget(1, "b", "127.0.0.1", port)], key.reach_secret(), results.update).join()
    return results[1]


def test_who_has_the_key_finds_the_host_and_who_has_another_finds_another_machine() -> None:
    responder = Responder("127.0.0.1", KEY.reach_secret())
    try:
        assert _try(responder.port) == ""
        assert _try(responder.port, Key(bytes(32))) == "another machine answers there"
    finally:
        responder.close()


def test_the_port_is_closed_at_once_although_a_stranger_keeps_silent_and_he_held_up_nobody() -> None:
    """One client after the other was served, each for up to two seconds: ten silent ones held up a whole job."""
    responder = Responder("127.0.0.1", KEY.reach_secret())
    place = ("127.0.0.1", responder.port)
    strangers = [socket.create_connection(place) for _ in range(200)]
    try:
        for stranger in strangers:
            stranger.sendall(b"half a nonce")
        assert _try(responder.port) == ""
        responder.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place)
        responder.close()  # a second call does nothing
        for stranger in strangers:
            stranger.settimeout(20)
            try:
                assert stranger.recv(64) == b""
            except ConnectionResetError:  # he had said something that nobody read
                pass
    finally:
        responder.close()
        for stranger in strangers:
            stranger.close()


def test_what_anybody_can_have_signed_is_of_no_use_elsewhere() -> None:
    """The answer was made with the job's key itself; now with a secret that follows from it, for this alone."""
    assert len({KEY.reach_secret(), KEY.raw, *_blake2b_of(KEY.raw)}) == 2 + len(_blake2b_of(KEY.raw))
    responder = Responder("127.0.0.1", KEY.reach_secret())
    try:
        nonce = os.urandom(32)
        with socket.create_connection(("127.0.0.1", responder.port)) as connection:
            connection.sendall(nonce[:7])
            connection.sendall(nonce[7:])
            answer = connection.recv(32, socket.MSG_WAITALL)
            assert connection.recv(1) == b""  # one answer, and no more
    finally:
        responder.close()
    assert answer == hmac.new(KEY.reach_secret(), b"phalanx reach " + nonce, "sha256").digest()
    assert answer != hmac.new(KEY.raw, b"phalanx reach " + nonce, "sha256").digest()


def _blake2b_of(raw: bytes) -> list[bytes]:
    """What else follows from a key: both CURVE secrets."""
    return [
        hashlib.blake2b(b"", digest_size=32, key=raw, person=person).digest()
        for person in (b"plx-coordinator", b"plx-member")
    ]


def test_an_address_of_another_machine_is_not_ours() -> None:
    check_own("127.0.0.1")
    with pytest.raises(OSError):
        check_own("192.0.2.1")


@pytest.mark.parametrize("size", [1, 2, 33, 34, 64, 65, 100, 999])
def test_each_host_is_tried_by_as_many_others_as_it_tries_in_all_parts_of_the_row(size):
    """All try all where they are few; of many hosts whoever is cut off is missed wherever in the row one looks."""
    nodes = sorted(random.Random(size).sample(range(2000), size))
    tried = {node: choose_targets(node, nodes) for node in nodes}
    tried_by = {node: {other for other in nodes if node in tried[other]} for node in nodes}
    for place, node in enumerate(nodes):
        assert node not in tried[node]
        assert tried[node] <= set(nodes)
        assert len(tried_by[node]) == len(tried[node])
        if size <= 33:
            assert len(tried[node]) == size - 1
        else:
            assert len(tried[node]) == (size - 1).bit_length()
            distances = sorted((place - nodes.index(other)) % size for other in tried_by[node])
            assert distances == [1 << k for k in range(len(distances))]


def test_hosts_cut_off_together_are_missed_by_others():
    """A switch fails in the middle of the row: each host behind it is tried by some host that is not."""
    rng = random.Random(3)
    for _ in range(50):
        size = rng.randrange(34, 400)
        nodes = list(range(size))
        first, count = rng.randrange(size), rng.randrange(1, size // 2)
        cut_off = {nodes[(first + n) % size] for n in range(count)}
        tried = {node: choose_targets(node, nodes) for node in nodes}
        missed = {node for other in nodes if other not in cut_off for node in tried[other] & cut_off}
        assert missed == cut_off
