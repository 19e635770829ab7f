"""The backend "phalanx" of torch.distributed: process groups over shared memory, and over an engine between hosts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULE_OF = {
    "create_process_group": "phalanx._comm.backend.create",
    "PhalanxProcessGroup": "phalanx._comm.backend.process_group",
    "Job": "phalanx._comm.backend.job",
    "Options": "phalanx._comm.transport.options",
    "init": "phalanx._comm.backend.job",
    "mesh": "phalanx._comm.backend.device_mesh",
    "shared_empty": "phalanx._comm.backend.shared",
}

__all__ = list(_MODULE_OF)

if TYPE_CHECKING:
    from phalanx._comm.backend.create import create_process_group as create_process_group
    from phalanx._comm.backend.device_mesh import mesh as mesh
    from phalanx._comm.backend.job import Job as Job
    from phalanx._comm.backend.job import init as init
    from phalanx._comm.backend.process_group import PhalanxProcessGroup as PhalanxProcessGroup
    from phalanx._comm.backend.shared import shared_empty as shared_empty
    from phalanx._comm.transport.options import Options as Options


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
