"""When replicas that train apart come together: every so many steps of the optimizer, and at the end.

    rank 0   step step step step | round | step step (no more data) | round |          . . .          | round |
    rank 1   step step step step | round | step step step step      | round | step (no more data)     | round |

A round begins by saying who has stepped since the last one, and who has no more data; only those who have stepped
count. A rank that has finished takes part until all have, so nobody hangs, and all end with the same values.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.errors import MismatchError
from phalanx.optim.arguments import decide_group
from phalanx.optim.flat import Flat


class Rounds(ABC):
    """Counts the steps of `optimizer`, and holds a round every `sync_every` of them. Collective.

    It begins to count at once. As a context manager it ends with `finish`, unless an exception ended the block.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, sync_every: int, process_group: dist.ProcessGroup | None
    ) -> None:
        if not (isinstance(sync_every, int) and sync_every >= 1):
            raise ValueError(f"{self._name}: sync_every must be a number of steps, 1 or more, got {sync_every!r}")
        self.sync_every = sync_every
        self.process_group = group = decide_group(process_group, self._name)
        _refuse_averaged(self._name, model, optimizer, group)
        self.local_steps = 0
        """Of this rank, since the last round."""
        self.num_rounds = 0
        self._named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not self._named:
            raise ValueError(f"{self._name}: the model has no parameter that requires a gradient")
        _verify_same(self._name, self._named, sync_every, group)
        self._parameters: list[Tensor] = [parameter for _, parameter in self._named]
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point() or buffer.is_complex()]
        self._flat = Flat(self._parameters + self._buffers, group=group)
        self._flat.take()
        self._flat.broadcast(group)
        self._flat.give()
        self._hook = optimizer.register_step_post_hook(self._after_step)

    _name: str

    @abstractmethod
    def _combine(self, *, counts: bool, num_counting: int) -> None:
        """Make the model of this round from those of the ranks that count. Collective."""

    def _after_step(self, _optimizer: Optimizer, _args: Any, _options: Any) -> None:
        self.local_steps += 1
        if self.local_steps >= self.sync_every:
            self._hold(finished=False)

    @torch.no_grad()
    def _hold(self, *, finished: bool) -> bool:
        """One round; whether all ranks have finished."""
        counts = self.local_steps > 0
        said = torch.tensor([counts, finished], dtype=torch.int64, device=self._parameters[0].device)
        dist.all_reduce(said, group=self.process_group)
        num_counting, num_finished = said.tolist()
        if num_counting:
            self._combine(counts=counts, num_counting=num_counting)
            self.num_rounds += 1
        self.local_steps = 0
        return bool(num_finished == self.process_group.size())

    def regroup(self, process_group: dist.ProcessGroup) -> None:
        """Go on in another group, after ranks were lost or came. Collective over it; `catch_up` comes next."""
        self.process_group = process_group
        self._flat = Flat(self._parameters + self._buffers, group=process_group)

    def catch_up(self, *, is_new: bool) -> None:
        """A round out of turn, in which ranks that are new have no say: then all have the same model. Collective.

        Whoever was lost has missed it, with the steps since the round before.
        """
        if is_new:
            self.local_steps = 0
        self._hold(finished=False)

    def finish(self) -> None:
        """Stop counting, and hold rounds until every rank has come here; all then have the same model. Collective."""
        self._hook.remove()
        while not self._hold(finished=True):
            pass

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self._hook.remove()


def _refuse_averaged(name: str, model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup) -> None:
    """Refuse what is averaged or shared by the same ranks at every step already.

    Raises:
        ValueError: with what it is.
    """
    averaging = [module for module in model.modules() if hasattr(module, "require_backward_grad_sync")]
    for one in itertools.chain(averaging, [optimizer]):
        theirs = getattr(one, "process_group", None)
        if not isinstance(theirs, dist.ProcessGroup):
            continue
        common = set(dist.get_process_group_ranks(theirs)) & set(dist.get_process_group_ranks(group))
        if len(common) > 1:
            raise ValueError(
                f"{name}: {type(one).__name__} already keeps ranks {sorted(common)} together at every step. Give "
                f"{name} the bare model and a plain optimizer, or groups that have only one rank in common: "
                "DistributedDataParallel inside each host, say, and this between hosts"
            )


def _verify_same(name: str, named: list[tuple[str, nn.Parameter]], sync_every: int, group: dist.ProcessGroup) -> None:
    """Return on every rank, or raise on every rank. Collective."""
    mine = f"sync_every={sync_every}", [(n, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in named]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    for rank, (settings, forms) in enumerate(everyone):
        if (settings, forms) == everyone[0]:
            continue
        differing = next((p for p in itertools.zip_longest(forms, everyone[0][1]) if p[0] != p[1]), None)
        fact = (
            f"rank {rank} has {settings}, rank 0 has {everyone[0][0]}"
            if differing is None
            else f"rank {rank} has the parameter {differing[0]} where rank 0 has {differing[1]}"
        )
        raise MismatchError(
            f"{name}: the ranks differ: {fact}.\nBuild the model and {name} from the same arguments on every rank.",
            calls={r: f"{theirs[0]}, {len(theirs[1])} parameters" for r, theirs in enumerate(everyone)},
        )
