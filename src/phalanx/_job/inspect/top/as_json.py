"""Return the view as data, for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from phalanx._job.inspect.top.view import JobView, Pace, left_s

FORMAT_VERSION = 1


def as_json(job: JobView) -> str:
    """Return one JSON object on one line."""
    fields = asdict(job)
    fields["ended"] = [{"rank": rank, "exit_code": code} for rank, code in job.ended]
    fields["ranks"] = [
        {**{name: value for name, value in asdict(rank).items() if name != "pace"}, **_pace(rank.pace)}
        for rank in job.ranks
    ]
    fields.pop("pace")
    return json.dumps(
        {"format": "phalanx-top", "version": FORMAT_VERSION, **fields, **_pace(job.pace), "left_s": left_s(job.pace)}
    )


def _pace(pace: Pace | None) -> dict[str, Any]:
    if pace is None:
        return {"steps_of": None, "step": None, "total_steps": None, "steps_per_s": None, "samples_per_s": None}
    return asdict(pace)
