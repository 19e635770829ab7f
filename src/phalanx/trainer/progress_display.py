"""Display the progress of the whole job on rank 0 while all ranks iterate."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Generic, SupportsFloat, TextIO, TypeVar

import torch
import torch.distributed as dist

from phalanx._comm.diagnostics.progress_page import PAGE_BYTES, ProgressPage, open_page
from phalanx.trainer.metrics import num_samples_or_one

T = TypeVar("T")

REDRAW_S = 0.1  # nobody reads faster, and each drawing waits for the device to compute the loss


class Progress(Generic[T]):
    """`Progress` is an iterable that shows its progress; `progress` creates it."""

    def __init__(
        self,
        iterable: Iterable[T],
        *,
        total: int | None,
        desc: str,
        unit: str,
        per_step: int | Callable[[T], float] | None,
        live: bool,
        out: TextIO | None,
        world_size: int,
        clock: Callable[[], float] = time.perf_counter,
        page: ProgressPage | None = None,
    ) -> None:
        self._iterable = iterable
        self._total = total
        self._desc = desc
        self._unit = unit
        self._per_step = per_step
        self._live = live
        self._out = out  # None on all ranks but 0, which iterate silently
        self._world_size = world_size
        self._clock = clock
        self._page = page or ProgressPage(bytearray(PAGE_BYTES))
        self._values: dict[str, SupportsFloat] = {}
        self._is_last = False
        self._steps = self._width = 0
        self._samples = 0.0
        self._begun = self._drawn = self._ended = 0.0

    def __iter__(self) -> Iterator[T]:
        self._steps, self._samples = 0, 0.0
        self._begun = self._drawn = self._clock()
        self._is_last = False
        loop = self._page.begin_loop(self._total)
        try:
            for item in self._iterable:
                try:
                    yield item
                except GeneratorExit:
                    if self._is_last:
                        self._count(item, loop)
                    raise
                self._count(item, loop)
                self._draw_if_due()
        finally:  # this also finishes the line after a break or an error
            self._ended = self._clock()
            if self._out is not None:
                self._write(final_line(self._state(self._ended)), end="\n")
                self._width = 0

    def __len__(self) -> int:
        if self._total is None:
            raise TypeError("progress over an iterable without a length needs total=")
        return self._total

    def end(self) -> None:
        """End the loop with the current item, which counts: call it before a `break` or `return`."""
        self._is_last = True

    def _count(self, item: T, loop: int) -> None:
        before = round(self._samples)
        if self._per_step is None:
            self._samples += num_samples_or_one(item)
        else:
            self._samples += self._per_step(item) if callable(self._per_step) else self._per_step
        self._steps += 1
        self._page.count(loop, round(self._samples) - before)

    def update(self, **values: SupportsFloat) -> None:
        """Show these numbers from now on, as in `update(loss=loss)`; one-element tensors are read at each redraw."""
        for name, value in values.items():
            self._values[name] = value.detach() if isinstance(value, torch.Tensor) else value

    @property
    def samples_per_s(self) -> float:
        """Return the samples per second of the whole job, in the current or the finished loop."""
        return self._state(self._ended or self._clock()).samples_per_s

    def _state(self, now: float) -> ProgressState:
        return ProgressState(
            desc=self._desc,
            unit=self._unit,
            steps=self._steps,
            total_steps=self._total,
            samples=round(self._samples * self._world_size),
            elapsed_s=now - self._begun,
            values={name: float(value) for name, value in self._values.items()} if self._out is not None else {},
        )

    def _draw_if_due(self) -> None:
        if not self._live or self._out is None:
            return
        now = self._clock()
        if now - self._drawn >= REDRAW_S:
            self._drawn = now
            fancy = (getattr(self._out, "encoding", None) or "").lower().startswith("utf")
            line = live_line(self._state(now), fancy=fancy)
            self._write(line[: shutil.get_terminal_size().columns - 1], end="\r")

    def _write(self, line: str, *, end: str) -> None:
        assert self._out is not None
        # A line that ends with a carriage return is overwritten by the next one: by a terminal, and by `phalanx run`,
        # which keeps it below the output of all ranks. Spaces cover the rest of a longer line.
        self._out.write(line.ljust(self._width) + end)
        self._out.flush()
        self._width = len(line) if end == "\r" else 0


def progress(
    iterable: Iterable[T],
    *,
    total: int | None = None,
    desc: str = "",
    unit: str = "samples",
    per_step: int | Callable[[T], float] | None = None,
    live: bool | None = None,
) -> Progress[T]:
    """Iterate over `iterable` on all ranks, with one display of the whole job on rank 0's standard output.

        bar = phalanx.progress(loader, desc=f"epoch {epoch}")
        for images, labels in bar:
            loss = train(images, labels)
            bar.update(loss=loss)

    On a terminal (or if `phalanx run` is on one), a live line shows the progress, the samples per second of all ranks
    together, the time left and the numbers passed to `update` on rank 0. When the loop ends, one plain line remains.

    Arguments:
        total: the number of steps of this rank. Default: the length of `iterable`, if it has one.
        unit: the name of the counted items.
        per_step: the number of items in one step of one rank, or a function of the batch that returns it. Default: the
            first dimension of the batch's first tensor.
        live: whether to show the live line. Default: if a terminal shows the output, also through `phalanx run`.

    Under `phalanx run` each rank also counts its steps for `phalanx top`.

    Cost: no communication: the count of the whole job is rank 0's count times the number of ranks. Nothing is read from
    a device except when the line is drawn, ten times a second at most. Counting a step takes a few microseconds.
    """
    if total is None and isinstance(iterable, Sized):
        with contextlib.suppress(TypeError):  # a DataLoader over an IterableDataset has none
            total = len(iterable)
    grouped = dist.is_available() and dist.is_initialized()
    return Progress(
        iterable,
        total=total,
        desc=desc,
        unit=unit,
        per_step=per_step,
        live=_is_watched() if live is None else live,
        out=sys.stdout if not grouped or dist.get_rank() == 0 else None,
        world_size=dist.get_world_size() if grouped else 1,
        page=open_page(os.environ.get("PHALANX_AGENT", "")),
    )


def _is_watched() -> bool:
    """Return whether a person watches the output: on this process's terminal, or on the terminal of `phalanx run`."""
    isatty = getattr(sys.stdout, "isatty", None)  # print() accepts any object with write()
    return bool(isatty and isatty()) or os.environ.get("PHALANX_TTY") == "1"


