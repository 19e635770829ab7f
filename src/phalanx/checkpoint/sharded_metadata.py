"""Read torch's `.metadata`, a pickle that says where everything in a sharded checkpoint lies, without trusting it.

Pythons pickle the same things differently. A file of any of them is read on any other:

    members of an Enum    3.11.0 to 3.11.3 write getattr(class, name), all others class(value)
    paths                 3.13 writes pathlib._local.PosixPath, all others pathlib.PosixPath
"""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
from enum import EnumMeta
from typing import Any, ClassVar, Final

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import Metadata

from phalanx._base.torch_names import find

_LOSES = "phalanx.checkpoint does not read sharded checkpoints that hold it"
_STORED = (
    find("torch.distributed.checkpoint.filesystem._StorageInfo", loses=_LOSES, instead=None),
    find("torch.distributed.checkpoint.filesystem._StoragePrefix", loses=_LOSES, instead=None),
)
_get_layout: Any = find(
    "torch.serialization._get_layout", loses="sharded checkpoints with tensors of a layout are not read"
)


def _member(kind: object, name: object) -> Any:
    """Return the member of an Enum, which is the only use of `getattr` in these pickles."""
    if isinstance(kind, EnumMeta) and isinstance(name, str) and name in kind.__members__:
        return kind.__members__[name]
    raise pickle.UnpicklingError(f"it asks for getattr({kind!r}, {name!r}), which no .metadata of torch does")


_OF_TORCH = [kind for kind in vars(metadata).values() if getattr(kind, "__module__", None) == metadata.__name__]
_RECORDS = frozenset(
    kind for kind in (*_OF_TORCH, *_STORED) if isinstance(kind, type) and not isinstance(kind, EnumMeta)
)
_PATHS = (pathlib.Path, pathlib.PosixPath, pathlib.PurePosixPath)

# Everything that a file may name. Nothing is imported, and no attribute is looked up, because a file says so.
_NAMED: Final[dict[tuple[str, str], Any]] = {
    **{(kind.__module__, kind.__name__): kind for kind in _RECORDS},
    **{(kind.__module__, kind.__name__): kind for kind in _OF_TORCH if isinstance(kind, EnumMeta)},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{(module, kind.__name__): kind for module in ("pathlib", "pathlib._local") for kind in _PATHS},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "getattr"): _member,
}


# Python's own implementation, and not the one in C, as it lets us say what BUILD may fill: it sets attributes of any
# object, and those of a class or of a member of an Enum belong to the whole process. It takes twice the time: 0.4 s
# for 8,000 pieces.
class _Unpickler(pickle._Unpickler):
    """`_Unpickler` makes the objects of torch's `.metadata` and nothing else: a file from a stranger runs no code."""

    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which no .metadata of torch does") from None

    def load_build(self) -> None:
        filled = self.stack[-2]  # type: ignore[attr-defined]
        if type(filled) not in _RECORDS:
            raise pickle.UnpicklingError(f"it changes {filled!r}, which no .metadata of torch does")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]


def decode_metadata(content: bytes) -> Metadata:
    """Return torch's `.metadata`, which says where everything lies.

    Raises:
        Exception: whatever its pickle raises.
    """
    found = _Unpickler(io.BytesIO(content)).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"it is a {type(found).__name__}")
    return found
