"""`LocalSGD` lets replicas train apart, and take their mean every so many steps."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from phalanx.optim.rounds import Rounds


class LocalSGD(Rounds):
    """Average the ranks' parameters every `sync_every` steps of `optimizer`, in place of gradients at every step.

        with phalanx.LocalSGD(model, optimizer, sync_every=32):
            for inputs, targets in loader:
                ...                                     # the loop of one process, unchanged
                optimizer.step()                        # every 32nd also takes the mean

    Collective: construction, which gives all ranks rank 0's values; every `sync_every`-th step; the end of the block.
    Floating buffers, such as the statistics of BatchNorm, are averaged too; the optimizer's state stays separate on
    each rank. Ranks may take different numbers of steps: a step that is skipped is not counted, and a rank that has no
    more data waits at the end of the block and takes part in the rounds. Only ranks that have stepped since the last
    round count in its mean.

    Cost: per round, two all_reduces, of 8 bytes a rank and of the parameters' size.
    Memory: the parameters and buffers once more, on every rank; in symmetric memory where ranks share memory.
    Numerics: bitwise equal on all ranks after each round.

    Arguments:
        model: the bare module. DistributedDataParallel over other ranks (those of the host, say) may be around it.
        process_group: the ranks that are averaged; the default group if None.

    Raises:
        ValueError: an argument makes no sense, or gradients of the same ranks are averaged at every step already.
        MismatchError: ranks construct it with different arguments or models.
        PhalanxError: in a round, a rank died or is late: every parameter holds what it held before the round.

    Source: Stich (2019), Local SGD Converges Fast and Communicates Little; the form of use is torchft's.
    """

    _name = "LocalSGD"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sync_every: int,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(model, optimizer, sync_every, process_group)

    def _combine(self, *, counting: tuple[int, ...]) -> None:
        self._flat.take()
        self._flat.average(self.process_group, counting)
        self._flat.give()
