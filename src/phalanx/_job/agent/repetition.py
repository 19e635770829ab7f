"""Find out whether an elastic job gets on, or loses ranks again and again at the same step. It is pure data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from phalanx._job.agent.failure import Exit, Report

_MAX_IN_VAIN = 20  # the most losses in a row between which no step was completed
_MAX_DISAGREED = 3  # how often ranks may call different operations; once or twice a loss may be the reason
_MAX_ALIKE = 2  # how often the same exception may be raised at the same step


class Repetition:
    """`Repetition` counts what has happened since the last step that a rank has completed."""

    def __init__(self) -> None:
        self.best_step = -1
        self._losses = 0
        self._disagreements = 0
        self._disagreement = ""  # the last disagreement, in the words of a rank
        self._raised: dict[tuple[tuple[str, ...], str, int], int] = {}  # by exception and step: how often it was raised

    def on_step(self, step: int) -> None:
        if step > self.best_step:
            self.best_step = step
            self._losses = self._disagreements = 0
            self._raised = {key: times for key, times in self._raised.items() if key[2] >= step}

    def on_loss(self) -> None:
        """Note that a rank, a host or the group was lost."""
        self._losses += 1

    def on_disagreement(self, error: str) -> None:
        """Note that the group was lost because ranks called different operations."""
        self._disagreements += 1
        self._disagreement = error

    def find_repeated(self, reports: Mapping[int, Report]) -> int | None:
        """Return the seat of `reports` whose exception was raised before, at the same step, if there is one."""
        alike = {
            (report.types, report.place): seat
            for seat, report in reports.items()
            if "PeerLostError" not in report.types
        }
        for (types, place), seat in alike.items():
            key = (types, place, self.best_step)
            self._raised[key] = self._raised.get(key, 0) + 1
            if self._raised[key] >= _MAX_ALIKE:
                return seat
        return None

    def find_hopeless(self, exits: Sequence[tuple[Exit, Report | None]], rank_of: Callable[[int], int]) -> str:
        """Return why replacements of ranks that have ended so would not help; empty if they may."""
        reports = {exit.rank: report for exit, report in exits if report is not None}
        seat = self.find_repeated(reports)
        if seat is not None:
            return f"rank {rank_of(seat)} has raised the same as before at the same step, and is not replaced"
        return self.describe()

    def describe(self) -> str:
        """Return in words why the job does not get on; empty if it may."""
        if self._disagreements >= _MAX_DISAGREED:
            return f"the ranks have disagreed {self._disagreements} times at the same step: {self._disagreement}"
        if self._losses > _MAX_IN_VAIN:
            return f"{self._losses} ranks were lost in a row, and no step was completed in between"
        return ""
