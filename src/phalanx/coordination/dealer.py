"""Open and set up the socket of a client."""

from __future__ import annotations

import os

import zmq

from phalanx.coordination.connection_guard import protect
from phalanx.coordination.key import Key

EPOCH_BYTES = 8  # in front of each frame of the coordinator
EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
)


def open_dealer(context: zmq.Context[zmq.Socket[bytes]], key: Key | None) -> zmq.Socket[bytes]:
    """Return a socket that is not connected yet; `key` is None for the coordinator's socket on this host."""
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.routing_id = b"\x01" + os.urandom(15)
    protect(dealer)
    dealer.sndhwm, dealer.rcvhwm = 1000, 0  # with a limit, heartbeats may end the process: see `Service`
    dealer.ipv6 = True
    dealer.reconnect_ivl, dealer.reconnect_ivl_max = 50, 1000
    dealer.connect_timeout = 3000
    dealer.handshake_ivl = 10000
    # A cut of the network is the kernel's to notice, which costs the coordinator's process nothing; ZeroMQ's heartbeats
    # are for one that hangs. The coordinator knows that the kernel waits for some four seconds (`_UNBROKEN_S`).
    dealer.tcp_keepalive, dealer.tcp_keepalive_idle, dealer.tcp_keepalive_intvl, dealer.tcp_keepalive_cnt = 1, 2, 1, 2
    dealer.tcp_maxrt = 4000
    dealer.heartbeat_ivl, dealer.heartbeat_timeout = 6000, 6000
    if key is not None:
        pair = key.member_pair()
        dealer.curve_publickey, dealer.curve_secretkey = pair.public, pair.secret
        dealer.curve_serverkey = key.coordinator_pair().public
    return dealer
