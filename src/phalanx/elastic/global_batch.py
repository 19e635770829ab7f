"""With `batch="global"` a step has as many micro-batches as the job had ranks at its start, however many are left.

    three ranks         rank 0: a     rank 1: b     rank 2: c        one step, each its batch, the mean of three
    two are left        rank 0: a, c  rank 1: b                      the same step: a is gathered, c and b synchronise

    five ranks          each a fifth of the samples of a, b and c    the same step: their mean, by samples

The user's loop does not know: it runs once for each batch. Where that batch is not the last of a rank's step, DDP does
not synchronise, and the optimizer, schedulers, scalers and the commit do nothing. What such a batch adds to the
gradients is taken away as soon as its backward ends and put back when the next one begins, so that neither
`zero_grad`, wherever it stands, nor the clipping of gradients sees half a step.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from phalanx._base.torch_names import find
from phalanx._comm.backend.dynamo import untraced
from phalanx.ddp import DistributedDataParallel
from phalanx.elastic.backward import call_before_backward
from phalanx.elastic.position import DataPosition

_LOSES = "phalanx.elastic does not notice when a backward ends"
_backward_number: Any = find("torch._C._current_graph_task_id", loses=_LOSES)
_engine: Any = find("torch.autograd.Variable._execution_engine", loses=_LOSES)


class GlobalBatch:
    """`GlobalBatch` is one rank's part in the global batch.

    `with_update` are the methods that only an update calls, of schedulers and scalers: (object, name).
    """

    def __init__(
        self,
        num_micro_batches: int,
        position: DataPosition,
        wrappers: Sequence[nn.Module],
        optimizers: Iterable[Optimizer],
        with_update: Iterable[tuple[Any, str]],
    ) -> None:
        self._wrappers = [_check_wrapper(one) for one in wrappers]
        if not self._wrappers:
            raise ValueError(
                "State: batch='global' changes when phalanx.DistributedDataParallel synchronises, and no model is one"
            )
        sampler = position.sampler
        if not sampler.padding and not sampler.drop_last and sampler.length % num_micro_batches:
            raise ValueError(
                f"State: batch='global': {sampler.length} samples do not divide by {num_micro_batches} ranks, so some "
                "ranks would have no batch in an epoch's last step. Leave out padding=False, or give drop_last=True."
            )
        self.num_micro_batches = num_micro_batches
        self.scale = 1.0  # the factor on the mean over ranks that makes it the mean over micro-batches
        self._world_size = num_micro_batches
        self._position = position
        position.keeps_global_batch = True
        self._parameters = [p for one in self._wrappers for p in one.parameters() if p.requires_grad]
        self._kept: dict[Tensor, Tensor] = {}
        self._has_mean = False
        for wrapper in self._wrappers:
            wrapper.register_forward_pre_hook(self._before_forward)
            wrapper.register_forward_hook(self._after_forward, always_call=True)
        for optimizer in optimizers:
            self._replace(optimizer, "step", self._step)
        for owner, name in with_update:
            self._replace(owner, name, self._follow)

    @property
    def ends_step(self) -> bool:
        """Return whether the loop is in the last micro-batch that this rank has in the step."""
        return self._position.ends_step

    def spread(self, rank: int, world_size: int) -> None:
        """Share the micro-batches among `world_size` ranks; if there are more ranks than micro-batches, share each."""
        self._position.sampler.regroup(self.num_micro_batches, rank, num_readers=world_size)
        self._kept.clear()
        self._has_mean = False
        self._world_size = world_size
        self.scale = min(world_size / self.num_micro_batches, 1.0)
        for wrapper in self._wrappers:
            wrapper.require_backward_grad_sync = True
            _check_wrapper(wrapper)
            wrapper._reducer.rescale, wrapper._reducer.weight = self.scale, 1.0

    def end_step(self) -> None:
        self._has_mean = False

    # -- in each micro-batch -------------------------------------------------------------------------------------

    @untraced
    def _before_forward(self, wrapper: Any, _inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if not wrapper.require_backward_grad_sync:
            raise RuntimeError(
                "phalanx.elastic: batch='global' accumulates over batches itself, and this forward is inside "
                "no_sync(). Leave no_sync() out, or batch='global'."
            )
        _check_wrapper(wrapper)
        wrapper.require_backward_grad_sync = self.ends_step
        if self._position.sampler.is_shared:
            wrapper._reducer.weight = self._position.share * self._world_size

    @untraced
    def _after_forward(self, wrapper: Any, _inputs: Any, output: Any) -> None:
        wrapper.require_backward_grad_sync = True
        if self.scale == 1.0 or output is None or not torch.is_grad_enabled():
            return  # the forward has raised if it is None
        call_before_backward(output, self._before_backward)

    @untraced
    def _before_backward(self, *_: Any) -> None:
        """Put the gradients of this step's earlier micro-batches back, so that this one's are added to them."""
        kept, self._kept = self._kept, {}
        for parameter, gradient in kept.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        if self.ends_step and self._has_mean:  # another backward of this step: what it averages again is scaled again
            self._has_mean = False
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self.scale)
        if _backward_number() != -1:
            _engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        if self.ends_step:
            self._has_mean = True
        else:
            self._keep()

    def _keep(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._kept[parameter] = parameter.grad
                parameter.grad = None

    # -- what does nothing before the last -----------------------------------------------------------------------

    def _replace(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def replacement(_owner: Any, *args: Any, **kwargs: Any) -> Any:
            return call(method, *args, **kwargs)

        if isinstance(owner, LRScheduler):  # the attributes of a scheduler are its state, and are saved
            kind = type(owner)
            owner.__class__ = type(kind.__name__, (kind,), {name: replacement, "__module__": kind.__module__})
        else:  # a bound method, as PyTorch's schedulers expect of an optimizer's step
            setattr(owner, name, types.MethodType(replacement, owner))

    def _step(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.ends_step:
            return method(*args, **kwargs)
        closure = args[0] if args else kwargs.get("closure")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._keep()  # for a forward whose output hides its tensors, so that no backward was seen
        return loss

    def _follow(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs) if self.ends_step else None


def _check_wrapper(wrapper: nn.Module) -> DistributedDataParallel:
    if not isinstance(wrapper, DistributedDataParallel):
        raise ValueError(
            "State: batch='global' needs to say what a mean is divided by, which PyTorch's DistributedDataParallel "
            "does not let it. Use phalanx.DistributedDataParallel, which takes the same arguments."
        )
    if wrapper._comm_hook is not None:
        raise ValueError(
            "State: batch='global' needs to say what a mean is divided by, and a comm hook divides as it likes. Leave "
            "out the hook, or batch='global'."
        )
    return wrapper
