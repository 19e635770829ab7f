"""Measure what a job of many hosts with several ranks each asks of its first host.

The first host's agent is the command itself (`phalanx run --nnodes N`) with its coordinator, and the network
(loopback), the encryption and the other agents' memberships are real. The other agents say what agents say until the
ranks are started; whether hosts reach each other is tried by the first alone. The ranks of a host are threads that run
the real bootstrap of a group, and tell each other where their Gloo listens; the requests of a host's ranks are put
together by the real relay's `HostRequests`, but one thread per process (`Mux`) reads and sends for the relays of all
its hosts, over one encrypted connection per host. Gloo's own connections are not made.

    joined     every host is told to start its ranks, from the moment when all begin to connect
    met        every rank has read what all ranks say of themselves, and where the Gloo of each is
    idle       nothing happens: what heartbeats and ranks that wait for a signal cost
    signalled  a rank posts a failure: until every rank has heard that there is something to read
    hosts' CPU what the simulated hosts and ranks themselves use for a start, which a real job has a core each for
    lost       a host stops: until its agent's loss was told to all others, counted from its last heartbeat
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import math
import multiprocessing
import os
import queue
import random
import resource
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402 - the line above says where it is
import zmq  # noqa: E402
from run import KEY  # noqa: E402

from phalanx._base.deadline import Deadline  # noqa: E402
from phalanx._comm.control.client import Client  # noqa: E402
from phalanx._comm.control.connection_guard import cut  # noqa: E402
from phalanx._comm.control.dealer import EPOCH_BYTES, MEMBER_HEARTBEAT_S, open_dealer  # noqa: E402
from phalanx._comm.control.key import Key  # noqa: E402
from phalanx._comm.control.pending_call import PendingCall  # noqa: E402
from phalanx._comm.control.wire import VERSION, WRITE_ONCE, AnswerStatus, Op, pack, pack_number, unpack  # noqa: E402
from phalanx._job.coordinator.host_requests import HostRequests  # noqa: E402
from phalanx._job.hosts.node_plan import HostFacts  # noqa: E402
from phalanx._job.hosts.reach import Responder  # noqa: E402
from phalanx.errors import CoordinationError, DeadlineError  # noqa: E402

FORK, SPAWN = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
TIMEOUT_S = 200.0
IDLE_S = float(os.environ.get("IDLE_S", "10"))
LOST_AFTER_S = 8.0
AGENTS_AT_A_TIME = 32  # of a process; those of a real job do not wait for each other at all
ZEROMQ = "ZMQbg/IO/0"  # the thread that encrypts, sends and receives
SIGNAL = f"phalanx/signal/0{WRITE_ONCE}"


def be_first(commands: Any, answers: Any, num_hosts: int, ranks: int, place: str, folder: str) -> None:
    """Be the first host: `phalanx run` in this process; say what the process has used whenever it is asked."""
    from phalanx._job.coordinator.coordinator import Coordinator
    from phalanx._job.launch.command import main

    num_requests = 0
    handle = Coordinator._handle

    def handle_and_count(self: Coordinator, session: Any, message: Any) -> bool:
        nonlocal num_requests
        num_requests += message.what != Op.HEARTBEAT
        return handle(self, session, message)

    Coordinator._handle = handle_and_count  # type: ignore[method-assign]

    def tell() -> None:
        while commands.get() != "end":
            memory = Path("/proc/self/smaps_rollup").read_text().split("Pss:")[1].split()[0]
            peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
            answers.put({
                "cpu_s": time.process_time(), "at": time.monotonic(), "requests": num_requests,
                "pss_mb": int(memory) / 1024, "peak_mb": int(peak) / 1024,
                "connections": sum(_is_socket(number) for number in os.listdir("/proc/self/fd")),
                "threads": _cpu_of_threads(),
            })  # fmt: skip

    threading.Thread(target=tell, daemon=True).start()
    with open(os.path.join(folder, "said"), "w") as said:
        for descriptor in (1, 2):
            os.dup2(said.fileno(), descriptor)
    os.environ |= {"PHALANX_KEY": str(Key(KEY)), "XDG_CONFIG_HOME": folder}
    address, port = place.split(":")
    where = ["--node-rank", "0", "--master-addr", address, "--master-port", port]
    words = ["--nnodes", str(num_hosts), *where, "--nproc-per-node", str(ranks), "--host-timeout", str(LOST_AFTER_S)]
    main([*words, "--no-preload", "--no-python", "sleep", "100000"])


def _cpu_of_threads() -> dict[str, float]:
    """Return the processor time of each thread of this process, in seconds; ZeroMQ's bear the names that it gives."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for number in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/self/task/{number}/stat").read_text()
            name = names.get(int(number)) or text[text.index("(") + 1 : text.rindex(")")]
            found[name] = found.get(name, 0.0) + _cpu_s(text)
    return found


