"""Whether an address leads to another host of the job: the port at which that is tried, and who learns what there."""

import hashlib
import hmac
import os
import socket

import pytest

from phalanx.coordination.key import Key
from phalanx.launch.hosts.reach import Responder, Target, check_own, try_all

KEY = Key(bytes(range(32)))


def _try(port: int, key: Key = KEY) -> str:
    results: dict[int, str] = {}
    try_all([Target(1, "b", "127.0.0.1", port)], key.reach_secret(), results.update).join()
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
        strangers[-1].sendall(b"half a nonce")
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
