"""`LocalSGD` trains replicas separately, and averages their parameters every few steps."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from phalanx.optim.rounds import Rounds


class LocalSGD(Rounds):
    """Average the ranks' parameters every `sync_every` steps of `optimizer`, instead of gradients at every step.

        with phalanx.LocalSGD(model, optimizer, sync_every=32):
            for inputs, targets in loader:
                ...                                     # the loop of one process, unchanged
                optimizer.step()                        # every 32nd also averages

    Collective: construction, which gives all ranks rank 0's values; every `sync_every`-th step; the end of the block.
    Floating-point buffers, such as BatchNorm statistics, are also averaged; each rank has its own optimizer state.
    Ranks may take different numbers of steps: a skipped step is not counted, and a rank without more data joins the
    remaining rounds at the end of the block. Only ranks that have stepped since the last round count in the mean.

    Cost: per round, two all_reduces, of 8 bytes per rank and of the parameters' size.
    Memory: one more copy of parameters and buffers on every rank; in symmetric memory if ranks share memory.
    Numerics: bitwise identical on all ranks after each round.

    Arguments:
        model: the bare module. DistributedDataParallel over other ranks (for example, those of the host) may wrap it.
        process_group: the ranks to average; the default group if None.

    Raises:
        ValueError: an argument is invalid, or gradients of the same ranks are already averaged at every step.
        MismatchError: the ranks' arguments or models differ.
        PhalanxError: a rank died or timed out in a round: every parameter has its value from before the round.

    Source: Stich (2019), Local SGD Converges Fast and Communicates Little; the interface follows torchft.
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
        self._flat.copy_in()
        self._flat.average(self.process_group, counting)
        self._flat.copy_out()
