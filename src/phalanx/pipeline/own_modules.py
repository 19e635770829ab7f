"""`OwnModules` are the layers on this rank, under their names in the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from phalanx._base.partition.parts import LayerRange


class OwnModules(nn.Module):
    """`OwnModules` are the modules and tensors of some parts, at their places in the whole model, and nothing else."""

    def __init__(self, root: nn.Module, parts: Iterable[LayerRange], extra: Sequence[str] = ()) -> None:
        """Add the modules of `parts`; `extra` are parameters and buffers that no part uses, assigned to this rank."""
        super().__init__()
        self.training = root.training
        parts = list(parts)
        for name in (name for part in parts for name in part.modules):
            self._put(root, name, root.get_submodule(name))
        for name in [*(name for part in parts for name in part.tensors), *extra]:
            path, _, last = name.rpartition(".")
            owner = root.get_submodule(path)
            holder = self._reach(root, path)
            if last in owner._parameters:
                holder._parameters[last] = owner._parameters[last]
            elif last in owner._buffers:
                holder.register_buffer(last, owner._buffers[last], last not in owner._non_persistent_buffers_set)
            else:
                setattr(holder, last, getattr(owner, last))

    def _put(self, root: nn.Module, name: str, module: nn.Module) -> None:
        path, _, last = name.rpartition(".")
        holder = self._reach(root, path)
        if last not in holder._modules:
            holder._modules[last] = module

    def _reach(self, root: nn.Module, path: str) -> nn.Module:
        """Return the module at `path`; create an empty one if there is none."""
        at: nn.Module = self
        for depth, step in enumerate(path.split(".") if path else ()):
            if step not in at._modules:
                at._modules[step] = nn.Module()
                at._modules[step].training = root.get_submodule(".".join(path.split(".")[: depth + 1])).training  # type: ignore[union-attr]
            child = at._modules[step]
            assert child is not None
            at = child
        return at


def unused_tensors(root: nn.Module, parts: Iterable[LayerRange]) -> list[str]:
    """Return the names of the model's parameters and buffers that none of its parts uses."""
    used = OwnModules(root, parts)
    known = {id(tensor) for tensor in (*used.parameters(), *used.buffers())}  # a tensor may have several names
    every = (*root.named_parameters(), *root.named_buffers())
    return [name for name, tensor in every if id(tensor) not in known]


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of `tensors` in memory, in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
