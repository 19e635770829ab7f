"""Measure what a job of many hosts with several ranks each asks of its coordinator.

The coordinator, the network (loopback), the encryption and the agents' memberships are real. The ranks of a host are
threads that run the real bootstrap of a group. What is simulated is the relay between them (`Mux`): one per process
speaks for the relays of all its hosts, over one encrypted connection per host, and batches as a relay does.

    joined     every host is a member, from the moment when all begin to connect
    met        every rank has read what all ranks say of themselves
    idle       nothing happens: what heartbeats and ranks that wait for a signal cost
    signalled  a rank posts a failure: until every rank has heard that there is something to read
    lost       a host stops: until its agent's loss was told to all others, counted from its last heartbeat
"""

from __future__ import annotations

import argparse
import functools
import logging
import math
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections import deque
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402 - the line above says where it is
import zmq  # noqa: E402
from run import KEY  # noqa: E402

from phalanx.coordination.client import Client  # noqa: E402
from phalanx.coordination.connection_guard import cut  # noqa: E402
from phalanx.coordination.dealer import EPOCH_BYTES, open_dealer  # noqa: E402
from phalanx.coordination.key import Key  # noqa: E402
from phalanx.coordination.pending_call import PendingCall  # noqa: E402
from phalanx.coordination.service import Service  # noqa: E402
from phalanx.coordination.wire import (  # noqa: E402
    VERSION,
    WRITE_ONCE,
    Op,
    Status,
    pack,
    pack_number,
    unpack,
)
from phalanx.deadline import Deadline  # noqa: E402

FORK, SPAWN = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
TIMEOUT_S = 200.0
IDLE_S = 10.0
LOST_AFTER_S = 8.0
SIGNAL = "phalanx/signal/0"


def serve(commands: Any, answers: Any, host_timeout_s: float) -> None:
    """Be the first host's coordinator and its agent; say what this process has used whenever it is asked."""
    with Service("127.0.0.1:0", Key(KEY), lost_after_s=host_timeout_s) as service, Client(service.local) as first:
        first.join({"host": "first"})
        counts = [0]
        handle = service.coordinator._handle

        def handle_and_count(session: Any, message: Any) -> bool:
            counts[0] += 1
            return handle(session, message)

        service.coordinator._handle = handle_and_count  # type: ignore[method-assign]
        answers.put(str(service.address))
        while (command := commands.get()) != "end":
            if command == "await all":
                answers.put(len(service.coordinator.members))
            elif command == "await loss":
                while not any(event.kind == "lost" for event in first.wait_event(TIMEOUT_S)):
                    pass
                first.post(-1, b"host lost")
                answers.put(time.monotonic())
            else:
                memory = Path("/proc/self/smaps_rollup").read_text().split("Pss:")[1].split()[0]
                peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
                answers.put({
                    "cpu_s": time.process_time(), "at": time.monotonic(), "requests": counts[0],
                    "pss_mb": int(memory) / 1024, "connections": service.num_open,
                    "peak_mb": int(peak) / 1024,
                })  # fmt: skip


class Host:
    """The relay of one host, as `Mux` drives it."""

    def __init__(self, dealer: zmq.Socket[bytes]) -> None:
        self.dealer = dealer
        self.requests: deque[tuple[bytes, bytes]] = deque()
        self.calls: dict[tuple[bytes, int], PendingCall] = {}
        self.fetches: dict[bytes, list[PendingCall]] = {}  # of keys that are written once
        self.kept: dict[bytes, list[bytes]] = {}


