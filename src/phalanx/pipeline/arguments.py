"""Check the arguments with which a pipeline is made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from phalanx.pipeline.cut import check_balance

_Make = TypeVar("_Make", bound=Callable[..., Any])

# Words of torchgpipe, torch.distributed.pipelining and Megatron for arguments of a Pipeline.
_ELSEWHERE = {
    "chunks": "micro_batches",
    "n_microbatches": "micro_batches",
    "num_microbatches": "micro_batches",
    "num_stages": "stages",
}
_CHECKPOINTS = ("never", "except_last", "always")


def names_our_arguments(make: _Make) -> _Make:
    """Let a call with another library's word for an argument end in a TypeError that says our word."""

    @functools.wraps(make)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for word in kwargs.keys() & _ELSEWHERE.keys():
            ours = _ELSEWHERE[word]
            raise TypeError(
                f"Pipeline takes no argument {word!r}: it is called {ours} here, as in {ours}={kwargs[word]!r}"
            )
        return make(*args, **kwargs)

    return cast(_Make, checked)


def check_arguments(
    micro_batches: int, ranks: int, schedule: str, checkpoint: str, reduction: str, outputs: str, balance: Any
) -> None:
    """Raise ValueError or TypeError unless the arguments make sense."""
    check_balance(balance)
    for name, value, allowed in (
        ("checkpoint", checkpoint, _CHECKPOINTS),
        ("loss_reduction", reduction, ("mean", "sum")),
        ("outputs", outputs, ("last", "all")),
    ):
        if value not in allowed:
            raise ValueError(f"Pipeline: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    if schedule != "gpipe" and micro_batches < ranks:
        raise ValueError(
            f"Pipeline: {micro_batches} micro-batch{'es' * (micro_batches != 1)} cannot keep {ranks} ranks at work: "
            f"schedule {schedule!r} needs one for each rank, and the bubble is short with four for each. Raise "
            "micro_batches, or take schedule 'gpipe', which takes any number."
        )
