"""Find what authenticates the pickles of a group: an authenticator between hosts, and nothing within one host."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from phalanx._comm.backend.torch_integration.groups import phalanx_group
from phalanx._comm.transport.authentication import PickleAuthenticator


def pickle_authenticator(group: Any) -> PickleAuthenticator | None:
    """Return what authenticates the pickles of `group` (None: the default one) on this rank.

    None for other backends' groups, and where all ranks are on one host.
    """
    ours = phalanx_group(dist.group.WORLD if group is None else group)
    return None if ours is None else ours.transport.pickles