class Mux:
    """One thread that sends what the ranks of many hosts ask for, and hands out the answers."""

    def __init__(self, endpoint: str, hosts: range, sources: list[str]) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.max_sockets = 16384
        self.hosts: list[Host] = []
        for _, source in zip(hosts, sources, strict=True):
            dealer = open_dealer(self.context, Key(KEY))
            dealer.connect(endpoint.replace("tcp://", f"tcp://{source}:0;"))
            dealer.send(pack(Op.RELAY, 0, b"", pack(Op.HELLO, 1, pack_number(VERSION))))  # as a relay begins
            self.hosts.append(Host(dealer))
        self.lock = threading.Lock()
        self.busy: set[Host] = set()
        self.num_resent = 0
        # Ranks that hold what all ranks say of themselves: a megabyte for each, of which a real host has eight.
        self.turns = threading.Semaphore(8)
        self.wake_reader, self.wake_writer = os.pipe()
        os.set_blocking(self.wake_reader, False)
        threading.Thread(target=self.run, daemon=True).start()

    def send(self, host: Host, route: bytes, call: PendingCall) -> None:
        with self.lock:
            host.calls[route, call.number] = call
            call.note_sent(time.monotonic())
            host.requests.append((route, call.message))
            was_idle = not self.busy
            self.busy.add(host)
        if was_idle:
            os.write(self.wake_writer, b"x")

    def run(self) -> None:
        poller = zmq.Poller()
        by_dealer = {host.dealer: host for host in self.hosts}
        for dealer in by_dealer:
            poller.register(dealer, zmq.POLLIN)
        poller.register(self.wake_reader, zmq.POLLIN)
        looked_at = time.monotonic()
        while True:
            for ready, _ in poller.poll(1000):
                if ready == self.wake_reader:
                    os.read(self.wake_reader, 4096)
                    continue
                self.receive(by_dealer[ready])
            now = time.monotonic()
            with self.lock:
                if now - looked_at > 1.0:
                    looked_at = now
                    for host in self.hosts:
                        self.send_late(host, now)
                busy, self.busy = self.busy, set()
                sent = [(host, list(host.requests)) for host in busy]
                for host in busy:
                    host.requests.clear()
            for host, requests in sent:
                fields = [field for request in requests for field in request]
                host.dealer.send_multipart(cut(pack(Op.RELAY, 0, *fields)))

    def send_late(self, host: Host, now: float) -> None:
        """Send again what was not answered, as a client does."""
        for (route, _), call in host.calls.items():
            if now > call.resend_at:
                call.note_sent(now)
                host.requests.append((route, call.message))
                self.busy.add(host)
                self.num_resent += 1

    def receive(self, host: Host) -> None:
        while True:
            try:
                frame = b"".join(host.dealer.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            for status, _, fields in unpack(frame[EPOCH_BYTES:]):
                if status != Status.RELAYED:
                    continue
                for route, answers in zip(fields[::2], fields[1::2], strict=True):
                    for answer, number, values in unpack(answers):
                        if answer == Status.PARKED and (route, number) in host.calls:
                            host.calls[route, number].is_parked = True
                        elif answer <= Status.UNKNOWN:
                            with self.lock:
                                call = host.calls.pop((route, number), None)
                            if call is not None:
                                self.finish(call, answer, values)

    def finish(self, call: PendingCall, answer: int, values: list[bytes]) -> None:
        call.fields, call.answer = values, answer
        call.wake.release()  # type: ignore[union-attr]


class Rank(Client):
    """A client whose requests go through a `Mux`."""

    def __init__(self, mux: Mux, host: Host, route: bytes) -> None:
        self.mux, self.host, self.route = mux, host, route
        self.timeout = TIMEOUT_S
        self._number = 0
        self._is_closed = False
        self.has_turn = False  # among `Mux.turns`

    def _call(self, what: int, *fields: bytes, deadline: Deadline | None = None, waits_for: Any = ()) -> list[bytes]:
        self._number += 1
        call = self.begin(what, *fields)
        left_s = TIMEOUT_S if deadline is None else deadline.left_s
        if not call.wake.acquire(timeout=min(left_s, TIMEOUT_S)):  # type: ignore[union-attr]
            from phalanx.errors import DeadlineError

            raise DeadlineError("wait timeout")
        if what == Op.GET and fields[0].endswith(WRITE_ONCE.encode()) and not self.has_turn:
            self.mux.turns.acquire()
            self.has_turn = True
        return call.result("the coordinator")

    def begin(self, what: int, *fields: bytes) -> PendingCall:
        call = PendingCall(self._number, what, pack(what, self._number, *fields))
        call.wake = threading.Lock()
        call.wake.acquire()
        if what == Op.GET and fields[0].endswith(WRITE_ONCE.encode()):
            with self.mux.lock:
                kept = self.host.kept.get(fields[0])
                calls = self.host.fetches.setdefault(fields[0], [])
                calls.append(call)
                is_first = len(calls) == 1
            if kept is not None:
                self.mux.finish(call, Status.OK, kept)
            elif is_first:
                threading.Thread(target=self.fetch, args=(call, fields[0]), daemon=True).start()
            return call
        self.mux.send(self.host, self.route, call)
        return call

    def fetch(self, first: PendingCall, key: bytes) -> None:
        asked = PendingCall(first.number, first.what, first.message)
        asked.wake = threading.Lock()
        asked.wake.acquire()
        self.mux.send(self.host, self.route, asked)
        asked.wake.acquire()
        with self.mux.lock:
            self.host.kept[key] = asked.fields
            waiting = self.host.fetches.pop(key)
        for call in waiting:
            self.mux.finish(call, Status.OK, asked.fields)


def be_agents(endpoint: str, hosts: range, ranks: int, answers: Any, steps: list[Event]) -> None:
    """Be the agents of these hosts: members of the job, of which one is lost in the end."""
    threading.stack_size(256 << 10)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.max_sockets = 16384
    join, _, _, lose = steps
    join.wait()
    agents = [Client(endpoint, Key(KEY), context=context, timeout=TIMEOUT_S) for _ in hosts]
    for host, agent in zip(hosts, agents, strict=True):
        agent.join({"host": f"node{host}", "pid": 1, "num_ranks": ranks, "address": _address(host)}, watch=(0,))
    answers.put("joined")
    lose.wait()
    lost = agents[0] if hosts.start == 0 else None
    if lost is not None:
        with lost._lock:
            lost._send_heartbeat()
            lost._stop.set()
        answers.put(("last heartbeat", time.monotonic()))
    for agent in agents:
        while agent is not lost and not any(event.kind == "message" for event in agent.wait_event(TIMEOUT_S)):
            pass
    answers.put(("told", time.monotonic()))
    time.sleep(0.5)
    os._exit(0)


def be_ranks(endpoint: str, hosts: range, ranks: int, size: int, answers: Any, steps: list[Event]) -> None:
    """Be the ranks of these hosts, with their relays."""
    from torch.distributed import PrefixStore

    from phalanx.backend.coordination_store import CoordinationStore
    from phalanx.coordination import bootstrap
    from phalanx.coordination.rank_info import RankInfo
    from phalanx.symmetric_memory.watch import ProcessId

    logging.getLogger("phalanx").setLevel(logging.CRITICAL)
    threading.stack_size(256 << 10)
    _, meet, wait, _ = steps
    mux = Mux(f"tcp://{endpoint}", hosts, [f"127.1.{host // 250}.{host % 250 + 1}" for host in hosts])
    meet.wait()
    # Each rank of a real job reads the facts for itself, on a core of its own; here thousands share two.
    unpack_once, unpacking = functools.cache(bootstrap.unpack_infos), threading.Lock()

    def unpack_infos(text: str) -> Any:
        with unpacking:
            return unpack_once(text)

    bootstrap.unpack_infos = unpack_infos
    here = ProcessId.of_self()
    firsts: list[Any] = []

    def come(rank: int, client: Rank) -> None:
        host = rank // ranks
        info = RankInfo(
            f"{host:036x} net:[4026531840] user:[4026531837] 0", f"node{host}", f"{rank:040x}@/proc/{rank}/fd/9",
            ProcessId(rank, here.start_ticks + rank, "pid:[1] time:[1]"), frozenset(range(12)), 7, _address(host),
            "timeout=1800.0 engine=gloo algorithm=ring wire_dtype=None",
        )  # fmt: skip
        client._call(Op.HELLO, pack_number(VERSION))
        store = PrefixStore("default_pg/", CoordinationStore("", client=client))
        met = bootstrap.exchange(store, rank, size, info, "0", Deadline.after(TIMEOUT_S))
        assert len(met.infos) == size
        if rank == 0:
            firsts.append(met)
        del met
        client.mux.turns.release()
        answers.put(rank)

    clients = [
        Rank(mux, mux.hosts[place], b"\1" + (host * ranks + local).to_bytes(15, "little"))
        for place, host in enumerate(hosts)
        for local in range(ranks)
    ]
    threads = [
        threading.Thread(target=come, args=(hosts.start * ranks + place, client))
        for place, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait.wait()
    for met in firsts:  # once all have met, as in a group that has connected
        met.forget()
    signals = []
    for client in clients:
        client._number += 1
        signals.append(client.begin(Op.GET, SIGNAL.encode()))
    answers.put("waits")
    for signal in signals:
        signal.wake.acquire()  # type: ignore[union-attr]
    answers.put(("signalled", time.monotonic()))
    answers.close()
    answers.join_thread()
    os._exit(0)


def _address(host: int) -> str:
    return f"10.0.{host // 250}.{host % 250}"


def measure(num_hosts: int, ranks: int, num_processes: int) -> dict[str, float]:
    """One job of `num_hosts` hosts from its start to the loss of a host."""
    commands, answers, met = SPAWN.Queue(), SPAWN.Queue(), FORK.Queue()
    server = SPAWN.Process(  # without torch, as an agent is
        target=serve, args=(commands, answers, LOST_AFTER_S)
    )
    server.start()
    endpoint = answers.get()
    steps = [FORK.Event() for _ in range(4)]
    share = math.ceil(num_hosts / num_processes)
    parts = [range(first, min(first + share, num_hosts)) for first in range(0, num_hosts, share)]
    size = num_hosts * ranks
    processes = [FORK.Process(target=be_ranks, args=(endpoint, part, ranks, size, met, steps)) for part in parts]
    half = math.ceil(num_hosts / 2)
    agents = [range(half), range(half, num_hosts)]
    processes += [FORK.Process(target=be_agents, args=(endpoint, part, ranks, met, steps)) for part in agents]
    for process in processes:
        process.start()

    def usage() -> dict[str, float]:
        commands.put("usage")
        found: dict[str, float] = answers.get()
        return found

    begun = usage()
    steps[0].set()
    for _ in agents:
        met.get(timeout=TIMEOUT_S)
    joined = usage()
    steps[1].set()
    for _ in range(size):
        met.get(timeout=TIMEOUT_S)
    all_met = usage()
    steps[2].set()
    for _ in parts:
        met.get(timeout=TIMEOUT_S)
    idle = usage()
    time.sleep(IDLE_S)
    idled = usage()
    with Client(endpoint, Key(KEY)) as client:
        posted = time.monotonic()
        client.set(SIGNAL, b"group")
        signalled = max(met.get(timeout=TIMEOUT_S)[1] for _ in parts) - posted
    after_signal = usage()
    commands.put("await loss")
    steps[3].set()
    told, last = [], 0.0
    for _ in range(len(agents) + 1):
        what, at = met.get(timeout=TIMEOUT_S)
        if what == "told":
            told.append(at)
        else:
            last = at
    answers.get()
    end = usage()
    commands.put("end")
    for process in (*processes, server):
        process.join()
    return {
        "joined_s": joined["at"] - begun["at"],
        "joined_cpu_s": joined["cpu_s"] - begun["cpu_s"],
        "met_s": all_met["at"] - joined["at"],
        "met_cpu_s": all_met["cpu_s"] - joined["cpu_s"],
        "requests_per_rank": (all_met["requests"] - joined["requests"]) / size,
        "connections": all_met["connections"],
        "pss_mb": idled["pss_mb"],
        "peak_mb": end["peak_mb"],
        "idle_percent": 100 * (idled["cpu_s"] - idle["cpu_s"]) / (idled["at"] - idle["at"]),
        "signalled_s": signalled,
        "signalled_cpu_s": after_signal["cpu_s"] - idled["cpu_s"],
        "lost_s": max(told) - last,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="125,250,500,1000", help="numbers of hosts")
    parser.add_argument("--ranks", type=int, default=8, help="ranks of a host")
    parser.add_argument("--processes", type=int, default=8, help="that simulate the hosts")
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)

    import torch.distributed  # noqa: F401  # here, once

    found: dict[int, dict[str, float]] = {}
    for hosts in map(int, arguments.hosts.split(",")):
        found[hosts] = measure(hosts, arguments.ranks, arguments.processes)
        print({name: round(value, 2) for name, value in found[hosts].items()}, flush=True)
    rows = [
        [
            str(hosts), harness.format_time(one["joined_s"]), harness.format_time(one["met_s"]),
            harness.format_time(one["joined_cpu_s"] + one["met_cpu_s"]), f"{one['requests_per_rank']:.1f}",
            f"{one['connections']:.0f}", f"{one['pss_mb']:.0f} MB", f"{one['peak_mb']:.0f} MB",
            f"{one['idle_percent']:.1f} %", harness.format_time(one["signalled_s"]), f"{one['lost_s']:.1f} s",
        ]
        for hosts, one in found.items()
    ]  # fmt: skip
    harness.print_table(
        ["hosts", "joined", "met", "CPU", "requests per rank", "connections", "memory", "peak", "idle", "signalled",
         "loss told after"],
        rows,
    )  # fmt: skip
    harness.write_results(arguments.output, {"scale": found}, machine=harness.describe_machine())


if __name__ == "__main__":
    main()
