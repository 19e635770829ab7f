"""How long do N ranks of several hosts take to meet, and what does that cost the process that keeps the store?

Each rank is a thread with a connection of its own, 64 of them in a process; they do what `init_process_group` does in
the job's store. The peer is the same over PyTorch's TCPStore, which does not encrypt; there ranks ask every 20 ms, and
a run with 128 and 256 of them was not over after a minute on two cores, so that it is measured up to 64.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402 - the line above says where it is
from run import KEY, PEER  # noqa: E402

FORK = multiprocessing.get_context("fork")
OURS = "phalanx, CURVE over TCP"
RANKS_OF_PROCESS = 64
TIMEOUT_S = 200.0
MOST_OF_PEER = 64


def serve_peer(answer: Any, stop: Event) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    answer.put(store.port)
    begun = time.process_time()
    stop.wait()
    answer.put((time.process_time() - begun, 0))


def serve_ours(answer: Any, stop: Event) -> None:
    from phalanx._comm.control.key import Key
    from phalanx._job.coordinator.service import Service

    with Service("127.0.0.1:0", Key(KEY)) as service:
        handle, count = service.coordinator._handle, [0]

        def handle_and_count(session: Any, message: Any) -> bool:
            count[0] += 1
            return handle(session, message)

        service.coordinator._handle = handle_and_count  # type: ignore[method-assign]
        answer.put(str(service.address))
        begun = time.process_time()
        stop.wait()
        answer.put((time.process_time() - begun, count[0]))


def open_peer(place: Any, count: int) -> list[Any]:
    from torch.distributed import TCPStore

    return [TCPStore("127.0.0.1", place, None, False, wait_for_workers=False) for _ in range(count)]


def open_ours(place: Any, count: int) -> list[Any]:
    import zmq

    from phalanx._comm.backend.coordination_store import CoordinationStore
    from phalanx._comm.control.client import Client
    from phalanx._comm.control.key import Key

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # one for all of them: a process has so many descriptors
    context.max_sockets = 4096
    return [CoordinationStore(place, client=Client(place, Key(KEY), context=context)) for _ in range(count)]


CONTESTANTS: dict[str, tuple[Callable[..., None], Callable[..., list[Any]]]] = {
    PEER: (serve_peer, open_peer),
    OURS: (serve_ours, open_ours),
}


def meet(contestant: str, place: Any, ranks: range, size: int, answer: Any, go: Event) -> None:
    """Be these ranks; answer once when they are connected, and once for each that has met all others."""
    from torch.distributed import PrefixStore

    from phalanx._base.deadline import Deadline
    from phalanx._comm.rendezvous.bootstrap import exchange
    from phalanx._comm.rendezvous.rank_info import RankInfo, host_identity
    from phalanx._comm.symmetric_memory.watch import ProcessId

    logging.getLogger("phalanx").setLevel(logging.ERROR)
    info = RankInfo(host_identity(), os.uname().nodename, "", ProcessId.of_self(), frozenset(), 1)
    stores = CONTESTANTS[contestant][1](place, len(ranks))

    def join(rank: int, store: Any) -> None:
        exchange(PrefixStore("group/", store), rank, size, info, "0", Deadline.after(TIMEOUT_S))
        answer.put(rank)

    threads = [threading.Thread(target=join, args=one) for one in zip(ranks, stores, strict=True)]
    answer.put(-1)
    go.wait()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answer.close()
    answer.join_thread()
    os._exit(0)  # how long a store takes to close is not the question


def measure(contestant: str, size: int) -> dict[str, float]:
    """Seconds until the last of `size` ranks has met all others; seconds of the server's processor; its requests."""
    answer, met, go, stop = FORK.Queue(), FORK.Queue(), FORK.Event(), FORK.Event()
    server = FORK.Process(target=CONTESTANTS[contestant][0], args=(answer, stop))
    server.start()
    place = answer.get()
    parts = [range(first, min(first + RANKS_OF_PROCESS, size)) for first in range(0, size, RANKS_OF_PROCESS)]
    processes = [FORK.Process(target=meet, args=(contestant, place, part, size, met, go)) for part in parts]
    for process in processes:
        process.start()
    for _ in processes:
        met.get(timeout=TIMEOUT_S)
    begun = time.perf_counter()
    go.set()
    for _ in range(size):
        met.get(timeout=TIMEOUT_S)
    seconds = time.perf_counter() - begun
    stop.set()
    cpu_s, num_requests = answer.get()
    for process in (*processes, server):
        process.join()
    return {"seconds": seconds, "cpu_s": cpu_s, "requests": num_requests / size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="64,128,256,512", help="numbers of ranks")
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]

    import torch.distributed  # noqa: F401  # here, once

    found: dict[str, dict[int, list[dict[str, float]]]] = {name: {size: [] for size in sizes} for name in CONTESTANTS}
    for number in range(arguments.rounds):
        for size in sizes:
            for name in sorted(CONTESTANTS, reverse=bool(number % 2)):
                if name == OURS or size <= MOST_OF_PEER:
                    found[name][size].append(measure(name, size))
    rows = []
    for size in sizes:
        theirs = [one["seconds"] for one in found[PEER][size]]
        for name in CONTESTANTS:
            samples = found[name][size]
            if not samples:
                continue
            seconds, cpu_s, requests = (
                harness.summarise([one[key] for one in samples]).median for key in ("seconds", "cpu_s", "requests")
            )
            rows.append([
                str(size), name, harness.format_time(seconds),
                harness.format_ratio(seconds / harness.summarise(theirs).median) if theirs else "",
                harness.format_time(cpu_s), f"{requests:.1f}" if requests else "",
            ])  # fmt: skip
    harness.print_table(["ranks", "store", "all have met", "of TCPStore", "server's CPU", "requests per rank"], rows)
    harness.write_results(arguments.output, {"starts": found}, machine=harness.describe_machine())


if __name__ == "__main__":
    main()
