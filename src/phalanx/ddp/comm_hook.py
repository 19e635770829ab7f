"""Call communication hooks through PyTorch's interface: the user's function replaces all_reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx._base.torch_names import find
from phalanx.ddp.bucket import DenseBucket

# `Work.get_future().then()` returns an object of this class, which is the base class of torch.futures.Future.
_Future: Any = find(
    "torch._C.Future", loses="a communication hook must return a torch.futures.Future", instead=torch.futures.Future
)


class GradBucket:
    """A `GradBucket` presents a bucket to a hook, with the methods of `torch.distributed.GradBucket`.

    Unlike in PyTorch, the buffer may have gaps of up to 63 bytes between gradients, filled with zeros. Complex
    gradients appear as real numbers, with one more dimension of size 2 at the end.
    """

    def __init__(self, bucket: DenseBucket, *, is_last: bool) -> None:
        self._bucket = bucket
        self._buffer = _real(bucket.buffer)
        self._is_last = is_last

    def index(self) -> int:
        """Return the bucket's number in the plan; buckets are launched in this order."""
        return self._bucket.plan.index

    def buffer(self) -> Tensor:
        """Return all gradients of the bucket as one flat tensor, not yet divided by the number of ranks."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the tensor behind `buffer()` and `gradients()`, for example by a tensor of another dtype."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients, as views of the buffer, each with its parameter's shape.

        As in PyTorch, elements are in memory order, which is not the logical order of a channels_last parameter. A
        gradient can therefore be viewed as a matrix, as PowerSGD does.
        """
        parts = 2 if self._bucket.buffer.is_complex() else 1
        gradients = []
        for slot, parameter in zip(self._bucket.plan.slots, self._bucket.parameters, strict=True):
            flat = self._buffer[slot.offset * parts : (slot.offset + slot.numel) * parts]
            gradients.append(flat.view((*parameter.shape, 2) if parts == 2 else tuple(parameter.shape)))
        return gradients

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of `gradients()`."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        return self._is_last


def _real(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


# (state, bucket). Any, because the state is the user's, and PyTorch's hooks annotate the bucket with a C++ class.
Hook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]


class HookPending:
    """A `HookPending` is a bucket whose hook has been called."""

    def __init__(self, bucket: DenseBucket, future: torch.futures.Future[Any]) -> None:
        self._bucket = bucket
        self._future = future

    def wait(self) -> None:
        """Wait for the future, and copy its value into the bucket unless the value is the bucket's own memory.

        Raises:
            TypeError: the future holds no tensor.
            ValueError: the numbers of elements of the tensor and of the bucket differ.
        """
        value: object = self._future.wait()
        if isinstance(value, (list, tuple)) and len(value) == 1:  # a work's future holds a list of its tensors
            value = value[0]
        index, buffer = self._bucket.plan.index, _real(self._bucket.buffer)
        if not isinstance(value, Tensor):
            raise TypeError(
                f"The communication hook's future of bucket {index} holds {type(value).__name__}, not a tensor"
            )
        if value.numel() != buffer.numel():
            raise ValueError(
                f"The communication hook returned {value.numel()} elements for bucket {index}, "
                f"which has {buffer.numel()}"
            )
        if value.data_ptr() != buffer.data_ptr():
            buffer.copy_(value.view_as(buffer))


class HookExchange:
    """A `HookExchange` passes each bucket to `hook(state, bucket)`, and uses the future's value as the result."""

    scale = 1.0

    def __init__(self, state: object, hook: Hook, num_buckets: Callable[[], int]) -> None:
        self._state = state
        self._hook = hook
        self._num_buckets = num_buckets

    def launch(self, bucket: DenseBucket) -> HookPending:
        """Call the hook.

        Raises:
            TypeError: the hook returned something other than a future.
        """
        future: object = self._hook(
            self._state, GradBucket(bucket, is_last=bucket.plan.index == self._num_buckets() - 1)
        )
        if not isinstance(future, _Future):
            name = getattr(self._hook, "__qualname__", repr(self._hook))
            raise TypeError(
                f"The communication hook {name} returned {type(future).__name__} for bucket {bucket.plan.index}; "
                "it must return a torch.futures.Future that will hold the bucket's new content"
            )
        return HookPending(bucket, future)
