"""How long is a step of phalanx.Trainer, against the bare loop, Lightning Fabric and Accelerate?"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness import (  # noqa: E402 - the line above says where it is
    add_output_arguments,
    describe_machine,
    format_ratio,
    format_time,
    plan_rounds,
    print_table,
    summarise,
    write_results,
)

BARE = "bare loop"
TARGET = {"Trainer": 1.02}


class Team:
    """The ranks of one contestant, each a process of its own, which sleep between their turns."""

    def __init__(self, name: str, python: str, world_size: int, steps: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._ranks = []
        for rank in range(world_size):
            read, write = os.pipe()
            environment = {
                **os.environ,
                **{"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world_size}"},
                **{"LOCAL_WORLD_SIZE": f"{world_size}", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "benchmark"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "OMP_NUM_THREADS": "1"},
                **{"PHALANX_RESULTS": f"{write}", "ACCELERATE_USE_CPU": "true"},
            }
            process = subprocess.Popen(
                [python, str(HERE / "contestant.py"), name, str(steps)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[write],
                text=True,
            )
            os.close(write)
            self._ranks.append((process, os.fdopen(read)))
        self._steps = steps
        self.losses = self._read()

    def measure(self) -> float:
        """Seconds of a step, of the slowest rank."""
        for process, _ in self._ranks:
            assert process.stdin is not None
            print(file=process.stdin, flush=True)
        return max(self._read()) / self._steps

    def _read(self) -> list[float]:
        lines = [results.readline() for _, results in self._ranks]
        if not all(lines):
            raise RuntimeError("a rank has ended")
        return [float(line) for line in lines]

    def close(self) -> None:
        """The end of its standard input ends a rank."""
        for process, results in self._ranks:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
            results.close()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20, help="per round")
    parser.add_argument("--fabric", help="a python that has lightning-fabric; default this one, if it has")
    parser.add_argument("--accelerate", help="a python that has accelerate; default this one, if it has")
    add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    machine = describe_machine()
    pythons = {BARE: sys.executable, "Trainer": sys.executable}
    for name, given, module in (
        ("Fabric", arguments.fabric, "lightning_fabric"),
        ("Accelerate", arguments.accelerate, "accelerate"),
    ):
        if given or importlib.util.find_spec(module):
            pythons[name] = given or sys.executable
        else:
            print(f"{name} is not installed: it is left out")
    results = {}
    for world_size in arguments.ranks:
        teams: dict[str, Team] = {}
        for name, python in pythons.items():
            try:
                teams[name] = Team(name, python, world_size, arguments.steps)
            except RuntimeError as error:
                print(f"{name} on {world_size} ranks is left out: {error}")
        losses = {name: team.losses for name, team in teams.items()}
        if max(abs(one[0] - losses[BARE][0]) for one in losses.values()) > 1e-3:
            raise SystemExit(f"the contestants don't train alike: {losses}")
        samples: dict[str, list[float]] = {name: [] for name in teams}
        for order in plan_rounds(list(teams), arguments.rounds):
            for name in order:
                samples[name].append(teams[name].measure())
        for team in teams.values():
            team.close()
        rows = []
        for name, mine in samples.items():
            ratio = statistics.median(one / bare for one, bare in zip(mine, samples[BARE], strict=True))
            within = "" if name not in TARGET else "yes" if ratio <= TARGET[name] else "no"
            rows.append([name, format_time(summarise(mine).median), format_ratio(ratio), within])
        title = f"{world_size} rank" + "s" * (world_size > 1)
        print_table(["", "step", "of the bare loop", "within 2 %"], rows, title=title)
        results[title] = samples
    write_results(arguments.output, {"seconds_per_step": results}, machine=machine)


if __name__ == "__main__":
    main()
