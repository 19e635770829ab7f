"""How long are collectives between hosts whose link is the bottleneck? Gloo over all ranks, and the hierarchy."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import phalanx
from phalanx.testing import Host, hosts, run_ranks, why_no_hosts

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402 - the line above says where it is
from harness.ranks import join_on_host  # noqa: E402

PEER, ROUNDED = "gloo", "phalanx-bfloat16"
KIB, MIB = 2**10, 2**20
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
SMALL = 64 * KIB  # up to here one call is too short for a clock: many are measured, one after the other
CALLS = 50


@dataclass(frozen=True)
class Case:
    """An operation on `nbytes` in all: of all_gather's output, of reduce_scatter's input."""

    operation: str
    nbytes: int

    @property
    def size(self) -> str:
        """'16 KiB'."""
        for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
            if self.nbytes % unit == 0:
                return f"{self.nbytes // unit} {name}"
        return f"{self.nbytes} B"

    @property
    def calls(self) -> int:
        """How many make a sample."""
        return CALLS if self.nbytes <= SMALL else 1

    def target(self, contestant: str) -> float | None:
        """What is asked for, as a share of the peer's time."""
        if contestant == PEER or self.operation == "reduce_scatter":
            return None
        if self.operation != "all_reduce":
            return 0.6 if self.nbytes == 64 * MIB else None
        if self.nbytes <= 16 * KIB:
            return 1.0
        return 0.35 if contestant == ROUNDED else 0.6


@dataclass(frozen=True)
class Sample:
    """Seconds of one call on the slowest rank, and bytes that it sent out of the busiest host, headers included."""

    seconds: float
    sent: float


