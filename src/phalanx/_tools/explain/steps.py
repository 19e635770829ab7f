"""Show a schedule step by step: which rank sends which chunks to which, and every rank's values afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from phalanx._comm.schedules.schedule import Schedule, Transfer
from phalanx._comm.schedules.symbolic import Snapshot, State, Value, trace

MOST_RANKS = 64

# Longer output is summarised unless --all is given; eight ranks in a ring take 280 lines.
MOST_LINES = 300
_MOVES_SHOWN = 3

# The values of a transfer with more chunks do not fit on a line: the line names the chunks, and the table below shows
# the values.
_VALUES_SHOWN = 3


@dataclass(frozen=True)
class Cell:
    """A `Cell` is a rank's value of a chunk, in symbols: whether the step wrote the value, and whether it is final."""

    text: str
    written: bool
    final: bool


@dataclass(frozen=True)
class StepView:
    """A `StepView` is one step: its title, a line for each transfer, and cells[rank][chunk] after the step."""

    title: str
    moves: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]


def walk_steps(schedule: Schedule) -> Iterator[StepView]:
    """Yield the state before the schedule, then each step. Raises ValueError for more than `MOST_RANKS` ranks."""
    require_readable(schedule)
    before: State = ()
    for snapshot in trace(schedule):
        yield StepView(
            title=_title(schedule, snapshot),
            moves=tuple(_move(t, before, schedule.world_size) for t in snapshot.transfers),
            cells=_cells(schedule, snapshot),
        )
        before = snapshot.state


def require_readable(schedule: Schedule) -> None:
    """Raise ValueError for more than `MOST_RANKS` ranks."""
    if schedule.world_size > MOST_RANKS:
        raise ValueError(f"at most {MOST_RANKS} ranks can be shown step by step, got {schedule.world_size}")


def headline(schedule: Schedule) -> list[str]:
    """Describe the schedule in a few lines."""
    chunks = _chunks_name(0, schedule.num_chunks)
    return [
        f"{schedule.algorithm} {schedule.operation}: {_count(schedule.world_size, 'rank')}, "
        f"{_count(schedule.num_chunks, 'chunk')} ({chunks}), {_count(schedule.num_steps, 'step')}",
        f"Order: {schedule.order}.",
    ]


def plain(schedule: Schedule) -> Iterator[str]:
    """Yield the steps as lines of text; a star marks values written by the step."""
    yield from headline(schedule)
    yield "a0+a1 is chunk a, the parts of ranks 0 and 1 combined; * was written in the step."
    names = [chunk_name(chunk) for chunk in range(schedule.num_chunks)]
    for view in walk_steps(schedule):
        yield ""
        yield view.title
        yield from (f"  {move}" for move in view.moves)
        rows = [[f"{cell.text}{'*' if cell.written else ''}" for cell in row] for row in view.cells]
        widths = [max(len(text) for text in column) for column in zip(names, *rows, strict=True)]
        label = len(f"rank {schedule.world_size - 1}")
        for head, row in [("", names), *((f"rank {rank}", row) for rank, row in enumerate(rows))]:
            cells = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
            yield f"    {head.ljust(label)}  {cells}".rstrip()


def count_lines(schedule: Schedule) -> int:
    """Return how many lines `plain` would yield, without creating them."""
    moves = sum(1 for step in schedule.steps() for _ in step.phase.transfers(step.within))
    return len(headline(schedule)) + 1 + moves + (schedule.num_steps + 1) * (schedule.world_size + 3)


def summary(schedule: Schedule) -> Iterator[str]:
    """Yield the first and the last step of each phase, with a few of their transfers."""
    yield from headline(schedule)
    before: State = ()
    for snapshot in trace(schedule):
        if snapshot.step is not None:
            _, phase, within = snapshot.step
            if within in (0, phase.num_steps - 1):
                yield ""
                yield f"{_title(schedule, snapshot)}, {_count(len(snapshot.transfers), 'transfer')}"
                shown = snapshot.transfers[:_MOVES_SHOWN]
                yield from (f"  {_move(t, before, schedule.world_size)}" for t in shown)
                if len(snapshot.transfers) > len(shown):
                    yield f"  … and {len(snapshot.transfers) - len(shown)} more"
        before = snapshot.state
    yield ""
    yield f"--all shows all {schedule.num_steps} steps, and what each rank holds: {count_lines(schedule):,} lines."


