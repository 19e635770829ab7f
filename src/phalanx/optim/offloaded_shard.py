"""What a rank updates of a parameter that lies on a device: a slice of its master, with a copy of the gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.backend.gradient_listeners import tell_mean
from phalanx.optim.master_parameters import MasterParameters
from phalanx.optim.parameter_shard import in_memory_order
from phalanx.optim.plan import Slice
from phalanx.optim.staging import Staging


class OffloadedShard:
    """As `ParameterShard`, of a master. On a device the gradient is copied as soon as it is known to hold its mean.

    A copy counts if `.grad` holds the bits that were copied when the update comes, by a checksum made just before the
    copy; else it is made anew. `alone`: there is nobody to average with, so a gradient that autograd has written is
    the mean.
    """

    def __init__(
        self, parameter: Tensor, masters: MasterParameters, part: Slice, staging: Staging, *, alone: bool
    ) -> None:
        self.parameter = parameter
        self.part = part
        self._masters = masters
        self.is_whole = part.stop - part.start == parameter.numel()
        flat = masters.flats[part.index]
        whole = masters.shaped(part.index)
        self.tensor = whole if self.is_whole else flat[part.start : part.stop]
        self.tensor.requires_grad_(self.tensor.is_floating_point() or self.tensor.is_complex())
        self._staging = staging
        self._host: Tensor | None = None
        self._wait: Callable[[], object] | None = None  # for the copy that is under way, or was made
        self._note: Tensor | None = None  # of what was copied
        self._launched = False  # since the latest mean
        self._is_told = False
        tell_mean(parameter, self)
        if alone and staging.copies_early and parameter.requires_grad:
            handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _hook(weakref.ref(self))
            )
            weakref.finalize(self, handle.remove)

    # -- while backward runs -------------------------------------------------------------------------------------

    @torch.no_grad()
    def on_launch(self, mean: Tensor, wait: Callable[[], object]) -> None:
        """Copy this rank's slice of what is being reduced, when it has been."""
        self._is_told = self._launched = True
        with self._staging.beside(wait):
            self._begin(mean)

    @torch.no_grad()
    def on_mean(self) -> None:
        """Copy this rank's slice of the gradient, unless that has begun already."""
        self._is_told = True
        if not self._launched:
            self._stage_early()
        self._launched = False

    @torch.no_grad()
    def on_written(self) -> None:
        """Autograd has written the gradient; unless somebody else says when it is the mean, it is."""
        if not self._is_told:
            self._stage_early()

    def _stage_early(self) -> None:
        self.forget()
        if self._staging.copies_early:
            self.stage()

    # -- the update ----------------------------------------------------------------------------------------------

    def stage(self) -> None:
        """Begin to copy the gradient's slice, unless there is a copy.

        Raises:
            RuntimeError: the gradient is sparse.
        """
        gradient = self.parameter.grad
        if gradient is None:
            self.forget()
            return
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"ZeroRedundancyOptimizer: a parameter of shape {tuple(gradient.shape)} has a sparse gradient, "
                "which offload=True does not copy. Make the gradient dense (sparse=False), or leave offload out."
            )
        if self._wait is None:
            with self._staging.beside():
                self._begin(gradient)

    @property
    def is_staged(self) -> bool:
        """Whether a copy has been made, or is under way: of the gradient as it was then."""
        return self._wait is not None and self.parameter.grad is not None

    def _begin(self, gradient: Tensor) -> None:
        if self._host is None:
            self._host = self._staging.empty_host(self.part.stop - self.part.start, self.parameter.dtype)
        flat = in_memory_order(gradient, self.parameter)[self.part.start : self.part.stop]
        # Before the copy: of a write between the two the checksum knows nothing, and the copy is made anew.
        self._note = self._staging.note(flat, self._host)
        self._wait = self._staging.to_host(self._host, flat)

    def take_gradient(self) -> None:
        """Wait for the copy, and show it to the optimizer in the master's precision."""
        self.tensor.grad = None
        if self.parameter.grad is None or self._host is None or self._wait is None:
            return
        self._wait()
        gradient = self._host.to(self.tensor.dtype)
        self.tensor.grad = gradient.as_strided(self.tensor.shape, self.tensor.stride())

    def drop_gradient(self) -> None:
        """Let go of what the optimizer saw; the next update takes the gradient anew."""
        self.tensor.grad = None
        self.forget()

    def forget(self) -> None:
        """Let no copy count that was made so far."""
        self._wait = self._note = None
        self._launched = False

    def load_master(self, values: Tensor | None) -> None:
        """Set the slice of the master to what was saved with the state; the parameter's own values if nothing was."""
        self._masters.load(self.part, values)

    def gradient_slice(self) -> Tensor | None:
        """Return this rank's slice of the gradient, on its device; a copy if its strides are not the parameter's."""
        gradient = self.parameter.grad
        if gradient is None:
            return None
        return in_memory_order(gradient, self.parameter)[self.part.start : self.part.stop]

    def noted_gradient(self) -> tuple[Tensor, Tensor] | None:
        """Return this rank's slice of the gradient, and what was noted of it when it was copied; waits for the copy."""
        gradient = self.gradient_slice()
        if gradient is None or self._wait is None or self._note is None:
            return None
        self._wait()
        return gradient, self._note

    def staged_copy(self) -> Tensor | None:
        """Return the copy of the gradient's slice, if there is one: what is done to the gradient is to be done
        to it, too.
        """
        if not self.is_staged or self._wait is None:
            return None
        self._wait()
        return self._host

    def note_scaled(self) -> None:
        """Note that the gradient and its copy, which was of the gradient of now, have been changed alike."""
        gradient = self.gradient_slice()
        if gradient is not None and self._host is not None:
            self._note = self._staging.note(gradient, self._host)


def _hook(shard: weakref.ref[OffloadedShard]) -> Callable[[Tensor], None]:
    def hook(_parameter: Tensor) -> None:
        alive = shard()
        if alive is not None:
            alive.on_written()

    return hook
