"""Check that all ranks have the same model, and report the differences."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from phalanx._comm.backend.shared import default_group, require_member
from phalanx._comm.transport.tensors import flat
from phalanx.ddp.digest import digest, digests, find_differences
from phalanx.ddp.module import DistributedDataParallel
from phalanx.ddp.replicate import gather_rows
from phalanx.ddp.structure import describe, verify_same
from phalanx.errors import MismatchError

_SHOWN = 8  # the maximum number of ranks in a message


def check_replicas(model: nn.Module, group: dist.ProcessGroup | None = None, *, buffers: bool | None = None) -> None:
    """Check that all ranks have the same parameters and buffers, bit by bit; raise on every rank if they do not.

    All ranks of `group` call it, at any time between two steps. A model wrapped in DistributedDataParallel is compared
    over the wrapper's group, without the tensors that the wrapper ignores.

    Arguments:
        group: None means the wrapper's group, or the default group if there is no wrapper.
        buffers: compare buffers. None compares them, unless a wrapper overwrites them with rank 0's at the next
            forward, in which case they normally differ.

    Cost: reads every tensor once, at memory speed, and gathers 8 bytes per tensor; a tensor is sent only if replicas
    differ. For a sparse tensor it reads the stored indices and values. Without a group, or with one rank, it does
    nothing.

    Raises:
        MismatchError: tensors differ: the message names the first, the ranks whose values differ from rank 0's, and the
            largest difference, unless the tensor is sparse. Or models differ in names, shapes or dtypes.
    """
    ignored: frozenset[str] = frozenset()
    if isinstance(model, (DistributedDataParallel, TorchDistributedDataParallel)):
        group = group or model.process_group
        if buffers is None:
            buffers = not model.broadcast_buffers
        model = model.module
        ignored = frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    group = group or default_group()
    if group is None:
        return
    require_member(group, "check_replicas", "group")
    if group.size() == 1:
        return
    named: list[tuple[str, str, Tensor]] = [("parameter", name, tensor) for name, tensor in model.named_parameters()]
    if buffers is not False:
        named += [("buffer", name, tensor) for name, tensor in model.named_buffers()]
    named = [entry for entry in named if entry[1] not in ignored]
    device = named[0][2].device if named else torch.device("cpu")
    verify_same(describe(model, ignored, memory=False), {"buffers": buffers}, group, device, caller="check_replicas")
    mine = torch.stack([_digest(tensor).to(device) for _, _, tensor in named]) if named else digests([], device)
    rows = gather_rows(mine, group)
    differing = find_differences(rows)
    if not differing:
        return
    kind, name, tensor = named[differing[0]]
    if tensor.layout is torch.strided:
        found = _compare_with_first(tensor, group)
    else:
        first = [row[differing[0]] for row in rows]
        found = {rank: "stores different elements than rank 0" for rank, one in enumerate(first) if one != first[0]}
    shown = [f"rank {rank} {text}" for rank, text in list(found.items())[:_SHOWN]]
    if len(found) > _SHOWN:
        shown.append(f"and {len(found) - _SHOWN} more ranks")
    raise MismatchError(
        f"check_replicas: {len(differing)} of {len(named)} tensors differ between the {group.size()} ranks. The first "
        f"is {kind} {name!r} ({_form(tensor)}): {', '.join(shown)}.\nRanks that are not named have rank 0's values. "
        "Change the model in the same way on every rank: load before wrapping, step every optimizer everywhere, seed "
        "layers with the same number.",
        calls=found,
    )


def _digest(tensor: Tensor) -> Tensor:
    """Return the digest of a tensor's stored elements in logical order, since ranks may have different strides."""
    parts = [_in_order(part) for part in _parts_of(tensor.detach())]
    return digest(parts[0]) if len(parts) == 1 else digest(digests(parts, tensor.device))


def _parts_of(tensor: Tensor) -> list[Tensor]:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


def _in_order(tensor: Tensor) -> Tensor:
    return flat(tensor.resolve_conj().resolve_neg().contiguous())


def _compare_with_first(tensor: Tensor, group: dist.ProcessGroup) -> dict[int, str]:
    """Return how tensors differ from rank 0's, by rank. Cost: a broadcast, and an all_gather of 16 bytes per rank."""
    mine = _in_order(tensor.detach())
    reference = mine.clone()
    dist.broadcast(reference.view(torch.uint8), group=group, group_src=0)
    wide = torch.complex128 if mine.is_complex() else torch.float64
    distance = (mine.to(wide) - reference.to(wide)).abs().max()
    same_bytes = torch.equal(mine.view(torch.uint8), reference.view(torch.uint8))
    verdict = torch.stack([torch.full_like(distance, float(same_bytes)), distance])
    found = {}
    for rank, (same, distance_of_rank) in enumerate(gather_rows(verdict, group)):
        if not same:
            found[rank] = _describe_distance(distance_of_rank)
    return found


def _describe_distance(distance: float) -> str:
    if math.isnan(distance):
        return "differs from rank 0, and one of the two tensors has a NaN"
    if distance == 0:
        return "differs from rank 0 in bits only, as 0.0 and -0.0 do"
    return f"differs from rank 0 by up to {distance:.3g}"


def _form(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}"
