"""This package is PyTorch's process group over shared memory: the backend "phalanx" of torch.distributed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULE_OF = {
    "create_process_group": "phalanx.backend.create",
    "PhalanxProcessGroup": "phalanx.backend.process_group",
    "Job": "phalanx.backend.job",
    "Options": "phalanx.transport.options",
    "init": "phalanx.backend.job",
    "mesh": "phalanx.backend.device_mesh",
    "shared_empty": "phalanx.backend.shared",
}

__all__ = list(_MODULE_OF)

if TYPE_CHECKING:
    from phalanx.backend.create import create_process_group as create_process_group
    from phalanx.backend.device_mesh import mesh as mesh
    from phalanx.backend.job import Job as Job
    from phalanx.backend.job import init as init
    from phalanx.backend.process_group import PhalanxProcessGroup as PhalanxProcessGroup
    from phalanx.backend.shared import shared_empty as shared_empty
    from phalanx.transport.options import Options as Options


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
