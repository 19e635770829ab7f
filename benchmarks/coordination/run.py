"""How many operations a second does the coordinator do, against TCPStore, and how soon have many agents joined it?"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402 - the line above says where it is

FORK = multiprocessing.get_context("fork")
KEY = bytes(range(32))
PEER = "TCPStore"
TARGET, JOIN_TARGET_S = 5.0, 5.0
SPAN_S = 1.0
BATCH = 100

# One call of each kind, and how many operations it is. TCPStore's set is not answered: the get after it is.
KEYS = [f"key{n}" for n in range(BATCH)]
CALLS: dict[str, tuple[Callable[[Any], object], int]] = {
    "add": (lambda store: store.add("n", 1), 1),
    "get": (lambda store: store.get("key0"), 1),
    "set, then get": (lambda store: (store.set("key1", "v" * 20), store.get("key1")), 2),
    f"multi_get of {BATCH}": (lambda store: store.multi_get(KEYS), BATCH),
    f"multi_set of {BATCH}": (lambda store: (store.multi_set(KEYS, ["v" * 20] * BATCH), store.check(KEYS[:1])), BATCH),
}


def open_peer(place: Any) -> Any:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", place, None, False, wait_for_workers=False)


def open_ours(place: Any) -> Any:
    from phalanx._comm.control.client import Client
    from phalanx._comm.control.key import Key

    return Client(place, None if place.startswith("/") else Key(KEY))


def serve_peer(answer: Any, stop: Event) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    answer.put(store.port)
    stop.wait()


def serve_ours(answer: Any, stop: Event, local: bool) -> None:
    from phalanx._comm.control.key import Key
    from phalanx._job.coordinator.service import Service

    with Service("127.0.0.1:0", Key(KEY)) as service:
        answer.put(service.local if local else str(service.address))
        stop.wait()


def serve_local(answer: Any, stop: Event) -> None:
    serve_ours(answer, stop, True)


def serve_remote(answer: Any, stop: Event) -> None:
    serve_ours(answer, stop, False)


def serve_relayed(answer: Any, stop: Event) -> None:
    """A coordinator, and in another process the relay of a host that has joined."""
    from phalanx._comm.control.key import Key
    from phalanx._job.coordinator.relay import Relay

    place: Any = FORK.Queue()
    coordinator = FORK.Process(target=serve_remote, args=(place, stop))
    coordinator.start()
    relay = Relay(f"tcp://{place.get()}", Key(KEY))
    answer.put(relay.path)
    stop.wait()
    relay.close()
    coordinator.join()


CONTESTANTS = {
    PEER: (serve_peer, open_peer),
    "phalanx, on the coordinator's host": (serve_local, open_ours),
    "phalanx, CURVE over TCP": (serve_remote, open_ours),
    "phalanx, through a host's relay": (serve_relayed, open_ours),
}


def work(opener: Callable[[Any], Any], place: Any, call: str, ready: Any, go: Event, answer: Any) -> None:
    store = opener(place)
    function, count = CALLS[call]
    store.multi_set(KEYS, ["v" * 20] * BATCH)
    function(store)
    ready.put(1)
    go.wait()
    done, begun = 0, time.perf_counter()
    while (now := time.perf_counter()) - begun < SPAN_S:
        function(store)
        done += count
    answer.put(done / (now - begun))
    answer.close()
    answer.join_thread()
    os._exit(0)  # how long a store takes to close is not the question


def processor_s(pid: int) -> float:
    """The processor time of this process and of its children, in seconds."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK") + sum(map(processor_s, children))


def rate(contestant: str, call: str, clients: int, server_us: dict[str, list[float]]) -> float:
    """Operations a second of `clients` processes together, each with one call under way.

    What an operation costs the store's process is appended to server_us[contestant], in microseconds.
    """
    serve, opener = CONTESTANTS[contestant]
    answer, ready, go, stop = FORK.Queue(), FORK.Queue(), FORK.Event(), FORK.Event()
    server = FORK.Process(target=serve, args=(answer, stop))
    server.start()
    place = answer.get()
    workers = [FORK.Process(target=work, args=(opener, place, call, ready, go, answer)) for _ in range(clients)]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.get()
    used_s, begun = processor_s(server.pid or 0), time.perf_counter()
    go.set()
    total = sum(answer.get() for _ in workers)
    used_s, took_s = processor_s(server.pid or 0) - used_s, time.perf_counter() - begun
    server_us.setdefault(contestant, []).append(used_s / (total * took_s) * 1e6)
    for worker in workers:
        worker.join()
    stop.set()
    server.join()
    return float(total)


