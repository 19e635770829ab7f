"""This package has ready communication hooks, under PyTorch's names: `model.register_comm_hook(state, hook)`.

The casts are PyTorch's own. PowerSGD is ours because PyTorch's can't be used over Gloo with more than one bucket, and
quantisation with error feedback because PyTorch has none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_TORCH = "torch.distributed.algorithms.ddp_comm_hooks."
_MODULE_OF = {
    "allreduce_hook": _TORCH + "default_hooks",
    "bf16_compress_hook": _TORCH + "default_hooks",
    "bf16_compress_wrapper": _TORCH + "default_hooks",
    "fp16_compress_hook": _TORCH + "default_hooks",
    "fp16_compress_wrapper": _TORCH + "default_hooks",
    "PostLocalSGDState": _TORCH + "post_localSGD_hook",
    "post_localSGD_hook": _TORCH + "post_localSGD_hook",
    "PowerSGDState": "phalanx.ddp.hooks.power_sgd",
    "powerSGD_hook": "phalanx.ddp.hooks.power_sgd",
    "QuantizationState": "phalanx.ddp.hooks.quantize",
    "quantize_hook": "phalanx.ddp.hooks.quantize",
}

__all__ = list(_MODULE_OF)

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook as allreduce_hook
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook as bf16_compress_hook
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper as bf16_compress_wrapper
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook as fp16_compress_hook
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper as fp16_compress_wrapper
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState as PostLocalSGDState
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook as post_localSGD_hook

    from phalanx.ddp.hooks.power_sgd import PowerSGDState as PowerSGDState
    from phalanx.ddp.hooks.power_sgd import powerSGD_hook as powerSGD_hook
    from phalanx.ddp.hooks.quantize import QuantizationState as QuantizationState
    from phalanx.ddp.hooks.quantize import quantize_hook as quantize_hook


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
