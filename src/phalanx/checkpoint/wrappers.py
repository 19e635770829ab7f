"""Convert the names of a model's parameters and modules between those with and without wrappers.

DistributedDataParallel(torch.compile(model))       "module._orig_mod.layer.weight"     "layer.weight"
a model whose encoder is wrapped                    "encoder.module.weight"             "encoder.weight"
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

_OURS = (DataParallel.__name__, TorchDistributedDataParallel.__name__)


def wrapper_prefixes(module: nn.Module) -> list[str]:
    """Return the prefixes of wrappers in parameters' names ("module.", "encoder.module."), outermost first."""
    return [
        f"{name}.{attribute}." if name else f"{attribute}."
        for name, inner in module.named_modules(remove_duplicate=False)  # a module may have several names
        if (attribute := _wraps_as(inner))
    ]


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers around the whole `module`."""
    while attribute := _wraps_as(module):
        module = getattr(module, attribute)
    return module


def unwrap_key(key: str, prefixes: Sequence[str]) -> str:
    """Remove the wrappers' prefixes from a parameter's name."""
    for prefix in reversed(prefixes):  # the innermost prefix comes first: outer ones are still in the key
        if key.startswith(prefix):
            outer, _, _ = prefix[:-1].rpartition(".")
            key = f"{outer}.{key[len(prefix) :]}" if outer else key[len(prefix) :]
    return key


def without_wrappers(state: Mapping[str, Any], prefixes: Sequence[str]) -> dict[str, Any]:
    """Return `state` under its names without wrappers."""
    renamed = OrderedDict((unwrap_key(key, prefixes), value) for key, value in state.items())
    if (versions := versions_of(state)) is not None:
        # A wrapper's own version is dropped in favour of its module's.
        set_versions(renamed, {_unwrap_module(name, prefixes): value for name, value in versions.items()})
    return renamed


def versions_as_wrapped(versions: Mapping[str, Any], own: Mapping[str, Any], prefixes: Sequence[str]) -> dict[str, Any]:
    """Return `versions`, whose module names are without wrappers, also under the names with wrappers from `own`."""
    names = {name: _unwrap_module(name, prefixes) for name in versions_of(own) or {}}
    return {**versions, **{name: versions[plain] for name, plain in names.items() if plain in versions}}


def versions_of(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the versions of the modules of `state`, by name; loading depends on them."""
    versions: Mapping[str, Any] | None = getattr(state, "_metadata", None)
    return versions


def set_versions(state: OrderedDict[str, Any], versions: Mapping[str, Any]) -> None:
    """Attach the versions to `state`, as PyTorch does."""
    state._metadata = OrderedDict(versions)  # type: ignore[attr-defined]


def _is_our_wrapper(kind: type) -> bool:
    """Return whether a class is Phalanx's replacement for a wrapper of PyTorch, by its name, without an import."""
    return kind.__module__.startswith("phalanx.") and kind.__name__ in _OURS


def _unwrap_module(name: str, prefixes: Sequence[str]) -> str:
    """Return a module's name without wrappers; unlike a prefix, it does not end with a dot."""
    return unwrap_key(f"{name}." if name else "", prefixes)[:-1]


def _wraps_as(module: nn.Module) -> str:
    """Return the attribute in which a wrapper keeps its module; "" if the module is not a wrapper."""
    if isinstance(module, (TorchDistributedDataParallel, DataParallel)) or any(
        map(_is_our_wrapper, type(module).__mro__)
    ):
        return "module"
    if type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules:  # torch.compile's wrapper
        return "_orig_mod"
    return ""
