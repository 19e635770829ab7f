"""Word the errors of a round of gradients that cannot end: gradients that never come, come twice, or stop half way."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.ddp.plan import ParameterSpec

_SHOWN = 8  # so many parameter names stand in a message


def interrupted(rank: int, num_launched: int, num_buckets: int) -> RuntimeError:
    """Return the error of a forward before which an exception ended the backward, with buckets under way."""
    return RuntimeError(
        f"{_here(rank)}: the backward before this forward was interrupted after {num_launched} of {num_buckets} "
        "buckets had been sent, so ranks are out of step. Let the exception that interrupted it end the job, and "
        "start again from a checkpoint."
    )


def another_gradient(rank: int, parameter: ParameterSpec) -> RuntimeError:
    """Return the error of a gradient that was written again after its bucket had been closed."""
    return RuntimeError(
        f"{_here(rank)}: parameter {parameter} received another gradient in one backward, after its bucket was closed. "
        "Reentrant checkpointing of a module that is used twice does that, and so do two backwards that each reach "
        "only a part of the parameters. Pass static_graph=True if every iteration does the same, use "
        "checkpoint(..., use_reentrant=False), or add the losses and call backward once. With static_graph=True it "
        "says that this iteration is not like the first."
    )


def nothing_learnt(rank: int) -> RuntimeError:
    """Return the error of a rank without data asked for a shadow of the round in which a static graph is learnt."""
    return RuntimeError(
        f"{_here(rank)}: static_graph=True learns the graph in the first step, and this rank has no batch for it. Give "
        "every rank at least one batch."
    )


def missing_gradients(
    rank: int, missing: Sequence[ParameterSpec], *, frozen: Sequence[ParameterSpec], num_parameters: int, unsent: str
) -> RuntimeError:
    """Return the error of a backward that ended without gradients of `missing`; `frozen` of them require none now."""
    shown = ", ".join(map(str, missing[:_SHOWN]))
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    advice = (
        f"{frozen[0]} no longer requires a gradient: freeze parameters before wrapping the module, or wrap it anew."
        if frozen
        else "Every parameter must take part in the loss, through the outputs of forward. If some are meant to be "
        "left out, pass find_unused_parameters=True; parameters that are never used are better frozen."
    )
    return RuntimeError(
        f"{_here(rank)}: backward left {len(missing)} of {num_parameters} parameters without a gradient: {shown}{more}"
        f". {unsent} buckets could not be sent, so the gradients of this step are not averaged. {advice}"
    )


def _here(rank: int) -> str:
    return f"DistributedDataParallel on rank {rank}"