def show(schedule: Schedule, console: Console) -> None:
    """Print the steps on a terminal: values that the step wrote are bold, final values are green."""
    for line in headline(schedule):
        console.print(escape(line), style="bold" if line.startswith(schedule.algorithm) else "", highlight=False)
    key = "a0+a1 is chunk a, the parts of ranks 0 and 1 combined; [bold]bold[/]: written; [green]green[/]: final."
    console.print(key, highlight=False)
    for view in walk_steps(schedule):
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        table.add_column("")
        for chunk in range(schedule.num_chunks):
            table.add_column(chunk_name(chunk), no_wrap=True)
        for rank, row in enumerate(view.cells):
            table.add_row(f"rank {rank}", *(Text(cell.text, style=_style(cell)) for cell in row))
        moves = (Text(move, style="cyan") for move in view.moves)
        console.print("", Text(view.title, style="bold"), Group(*moves, table), sep="\n")


def _style(cell: Cell) -> str:
    return " ".join(word for word, on in (("bold", cell.written), ("green", cell.final)) if on) or "none"


def _title(schedule: Schedule, snapshot: Snapshot) -> str:
    if snapshot.step is None:
        return "Before"
    number, phase, within = snapshot.step
    return f"Step {number + 1} of {schedule.num_steps}: {phase.name} {within + 1} of {phase.num_steps}"


def _move(t: Transfer, before: State, world_size: int) -> str:
    what = _chunks_name(t.start, t.stop)
    if t.width <= _VALUES_SHOWN:
        what = ", ".join(value_text(before[t.src][chunk], chunk, world_size) for chunk in range(t.start, t.stop))
    return f"rank {t.src} → rank {t.dst}  {'combine' if t.kind == 'reduce' else 'copy'} {what}"


def _cells(schedule: Schedule, snapshot: Snapshot) -> tuple[tuple[Cell, ...], ...]:
    written = {(t.dst, chunk) for t in snapshot.transfers for chunk in range(t.start, t.stop)}
    return tuple(
        tuple(
            Cell(
                text=value_text(value, chunk, schedule.world_size),
                written=(rank, chunk) in written,
                final=value is not None and len(value.contributors) == schedule.contributions,
            )
            for chunk, value in enumerate(row)
        )
        for rank, row in enumerate(snapshot.state)
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# Write chunks and values in letters and numbers: a0+a1 is chunk a, the contributions of ranks 0 and 1 combined.

# How many contributions are written out, so that five ranks fit 80 columns; more become Σa (all ranks) or a[0-3,6].
_WRITTEN_OUT = 4


def chunk_name(chunk: int) -> str:
    """Return the name of a chunk: a, b, … z, aa, ab, …"""
    name = ""
    chunk += 1
    while chunk:
        chunk, letter = divmod(chunk - 1, 26)
        name = chr(ord("a") + letter) + name
    return name


def _chunks_name(start: int, stop: int) -> str:
    """Return the chunks [start, stop): a, or a-d."""
    return chunk_name(start) if stop - start == 1 else f"{chunk_name(start)}-{chunk_name(stop - 1)}"


def value_text(value: Value | None, chunk: int, world_size: int) -> str:
    """Return a rank's value of `chunk`: a0+a1, a[0-5], Σa for all of more than four ranks, · for no value."""
    if value is None:
        return "·"
    name, ranks = chunk_name(chunk), sorted(value.contributors)
    if len(ranks) <= _WRITTEN_OUT:
        return "+".join(f"{name}{rank}" for rank in ranks)
    if len(ranks) == world_size:
        return f"Σ{name}"
    return f"{name}[{','.join(_runs(ranks))}]"


def _runs(ranks: Iterable[int]) -> list[str]:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
