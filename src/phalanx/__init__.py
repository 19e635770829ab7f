"""Phalanx is a distributed-training system for PyTorch that keeps PyTorch's own names.

Importing this package does no work: names are loaded on first use, so that the launcher, which never needs torch,
starts in milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The public names, and the module that defines each. One line per name; the names are PyTorch's where PyTorch has one.
_MODULE_OF = {
    "DistributedDataParallel": "phalanx.ddp",
    "ZeroRedundancyOptimizer": "phalanx.optim",
    "LocalSGD": "phalanx.optim",
    "DiLoCo": "phalanx.optim",
    "DistributedSampler": "phalanx.data",
    "SyncBatchNorm": "phalanx.nn",
    "Pipeline": "phalanx.pipeline",
    "ParameterServer": "phalanx.parameter_server",
    "check_replicas": "phalanx.ddp",
    "init": "phalanx._comm.backend",
    "mesh": "phalanx._comm.backend",
    "shared_empty": "phalanx._comm.backend",
    "Options": "phalanx._comm.backend",
    "launch": "phalanx.launch",
    "Trainer": "phalanx.trainer",
    "progress": "phalanx.trainer",
    "CheckpointManager": "phalanx.checkpoint",
    "save_checkpoint": "phalanx.checkpoint",
    "load_checkpoint": "phalanx.checkpoint",
    "PhalanxError": "phalanx.errors",
    "AuthenticationError": "phalanx.errors",
    "CheckpointError": "phalanx.errors",
    "ClosedError": "phalanx.errors",
    "CoordinationError": "phalanx.errors",
    "DataError": "phalanx.errors",
    "DeadlineError": "phalanx.errors",
    "InternalError": "phalanx.errors",
    "LaunchError": "phalanx.errors",
    "MismatchError": "phalanx.errors",
    "PeerLostError": "phalanx.errors",
}

# Packages that are used under their own names: `phalanx.elastic.run`, `phalanx.rpc.rpc_sync`.
_PACKAGES = (
    "checkpoint",
    "collectives",
    "data",
    "ddp",
    "elastic",
    "errors",
    "loggers",
    "mapreduce",
    "nn",
    "optim",
    "parameter_server",
    "pipeline",
    "report",
    "rpc",
    "strategies",
    "testing",
    "trainer",
)

__all__ = ["__version__", *_MODULE_OF, *_PACKAGES]

if TYPE_CHECKING:
    from phalanx import checkpoint as checkpoint
    from phalanx import collectives as collectives
    from phalanx import data as data
    from phalanx import ddp as ddp
    from phalanx import elastic as elastic
    from phalanx import errors as errors
    from phalanx import loggers as loggers
    from phalanx import mapreduce as mapreduce
    from phalanx import nn as nn
    from phalanx import optim as optim
    from phalanx import parameter_server as parameter_server
    from phalanx import pipeline as pipeline
    from phalanx import report as report
    from phalanx import rpc as rpc
    from phalanx import strategies as strategies
    from phalanx import testing as testing
    from phalanx import trainer as trainer
    from phalanx._comm.backend import Options as Options
    from phalanx._comm.backend import init as init
    from phalanx._comm.backend import mesh as mesh
    from phalanx._comm.backend import shared_empty as shared_empty
    from phalanx.checkpoint import CheckpointManager as CheckpointManager
    from phalanx.checkpoint import load_checkpoint as load_checkpoint
    from phalanx.checkpoint import save_checkpoint as save_checkpoint
    from phalanx.data import DistributedSampler as DistributedSampler
    from phalanx.ddp import DistributedDataParallel as DistributedDataParallel
    from phalanx.ddp import check_replicas as check_replicas
    from phalanx.errors import AuthenticationError as AuthenticationError
    from phalanx.errors import CheckpointError as CheckpointError
    from phalanx.errors import ClosedError as ClosedError
    from phalanx.errors import CoordinationError as CoordinationError
    from phalanx.errors import DataError as DataError
    from phalanx.errors import DeadlineError as DeadlineError
    from phalanx.errors import InternalError as InternalError
    from phalanx.errors import LaunchError as LaunchError
    from phalanx.errors import MismatchError as MismatchError
    from phalanx.errors import PeerLostError as PeerLostError
    from phalanx.errors import PhalanxError as PhalanxError
    from phalanx.launch import launch as launch
    from phalanx.nn import SyncBatchNorm as SyncBatchNorm
    from phalanx.optim import DiLoCo as DiLoCo
    from phalanx.optim import LocalSGD as LocalSGD
    from phalanx.optim import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
    from phalanx.parameter_server import ParameterServer as ParameterServer
    from phalanx.pipeline import Pipeline as Pipeline
    from phalanx.trainer import Trainer as Trainer
    from phalanx.trainer import progress as progress


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"phalanx.{name}")
    if name == "_core":
        return _import_core()
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def _import_core() -> Any:
    """Import the C core; if that fails, raise an ImportError that says what to do."""
    try:
        return importlib.import_module("phalanx._core")
    except ImportError as error:
        raise ImportError(
            f"Phalanx's C core is not installed ({error}), and this part of Phalanx needs it. Reinstall where a C "
            "compiler is available; `phalanx doctor` lists what works here.",
            name="phalanx._core",
        ) from error


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
