"""`GossipSGD` lets replicas train apart; each takes the mean with one other replica, a new one in each round."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from phalanx.optim.flat import Flat
from phalanx.optim.round_plan import RoundPlan, Topology, decide_topology
from phalanx.optim.rounds import Rounds


class GossipSGD(Rounds):
    """Average each rank's parameters with those of a changing partner, every `sync_every` steps of `optimizer`.

        with phalanx.GossipSGD(model, optimizer, sync_every=4):
            for inputs, targets in loader:
                ...                                     # the loop of one process, unchanged
                optimizer.step()                        # every 4th also takes the mean with the partner

    The pairs of each round are a plan that all ranks know: `print(gossip.plan.describe(10))`. If the number of ranks is
    odd, one rank stays alone in each round. Models differ between ranks; at the end of the block all ranks take the
    mean of all.

    Collective calls, uneven ends and buffers are those of `LocalSGD`. In a pair, a rank that has not stepped since the
    last round takes the other's parameters.

    Cost: per round, an all_reduce of 8 bytes a rank, and the parameters' size sent to one rank and received from it,
        whatever the number of ranks.
    Memory: the parameters and buffers twice more, on every rank.
    Numerics: bitwise equal on both ranks of a pair after each round, on all at the end.

    Arguments:
        model: the bare module. DistributedDataParallel over other ranks (those of the host, say) may be around it.
        topology: "hypercube": the partners of a recursive doubling, for 2, 4, 8, ... ranks; "random": pairs that are
            drawn anew for each round. By default "hypercube" if the number of ranks allows it.
        seed: for the random pairs; the same on all ranks.
        process_group: the ranks that train together; the default group if None.

    Raises:
        ValueError: an argument makes no sense, or gradients of the same ranks are averaged at every step already.
        MismatchError: ranks construct it with different arguments or models.
        PhalanxError: in a round, a rank died or is late: every parameter holds what it held before the round.

    Source: Boyd et al. (2006), Randomized gossip algorithms; Daily et al. (2018), GossipGraD.
    """

    _name = "GossipSGD"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sync_every: int,
        topology: Topology | None = None,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._topology, self._seed = topology, seed
        super().__init__(model, optimizer, sync_every, process_group, f", topology={topology}, seed={seed}")

    def _make_plan(self, world_size: int) -> RoundPlan:
        topology = decide_topology(world_size, self._topology)
        return RoundPlan(world_size, self.sync_every, topology=topology, seed=self._seed)

    def regroup(self, process_group: dist.ProcessGroup) -> None:
        """Go on in another group as `Rounds` does; if the ranks that are left make no hypercube, pairs are drawn from
        here on.
        """
        if process_group.size() & (process_group.size() - 1):
            self._topology = None
        super().regroup(process_group)

    def _combine(self, *, counting: tuple[int, ...]) -> None:
        rank = self.process_group.rank()
        others = [one for one in self.plan.round(self.num_rounds).group_of(rank) if one != rank]
        if not others:
            return
        (partner,) = others
        theirs = Flat(self._find_tensors)
        self._flat.take()
        swaps = []
        for mine, received in zip(self._flat.numbers, theirs.numbers, strict=True):
            swaps.append(dist.P2POp(dist.isend, mine, group=self.process_group, group_peer=partner))
            swaps.append(dist.P2POp(dist.irecv, received, group=self.process_group, group_peer=partner))
        for work in dist.batch_isend_irecv(swaps):
            work.wait()
        # Everything that a lost partner could interrupt is over, and no parameter has changed yet.
        if (rank in counting) == (partner in counting):
            for mine, received in zip(self._flat.numbers, theirs.numbers, strict=True):
                mine.add_(received).div_(2)
            self._flat.give()
        elif partner in counting:
            theirs.give()

    @torch.no_grad()
    def finish(self) -> None:
        """Stop counting steps and take part in the last rounds; then all ranks have the mean of all. All ranks call
        it.
        """
        super().finish()
        self._flat.take()
        self._flat.average(self.process_group, range(self.process_group.size()))
        self._flat.give()
