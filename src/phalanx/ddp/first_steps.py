"""Watch the first steps for mistakes that only a comparison of ranks reveals, and log them on rank 0.

    forward     digest of the inputs, state of the generator before and after, NaN in the outputs
    backward    NaN in each gradient, before it is averaged
    step end    digest of the parameters; one small all_gather; decide_warnings

A rank that cannot observe something raises no error: it joins the all_gather with its other observations.

The all_gather runs at the end of a backward, the only point that all ranks are sure to reach together: they have just
averaged the same gradients.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from phalanx._base.log import get_logger
from phalanx.ddp.digest import digest, digests, find_differences
from phalanx.ddp.epoch_order import MOST_OBJECTS
from phalanx.ddp.graph import find_tensors
from phalanx.ddp.invisible import all_elements_of, elements_of, invisible, outside_modes
from phalanx.ddp.mistakes import (
    DIFFERING_PARAMETERS,
    NUM_STEPS,
    Mistake,
    Observation,
    StepObservations,
    decide_warnings,
    parameters_were_restored,
)
from phalanx.ddp.replicate import gather_rows
from phalanx.nn.sync_batchnorm import is_uncounted

_logger = get_logger("phalanx.ddp")

# dtypes that can be NaN, and that torch can sum on every device.
_SUMMED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128})


class FirstSteps:
    """`FirstSteps` holds this rank's observations in the first `NUM_STEPS` rounds. Either all ranks have one or none.

    `names` are the names of `parameters`, in the same order.

    Cost: each of these steps reads the inputs, the gradients and the parameters once more.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._names = names
        self._parameters = parameters
        self._group = group
        self._device = parameters[0].device
        self.disabled = False
        """Whether an error has ended the watch on this rank."""
        self._steps: list[StepObservations] = []
        self._reported: set[str] = set()
        self._unconfirmed: list[Mistake] = []  # found in the last backward, to be confirmed by an optimizer's step
        self._restores_parameters = False  # whether the program changes parameters for a backward and restores them
        self._optimizers = OptimizerWatch(parameters)
        self._begin_step()

    def _begin_step(self) -> None:
        self._has_forward = False
        self._inputs: Tensor | None = None
        self._generator: Tensor | None = None
        self._draws: bool | None = None
        self._digests = [0] * len(self._parameters)
        self._scaled = False  # float16, usually with a scaled loss, whose first gradients may overflow
        self._nan_outputs: list[Tensor] = []
        self._nan_gradients: dict[int, Tensor] = {}

    @invisible
    def before_forward(self, inputs: object) -> None:
        """Observe the inputs of the step's first forward, unless some of them cannot be read."""
        if self._has_forward:
            return
        self._has_forward = True
        tensors, is_complete = find_tensors(inputs, MOST_OBJECTS)
        content = all_elements_of(tensors)
        if content is not None and any(map(len, content)) and is_complete and not is_uncounted():
            self._inputs = digest(digests(content, self._device))
        self._generator = self._generator_state()
        kind = self._device.type
        self._scaled = any(parameter.dtype == torch.float16 for parameter in self._parameters) or (
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        )

    @invisible
    def after_forward(self, outputs: Iterable[Tensor]) -> None:
        """Observe a forward's outputs, and whether the step's first forward drew random numbers."""
        if self._draws is None and self._generator is not None:  # this follows the first forward
            self._draws = not torch.equal(self._generator, self._generator_state())
        self._nan_outputs += _nans(outputs)

    @invisible
    def on_gradient(self, index: int) -> None:
        gradient = self._parameters[index].grad
        if gradient is not None and not self._scaled:
            for nan in _nans([gradient]):
                self._nan_gradients.setdefault(index, nan)

    def compare(self) -> bool:
        """Gather all ranks' observations at the end of a backward, and warn; return False after the last step.

        All ranks call it. Cost: one all_gather of a few numbers, and one of 8 bytes per parameter if parameters differ.
        """
        seen = self._observe() or Observation()
        self._steps.append([Observation(*row) for row in self._gather(seen.row())])
        differing: list[int] = []
        if len({one.parameters for one in self._steps[-1]}) > 1:
            differing = find_differences(self._gather(self._digests))
        mistakes = self._select_confirmed(decide_warnings(self._steps, self._names, differing))
        if self._group.rank() == 0:
            for mistake in mistakes:
                if mistake.kind not in self._reported:
                    warn_of(mistake.text)
        self._reported |= {mistake.kind for mistake in mistakes}
        self._begin_step()
        if len(self._steps) < NUM_STEPS:
            return True
        self.close()
        return False

    def _select_confirmed(self, found: list[Mistake]) -> list[Mistake]:
        """Return the warnings to log now. Hold back one about parameters until an optimizer steps with their values."""
        if self._unconfirmed and parameters_were_restored(self._steps[-1]):
            self._restores_parameters = True
        confirmed = [] if self._restores_parameters else self._unconfirmed
        differing = [one for one in found if one.kind == DIFFERING_PARAMETERS and not self._restores_parameters]
        self._unconfirmed = differing if len(self._steps) < NUM_STEPS else []
        if self._unconfirmed:
            self._optimizers.expect_step()
        rest = [one for one in found if one.kind != DIFFERING_PARAMETERS]
        return [*(confirmed or ([] if self._unconfirmed else differing)), *rest]

    def close(self) -> None:
        self._optimizers.close()

    @invisible
    def _observe(self) -> Observation:
        found = _digest_each(self._parameters)
        self._digests = found.tolist()
        nan_gradients = [index for index, nan in self._nan_gradients.items() if nan.item()]
        return Observation(
            has_inputs=int(self._inputs is not None),
            inputs=0 if self._inputs is None else int(self._inputs),
            draws=int(bool(self._draws)),
            generator=0 if self._generator is None else int(digest(self._generator)),
            parameters=int(digest(found)),
            nan_output=int(any(nan.item() for nan in self._nan_outputs)),
            nan_gradient=nan_gradients[0] + 1 if nan_gradients else 0,
            stale_optimizer=int(self._optimizers.stale),
            stepped=self._optimizers.pop_step_digest(),
        )

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        with outside_modes():
            return gather_rows(torch.tensor(numbers, dtype=torch.int64, device=self._device), self._group)

    def _generator_state(self) -> Tensor:
        if self._device.type == "cuda":
            return torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state()


