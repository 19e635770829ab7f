"""Open a client's ZeroMQ socket, with the timeouts and keys for a connection to the coordinator."""

from __future__ import annotations

import os

import zmq

from phalanx._comm.control.connection_guard import protect
from phalanx._comm.control.key import Key

EPOCH_BYTES = 8  # at the start of each frame from the coordinator
HEARTBEAT_S = 6.0  # the interval between ZeroMQ's heartbeats, and the timeout for their answers
MEMBER_HEARTBEAT_S = 30.0  # the same for a member, whose own heartbeats detect that the coordinator hangs
EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
)


def open_dealer(
    context: zmq.Context[zmq.Socket[bytes]], key: Key | None, heartbeat_s: float = HEARTBEAT_S
) -> zmq.Socket[bytes]:
    """Open a client's socket, which is not yet connected.

    Arguments:
        key: the job's key; None for the coordinator's socket on this host.
        heartbeat_s: the interval between ZeroMQ's heartbeats, each of which the coordinator answers; 0 for none.
    """
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.routing_id = b"\x01" + os.urandom(15)
    protect(dealer)
    dealer.sndhwm, dealer.rcvhwm = 1000, 0  # rcvhwm 0: at a limit, a heartbeat may make libzmq abort
    dealer.ipv6 = True
    dealer.reconnect_ivl, dealer.reconnect_ivl_max = 50, 1000
    dealer.connect_timeout = 1500
    dealer.handshake_ivl = 10000
    # The kernel detects a network cut, at no cost to the coordinator's process; ZeroMQ's heartbeats detect that the
    # coordinator hangs. The coordinator relies on the kernel's limit of about four seconds (`_UNBROKEN_S`).
    dealer.tcp_keepalive, dealer.tcp_keepalive_idle, dealer.tcp_keepalive_intvl, dealer.tcp_keepalive_cnt = 1, 2, 1, 2
    dealer.tcp_maxrt = 4000
    dealer.heartbeat_ivl = dealer.heartbeat_timeout = int(heartbeat_s * 1000)
    if key is not None:
        pair = key.member_pair()
        dealer.curve_publickey, dealer.curve_secretkey = pair.public, pair.secret
        dealer.curve_serverkey = key.coordinator_pair().public
    return dealer
