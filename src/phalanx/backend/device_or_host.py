"""Decide which collectives of a device's tensors run on the device, when the ranks map each other's device memory.

Ranks that make the same call come to the same answer. Where they make different ones the answer may differ, too: the
fingerprint of a call on the device is not that of the call in the host's memory, so that they are told.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.backend.arguments import reduction_of
from phalanx.backend.device_backends import first_tensor
from phalanx.transport.device_memory import can_combine_on_device
from phalanx.transport.tensors import nbytes

ON_DEVICE_FROM_BYTES = 4 << 20
"""The number of bytes below which the host's memory answers sooner, because ranks take turns on a device
(benchmarks/gpu).
"""

# all_to_all is not among them: two ranks may give its sizes in different ways. In those that scatter, each rank's
# inputs are alike, and the outputs perhaps of different sizes.
_OUTPUTS_FIRST = frozenset({
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "all_gather_single", "_allgather_base",
    "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "allgather_coalesced", "gather", "scatter",
})  # fmt: skip
_INPUTS_FIRST = frozenset({
    "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
})  # fmt: skip


def stays_on_device(name: str, arguments: tuple[Any, ...], from_bytes: int) -> bool:
    """Return whether c10d's collective `name` of dense tensors is carried out on the device, as it is from so many
    bytes on.
    """
    if name in _INPUTS_FIRST:
        tensor: Tensor | None = first_tensor(arguments[1:])
    else:
        tensor = first_tensor(arguments) if name in _OUTPUTS_FIRST else None
    if tensor is None or tensor.layout is not torch.strided or nbytes(tensor) < from_bytes:
        return False
    op = next((argument.reduceOp for argument in arguments if hasattr(argument, "reduceOp")), None)
    return op is None or can_combine_on_device(tensor.dtype, reduction_of(op, tensor.dtype, name)[0])