def warn_of(text: str) -> None:
    """Log the warning `text`."""
    _logger.warning("DistributedDataParallel: %s. (check=False turns these checks off.)", text)


def _digest_each(parameters: Sequence[Tensor]) -> Tensor:
    return digests(map(elements_of, parameters), parameters[0].device)


def _nans(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield, for each tensor that can hold a NaN, whether its sum is NaN: faster than testing its elements.

    The sum of infinities of both signs is NaN, too.
    """
    for tensor in tensors:
        elements = elements_of(tensor)
        if elements is not None and elements.dtype in _SUMMED:
            yield elements.sum().isnan()


Forms = Counter[tuple[torch.Size, torch.dtype]]


class OptimizerWatch:
    """An `OptimizerWatch` detects an optimizer over another copy of the model, whose steps have no effect on this one.

    Until it is closed, it observes the steps of all optimizers in this process through torch's hook.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self.disabled = False
        """Whether an error has ended the watch."""
        self._stepped = 0
        self._is_expected = False
        self._ours = {id(parameter) for parameter in parameters}
        self._forms = _forms(parameters)
        self._found_ours = False
        self._found_lookalikes = False
        _register_hook()
        _watches.add(self)

    @property
    def stale(self) -> bool:
        """Return whether an optimizer stepped similar parameters without gradients, and none stepped these."""
        return self._found_lookalikes and not self._found_ours

    def expect_step(self) -> None:
        """Request the digest of the parameters at the next step; other steps cost nothing."""
        self._is_expected = True

    def pop_step_digest(self) -> int:
        """Return and clear the digest at the expected step; 0 if no optimizer has stepped."""
        stepped, self._stepped, self._is_expected = self._stepped, 0, False
        return stepped

    def close(self) -> None:
        _watches.discard(self)

    @invisible
    def before_step(self, optimizer: Optimizer) -> None:
        """Record that an optimizer of this process is about to step."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) in self._ours for parameter in held):
            self._found_ours = True
            if self._is_expected:
                self._is_expected = False
                self._stepped = int(digest(_digest_each(self._parameters)))
        elif all(parameter.grad is None for parameter in held) and _forms(held) == self._forms:
            self._found_lookalikes = True


_watches: weakref.WeakSet[OptimizerWatch] = weakref.WeakSet()


@functools.cache
def _register_hook() -> None:
    """Register torch's hook once per process. It is never removed, for the reason given in `late_parameters`."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, _args: Any, _options: Any) -> None:
    for watch in list(_watches):
        watch.before_step(optimizer)


def _forms(tensors: Sequence[Tensor]) -> Forms:
    return Counter((tensor.shape, tensor.dtype) for tensor in tensors)