def agents(place: str, count: int, joined: Any, go: Event, stop: Event) -> None:
    import zmq

    from phalanx._comm.control.client import Client
    from phalanx._comm.control.key import Key

    context = zmq.Context()
    context.max_sockets = 4 * count + 16  # each client has three: itself, and the two ends of its monitor
    go.wait()
    clients = []
    for number in range(count):
        clients.append(Client(place, Key(KEY), context=context, timeout=60.0))
        clients[-1].join({"host": f"host{os.getpid()}-{number}"})
    joined.put(time.monotonic())
    joined.close()
    joined.join_thread()
    stop.wait()
    os._exit(0)


def seconds_to_join(count: int, processes: int) -> float:
    """Until the last of `count` agents is a member, each with a connection (CURVE) and a thread of its own."""
    answer, joined, go, stop = FORK.Queue(), FORK.Queue(), FORK.Event(), FORK.Event()
    server = FORK.Process(target=serve_remote, args=(answer, stop))
    server.start()
    place = answer.get()
    arguments = (place, count // processes, joined, go, stop)
    workers = [FORK.Process(target=agents, args=arguments) for _ in range(processes)]
    for worker in workers:
        worker.start()
    begun = time.monotonic()
    go.set()
    last = max(joined.get() for _ in workers)
    stop.set()
    for worker in workers:
        worker.join()
    server.join()
    return last - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-joins", action="store_true", help="leave out how long agents take to join")
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()

    import torch.distributed  # noqa: F401  # here, once: nine processes that each import it for TCPStore take 12 s

    machine = harness.describe_machine()
    rates: dict[str, dict[str, list[float]]] = {}
    server_us: dict[str, dict[str, list[float]]] = {}
    for clients in arguments.clients:
        rows = []
        for call in CALLS:
            spent: dict[str, list[float]] = {}
            contestants = {
                name: lambda name=name, c=call, n=clients, spent=spent: rate(name, c, n, spent) for name in CONTESTANTS
            }
            samples = harness.interleave(contestants, arguments.rounds)
            rates[f"{clients} clients, {call}"] = samples
            peer = harness.summarise(samples[PEER]).median
            for name, values in samples.items():
                one = harness.summarise(values)
                cost = harness.summarise(spent[name]).median
                ratio = harness.format_ratio(one.median / peer)
                rows.append([call, name, f"{one.median:,.0f}/s", ratio, f"{cost:.1f} µs"])
            server_us[f"{clients} clients, {call}"] = spent
        title = f"{clients} processes, each with one call under way; median of {arguments.rounds} rounds"
        harness.print_table(
            ["operation", "store", "operations", "of TCPStore", "of the store's CPU"], rows, title=title
        )
        print()
    joins: dict[str, list[float]] = {}
    if not arguments.no_joins:
        joins = harness.interleave(
            {
                "512 agents in 4 processes": lambda: seconds_to_join(512, 4),
                "64 processes": lambda: seconds_to_join(64, 64),
            },
            arguments.rounds,
        )
        rows = [[name, harness.format_time(harness.summarise(values).median)] for name, values in joins.items()]
        harness.print_table(["who joins", "until the last is a member"], rows, title="Joining, CURVE over TCP")
        slowest = harness.summarise(joins["512 agents in 4 processes"]).median
        print(f"\nTarget, 512 agents in {JOIN_TARGET_S:g} s: {'reached' if slowest <= JOIN_TARGET_S else 'missed'}.")
    results = {"target": TARGET, "operations_per_s": rates, "server_us": server_us, "join_s": joins}
    harness.write_results(arguments.output, results, machine=machine)


if __name__ == "__main__":
    main()