# Format a loop's progress in one line of text.

_BAR_WIDTH = 20


@dataclass(frozen=True)
class ProgressState:
    """`ProgressState` is a loop's progress: the samples of the job so far, and the steps of this rank."""

    desc: str
    unit: str
    steps: int
    total_steps: int | None
    samples: int
    elapsed_s: float
    values: Mapping[str, float] = field(default_factory=dict)

    @property
    def samples_per_s(self) -> float:
        """Return samples of the whole job per second since the loop began; 0 before its first step."""
        return self.samples / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """Return the seconds left at the average pace so far; None if unknown."""
        if self.total_steps is None or self.steps == 0:
            return None
        return max(0, self.total_steps - self.steps) * self.elapsed_s / self.steps


def live_line(state: ProgressState, *, fancy: bool = True) -> str:
    """Return the live line, `epoch 3  ━━━━━━━━━━──────────  50%  12,345 samples/s  0:07 left  loss 0.1234`; in ASCII
    unless `fancy`.
    """
    parts = [state.desc]
    if state.total_steps:
        done = min(1.0, state.steps / state.total_steps)
        full, empty = ("━", "─") if fancy else ("#", "-")
        filled = int(done * _BAR_WIDTH)
        parts.append(f"{full * filled}{empty * (_BAR_WIDTH - filled)} {done:4.0%}")
    else:
        parts.append(f"{state.samples:,} {state.unit}")
    parts.append(_rate(state))
    if state.left_s is not None:
        parts.append(f"{_clock_time(state.left_s)} left")
    return "  ".join(filter(None, [*parts, values_text(state.values)]))


def final_line(state: ProgressState) -> str:
    """Return the last line, `epoch 3: 50,000 samples in 4.1 s, 12,345 samples/s, loss 0.1234`."""
    facts = [f"{state.samples:,} {state.unit} in {state.elapsed_s:.1f} s", _rate(state), values_text(state.values)]
    return f"{state.desc}: {', '.join(filter(None, facts))}" if state.desc else ", ".join(filter(None, facts))


def _rate(state: ProgressState) -> str:
    rate = state.samples_per_s
    return f"{rate:,.0f} {state.unit}/s" if rate >= 10 else f"{rate:.2f} {state.unit}/s"


def values_text(values: Mapping[str, float]) -> str:
    """Return the values as text, `loss 0.1234  accuracy 0.9`."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
