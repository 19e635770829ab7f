"""Return the authenticator of a group's pickles: there is none if all ranks share memory."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from phalanx._comm.backend.torch_integration.groups import phalanx_group
from phalanx._comm.transport.authentication import PickleAuthenticator


def pickle_authenticator(group: Any) -> PickleAuthenticator | None:
    """Return the authenticator of the pickles of `group` (None: the default one) on this rank.

    Return None for other backends' groups, and for a group whose ranks all share memory.
    """
    ours = phalanx_group(dist.group.WORLD if group is None else group)
    return None if ours is None else ours.transport.pickles
