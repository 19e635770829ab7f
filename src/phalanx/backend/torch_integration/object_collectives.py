"""PyTorch's collectives of objects (`all_gather_object`, `send_object_list`, …) in groups of ours that span hosts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.backend.torch_integration.groups import phalanx_group
from phalanx.backend.torch_integration.patch import distributed_c10d, patch
from phalanx.transport.authentication import MAC_BYTES, authenticate, verify

_PURPOSE = "object of a collective"


@patch(
    "torch.distributed.distributed_c10d._object_to_tensor(obj, device, group)",
    "torch.distributed.distributed_c10d._tensor_to_object(tensor, tensor_size, group)",
    loses="objects that collectives send between hosts are pickles without a MAC",
)
def authenticate_object_collectives() -> None:
    """Let the pickles of torch's object collectives carry a MAC between hosts; ends when torch authenticates them."""
    c10d: Any = distributed_c10d()
    to_tensor, to_object = c10d._object_to_tensor, c10d._tensor_to_object

    def _object_to_tensor(obj: Any, device: Any, group: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key, _ = pickle_key(group)
        pickled, size = to_tensor(obj, "cpu" if key else device, group, *args, **kwargs)
        if not key:
            return pickled, size
        sent = bytearray(authenticate(pickled.numpy().tobytes(), key, _PURPOSE))
        tensor = torch.frombuffer(sent, dtype=torch.uint8).clone()  # torch resizes it
        return tensor.to(device), (size + MAC_BYTES).to(device)

    def _tensor_to_object(tensor: Tensor, tensor_size: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        key, name = pickle_key(group)
        if not key:
            return to_object(tensor, tensor_size, group, *args, **kwargs)
        received = tensor.cpu().numpy().tobytes()[: int(tensor_size)]
        pickled = bytearray(verify(received, key, _PURPOSE, name))
        return to_object(torch.frombuffer(pickled, dtype=torch.uint8), len(pickled), group, *args, **kwargs)

    c10d._object_to_tensor, c10d._tensor_to_object = _object_to_tensor, _tensor_to_object


def pickle_key(group: Any) -> tuple[bytes, str]:
    """Return what authenticates the pickles of `group` (None: the default one), and its name in messages.

    The key is empty for other backends' groups, and where all ranks are on one host.
    """
    ours = phalanx_group(distributed_c10d().group.WORLD if group is None else group)
    return (b"", "") if ours is None else (ours.transport.pickle_key, ours.transport.group)


def count_exchange(group: Any) -> int:
    """Return a number that is the same on all ranks and another one at each call; one of our groups across hosts."""
    ours = phalanx_group(group)
    assert ours is not None
    ours.transport.num_exchanges += 1
    return ours.transport.num_exchanges
