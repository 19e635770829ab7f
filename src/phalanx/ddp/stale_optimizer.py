"""An optimizer that was built from another copy of the model: it steps, and nothing is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

Forms = Counter[tuple[torch.Size, torch.dtype]]


class OptimizerWatch:
    """Sees every optimizer's step in this process, through torch's hook for that, until it is closed."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._ours = {id(parameter) for parameter in parameters}
        self._forms = _forms(parameters)
        self._found_ours = False
        self._found_lookalikes = False
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    @property
    def stale(self) -> bool:
        """Whether some optimizer has stepped over look-alikes without any gradient, and none over the parameters."""
        return self._found_lookalikes and not self._found_ours

    def close(self) -> None:
        """See no more steps."""
        self._hook.remove()

    def _before_step(self, optimizer: Optimizer, _args: Any, _options: Any) -> None:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) in self._ours for parameter in held):
            self._found_ours = True
        elif all(parameter.grad is None for parameter in held) and _forms(held) == self._forms:
            self._found_lookalikes = True


def _forms(tensors: Sequence[Tensor]) -> Forms:
    return Counter((tensor.shape, tensor.dtype) for tensor in tensors)
