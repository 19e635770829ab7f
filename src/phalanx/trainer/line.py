"""Format a loop's progress in one line of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BAR_WIDTH = 20


@dataclass(frozen=True)
class ProgressState:
    """`ProgressState` is a loop's progress: `samples` of the job in `steps` of this rank; `total_steps` if known."""

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
        """Return the seconds left at the current pace; None if unknown."""
        if self.total_steps is None or self.steps == 0:
            return None
        return max(0, self.total_steps - self.steps) * self.elapsed_s / self.steps


def live_line(state: ProgressState, *, fancy: bool = True) -> str:
    """Return the moving line, `epoch 3  ━━━━━━━━━━──────────  50%  12,345 samples/s  0:07 left  loss 0.1234`; in ASCII
    unless `fancy`.
    """
    parts = [state.desc]
    if state.total_steps:
        done = min(1.0, state.steps / state.total_steps)
        full, empty = ("━", "─") if fancy else ("#", "-")
        filled = int(done * BAR_WIDTH)
        parts.append(f"{full * filled}{empty * (BAR_WIDTH - filled)} {done:4.0%}")
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
