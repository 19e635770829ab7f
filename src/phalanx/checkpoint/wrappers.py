"""Translate the names of a model's parameters and modules with wrappers to those without, and back.

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
    """Return the prefixes by wrappers in parameters' names ("module.", "encoder.module."), outermost first."""
    return [
        f"{name}.{attribute}." if name else f"{attribute}."
        for name, inner in module.named_modules(remove_duplicate=False)  # a module may have several names
        if (attribute := _wraps_as(inner))
    ]


def unwrap_key(key: str, prefixes: Sequence[str]) -> str:
    """Return the name of a parameter without the prefixes of wrappers."""
    for prefix in reversed(prefixes):  # the innermost prefix comes first: those around it are still in the key
        if key.startswith(prefix):
            outer, _, _ = prefix[:-1].rpartition(".")
            key = f"{outer}.{key[len(prefix) :]}" if outer else key[len(prefix) :]
    return key


def without_wrappers(state: Mapping[str, Any], prefixes: Sequence[str]) -> dict[str, Any]:
    """Return `state` under the names that it has without wrappers."""
    renamed = OrderedDict((unwrap_key(key, prefixes), value) for key, value in state.items())
    if (versions := versions_of(state)) is not None:
        # A wrapper's own version is dropped: its module's takes its place.
        set_versions(renamed, {_unwrap_module(name, prefixes): value for name, value in versions.items()})
    return renamed


def versions_as_wrapped(versions: Mapping[str, Any], own: Mapping[str, Any], prefixes: Sequence[str]) -> dict[str, Any]:
    """Return `versions`, whose module names have no wrappers, under the names that these have in the state `own`."""
    names = {name: _unwrap_module(name, prefixes) for name in versions_of(own) or {}}
    return {**versions, **{name: versions[plain] for name, plain in names.items() if plain in versions}}


def versions_of(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the versions of the modules that have made `state`, by name; how they read it again depends on these."""
    versions: Mapping[str, Any] | None = getattr(state, "_metadata", None)
    return versions


def set_versions(state: OrderedDict[str, Any], versions: Mapping[str, Any]) -> None:
    """Make `state` carry the versions, as a state of PyTorch's does."""
    state._metadata = OrderedDict(versions)  # type: ignore[attr-defined]


def _is_our_wrapper(kind: type) -> bool:
    """Return whether a class is one of ours with the name of one of PyTorch's wrappers; they are in other rooms."""
    return kind.__module__.startswith("phalanx.") and kind.__name__ in _OURS


def _unwrap_module(name: str, prefixes: Sequence[str]) -> str:
    """Return the name of a module without wrappers; unlike a prefix, it ends without a dot."""
    return unwrap_key(f"{name}." if name else "", prefixes)[:-1]


def _wraps_as(module: nn.Module) -> str:
    """Return the attribute in which a wrapper keeps its module; empty if the module is no wrapper."""
    if isinstance(module, (TorchDistributedDataParallel, DataParallel)) or any(
        map(_is_our_wrapper, type(module).__mro__)
    ):
        return "module"
    if type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules:  # the wrapper is torch.compile's
        return "_orig_mod"
    return ""
