"""An `OffloadedShard` is the slice of a master parameter that a rank updates, with a host copy of its gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.optim.master_parameters import MasterParameters
from phalanx.optim.parameter_shard import in_memory_order
from phalanx.optim.plan import Slice
from phalanx.optim.staging import HostStaging


class OffloadedShard:
    """An `OffloadedShard` is a `ParameterShard` of a master. Its gradient is copied to the host before an update."""

    def __init__(self, parameter: Tensor, masters: MasterParameters, part: Slice, staging: HostStaging) -> None:
        self.parameter = parameter
        self.part = part
        self.staging = staging
        self._masters = masters
        self.is_whole = part.stop - part.start == parameter.numel()
        flat = masters.flats[part.index]
        whole = masters.shaped(part.index)
        self.tensor = whole if self.is_whole else flat[part.start : part.stop]
        self.tensor.requires_grad_(self.tensor.is_floating_point() or self.tensor.is_complex())
        self._copy: Tensor | None = None
        self._wait: Callable[[], object] | None = None  # waits for the current copy

    @property
    def count(self) -> int:
        return self.part.stop - self.part.start

    def copy_gradient(self, host: Tensor) -> None:
        """Start copying the gradient's slice to `host`, in the master's precision; call this inside `staging.beside()`.

        Raises:
            RuntimeError: the gradient is sparse.
        """
        gradient = self.parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"ZeroRedundancyOptimizer: a parameter of shape {tuple(gradient.shape)} has a sparse gradient, "
                "which offload=True does not copy. Make the gradient dense (sparse=False), or remove offload=True."
            )
        flat = in_memory_order(gradient, self.parameter)[self.part.start : self.part.stop]
        self._copy = host
        self._wait = self.staging.to_host(host, flat)

    def acquire_gradient(self) -> None:
        """Wait for the copy, and set it as the gradient for the optimizer."""
        self.tensor.grad = None
        if self._copy is None or self._wait is None:
            return
        self._wait()
        self.tensor.grad = self._copy.as_strided(self.tensor.shape, self.tensor.stride())

    def release_gradient(self) -> None:
        """Release the optimizer's gradient and the copy."""
        self.tensor.grad = self._copy = self._wait = None

    def load_master(self, values: Tensor | None) -> None:
        """Set the slice of the master to the saved `values`; with None, to the parameter's values."""
        self._masters.load(self.part, values)

    def gradient_slice(self) -> Tensor | None:
        """Return this rank's slice of the gradient, on its device; a copy if its strides are not the parameter's."""
        gradient = self.parameter.grad
        if gradient is None:
            return None
        return in_memory_order(gradient, self.parameter)[self.part.start : self.part.stop]
