"""Find the blocks of a model whose parameters are gathered together, each by itself, while it runs."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model: the children of its ModuleLists and Sequentials that have parameters.

    A container without a forward is no block, since nobody calls it: its children are. A module that shares a parameter
    with what is outside of it is none either, as a parameter belongs to one block: parts of it may be.
    """
    names = _Names(model)
    found = {id(block): block for block in _search(model, False, names)}
    return list(found.values())


def _search(module: nn.Module, is_list: bool, names: _Names) -> Iterator[nn.Module]:
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) or (is_list and not _has_forward(module))
    for child in module.children():
        if is_list and _has_forward(child) and names.are_its_own(child):
            yield child
        else:
            yield from _search(child, is_list, names)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


class _Names:
    """These are all names that a model's modules and parameters have in it."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: dict[int, list[str]] = {}
        self._parameters: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._modules.setdefault(id(module), []).append(name)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._parameters.setdefault(id(parameter), []).append(name)

    def are_its_own(self, block: nn.Module) -> bool:
        """Return whether a block has parameters, and nothing outside of it has one of them."""
        prefixes = tuple(f"{name}." for name in self._modules[id(block)])
        names = [name for parameter in block.parameters() for name in self._parameters[id(parameter)]]
        return bool(names) and all(name.startswith(prefixes) for name in names)
