"""Register the backend's names during `import torch`, without importing the backend.

PyTorch calls `register` through the `torch.backends` entry point. Programs that do not use the backend pay only for a
dict entry.
"""

from __future__ import annotations


def register() -> None:
    """Register the names "phalanx" and "mpi" with torch; safe to call more than once."""
    from phalanx._comm.backend.torch_integration.backend_names import offer_backend

    offer_backend()
