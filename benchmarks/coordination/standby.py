"""What does it cost the operations of a store that another host follows it, so that it can take over?

The coordinator, a standby and the client are processes of their own, with encrypted connections over loopback. In
turns the coordinator answers at once, as without a standby, and only what the standby has.
"""

from __future__ import annotations

import argparse
import multiprocessing
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
from run import KEY  # noqa: E402

SPAWN = multiprocessing.get_context("spawn")
TICKET = b"standby"
ALONE, FOLLOWED = "without a standby", "with a standby"


def serve(place: Any, commands: Any, done: Any) -> None:
    """Be the coordinator; each command says whether the standby is required."""
    from phalanx._comm.control.key import Key
    from phalanx._job.coordinator.service import Service

    with Service("127.0.0.1:0", Key(KEY)) as service:
        assert service.address is not None
        place.put((str(service.address), service.address.endpoint))
        while (is_required := commands.get()) is not None:
            service.coordinator.followers.required = frozenset([TICKET] if is_required else [])
            done.put(None)


def follow(endpoint: str, is_whole: Event, stop: Event) -> None:
    """Be the standby."""
    from phalanx._comm.control.key import Key
    from phalanx._job.hosts.succession.standby import Standby

    standby = Standby(endpoint, Key(KEY), TICKET, is_whole.set)
    stop.wait()
    standby.stop()


def ask(address: str, operations: int, threads: int) -> dict[str, Callable[[], float]]:
    """Return functions by operation that give its seconds, of `threads` clients with one call under way each."""
    from phalanx._comm.control.client import Client
    from phalanx._comm.control.key import Key

    clients = [Client(address, Key(KEY)) for _ in range(threads)]

    def run(call: Callable[[Any, int], object]) -> float:
        def repeat(number: int, client: Any) -> None:
            for _ in range(operations // threads):
                call(client, number)

        begun = time.perf_counter()
        each = [threading.Thread(target=repeat, args=one) for one in enumerate(clients)]
        for thread in each:
            thread.start()
        for thread in each:
            thread.join()
        return (time.perf_counter() - begun) / (operations // threads)

    return {
        "set": lambda: run(lambda client, number: client.set(f"key-{number}", b"value")),
        "add": lambda: run(lambda client, number: client.add(f"count-{number}", 1)),
        "get": lambda: run(lambda client, number: client.get(f"key-{number}")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--operations", type=int, default=1600, help="of each kind, in each turn")
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    place, commands, done = SPAWN.Queue(), SPAWN.Queue(), SPAWN.Queue()
    is_whole, stop = SPAWN.Event(), SPAWN.Event()
    server = SPAWN.Process(target=serve, args=(place, commands, done))
    server.start()
    address, endpoint = place.get()
    standby = SPAWN.Process(target=follow, args=(endpoint, is_whole, stop))
    standby.start()
    is_whole.wait()

    def turn(is_required: bool, operation: Callable[[], float]) -> float:
        commands.put(is_required)
        done.get()
        return operation()

    found: dict[str, dict[str, list[float]]] = {}
    for threads in (1, 16):
        for name, operation in ask(address, arguments.operations, threads).items():
            contestants = {
                ALONE: lambda operation=operation: turn(False, operation),
                FOLLOWED: lambda operation=operation: turn(True, operation),
            }
            found[f"{name}, {threads} at once"] = harness.interleave(contestants, arguments.rounds)
    commands.put(None)
    stop.set()
    for process in (server, standby):
        process.join()
    rows = []
    for name, times in found.items():
        alone, followed = (harness.summarise(times[which]).median for which in (ALONE, FOLLOWED))
        times_as_long = harness.format_ratio(followed / alone)
        rows.append([name, harness.format_time(alone), harness.format_time(followed), times_as_long])
    harness.print_table(["operation", ALONE, FOLLOWED, "times as long"], rows)
    harness.write_results(arguments.output, {"standby": found}, machine=harness.describe_machine())


if __name__ == "__main__":
    main()
