"""`ZeroRedundancyOptimizer(offload=True)` keeps parameters on their devices, and updates masters in host memory.

              device                                host, each rank its slices
------------- sync: no rank reads masters any more ---------------
step          gradients ──────────────────────────▶ copies of them, wave by wave
                                                    masters and state: the user's optimizer, a wave behind
------------- sync: all ranks have written ----------------------
then          parameters ◀───────────────────────── all masters, rounded (by the device, for a single rank)

Gradients are not copied during backward: other code (a collective, a GradScaler) may still write them before the
update. Only the gradient's bits would reveal such a write, and checking the bits twice takes longer than the copies.
The update hides all copies except the first wave's.

Source: Ren et al. (2021), ZeRO-Offload. Sharing masters and state between a host's ranks is an addition of Phalanx.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.optim import Optimizer

from phalanx._base.torch_names import find
from phalanx._comm.transport.tensors import is_dense
from phalanx.optim.master_parameters import MasterParameters
from phalanx.optim.offloaded_shard import OffloadedShard
from phalanx.optim.plan import LINE, ParameterExtent, Plan, plan_waves
from phalanx.optim.staging import HostStaging

_foreach_mul_: Any = find(
    "torch._foreach_mul_", loses="clipping gradients of an offloaded optimizer is slower", instead=None
)

# While one wave is updated, the gradients of the next wave are copied to the host, and the parameters of the previous
# wave to the device. A wave costs one call of the optimizer.
WAVE_BYTES = 32 << 20

_FUSED = frozenset({optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad})


def may_fuse(optimizer_class: type[Optimizer], options: Mapping[str, Any], parameters: Sequence[Tensor]) -> bool:
    """Return whether torch has a fused CPU kernel for this class, and the user has not chosen another kernel."""
    return (
        optimizer_class in _FUSED
        and options.get("fused") is None
        and options.get("foreach") is None
        and not options.get("capturable")
        and all(parameter.is_floating_point() for parameter in parameters)
    )


class Offload:
    """An `Offload` has the masters of all groups of parameters, and this rank's slices of them.

    With `cut`, parameters may be cut and are updated in waves; otherwise one call of the optimizer updates them all.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, cut: bool, make_staging: Callable[[torch.device], HostStaging]
    ) -> None:
        self._group = group
        self._cut = cut
        self._make_staging = make_staging
        self._stagings: dict[torch.device, HostStaging] = {}
        self._masters: list[MasterParameters] = []
        self._shards: list[list[OffloadedShard]] = []
        self._states: list[SharedState] = []
        self._num_with_state = 0
        self._copies: dict[
            tuple[torch.device, torch.dtype], Tensor
        ] = {}  # copies of gradients, in the masters' precision

    def share(
        self,
        parameters: Sequence[Tensor],
        plan: Callable[[Sequence[ParameterExtent], int], Plan],
        source: int,
        previous: MasterParameters | None,
    ) -> tuple[MasterParameters, Plan, list[OffloadedShard]]:
        """Create masters for another group of parameters, with the values of rank `source`. All ranks call it."""
        for device in {parameter.device for parameter in parameters}:
            if device not in self._stagings:
                self._stagings[device] = self._make_staging(device)
        masters = MasterParameters(parameters, self._group, self._stagings, source, previous)
        parts = plan(masters.extents, self._group.size())
        shards = [
            OffloadedShard(
                parameters[part.index],
                masters,
                part,
                self._stagings[parameters[part.index].device],
            )
            for part in parts[self._group.rank()]
        ]
        masters.watch(parts[self._group.rank()])
        self._masters.append(masters)
        self._shards.append(shards)
        self._states.append(SharedState(masters.extents, parts, self._group))
        return masters, parts, shards

    def prepare(self) -> None:
        """Wait until this rank no longer reads masters, and start copying the gradients; call this before an update."""
        for masters in self._masters:
            masters.synchronize()
            masters.activate_unfrozen()
        with_gradient = [shard for _, shard in self._all() if shard.parameter.grad is not None]
        for staging in self._stagings.values():
            here = [shard for shard in with_gradient if shard.staging is staging]
            with staging.beside():
                for shard, host in zip(here, self._rooms(here), strict=True):
                    shard.copy_gradient(host)
            staging.follow()

    def _rooms(self, shards: Sequence[OffloadedShard]) -> Iterator[Tensor]:
        """Yield host memory for the gradient of each shard, from one block per device and dtype."""
        used: dict[tuple[torch.device, torch.dtype], int] = {}
        for shard in shards:
            key = shard.staging.device, shard.tensor.dtype
            if key not in used:
                used[key] = 0
                count = sum(other.count for other in shards if other.tensor.dtype == key[1])
                if key not in self._copies or self._copies[key].numel() < count:
                    self._copies[key] = shard.staging.empty_host(count, key[1])
            yield self._copies[key][used[key] : used[key] + shard.count]
            used[key] += shard.count

    def update(self, optimizer: Optimizer, kwargs: dict[str, Any]) -> None:
        """Update this rank's slices of the masters; in a group of one rank, also start copying them to the devices."""
        for masters in self._masters:
            masters.pull()
        with_gradient = [pair for pair in self._all() if pair[1].parameter.grad is not None]
        for alike in _split_by_momentum(with_gradient, optimizer) if self._cut else [with_gradient]:
            sizes = [shard.count * shard.tensor.element_size() for _, shard in alike]
            waves = plan_waves(sizes, WAVE_BYTES) if self._cut else [range(len(alike))]
            for wave in waves:
                self._update_wave(optimizer, kwargs, [alike[position] for position in wave])
        for masters in self._masters:
            masters.note_pushed()
        self.share_state(optimizer)

    def _update_wave(
        self, optimizer: Optimizer, kwargs: dict[str, Any], wave: Sequence[tuple[MasterParameters, OffloadedShard]]
    ) -> None:
        try:
            for _, shard in wave:
                shard.acquire_gradient()
            optimizer.step(**kwargs)
        finally:
            for _, shard in wave:
                shard.release_gradient()
        for masters, shard in wave:
            masters.round(shard.part)
        if self._group.size() == 1:
            for masters in self._masters:
                masters.push({shard.part.index for owner, shard in wave if owner is masters})

    def share_state(self, optimizer: Optimizer, *, recheck: bool = False) -> None:
        """Move the optimizer's state to the host's shared memory, if there is new state, or always with `recheck`."""
        if len(optimizer.state) == self._num_with_state and not recheck:
            return
        self._num_with_state = len(optimizer.state)
        for shards, memory in zip(self._shards, self._states, strict=True):
            for shard in shards:
                if shard.tensor in optimizer.state:
                    memory.adopt(shard.part.index, optimizer.state[shard.tensor])

    def push(self) -> None:
        """Start copying all parameters to their devices, after all ranks have updated their slices."""
        for masters in self._masters:
            masters.push()
            masters.note_pushed()

    def push_exact(self) -> None:
        """Copy the masters themselves, since a lost rank may not have rounded its part, and wait for the copies."""
        for masters in self._masters:
            masters.push_exact()

    def gradient_slices(self) -> list[Tensor]:
        """Return this rank's slices of the gradients, on their devices."""
        slices = (shard.gradient_slice() for _, shard in self._all())
        return [gradient for gradient in slices if gradient is not None]

    def scale_gradients(self, factor: Tensor, parameters: Sequence[Tensor], foreach: bool | None) -> None:
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                kinds.setdefault((parameter.grad.device, parameter.grad.dtype), []).append(parameter.grad)
        for (device, _), alike in kinds.items():
            if foreach is False or _foreach_mul_ is None:
                for tensor in alike:
                    tensor.mul_(factor.to(device))
            else:
                _foreach_mul_(alike, factor.to(device))

    def _all(self) -> Iterator[tuple[MasterParameters, OffloadedShard]]:
        return itertools.chain.from_iterable(
            ((masters, shard) for shard in shards) for masters, shards in zip(self._masters, self._shards, strict=True)
        )


