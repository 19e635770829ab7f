"""A `MeshPlacement` says which ranks have the stages of this pipeline, and which ones the same stages in others."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class MeshPlacement:
    """A placement has a pipeline on the ranks of a group, or pipelines and their replicas on those of a mesh.

    `group` has the ranks of this pipeline, `data_group` those with this rank's stages in others, if there are any.

    Raises:
        ValueError: the mesh has other axes, or this rank is not in the group.
        RuntimeError: there is no process group.
    """

    def __init__(self, mesh: DeviceMesh | None, process_group: dist.ProcessGroup | None) -> None:
        self._mesh = mesh
        self.group, self.data_group = _find_groups(mesh, process_group)

    def pipeline_rank(self, rank: int) -> int:
        if self._mesh is None:
            return rank
        axis = (self._mesh.mesh_dim_names or ()).index("pipeline")
        return int((self._mesh.mesh == rank).nonzero()[0, axis])

    def spans(self, group: dist.ProcessGroup | None) -> bool:
        """Return whether all stages, with their replicas, are on the ranks of `group`."""
        if self._mesh is None or group is None:
            return self.group is group
        return sorted(self._mesh.mesh.flatten().tolist()) == list(range(group.size()))

    def regroup(self, group: dist.ProcessGroup) -> None:
        """Place the pipeline, or all that are in the mesh, on the ranks of `group`. All of these call it.

        The mesh, the same object, has groups of the default group of now; the old ones are gone.

        Raises:
            ValueError: the group has another size.
        """
        size = self.group.size() if self._mesh is None else self._mesh.mesh.numel()
        if group.size() != size:
            raise ValueError(f"Pipeline.regroup: its {size} ranks can't go on as {group.size()}")
        if self._mesh is None:
            self.group = group
        else:
            new = DeviceMesh(self._mesh.device_type, self._mesh.mesh, mesh_dim_names=self._mesh.mesh_dim_names)
            vars(self._mesh).update(vars(new))  # the object that the program has goes on
            self.group, self.data_group = _find_groups(self._mesh, None)


def _find_groups(
    mesh: DeviceMesh | None, process_group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
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
