"""What do hostile connections and fuzzed frames cost a job? Its step time in windows with and without them, in turns.

The coordinator runs in a process of its own, as in an agent; the ranks are members of it, add to a key in every step,
and compute and reduce over shared memory. The attack is paced, so that the figure is what the coordinator takes from
the job and not what the attackers do, which run on the same machine here (at the lowest priority).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import struct
import sys
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE.parents[1]))

from harness import (  # noqa: E402
    add_output_arguments,
    describe_machine,
    format_ratio,
    format_time,
    print_table,
    summarise,
    write_results,
)
from run import FORK, KEY  # noqa: E402
from tests.coordination.test_hostile import random_frame, rubbish  # noqa: E402

TARGET = 1.05


def serve(answer: Any, stop: Event) -> None:
    from phalanx._comm.control.key import Key
    from phalanx._job.coordinator.service import Service

    with Service("127.0.0.1:0", Key(KEY)) as service:
        answer.put((str(service.address), service.local))
        stop.wait()
        known = len([s for s in service.coordinator.sessions.values() if s.member is not None])
        answer.put((time.process_time(), service.num_refused, service.coordinator.num_malformed, known))


def train(rank: int, size: int, local: str, folder: str, stop: Event) -> None:
    """Steps until `stop`; rank 0 writes when each ended."""
    import torch
    import torch.distributed as dist

    from phalanx._comm.control.client import Client

    torch.set_num_threads(1)
    dist.init_process_group("phalanx", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    gradient, weight = torch.ones(1 << 18), torch.ones(300, 300)
    with Client(local) as client, open(f"{folder}/steps-{rank}", "w") as times:
        client.join({"host": f"rank {rank}"})
        go_on = torch.ones(1)
        while go_on.item():
            for _ in range(8):
                weight = weight @ weight / weight.norm()
            dist.all_reduce(gradient)
            gradient /= size
            client.add("steps", 1)
            go_on.fill_(float(not stop.is_set()))
            dist.all_reduce(go_on, op=dist.ReduceOp.MIN)
            print(time.monotonic(), file=times)
        client.leave()
    dist.destroy_process_group()


def attack(place: str, connections_per_s: float, frames_per_s: float, on: Event, stop: Event, answer: Any) -> None:
    import zmq

    from phalanx._comm.control.key import Key

    os.nice(19)
    rng = random.Random(1)
    pair, server = Key(KEY).member_pair(), Key(KEY).coordinator_pair()
    context = zmq.Context()
    insider = context.socket(zmq.DEALER)
    insider.linger = 0
    insider.curve_publickey, insider.curve_secretkey, insider.curve_serverkey = pair.public, pair.secret, server.public
    insider.connect(f"tcp://{place}")
    host, port = place.rsplit(":", 1)
    open_ones: list[socket.socket] = []
    num_connections = num_frames = 0
    while not stop.is_set():
        if not on.wait(0.1):
            continue
        begun = time.monotonic()
        for _ in range(round(connections_per_s / 10)):
            stranger = socket.create_connection((host, int(port)))
            with contextlib.suppress(OSError):
                stranger.sendall(rubbish(rng))
            if rng.random() < 0.3:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            open_ones.append(stranger)
            if len(open_ones) > 200:
                open_ones.pop(rng.randrange(len(open_ones))).close()
            num_connections += 1
        for _ in range(round(frames_per_s / 10)):
            with contextlib.suppress(zmq.Again):
                insider.send(random_frame(rng), zmq.NOBLOCK)
                num_frames += 1
        time.sleep(max(0.0, 0.1 - (time.monotonic() - begun)))
    answer.put((num_connections, num_frames))
    context.destroy(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="pairs of windows, one of them under attack")
    parser.add_argument("--window", type=float, default=5.0, help="seconds of a window")
    parser.add_argument("--connections-per-s", type=float, default=100.0)
    parser.add_argument("--frames-per-s", type=float, default=1000.0)
    add_output_arguments(parser, HERE)
    arguments = parser.parse_args()

    import tempfile

    import torch.distributed  # noqa: F401 - once for all ranks

    machine = describe_machine()
    answer, hits, on, stop, end = FORK.Queue(), FORK.Queue(), FORK.Event(), FORK.Event(), FORK.Event()
    coordinator = FORK.Process(target=serve, args=(answer, end))
    coordinator.start()
    place, local = answer.get()
    windows: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            FORK.Process(target=train, args=(rank, arguments.ranks, local, folder, stop))
            for rank in range(arguments.ranks)
        ]
        pace = (arguments.connections_per_s, arguments.frames_per_s)
        workers.append(FORK.Process(target=attack, args=(place, *pace, on, stop, hits)))
        for worker in workers:
            worker.start()
        time.sleep(2.0)
        for number in range(arguments.rounds):
            for name in ("calm", "attack") if number % 2 == 0 else ("attack", "calm"):
                (on.set if name == "attack" else on.clear)()
                begun = time.monotonic()
                time.sleep(arguments.window)
                windows.append((name, begun, time.monotonic()))
        on.clear()
        stop.set()
        num_connections, num_frames = hits.get()
        for worker in workers:
            worker.join()
        ended = [float(line) for line in Path(folder, "steps-0").read_text().split()]
    end.set()
    cpu_s, num_refused, num_malformed, num_members = answer.get()
    coordinator.join()

    samples: dict[str, list[float]] = {"calm": [], "attack": []}
    for name, begun, over in windows:
        inside = [at for at in ended if begun <= at < over]
        samples[name].append((inside[-1] - inside[0]) / (len(inside) - 1))
    medians = {name: summarise(values).median for name, values in samples.items()}
    ratio = medians["attack"] / medians["calm"]
    rows = [[name, format_time(one), format_ratio(one / medians["calm"])] for name, one in medians.items()]
    print_table(["windows", "step", "of calm"], rows, title=f"{arguments.ranks} ranks, {arguments.rounds} rounds")
    print(
        f"\n{num_connections} hostile connections ({num_refused} refused by name, the others went or were silent), "
        f"{num_frames} fuzzed frames of somebody who knows the key ({num_malformed} malformed); the coordinator took "
        f"{cpu_s:.1f} s of processor time."
    )
    print(f"Target, step time at most {format_ratio(TARGET)}: {'reached' if ratio <= TARGET else 'missed'}.")
    results = {
        "target": TARGET,
        "ratio": ratio,
        "step_s": samples,
        "connections": num_connections,
        "frames": num_frames,
        "refused": num_refused,
        "malformed": num_malformed,
        "members_at_the_end": num_members,
        "coordinator_cpu_s": cpu_s,
    }
    write_results(arguments.output, results, machine=machine)


if __name__ == "__main__":
    main()
