"""Call a function when the backward of a module's output begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.ddp.graph import tensors_in


def call_before_backward(output: Any, function: Callable[..., None]) -> None:
    """Call `function` when gradients of `output` are about to be computed.

    If the tensors of `output` are hidden in an object of the user's own, call it at once.
    """
    nodes = {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}
    for node in nodes:
        node.register_prehook(function)
    if not nodes:
        function()
