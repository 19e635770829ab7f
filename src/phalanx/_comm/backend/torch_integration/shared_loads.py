"""Make `load_state_dict` wait for ranks that still read the parameters, if ranks share their memory."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from phalanx._comm.backend.shared_updates import await_readers
from phalanx._comm.backend.torch_integration.patch import patch


@patch(
    "torch.nn.Module.load_state_dict(state_dict, strict, assign)",
    loses="load_state_dict does not wait for other ranks that still read the shared parameters: call "
    "torch.distributed.barrier() first",
)
def wait_before_loads() -> None:
    """Make a module's `load_state_dict` wait until no other rank reads its parameters, if ranks share them."""
    original = nn.Module.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        await_readers(self.parameters())
        return original(self, *args, **kwargs)

    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]
