"""Register the backend's name with torch; `import torch` runs this when Phalanx is installed, and it loads nothing.

PyTorch calls `register` through the `torch.backends` entry point; programs without the backend pay for a dict entry.
"""

from __future__ import annotations


def register() -> None:
    """Register the backend "phalanx" with torch; safe to call more than once."""
    from phalanx._comm.backend.torch_integration.backend_names import offer_backend

    offer_backend()