class Tensors:
    """What one case works on, on one rank; whole numbers, so that every order of addition gives the same bits."""

    def __init__(self, case: Case, rank: int, world_size: int) -> None:
        self.case = case
        count = case.nbytes // 4
        self.part = torch.full((max(1, count // world_size),), rank + 1.0)
        self.whole = torch.full((self.part.numel() * world_size if count >= world_size else count,), rank + 1.0)
        self.rank, self.world_size = rank, world_size

    def call(self, group: dist.ProcessGroup | None) -> None:
        """Carry the operation out once."""
        operation = self.case.operation
        if operation == "all_reduce":
            dist.all_reduce(self.whole, group=group)
        elif operation == "broadcast":
            dist.broadcast(self.whole, src=0, group=group)
        elif operation == "all_gather":
            dist.all_gather_single(self.whole, self.part, group=group)
        else:
            dist.reduce_scatter_single(self.part, self.whole, group=group)

    def reset(self) -> None:
        """As before the first call: sums of sums would overflow."""
        self.part.fill_(self.rank + 1.0)
        self.whole.fill_(self.rank + 1.0)

    def check(self, group: dist.ProcessGroup | None) -> str:
        """What is wrong with the result of one call, or nothing."""
        self.reset()
        self.call(group)
        total = self.world_size * (self.world_size + 1) / 2
        ranks = torch.arange(1.0, self.world_size + 1)
        got = self.part if self.case.operation == "reduce_scatter" else self.whole
        expected = {
            "all_reduce": torch.full_like(got, total),
            "broadcast": torch.ones_like(got),
            "all_gather": ranks.repeat_interleave(self.part.numel()) if self.case.operation == "all_gather" else got,
            "reduce_scatter": torch.full_like(got, total),
        }[self.case.operation]
        return "" if torch.equal(got, expected) else f"{got[:4].tolist()}, not {expected[:4].tolist()}"


Samples = dict[str, dict[Case, list[Sample]]]  # by contestant


def rank_main(
    rank: int, world_size: int, machines: list[Host], per_host: int, cases: Sequence[Case], rounds: int
) -> Samples:
    """Build a group per contestant, check its values, and measure all of them in turns."""
    join_on_host(rank, world_size, machines, per_host)
    everybody = list(range(world_size))
    groups = {
        PEER: dist.new_group(everybody, backend="gloo"),
        "phalanx": dist.group.WORLD,
        ROUNDED: dist.new_group(everybody, backend="phalanx", pg_options=phalanx.Options(wire_dtype=torch.bfloat16)),
    }
    samples: Samples = {name: {} for name in groups}
    for case in cases:
        tensors = Tensors(case, rank, world_size)
        rounds_off = case.operation == "all_reduce" and case.nbytes > SMALL
        names = [name for name in groups if name != ROUNDED or rounds_off]
        for name in names:
            samples[name][case] = []
            if wrong := tensors.check(groups[name]):
                raise SystemExit(f"{name}: {case.operation} of {case.size} gave {wrong}")
        for order in harness.plan_rounds(names, rounds):
            for name in order:
                samples[name][case].append(measure(tensors, groups[name], machines, rank))
    dist.destroy_process_group()
    return samples


def measure(tensors: Tensors, group: dist.ProcessGroup | None, machines: list[Host], rank: int) -> Sample:
    """A case's calls, back to back with nothing else; all ranks begin together."""
    calls = tensors.case.calls
    tensors.reset()
    if calls > 1:
        tensors.call(group)  # threads and connections that slept
    before = [machine.bytes_sent() for machine in machines] if rank == 0 else []
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        tensors.call(group)
    took = torch.tensor([(time.perf_counter() - begin) / calls])
    dist.barrier()
    sent = max((m.bytes_sent() - b for m, b in zip(machines, before, strict=False)), default=0)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return Sample(took.item(), sent / calls)


def table(samples: Samples) -> list[list[str]]:
    """A row for each case and contestant."""
    rows = []
    for case, of_peer in samples[PEER].items():
        peer = [sample.seconds for sample in of_peer]
        for name, by_case in samples.items():
            if case not in by_case:
                continue
            mine = [sample.seconds for sample in by_case[case]]
            ratio = harness.summarise(a / b for a, b in zip(mine, peer, strict=True))
            sent = harness.summarise(sample.sent / case.nbytes for sample in by_case[case])
            target = case.target(name)
            rows.append(
                [
                    f"{case.operation}, {case.size}, {name}",
                    harness.format_time(harness.summarise(mine).median),
                    harness.format_ratio(ratio.median),
                    harness.format_ratio(ratio.high),
                    f"at most {target:g}x" if target is not None else "",
                    f"{sent.median:.2f}" if case.nbytes >= KIB else "",
                ]
            )
    return rows


def parse_size(text: str) -> int:
    """Bytes, from '4', '16KiB' or '64MiB'."""
    for suffix, unit in (("KiB", KIB), ("MiB", MIB)):
        if text.endswith(suffix):
            return int(text.removesuffix(suffix)) * unit
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="what each host may send, as tc says it")
    parser.add_argument("--sizes", default="4,16KiB,256KiB,1MiB,16MiB,64MiB", help="comma-separated, for all_reduce")
    parser.add_argument("--others", default="16KiB,64MiB", help="the same for the other operations")
    parser.add_argument("--operations", default=",".join(OPERATIONS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=7)
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    if reason := why_no_hosts():
        raise SystemExit(f"benchmarks/hosts: {reason}")

    machine = harness.describe_machine()
    cases = [
        Case(operation, parse_size(size))
        for operation in arguments.operations.split(",")
        for size in (arguments.sizes if operation == "all_reduce" else arguments.others).split(",")
    ]
    world_size = arguments.hosts * arguments.ranks_per_host
    with hosts(arguments.hosts, rate=arguments.rate) as machines:
        job = (machines, arguments.ranks_per_host, cases, arguments.rounds)
        samples = run_ranks(rank_main, world_size, *job, init=False, timeout=3600)[0]
    place = f"{arguments.hosts} hosts x {arguments.ranks_per_host} ranks, {arguments.rate} between them"
    header = ["float32", "median", "of Gloo's", "worst round", "target", "bytes out of a host / tensor"]
    harness.print_table(header, table(samples), title=f"{place}, {arguments.rounds} rounds")
    raw = {
        name: {f"{case.operation} {case.nbytes}": [asdict(s) for s in all_] for case, all_ in by.items()}
        for name, by in samples.items()
    }
    harness.write_results(arguments.output, {"place": place, "samples": raw}, machine=machine)


if __name__ == "__main__":
    main()
