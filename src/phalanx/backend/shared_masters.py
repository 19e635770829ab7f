"""An offloaded optimizer notes here which parameters have a master copy in shared memory; other code asks."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_owners: MutableMapping[Tensor, weakref.ref[object]] = WeakIdKeyDictionary()


def note_master(parameter: Tensor, owner: object) -> None:
    """Note that `owner`, as long as it lives, updates a master of the parameter."""
    _owners[parameter] = weakref.ref(owner)


def has_master(parameter: Tensor) -> bool:
    """Return whether an optimizer that lives updates a master of the parameter."""
    owner = _owners.get(parameter)
    return owner is not None and owner() is not None
