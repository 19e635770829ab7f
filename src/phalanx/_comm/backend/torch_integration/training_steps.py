"""Notify a step recorder of the parts of a training step: batches, backward passes, losses and optimizer updates."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from phalanx._comm.backend.torch_integration.patch import patch
from phalanx._comm.diagnostics.interruptions import SuppressedErrors, is_interruption

_recorders: list[Any] = []  # at most one
_marks: list[Any] = []  # the `mark` of the recorder's log, for batches and backward passes
_hooks: list[Any] = []  # the optimizers' hooks, for updates

_NUM_EXAMINED = 16  # elements of a list that are examined: the first elements show its kind
_DEEPEST = 8
_MOST_PARTS = 256  # the maximum number of parts examined: nested lists have up to 16 per list and level


def observe_steps(recorder: Any) -> None:
    """Notify `recorder`, a `phalanx._comm.diagnostics.step_recorder.StepRecorder`, of the parts of training steps.

    If torch is not imported yet, the notifications start with its import. A previous recorder is no longer notified.
    """
    _recorders[:] = [recorder]
    _marks[:] = [recorder.log.mark]
    if "torch" in sys.modules:
        start_observing()


def start_observing() -> None:
    """Start the notifications. `import torch` calls this if a recorder was set before the import."""
    if _recorders:
        _observe_batches()
        _observe_backward()
        _observe_scaler()
        _hook_optimizers()


def _hook_optimizers() -> None:
    """Register the log's own methods as optimizer hooks: a Python function in between would cost more."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    log = _recorders[0].log
    while _hooks:
        _hooks.pop().remove()
    _hooks.append(register_optimizer_step_pre_hook(log.begin_update))
    _hooks.append(register_optimizer_step_post_hook(log.end_update))


@patch(
    "torch.utils.data.dataloader._BaseDataLoaderIter.__next__(self)",
    loses="a run report lacks the DataLoader's batches",
)
def _observe_batches() -> None:
    """Notify the recorder of batches. The code is short, because each training step evicts it from the CPU's caches."""
    import torch
    from torch.utils.data import dataloader

    from phalanx._comm.diagnostics.step_machine import BEGIN_DATA, END_DATA, NO_DATA, WORKERS

    tensor, marks = torch.Tensor, _marks
    iterators: Any = dataloader._BaseDataLoaderIter
    theirs = iterators.__next__

    @functools.wraps(theirs)
    def __next__(self: Any) -> Any:
        mark = marks[0]
        try:  # a signal handler may raise in the first line, too
            mark(BEGIN_DATA)
            batch = theirs(self)
        except BaseException:
            mark(NO_DATA)
            raise
        try:
            first = batch[0] if type(batch) in (list, tuple) and batch else batch
            plain = type(first) is tensor and self._auto_collation and first.dim()
            samples = len(first) if plain else _samples_in(self, batch)
            mark(END_DATA + WORKERS * (1 + self._num_workers), samples)
        except AttributeError:  # not one of torch's iterators
            mark(END_DATA)
        return batch

    iterators.__next__ = __next__


@patch("torch.autograd.backward(tensors)", loses="a run report lacks backward passes and losses")
def _observe_backward() -> None:
    """Notify the recorder of backward passes and losses. The code is short, as in `_observe_batches`."""
    import torch

    from phalanx._comm.diagnostics.step_machine import BEGIN_BACKWARD, END_BACKWARD, END_BACKWARD_WITH_LOSS

    tensor, marks = torch.Tensor, _marks
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def observed_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        has_scaled, _has_scaled[0] = _has_scaled[0], False
        mark = marks[0]
        try:
            mark(BEGIN_BACKWARD)
            backward(tensors, *args, **kwargs)
        except BaseException:
            mark(END_BACKWARD)
            raise
        if type(tensors) is tensor and tensors.is_cpu and not has_scaled:
            try:
                loss = tensors.item()
            except BaseException as error:  # it has several elements, or is a tracer's tensor without values
                mark(END_BACKWARD)
                if is_interruption(error):
                    raise
            else:
                mark(END_BACKWARD_WITH_LOSS, loss) if type(loss) is float else mark(END_BACKWARD)
        elif not isinstance(tensors, tensor) or (has_scaled and not hasattr(tensors, "unscaled_loss")):
            mark(END_BACKWARD)  # several tensors, or a tensor that was computed from a scaled loss
        else:
            _recorders[0].end_backward(tensors)

    vars(torch.autograd)["backward"] = observed_backward


def _samples_in(iterator: Any, batch: Any) -> float:
    """Return the number of samples in a batch: 1 if the loader does not batch; 0.0 if unknown."""
    return (count_samples(batch) or 0.0) if getattr(iterator, "_auto_collation", True) else 1.0


def count_samples(batch: Any) -> float | None:
    """Return the size of dimension 0 of the batch's first tensor or array, or else the first list's length, or None.

    This never raises, because it runs inside the user's loader.
    """
    with SuppressedErrors():
        parts = list(itertools.islice(_parts(batch, 0), _MOST_PARTS))
        for part in parts:
            length = _first_dimension(part)
            if length is not None:
                return length
        return next((float(len(part)) for part in parts if _is_plain_list(part)), None)
    return None


def _parts(batch: Any, depth: int) -> Iterator[Any]:
    yield batch
    if depth >= _DEEPEST:
        return
    inside: Any = ()
    if isinstance(batch, Mapping):
        inside = batch.values()
    elif isinstance(batch, (list, tuple)):
        inside = batch[:_NUM_EXAMINED]
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        inside = vars(batch).values()
    for part in inside:
        yield from _parts(part, depth + 1)


def _first_dimension(part: Any) -> float | None:
    if getattr(part, "is_nested", False) is True:  # its shape cannot be read
        return float(part.size(0))
    shape = getattr(part, "shape", None)
    if isinstance(shape, tuple) and shape and isinstance(shape[0], int):
        return float(shape[0])
    return None


def _is_plain_list(part: Any) -> bool:
    return isinstance(part, (list, tuple)) and not any(isinstance(p, (list, tuple, Mapping)) for p in part[:1])


_has_scaled = [False]  # whether a GradScaler has scaled since the last backward


@patch("torch.amp.GradScaler.scale(outputs)", loses="a run report shows losses as a GradScaler has scaled them")
def _observe_scaler() -> None:
    """Attach the unscaled loss to the result of `GradScaler.scale`, because `backward` receives the scaled loss.

    This includes subclasses, such as FSDP's ShardedGradScaler, which has its own `scale`. A subclass that is imported
    later is patched when its first scaler is created.
    """
    import torch

    base: Any = torch.amp.GradScaler
    begin = base.__init__

    @functools.wraps(begin)
    def observed_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        for kind in type(self).__mro__:
            _observe_scale(kind)
        begin(self, *args, **kwargs)

    base.__init__ = observed_begin
    kinds = [base]
    for kind in kinds:
        _observe_scale(kind)
        kinds += kind.__subclasses__()


def _observe_scale(kind: Any) -> None:
    import torch

    theirs = vars(kind).get("scale")
    if theirs is None or hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = theirs(self, outputs)
        if scaled is not outputs:
            _has_scaled[0] = True
            if isinstance(outputs, torch.Tensor) and isinstance(scaled, torch.Tensor):
                scaled.unscaled_loss = outputs.detach()  # type: ignore[attr-defined]
        return scaled

    kind.scale = scale
