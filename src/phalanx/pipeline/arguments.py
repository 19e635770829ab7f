"""Check the arguments with which a pipeline is made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

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
    """Let a call with another library's word for an argument end in a TypeError that says ours."""

    @functools.wraps(make)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for word in kwargs.keys() & _ELSEWHERE.keys():
            ours = _ELSEWHERE[word]
            raise TypeError(
                f"Pipeline takes no argument {word!r}: it is called {ours} here, as in {ours}={kwargs[word]!r}"
            )
        return make(*args, **kwargs)

    return cast(_Make, checked)


def find_groups(
    mesh: DeviceMesh | None, process_group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return the ranks of this pipeline, and those with the same stages in others.

    Raises:
        ValueError: the mesh has other axes, or this rank is not in the group.
        RuntimeError: there is no process group.
    """
    if mesh is not None:
        if process_group is not None:
            raise ValueError("Pipeline takes process_group or mesh, not both")
        names = mesh.mesh_dim_names or ()
        if "pipeline" not in names or set(names) - {"pipeline", "data"}:
            raise ValueError(
                "Pipeline takes a mesh with the axes 'pipeline' and, if there are replicas, 'data', as in "
                f"phalanx.mesh(pipeline=2, data=2); got {', '.join(map(repr, names)) or 'none with names'}"
            )
        return mesh.get_group("pipeline"), mesh.get_group("data") if "data" in names else None
    if not dist.is_initialized():
        raise RuntimeError(
            "Pipeline needs a process group: call phalanx.init() or torch.distributed.init_process_group()"
        )
    group = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("Pipeline: this rank is not in process_group; let only its ranks make the Pipeline")
    return group, None


def form_anew(mesh: DeviceMesh) -> None:
    """Give a mesh groups in the default group of now; the old ones are gone. Collective over that."""
    new = DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
    vars(mesh).update(vars(new))  # the object that the program has goes on


def place_in(mesh: DeviceMesh, rank: int) -> int:
    """Where a rank of the job is along a mesh's axis of pipelines."""
    axis = (mesh.mesh_dim_names or ()).index("pipeline")
    return int((mesh.mesh == rank).nonzero()[0, axis])


def check_arguments(
    micro_batches: int, ranks: int, schedule: str, checkpoint: str, reduction: str, outputs: str, balance: Any
) -> None:
    """Raise ValueError or TypeError unless they make sense."""
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