def _cpu_s(stat: str) -> float:
    """Return the processor time in a line of /proc/<pid>/stat."""
    fields = stat[stat.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_socket(number: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    except OSError:
        return False


class Host:
    """The relay of one host, as `Mux` drives it."""

    def __init__(self, dealer: zmq.Socket[bytes]) -> None:
        self.dealer = dealer
        self.requests = HostRequests()
        self.calls: dict[tuple[bytes, int], PendingCall] = {}


class Mux:
    """One thread that sends what the ranks of many hosts ask for, and hands out the answers."""

    def __init__(self, endpoint: str, sources: list[str]) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.max_sockets = 16384
        self.hosts: list[Host] = []
        for source in sources:
            dealer = open_dealer(self.context, Key(KEY), heartbeat_s=0.0)  # as a relay does
            dealer.connect(endpoint.replace("tcp://", f"tcp://{source}:0;"))
            self.hosts.append(Host(dealer))
        self.lock = threading.Lock()
        self.asked: dict[Host, list[tuple[bytes, bytes]]] = {host: [] for host in self.hosts}  # each says hello
        # Ranks that hold what all ranks say of themselves: a megabyte for each, of which a real host has eight.
        self.turns = threading.Semaphore(8)
        self.wake_reader, self.wake_writer = os.pipe()
        os.set_blocking(self.wake_reader, False)
        threading.Thread(target=self.run, daemon=True).start()

    def send(self, host: Host, route: bytes, call: PendingCall) -> None:
        with self.lock:
            host.calls[route, call.number] = call
            self._ask(host, route, call.message)

    def cancel(self, host: Host, route: bytes, call: PendingCall) -> None:
        with self.lock:
            if host.calls.pop((route, call.number), None) is not None:
                self._ask(host, route, pack(Op.CANCEL, 0, pack_number(call.number)))

    def _ask(self, host: Host, route: bytes, frame: bytes) -> None:
        if not self.asked:
            os.write(self.wake_writer, b"x")
        self.asked.setdefault(host, []).append((route, frame))

    def run(self) -> None:
        poller = zmq.Poller()
        by_dealer = {host.dealer: host for host in self.hosts}
        for dealer in by_dealer:
            poller.register(dealer, zmq.POLLIN)
        poller.register(self.wake_reader, zmq.POLLIN)
        looked_at = time.monotonic()
        while True:
            busy: set[Host] = set()
            for ready, _ in poller.poll(1000):
                if ready == self.wake_reader:
                    os.read(self.wake_reader, 4096)
                else:
                    busy.add(by_dealer[ready])
                    self.receive(by_dealer[ready])
            now = time.monotonic()
            with self.lock:
                asked, self.asked = self.asked, {}
            for host, requests in asked.items():
                for route, frame in requests:
                    host.requests.receive_requests(route, frame)
            if now - looked_at > 1.0:
                looked_at = now
                for host in self.hosts:
                    host.requests.ask_again(now)
                busy.update(self.hosts)
            for host in {*busy, *asked}:
                self.answer(host)
                for envelope in host.requests.pop_outgoing(now):
                    host.dealer.send_multipart(cut(envelope))

    def receive(self, host: Host) -> None:
        now = time.monotonic()
        while True:
            try:
                frame = b"".join(host.dealer.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            host.requests.receive_answers(frame[EPOCH_BYTES:], now)

    def answer(self, host: Host) -> None:
        for route, answers in host.requests.pop_answers():
            for status, number, fields in unpack(answers):
                with self.lock:
                    call = host.calls.pop((route, number), None) if status <= AnswerStatus.UNKNOWN else None
                if call is not None:
                    call.fields, call.answer = fields, status
                    call.wake.release()  # type: ignore[union-attr]


class Rank(Client):
    """A client whose requests go through a `Mux`."""

    def __init__(self, mux: Mux, host: Host, route: bytes) -> None:
        self.mux, self.host, self.route = mux, host, route
        self.address = "through a relay"  # type: ignore[assignment]
        self.timeout = TIMEOUT_S
        self._number = 0
        self._is_closed = False
        self.has_turn = False  # among `Mux.turns`

    def _call(self, what: int, *fields: bytes, deadline: Deadline | None = None, waits_for: Any = ()) -> list[bytes]:
        deadline = Deadline.after(TIMEOUT_S) if deadline is None else deadline
        call = self._send_request(what, *fields, deadline=deadline)
        self._await(call, deadline)
        self._release_call(call)
        if not call.is_over:
            raise DeadlineError("wait timeout")
        return call.result("the coordinator")

    def _send_request(self, what: int, *fields: bytes, deadline: Deadline) -> PendingCall:
        self._number += 1
        call = PendingCall(self._number, what, pack(what, self._number, *fields))
        call.wake = threading.Lock()
        call.wake.acquire()
        self.mux.send(self.host, self.route, call)
        return call

    def _send_requests(self, requests: Any, deadline: Deadline) -> list[PendingCall]:
        return [self._send_request(what, *fields, deadline=deadline) for what, fields in requests]

    def _await(self, call: PendingCall, deadline: Deadline) -> None:
        if not call.is_over:
            call.wake.acquire(timeout=min(deadline.left_s, TIMEOUT_S))  # type: ignore[union-attr]
        if call.is_over and call.what == Op.GET and call.message.endswith(WRITE_ONCE.encode()) and not self.has_turn:
            self.mux.turns.acquire()
            self.has_turn = True

    def _try_read(self, call: PendingCall) -> None:
        pass  # `Mux` reads

    def _release_call(self, call: PendingCall) -> None:
        if not call.is_over:
            self.mux.cancel(self.host, self.route, call)

    def let_go(self) -> None:
        """Hold what all ranks say no more."""
        if self.has_turn:
            self.has_turn = False
            self.mux.turns.release()


class Agent:
    """The agent of another host, as far as the first one hears of it."""

    def __init__(self, client: Client, host: int, ranks: int, port: int) -> None:
        self.client = client
        self._port = port
        self._ranks = ranks
        self._number = 0
        facts = HostFacts(-1, f"node{host}", 1, ranks, "default", _loopback(host), None, "", "")
        client.join({**facts.to_json(), "reached": "127.0.0.1"}, watch=(0,))

    def say(self, kind: str, *bodies: dict[str, Any]) -> None:
        lines = []
        for body in bodies:
            self._number += 1
            lines.append(json.dumps({"kind": kind, "number": self._number, "now": time.monotonic(), **body}))
        self.client.post(0, "\n".join(lines).encode(), timeout=TIMEOUT_S)

    def hear(self, *kinds: str) -> dict[str, Any]:
        """Return the first host's next message of one of these kinds."""
        while True:
            for event in self.client.wait_event(TIMEOUT_S):
                if event.kind == "message" and (said := json.loads(event.body))["kind"] in kinds:
                    return dict(said)

    def answer(self) -> None:
        self.say("answering", {"trial": self.hear("answer")["trial"], "port": self._port, "problem": ""})

    def reach(self) -> None:
        said = self.hear("reach")
        self.say("reached", {"trial": said["trial"], "results": [[target[0], ""] for target in said["targets"]]})

    def start(self) -> None:
        said = self.hear("start")
        first = said["place"]["first_rank"]
        ranks = range(first, first + self._ranks)
        self.say("started", *({"attempt": said["attempt"], "rank": rank, "pid": rank + 2} for rank in ranks))


def be_agents(endpoint: str, hosts: range, ranks: int, answers: Any, steps: list[Event]) -> None:
    """Be the agents of these hosts: members of the job, of which one is lost in the end."""
    _prepare_for_many_threads()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.max_sockets = 16384
    begin, _, _, lose = steps
    begin.wait()
    with (
        contextlib.closing(Responder("0.0.0.0", Key(KEY).reach_secret())) as responder,
        ThreadPoolExecutor(AGENTS_AT_A_TIME) as at_once,
    ):

        def begin_host(host: int) -> Agent:
            client = Client(endpoint, Key(KEY), context=context, timeout=TIMEOUT_S, heartbeat_s=MEMBER_HEARTBEAT_S)
            return Agent(client, host, ranks, responder.port)

        agents = list(at_once.map(begin_host, hosts))
        for part in (Agent.answer, Agent.reach, Agent.start):
            list(at_once.map(part, agents))
    answers.put("started")
    lose.wait()
    lost = agents[0].client if hosts.start == 1 else None
    if lost is not None:
        with lost._lock:
            lost._send_heartbeat()
            lost._stop.set()
        answers.put(("last heartbeat", time.monotonic()))
    for agent in agents:
        if agent.client is not lost:
            agent.hear("host lost", "sweep", "end")
    answers.put(("told", time.monotonic()))
    time.sleep(0.5)
    os._exit(0)


def be_ranks(endpoint: str, hosts: range, ranks: int, size: int, answers: Any, steps: list[Event]) -> None:
    """Be the ranks of these hosts, with their relays."""
    from torch.distributed import PrefixStore

    from phalanx._comm.backend.coordination_store import CoordinationStore
    from phalanx._comm.engines import gloo
    from phalanx._comm.rendezvous import bootstrap
    from phalanx._comm.rendezvous.rank_info import RankInfo
    from phalanx._comm.symmetric_memory.watch import ProcessId

    logging.getLogger("phalanx").setLevel(logging.CRITICAL)
    _prepare_for_many_threads()
    os.nice(10)  # a real agent need not wait for the ranks of other hosts when it says that it is there
    _, meet, wait, _ = steps
    mux = Mux(f"tcp://{endpoint}", [_loopback(host) for host in hosts])
    meet.wait()
    # Each rank of a real job reads the facts for itself, on a core of its own; here thousands share two.
    unpack_once, unpacking = functools.cache(bootstrap.unpack_infos), threading.Lock()

    def unpack_infos(text: str) -> Any:
        with unpacking:
            return unpack_once(text)

    bootstrap.unpack_infos = unpack_infos
    loads_once = functools.cache(gloo.unpack_all)

    def unpack_all(data: bytes) -> Any:
        with unpacking:
            return loads_once(data)

    gloo.unpack_all = unpack_all
    here = ProcessId.of_self()
    row = struct.pack(f"<{size}Q", *range(size))  # Gloo's number for each connection
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
        client.let_go()
        book = gloo.GlooAddresses(PrefixStore("gloo/", store), rank, size)
        book.set(f"0/{rank}", b"".join((b"\2" + bytes(7) + b"node", rank.to_bytes(40, "little"), bytes(96), row)))
        book.wait([], timedelta(seconds=TIMEOUT_S))
        assert len(book.get(f"0/{size - 1}")) == 148 + len(row)
        del book
        client.let_go()
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
        signals.append(client._send_request(Op.GET, SIGNAL.encode(), deadline=Deadline.after(TIMEOUT_S)))
    answers.put("waits")
    for signal in signals:
        signal.wake.acquire()  # type: ignore[union-attr]
    answers.put(("signalled", time.monotonic()))
    answers.close()
    answers.join_thread()
    os._exit(0)


def _prepare_for_many_threads() -> None:
    """Let a thousand threads of this process be woken at once.

    Each that waits for the interpreter looks every `switchinterval` whether it can have it. At the default of 5 ms a
    thousand of them in each of eight processes leave the machine time for nothing else, and no answer is heard.
    """
    threading.stack_size(256 << 10)
    sys.setswitchinterval(0.2)


def _address(host: int) -> str:
    return f"10.0.{host // 250}.{host % 250}"


def _loopback(host: int) -> str:
    return f"127.1.{host // 250}.{host % 250 + 1}"


def find_port() -> int:
    """Return a free port that the kernel gives to nobody: who connects again and again to one that it gives away, and
    where nobody listens yet, is connected to itself in the end.
    """
    for port in random.sample(range(15_000, 30_000), 1000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise SystemExit("no port is free")


def await_coordinator(endpoint: str, first: Any) -> None:
    while first.is_alive():
        try:
            Client(endpoint, Key(KEY)).close()
        except CoordinationError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit("the first host's command has ended")


def measure(num_hosts: int, ranks: int, num_processes: int) -> dict[str, float]:
    """One job of `num_hosts` hosts from its start to the loss of a host."""
    commands, answers, met = SPAWN.Queue(), SPAWN.Queue(), FORK.Queue()
    endpoint = f"127.0.0.1:{find_port()}"
    folder = tempfile.mkdtemp(prefix="phalanx-scale-")
    first = SPAWN.Process(  # without torch, as an agent is
        target=be_first, args=(commands, answers, num_hosts, ranks, endpoint, folder)
    )
    first.start()
    steps = [FORK.Event() for _ in range(4)]
    share = math.ceil(num_hosts / num_processes)
    parts = [range(begin, min(begin + share, num_hosts)) for begin in range(0, num_hosts, share)]
    size = num_hosts * ranks
    processes = [FORK.Process(target=be_ranks, args=(endpoint, part, ranks, size, met, steps)) for part in parts]
    half = math.ceil(num_hosts / 2)
    agents = [range(1, half), range(half, num_hosts)]
    processes += [FORK.Process(target=be_agents, args=(endpoint, part, ranks, met, steps)) for part in agents]
    await_coordinator(endpoint, first)
    for process in processes:
        process.start()

    def usage() -> dict[str, Any]:
        commands.put("usage")
        found: dict[str, Any] = answers.get()
        found["hosts_cpu_s"] = sum(_cpu_s(Path(f"/proc/{process.pid}/stat").read_text()) for process in processes)
        return found

    def hear() -> Any:
        """Return what one of the processes says next, as long as the first host's command runs."""
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                return met.get(timeout=1.0)
            if not first.is_alive():
                break
        for process in processes:
            process.kill()
        first.terminate()
        said = Path(folder, "said").read_text()
        raise SystemExit(
            f"{num_hosts} hosts: no answer within {TIMEOUT_S:g} s. The first host has said:\n{said[-2000:]}"
        )

    begun = usage()
    steps[0].set()
    for _ in agents:
        hear()
    joined = usage()
    steps[1].set()
    for _ in range(size):
        hear()
    all_met = usage()
    steps[2].set()
    for _ in parts:
        hear()
    idle = usage()
    time.sleep(IDLE_S)
    idled = usage()
    with Client(endpoint, Key(KEY)) as client:
        posted = time.monotonic()
        client.set(SIGNAL, b"group")  # as a rank does that has failed
        signalled = max(hear()[1] for _ in parts) - posted
    after_signal = usage()
    steps[3].set()
    told, last = [], 0.0
    for _ in range(len(agents) + 1):
        what, at = hear()
        if what == "told":
            told.append(at)
        else:
            last = at
    end = usage()
    commands.put("end")
    for process in processes:
        process.join()
    first.terminate()
    first.join()
    shutil.rmtree(folder)
    return {
        "joined_s": joined["at"] - begun["at"],
        "joined_cpu_s": joined["cpu_s"] - begun["cpu_s"],
        "met_s": all_met["at"] - joined["at"],
        "met_cpu_s": all_met["cpu_s"] - joined["cpu_s"],
        "hosts_cpu_s": all_met["hosts_cpu_s"] - begun["hosts_cpu_s"],
        "network_cpu_s": all_met["threads"][ZEROMQ] - begun["threads"].get(ZEROMQ, 0.0),
        "requests_per_host": (all_met["requests"] - joined["requests"]) / num_hosts,
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
            harness.format_time(one["joined_cpu_s"] + one["met_cpu_s"]), harness.format_time(one["network_cpu_s"]),
            harness.format_time(one["hosts_cpu_s"]), f"{one['requests_per_host']:.1f}",
            f"{one['connections']:.0f}", f"{one['pss_mb']:.0f} MB", f"{one['peak_mb']:.0f} MB",
            f"{one['idle_percent']:.1f} %", harness.format_time(one["signalled_s"]), f"{one['lost_s']:.1f} s",
        ]
        for hosts, one in found.items()
    ]  # fmt: skip
    harness.print_table(
        ["hosts", "joined", "met", "CPU", "of it ZeroMQ's", "hosts' CPU", "requests per host", "connections", "memory",
         "peak", "idle", "signalled", "loss told after"],
        rows,
    )  # fmt: skip
    harness.write_results(arguments.output, {"scale": found}, machine=harness.describe_machine())


if __name__ == "__main__":
    main()
