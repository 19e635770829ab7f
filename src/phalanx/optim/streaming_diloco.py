"""`StreamingDiLoCo` is DiLoCo in which one fragment of the model at a time is sent, while training goes on.

    step         1     2     3     4     5     6     7     8     9      sync_every=4, two fragments, delay 1
    fragment 1         ├──▶──┤                 ├──▶──┤
    fragment 2                     ├──▶──┤                 ├──▶──┤      ├ given   ──▶── on its way   ┤ taken over

At "taken over":  t <- outer step with the mean of (t - x_i) as they were given;  x_i <- mix x_i + (1 - mix) t
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from phalanx.backend.torch_integration.groups import is_listed, phalanx_group
from phalanx.optim.flat import Flat
from phalanx.optim.outer import OuterParameters, check_optimizers
from phalanx.optim.round_plan import RoundPlan, plan_fragments
from phalanx.optim.rounds import Rounds, check_kinds, read_said


@dataclass
class _InFlight:
    """It is a fragment on its way: what was said with it, and the sums that come.

    `works` is empty once they are there.
    """

    fragment: int
    said: Tensor
    works: list[dist.Work | None] = field(default_factory=list)

    def wait(self) -> None:
        for work in self.works:
            if work is not None:
                work.wait()
        self.works.clear()


class StreamingDiLoCo(Rounds):
    """Do DiLoCo on one fragment of the model after the other, whose bytes are sent while training goes on.

        inner = torch.optim.AdamW(model.parameters(), lr=4e-4)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with phalanx.StreamingDiLoCo(model, inner, outer, sync_every=100, fragments=4, delay=10):
            for inputs, targets in loader:
                ...                                     # the loop of one process, unchanged
                inner.step()                            # every 25th sends a fragment, and 10 steps later uses it

    Each fragment takes its outer step every `sync_every` steps. It sends as many bytes as DiLoCo with the same
    `sync_every`, but never more than a fragment's bytes at once; if they arrive within `delay` steps, no rank waits.
    With `fragments=1`, `delay=0` and `mix=0` it is DiLoCo.

    Collective calls, uneven ends and buffers are those of `LocalSGD`. The last fragment also has the buffers.

    Cost: per fragment, two all_reduces in the background, of 8 bytes a rank and of the fragment's size; the outer step
        on every rank.
    Memory: the parameters twice more, and the outer optimizer's state, on every rank.
    Numerics: outer parameters are bitwise equal on all ranks after each outer step.

    Arguments:
        model: the bare module. DistributedDataParallel over other ranks (those of the host, say) may be around it.
        inner_optimizer, outer_optimizer: both over the model's own parameters, the latter over all that it trains.
        fragments: how many, cut in the order of the parameters into parts of nearly the same size; or a list of
            modules, each of which is a fragment; every trained parameter must belong to exactly one.
        delay: steps between sending a fragment and using its outer step; less than sync_every / fragments.
        mix: how much of its own values a rank keeps when it uses the result, in 0..1 (the paper's alpha).
        backup_device: where the outer parameters are kept between rounds; None is where the parameters are.
        process_group: the ranks that train together; the default group if None. Fragments are sent over a separate
            group of the same ranks, so other collectives do not wait for them.

    Raises:
        ValueError: an argument makes no sense, or gradients of the same ranks are averaged at every step already.
        MismatchError: ranks construct it with different arguments or models.
        PhalanxError: when a fragment is sent or its result is used, a rank died or is late: every parameter holds what
            it held before.

    Source: Douillard et al. (2025), Streaming DiLoCo with overlapping communication; without its quantised gradients.
    """

    _name = "StreamingDiLoCo"

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: Optimizer,
        outer_optimizer: Optimizer,
        *,
        sync_every: int,
        fragments: int | Sequence[nn.Module] = 2,
        delay: int = 0,
        mix: float = 0.0,
        backup_device: torch.device | str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_kinds("StreamingDiLoCo", model, inner_optimizer, outer_optimizer)
        check_optimizers("StreamingDiLoCo", model, inner_optimizer, outer_optimizer)
        self._fragments = _decide_fragments(model, fragments)
        num = len(self._fragments)
        self.delay, self.mix = delay, mix
        _check_times(sync_every, num, delay, mix)
        settings = f", fragments={self._fragments}, delay={delay}, mix={mix}"
        super().__init__(model, inner_optimizer, sync_every, process_group, settings)
        self.outer_optimizer = outer_optimizer
        self._outer = self._common = OuterParameters("StreamingDiLoCo", self._named, outer_optimizer, backup_device)
        self._in_flight: _InFlight | None = None
        self.num_steps = 0
        """The number of steps of this rank, in all."""
        self._given_at = [0] * num  # num_steps when each fragment was given last
        self._make_rooms()

    def _make_plan(self, world_size: int) -> RoundPlan:
        return RoundPlan(world_size, self.sync_every, len(self._fragments), self.delay)

    def _make_rooms(self) -> None:
        """Make a group for what is sent while the others are used, and room for what goes through it. All ranks call
        it.
        """
        group = self.process_group
        ranks = dist.get_process_group_ranks(group)
        self._exchange: Any = dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)
        if (ours := phalanx_group(self._exchange)) is not None:
            ours.forms_again = False  # `regroup` makes the next one, which has the same name
        self._rooms = []
        for number, fragment in enumerate(self._fragments):
            is_last = number == len(self._fragments) - 1
            self._rooms.append(Flat(functools.partial(self._find_parts, fragment, is_last), group=self._exchange))

    def _find_parts(self, fragment: tuple[int, ...], is_last: bool) -> list[Tensor]:
        return [self._parameters[one] for one in fragment] + (self._buffers if is_last else [])

    def outer_parameters(self) -> dict[str, Tensor]:
        """Return the outer parameters by name: the model to evaluate or save between rounds. They are no copies.

        Shape: as the model's parameters.
        """
        return self._outer.by_name()

    def _after_step(self, _optimizer: Optimizer, _args: Any, _options: Any) -> None:
        self.num_steps += 1
        self.local_steps += 1
        if self._in_flight is not None and self.local_steps >= self.delay:
            self._take_over()
        if self.local_steps >= self.plan.steps_between:
            self._give(finished=False)
            if not self.delay:
                self._take_over()

    @torch.no_grad()
    def _give(self, *, finished: bool) -> None:
        self._refuse_newcomers()
        fragment = self.num_rounds % len(self._fragments)
        counts = self.num_steps > self._given_at[fragment]
        room, numbers = self._rooms[fragment], self._fragments[fragment]
        room.take()
        self._outer.subtract(numbers, room.views[: len(numbers)])
        if not counts:
            for block in room.blocks:
                block.zero_()
        said, work = self._say(self._exchange, counts=counts, finished=finished, async_op=True)
        works = [work, *(dist.all_reduce(block, group=self._exchange, async_op=True) for block in room.numbers)]
        self._in_flight = _InFlight(fragment, said, works)
        self._given_at[fragment] = self.num_steps
        self.local_steps = 0

    @torch.no_grad()
    def _take_over(self) -> bool:
        """Wait for what is on its way, and take the outer step; return whether all ranks have finished."""
        one = self._in_flight
        assert one is not None
        one.wait()
        self._in_flight = None
        counting, num_finished = read_said(one.said, None)
        are_finished = num_finished == self.process_group.size()
        mix = 0.0 if are_finished else self.mix
        room, numbers = self._rooms[one.fragment], self._fragments[one.fragment]
        mine = [self._parameters[number].detach().clone() for number in numbers] if mix else []
        if counting:
            for block in room.numbers:
                block /= len(counting)
            for buffer, mean in zip(self._buffers, room.views[len(numbers) :], strict=False):
                buffer.copy_(mean)
            self._outer.step(numbers, room.views[: len(numbers)])
        elif are_finished:
            for number in numbers:
                self._parameters[number].copy_(self._outer.views[number])
        for number, own in zip(numbers, mine if counting else [], strict=False):
            self._parameters[number].lerp_(own, mix)
        self.num_rounds += 1
        return are_finished

    def _combine(self, *, counting: tuple[int, ...]) -> None:
        raise AssertionError("fragments come together by _give and _take_over")

    def regroup(self, process_group: dist.ProcessGroup) -> None:
        """Go on in another group, after ranks were lost or came. What was on its way is lost. All ranks call it."""
        self._in_flight = None
        self._leave_exchange()
        super().regroup(process_group)
        self._make_rooms()

    def _leave_exchange(self) -> None:
        """Keep PyTorch's own groups: the next of the same ranks has the same name, and meets at the keys that this one
        wrote.
        """
        exchange, self._exchange, self._rooms = self._exchange, None, []
        if phalanx_group(exchange) is not None and is_listed(exchange):
            dist.destroy_process_group(exchange)

    def _catch_up(self, *, counts: bool) -> None:
        """Let all go on at the beginning of the same round; none is held out of turn, as fragments have times apart."""
        self.local_steps = 0

    def finish(self) -> None:
        """Stop counting; when every rank has come here, each fragment in turn becomes the outer one. All ranks call
        it.
        """
        self._hook.remove()
        if self._exchange is None:
            return  # it has
        num_last = 0
        while num_last < len(self._fragments):
            if self._in_flight is None:
                self._give(finished=True)
            num_last = num_last + 1 if self._take_over() else 0
        self._leave_exchange()

    def state_dict(self) -> dict[str, Any]:
        """Return the outer parameters and optimizer, the same on all ranks, what is on its way, and how far this rank
        is.

        It waits for what is on its way to come, which is not taken over before its time.
        """
        one = self._in_flight
        if one is not None:
            one.wait()
        room = [] if one is None else [block.clone() for block in self._rooms[one.fragment].blocks]
        return {
            "local_steps": self.local_steps,
            "num_rounds": self.num_rounds,
            "num_steps": self.num_steps,
            "given_at": list(self._given_at),
            "in_flight": None if one is None else {"fragment": one.fragment, "said": one.said.clone(), "sums": room},
            **self._outer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; the caller loads the model and the inner optimizer.

        What was on its way is taken over at its time. With another number of ranks it is dropped.

        Raises:
            ValueError: it is of another model, or of other fragments; nothing was changed.
        """
        if len(state_dict["given_at"]) != len(self._fragments):
            raise ValueError(
                f"StreamingDiLoCo: the state is of {len(state_dict['given_at'])} fragments, and this has "
                f"{len(self._fragments)}"
            )
        self._outer.load_state_dict(state_dict)
        for name in ("local_steps", "num_rounds", "num_steps"):
            setattr(self, name, state_dict[name])
        self._given_at = list(state_dict["given_at"])
        saved = state_dict["in_flight"]
        if self._in_flight is not None:
            self._in_flight.wait()  # it would still write where what was saved is put
        self._in_flight = None
        if saved is None:
            return
        if saved["said"].numel() != self.process_group.size() + 1 or not self._rooms:
            self.num_rounds += 1  # it counts as a round in which no rank counted
            return
        self._in_flight = _InFlight(saved["fragment"], saved["said"].clone())
        for block, sums in zip(self._rooms[saved["fragment"]].blocks, saved["sums"], strict=True):
            block.copy_(sums)


def _check_times(sync_every: int, num_fragments: int, delay: int, mix: float) -> None:
    name = "StreamingDiLoCo"
    if isinstance(sync_every, int) and sync_every >= 1 and sync_every % num_fragments:
        raise ValueError(
            f"{name}: {num_fragments} fragments in turns need a sync_every that they divide, got {sync_every}: make it "
            f"{-(-sync_every // num_fragments) * num_fragments}"
        )
    if not (isinstance(delay, int) and delay >= 0) or (
        isinstance(sync_every, int) and sync_every >= 1 and delay >= max(1, sync_every // num_fragments)
    ):
        raise ValueError(
            f"{name}: delay must be 0 or more steps, and less than sync_every / fragments, so that one fragment is "
            f"there before the next is sent; got {delay!r}"
        )
    if not (isinstance(mix, float | int) and 0 <= mix < 1):
        raise ValueError(f"{name}: mix must be 0 or more and less than 1, got {mix!r}")


def _decide_fragments(model: nn.Module, fragments: int | Sequence[nn.Module]) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the trained parameters of each fragment.

    Raises:
        ValueError: there are not so many, or modules that do not share the parameters among them.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if isinstance(fragments, int):
        if fragments < 1:
            raise ValueError(f"StreamingDiLoCo: fragments must be 1 or more, got {fragments}")
        if not trained:
            return ((),)  # Rounds refuses this
        return plan_fragments([parameter.nbytes for _, parameter in trained], fragments)
    if not (isinstance(fragments, Sequence) and all(isinstance(module, nn.Module) for module in fragments)):
        raise TypeError(
            f"StreamingDiLoCo: fragments must be a number or modules of the model, one each, got {fragments!r}"
        )
    owner_of: dict[int, int] = {}
    for number, module in enumerate(fragments):
        for parameter in module.parameters():
            if owner_of.setdefault(id(parameter), number) != number:
                raise ValueError(
                    f"StreamingDiLoCo: fragments {owner_of[id(parameter)]} and {number} share a parameter of shape "
                    f"{tuple(parameter.shape)}: put both into one"
                )
    left = [name for name, parameter in trained if id(parameter) not in owner_of]
    if left:
        raise ValueError(f"StreamingDiLoCo: parameter {left[0]!r} is in none of the fragments")
    found = [tuple(i for i, (_, p) in enumerate(trained) if owner_of[id(p)] == f) for f in range(len(fragments))]
    if empty := [number for number, one in enumerate(found) if not one]:
        raise ValueError(f"StreamingDiLoCo: fragment {empty[0]} has no parameter that is trained")
    return tuple(found)
