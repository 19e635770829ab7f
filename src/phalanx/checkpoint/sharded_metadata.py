"""Read torch's `.metadata`, a pickle with the positions of all pieces of a sharded checkpoint, without trusting it.

Python versions pickle the same objects differently. Any version's file can be read by any other version:

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

_LOSES = "phalanx.checkpoint does not read sharded checkpoints that contain this class"
_STORED = (
    find("torch.distributed.checkpoint.filesystem._StorageInfo", loses=_LOSES, instead=None),
    find("torch.distributed.checkpoint.filesystem._StoragePrefix", loses=_LOSES, instead=None),
)
_get_layout: Any = find(
    "torch.serialization._get_layout", loses="sharded checkpoints that record a tensor layout are not read"
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

# All names that a file may use. A file can cause neither an import nor an attribute look-up.
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


# Only pickle's Python implementation can restrict BUILD, which sets attributes of any object: those of a class or an
# Enum's member belong to the whole process. It takes twice as long as the C implementation: 0.4 s for 8,000 pieces.
class _Unpickler(pickle._Unpickler):
    """`_Unpickler` creates only the objects of torch's `.metadata`, so that an untrusted file runs no code."""

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
    """Decode torch's `.metadata`, which has the positions of all pieces.

    Raises:
        Exception: any error of the unpickler.
    """
    found = _Unpickler(io.BytesIO(content)).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"it is a {type(found).__name__}")
    return found
