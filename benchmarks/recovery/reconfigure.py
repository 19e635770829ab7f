"""How long does a group need, of which a member was killed, until those that are left have reduced a tensor together?

Three processes form a group with `torch.distributed._reconfigure` (PyTorch 2.14 and on), over Gloo and over ours in
turns, and reduce small tensors. One of them is killed (SIGKILL). The two others hear of it as an error of their
all_reduce, reconfigure the group with handles that they have exchanged before, and reduce a tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

WORLD = 3
PEER = "gloo"
TIMEOUT = timedelta(seconds=60)


def live(me: int, backend: str, killed: int, memory_gb: float, ports: Connection, result: Connection) -> None:
    """Be a member; tell when the loss was heard, and when the next all_reduce was done, by CLOCK_MONOTONIC."""
    torch.set_num_threads(1)
    store, meeting = (
        dist.TCPStore("127.0.0.1", port, WORLD, is_master=False, timeout=TIMEOUT) for port in ports.recv()
    )
    dist.init_process_group(backend, store=store, rank=me, world_size=WORLD, timeout=TIMEOUT, enable_reconfigure=True)
    dist._reconfigure(100, exchange_handles(meeting, 1, me)).wait()
    handles = exchange_handles(meeting, 2, me)
    # the kernel frees what a member holds before others are told that it has ended
    tensor = torch.ones(1 + (int(memory_gb * 1e9) // 4 if me == killed else 0))[:1]
    for _ in range(200):
        dist.all_reduce(tensor)
    if me == killed:
        result.send(time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(RuntimeError):
        while True:
            dist.all_reduce(tensor)
    heard = time.monotonic()
    dist._reconfigure(101, [handle for member, handle in enumerate(handles) if member != killed]).wait()
    dist.all_reduce(tensor.fill_(me + 1.0))
    result.send((heard, time.monotonic(), tensor.item()))
    os._exit(0)  # Gloo's destructors may wait for the lost member


def exchange_handles(meeting: dist.Store, number: int, me: int) -> list[str]:
    """Return the handles of all members."""
    meeting.set(f"{number}/{me}", dist._get_reconfigure_handle())
    return [meeting.get(f"{number}/{member}").decode() for member in range(WORLD)]


def lead(backend: str, killed: int, memory_gb: float, result: Connection) -> None:
    """Start the members and their stores, and tell the seconds from the kill until both others have heard of it, and
    until both have reduced a tensor.
    """
    context = multiprocessing.get_context("fork")
    told: list[tuple[Connection, Connection]] = []
    for me in range(WORLD):  # before the stores: their threads may hold a lock that a forked process would wait for
        (ports, own_ports), (answers, own_answers) = context.Pipe(), context.Pipe()
        context.Process(target=live, args=(me, backend, killed, memory_gb, own_ports, own_answers), daemon=True).start()
        own_answers.close()
        told.append((ports, answers))
    stores = [dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False) for _ in range(2)]
    for ports, _ in told:
        ports.send([store.port for store in stores])
    since = told[killed][1].recv()
    found = [answers.recv() for member, (_, answers) in enumerate(told) if member != killed]
    if [value for _, _, value in found] != [sum(range(1, WORLD + 1)) - (killed + 1.0)] * 2:
        raise SystemExit(f"{backend}: the two others have reduced their numbers to {found}")
    result.send((max(heard for heard, _, _ in found) - since, max(done for _, done, _ in found) - since))


def measure(backend: str, killed: int, memory_gb: float) -> tuple[float, float]:
    """Return what `lead` tells, from a process of its own."""
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()
    leader = context.Process(target=lead, args=(backend, killed, memory_gb, theirs))
    leader.start()
    theirs.close()
    found: tuple[float, float] = pipe.recv()
    leader.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kill", type=int, choices=range(WORLD), default=1, help="the member")
    parser.add_argument("--memory", type=float, default=0.0, metavar="GB", help="what the killed member holds besides")
    harness.add_output_arguments(parser, Path(__file__).resolve().parent)
    arguments = parser.parse_args()
    if not hasattr(dist, "_reconfigure"):
        parser.error(f"PyTorch {torch.__version__} has no torch.distributed._reconfigure; 2.14 or later has")
    machine = harness.describe_machine()
    samples: dict[str, list[tuple[float, float]]] = {PEER: [], "phalanx": []}
    for order in harness.plan_rounds(list(samples), arguments.rounds):
        for backend in order:
            samples[backend].append(measure(backend, arguments.kill, arguments.memory))
    rows = []
    for backend, times in samples.items():
        heard, done = (median(one[which] for one in times) for which in (0, 1))
        peer = median(one[1] for one in samples[PEER])
        spread = f"{min(t for _, t in times) * 1e3:.1f} to {max(t for _, t in times) * 1e3:.1f} ms"
        rows.append([backend, harness.format_time(heard), harness.format_time(done), spread, f"{done / peer:.3g}x"])
    harness.print_table(["", "heard by both", "next all_reduce of both", "range", f"of {PEER}"], rows)
    harness.write_results(
        arguments.output,
        {"rounds": arguments.rounds, "killed": arguments.kill, "memory_gb": arguments.memory, "samples": samples},
        machine=machine,
    )


if __name__ == "__main__":
    main()
