"""Find out whether a thread is in one of torch's modes, which would see or change tensors that it makes for others."""

from __future__ import annotations

from typing import Any

from phalanx._base.torch_names import find

_LOSES = "an answer of phalanx.rpc that a thread inside a mode of torch reads is changed by the mode"
_num_dispatch_modes: Any = find("torch._C._len_torch_dispatch_stack", loses=_LOSES, instead=int)
_num_function_modes: Any = find("torch._C._len_torch_function_stack", loses=_LOSES, instead=int)
_find_transform: Any = find("torch._C._functorch.maybe_current_level", loses=_LOSES, instead=lambda: None)


def is_in_mode() -> bool:
    """Return whether this thread is in a dispatcher's or functions' mode, as a default device is, or in torch.func."""
    return bool(_num_function_modes() or _num_dispatch_modes() or _find_transform() is not None)
