"""Check that all ranks wrap the same model, before any other collective depends on it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx._comm.backend.memoryless import address_of
from phalanx._comm.transport.tensors import memory_order
from phalanx.ddp.plan import ParameterSpec
from phalanx.errors import MismatchError

_SHOWN = 8  # the maximum number of differences in a message; more would hide the first


@dataclass(frozen=True)
class TensorEntry:
    """A `TensorEntry` has the properties of a parameter or buffer that must be the same on all ranks.

    strides   of a parameter's gradient; None if the gradient is contiguous
    beside    names of other parameters in the same memory
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    strides: tuple[int, ...] | None = None
    beside: tuple[str, ...] = ()

    def __str__(self) -> str:
        strides = "" if self.strides is None else f" and strides {self.strides}"
        requires_grad = ", requires_grad" if self.requires_grad else ""
        beside = f", sharing memory with {', '.join(map(repr, self.beside))}" if self.beside else ""
        return f"shape {self.shape}{strides}, {self.dtype}{requires_grad}{beside}"


Structure = dict[str, TensorEntry]


def describe(module: nn.Module, ignored: frozenset[str], *, memory: bool = True) -> Structure:
    """Return the parameters and buffers of a module, by dotted name, in order of registration.

    With `memory` the entries also describe the parameters' memory layout, which determines the layout of their
    gradients. Buffers are sent in logical order, whatever their strides.
    """
    beside = _find_beside(module) if memory else {}
    structure = {}
    for name, parameter in module.named_parameters():
        if name not in ignored:
            strides = _unusual_strides(parameter) if memory else None
            structure[name] = TensorEntry(
                "parameter",
                tuple(parameter.shape),
                _dtype_of(parameter),
                parameter.requires_grad,
                strides,
                beside.get(name, ()),
            )
    for name, buffer in module.named_buffers():
        if name not in ignored:
            structure[name] = TensorEntry("buffer", tuple(buffer.shape), _dtype_of(buffer), buffer.requires_grad)
    return structure


def _dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _unusual_strides(tensor: Tensor) -> tuple[int, ...] | None:
    order = memory_order(tensor)
    return None if order == memory_order(torch.empty(tensor.shape, device="meta")) else order


def _find_beside(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Map each parameter that overlaps others in memory, or that has several names, to the other names."""
    blocks = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        start = address_of(parameter) if parameter.layout is torch.strided else 0
        if start and parameter.numel():
            last = sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride(), strict=True))
            blocks.append((str(parameter.device), start, start + (last + 1) * parameter.element_size(), name))
    overlapping: list[list[str]] = []
    device, end = "", 0
    for block in sorted(blocks):
        if block[0] == device and block[1] < end:
            overlapping[-1].append(block[3])
            end = max(end, block[2])
        else:
            overlapping.append([block[3]])
            device, end = block[0], block[2]
    return {
        name: tuple(sorted(other for other in names if other != name))
        for names in overlapping
        if len(names) > 1
        for name in names
    }


def compare(mine: Structure, reference: Structure, rank: int) -> list[str]:
    """Return how the model of `rank` differs from rank 0's, one sentence per difference."""
    differences = []
    for name, entry in mine.items():
        other = reference.get(name)
        if other is None:
            differences.append(f"rank {rank} has {entry.kind} {name!r} ({entry}), but rank 0 has no such name")
        elif entry != other:
            differences.append(f"rank {rank} has {entry.kind} {name!r} with {entry}, but rank 0 has {other}")
    for name, entry in reference.items():
        if name not in mine:
            differences.append(f"rank {rank} lacks {entry.kind} {name!r} ({entry}), which rank 0 has")
    if not differences and list(mine) != list(reference):
        first = next(name for name, other in zip(mine, reference, strict=True) if name != other)
        differences.append(f"rank {rank} registers the same names in another order, from {first!r} on")
    return differences


def verify_same(
    structure: Structure,
    settings: Mapping[str, object],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    caller: str = "DistributedDataParallel",
) -> None:
    """Check that all ranks have the same structure and settings; otherwise raise on every rank.

    Cost: one all_gather of 32 bytes per rank; descriptions are sent only if they differ.

    Raises:
        MismatchError: models or settings differ; the message names `caller` and lists the differences by rank.
    """
    settings_text = {name: repr(value) for name, value in settings.items()}
    digest = hashlib.sha256(repr((structure, settings_text)).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    digests = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(digests, mine, group=group)
    if all(torch.equal(digests[0], other) for other in digests[1:]):
        return
    everyone: list[tuple[Structure, dict[str, str]]] = [({}, {})] * group.size()
    dist.all_gather_object(everyone, (structure, settings_text), group=group)
    raise _mismatch(everyone, caller)


def _mismatch(everyone: Sequence[tuple[Structure, dict[str, str]]], caller: str) -> MismatchError:
    reference, reference_settings = everyone[0]
    differences = []
    for rank, (structure, settings) in enumerate(everyone):
        differences += compare(structure, reference, rank)
        differences += [
            f"rank {rank} passes {name}={value}, rank 0 {name}={reference_settings[name]}"
            for name, value in settings.items()
            if value != reference_settings[name]
        ]
    shown = differences[:_SHOWN]
    if len(differences) > _SHOWN:
        shown.append(f"and {len(differences) - _SHOWN} more")
    return MismatchError(
        f"{caller}: the ranks' models differ.\n  "
        + "\n  ".join(shown)
        + "\nBuild the model from the same arguments on every rank, before wrapping it.",
        calls={rank: f"a model of {len(structure)} tensors" for rank, (structure, _) in enumerate(everyone)},
    )


def specify(module: nn.Module, trained: Sequence[tuple[str, nn.Parameter]]) -> list[ParameterSpec]:
    """Return the specs of the `trained` parameters for the plan; embeddings with sparse=True have sparse gradients."""
    specs = []
    for name, parameter in trained:
        owner = module.get_submodule(name.rpartition(".")[0])
        sparse = isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse
        specs.append(
            ParameterSpec(
                name, tuple(parameter.shape), parameter.dtype, parameter.device, type(owner).__name__, sparse=sparse
            )
        )
    return specs


def refuse_in_backward(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that are updated before their gradients are averaged.

    Raises:
        RuntimeError: a parameter has an optimizer that steps inside backward.
    """
    stepped = [name for name, parameter in named if hasattr(parameter, "_in_backward_optimizers")]
    if stepped:  # these optimizers would step with this rank's gradient, or not at all
        raise RuntimeError(
            f"Parameter {stepped[0]!r} has an optimizer that steps inside backward (_apply_optimizer_in_backward), "
            "before its gradient is averaged. Use an ordinary optimizer, and step it after backward"
        )


def refuse_uninitialized(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse the uninitialized parameters of lazy modules.

    Raises:
        RuntimeError: a parameter has no shape yet.
    """
    lazy = [name for name, parameter in named if isinstance(parameter, nn.parameter.UninitializedParameter)]
    if lazy:
        raise RuntimeError(
            f"Parameter {lazy[0]!r} has no shape yet: run one forward of the module on every rank, then wrap it"
        )
