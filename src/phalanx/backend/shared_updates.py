"""The memory of an optimizer whose update ranks share notes here which parameters it has; other code asks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_owners: MutableMapping[Tensor, weakref.ref[object]] = WeakIdKeyDictionary()


def note_shared_update(parameters: Iterable[Tensor], owner: object) -> None:
    """Note that ranks share the update of `parameters`, or of their masters, as long as `owner` lives."""
    for parameter in parameters:
        _owners[parameter] = weakref.ref(owner)


def has_shared_update(parameter: Tensor) -> bool:
    """Return whether ranks share the update of the parameter, or of its master."""
    owner = _owners.get(parameter)
    return owner is not None and owner() is not None
