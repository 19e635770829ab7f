"""The tables: the time of every contestant, then the ratios that the question asks for."""

from __future__ import annotations

from cases import Case
from harness import format_ratio, format_time, print_table
from measurements import GLOO, Measurements
from peers import PHALANX

NOTHING = "-"


def print_report(measurements: Measurements) -> None:
    """Print a pair of tables for each world size and operation, the memory's speed, and who is missing."""
    groups: dict[tuple[int, str], list[Case]] = {}
    for case in measurements.cases():
        groups.setdefault((case.world_size, case.op), []).append(case)
    for (world_size, op), cases in groups.items():
        _print_times(measurements, cases, f"### {op}, {world_size} ranks, float32: time of one call")
        _print_ratios(measurements, cases, "Phalanx's time as a multiple of another's (below 1 is faster)")
    print()
    for world_size in dict.fromkeys(world_size for world_size, _ in groups):
        bandwidth = measurements.memory_bandwidth(world_size)
        if bandwidth:
            print(f"Memory: {world_size} ranks at once read and write {bandwidth / 1e9:.1f} GB/s together.")
    for name, reason in measurements.absent.items():
        print(f"Absent: {name}: {reason}")
    for name, operations in measurements.not_offered.items():
        for reason, which in _by_reason(operations).items():
            print(f"Not offered by {name}: {', '.join(which)}: {reason}")
    for reason in measurements.failed.values():
        print(f"FAILED: {reason}")


def _print_times(measurements: Measurements, cases: list[Case], title: str) -> None:
    names = [name for name in measurements.names() if any(measurements.summary(name, case) for case in cases)]
    rows = []
    for case in cases:
        summaries = [measurements.summary(name, case) for name in names]
        floor = measurements.floor_seconds(case)
        times = [format_time(summary.median) if summary else NOTHING for summary in summaries]
        rows.append([format_bytes(case.num_bytes), *times, format_time(floor) if floor else NOTHING])
    print_table(["size", *names, "(memory)"], rows, title=title)


def _print_ratios(measurements: Measurements, cases: list[Case], title: str) -> None:
    ours = [name for name in measurements.names() if name.startswith(PHALANX)]
    ours = [name for name in ours if any(measurements.summary(name, case) for case in cases)]
    if not ours:
        return
    rows = []
    for case in cases:
        gloo, best = measurements.summary(GLOO, case), measurements.best_peer(case)
        row = [format_bytes(case.num_bytes), best[0] if best else NOTHING]
        for name in ours:
            own = measurements.summary(name, case)
            row.append(format_ratio(own.median / gloo.median) if own and gloo else NOTHING)
            row.append(format_ratio(own.median / best[1]) if own and best else NOTHING)
            bandwidth = measurements.memory_bandwidth(case.world_size)
            share = case.least_traffic / own.median / bandwidth if own and bandwidth else None
            row.append(f"{share:.0%}" if share is not None else NOTHING)
        rows.append(row)
    header = ["size", "best peer"]
    for name in ours:
        header += [f"{name} / gloo", "/ best", "of bandwidth"]
    print_table(header, rows, title=title)


def format_bytes(num_bytes: int) -> str:
    """4 B, 16 KiB, 64 MiB."""
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale and num_bytes % scale == 0:
            return f"{num_bytes // scale} {unit}"
    return f"{num_bytes} B"


def _by_reason(operations: dict[str, str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for operation, reason in operations.items():
        grouped.setdefault(reason, []).append(operation)
    return grouped