def _split_by_momentum(
    pairs: Sequence[tuple[MasterParameters, OffloadedShard]], optimizer: Optimizer
) -> list[list[tuple[MasterParameters, OffloadedShard]]]:
    """Separate shards with a momentum buffer from the others, since torch's fused SGD accepts no mixture.

    Return at least one list, which may be empty.
    """
    kinds: dict[bool, list[tuple[MasterParameters, OffloadedShard]]] = {}
    for pair in pairs:
        state = optimizer.state.get(pair[1].tensor, {})
        kinds.setdefault(state.get("momentum_buffer") is None, []).append(pair)
    return list(kinds.values()) or [[]]


# The largest states in torch.optim (centered RMSprop, Adam with amsgrad) have three numbers per element.
_STATES = 4


class SharedState:
    """A `SharedState` has room for four numbers per element that a rank updates; unused room takes no memory.

    Construction is collective.
    """

    def __init__(self, extents: Sequence[ParameterExtent], plan: Plan, group: dist.ProcessGroup) -> None:
        from phalanx._comm.backend.shared import shared_empty  # needs the C core, which a group that shares memory has

        nbytes = max(
            sum(_STATES * ((part.stop - part.start) * extents[part.index].itemsize + LINE) for part in parts)
            for parts in plan
        )
        self._memory = shared_empty(max(nbytes, 1), dtype=torch.uint8, group=group)
        self._used = 0
        self._places: dict[tuple[int, str], Tensor] = {}

    def adopt(self, number: int, state: dict[str, Any]) -> None:
        """Move the per-element state of parameter `number` into the shared memory, as far as there is room."""
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.is_cpu and is_dense(value):
                place = self._place(number, key, value)
                if place is not None and place.data_ptr() != value.data_ptr():
                    state[key] = place.copy_(value)

    def _place(self, number: int, key: str, value: Tensor) -> Tensor | None:
        known = self._places.get((number, key))
        if known is not None and known.dtype == value.dtype and known.shape == value.shape:
            return known
        stop = self._used + -(-value.nbytes // LINE) * LINE
        if known is not None or stop > self._memory.numel() or value.numel() == 0:
            return None
        flat = torch.frombuffer(self._memory.numpy(), dtype=value.dtype, count=value.numel(), offset=self._used)
        self._used = stop
        self._places[number, key] = flat.as_strided(value.shape, value.stride())
        return self._places[number, key]
