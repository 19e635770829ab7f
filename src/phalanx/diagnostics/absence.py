"""Ranks that have run out of data, told as such: who was out of the latest steps, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.coordination.bootstrap import ranks

EVEN_ADVICE = "Give every rank the same number of batches: phalanx.DistributedSampler does, and drop_last=True"
"""For ranks that run out of data where the others can't go on without them."""

JOIN_ADVICE = (
    f"{EVEN_ADVICE}; or pass uneven_inputs=True to phalanx's DistributedDataParallel, on one host; or train inside "
    "`with torch.distributed.algorithms.Join([model]):`."
)
"""The same where the others can, if they are asked to."""


def tell_absence(absent: Sequence[int], num_steps: int) -> str:
    """One sentence: who was out of the latest steps when the ranks met, and did not do the same; or nothing."""
    if not absent or not num_steps:
        return ""
    was, steps = "were" if len(absent) > 1 else "was", "steps" if num_steps > 1 else "step"
    return (
        f"{ranks(absent).capitalize()} {was} out of the last {num_steps} training {steps}, as ranks are that have run "
        "out of data: where they wait, the others must come as well, to the same line."
    )
