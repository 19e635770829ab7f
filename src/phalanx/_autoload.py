"""What `import torch` runs when Phalanx is installed: the backend's name is registered, nothing is loaded.

PyTorch calls `register` through the `torch.backends` entry point. Programs that never ask for the backend pay for one
dictionary entry.
"""

from __future__ import annotations

import importlib
from typing import Any

DEVICES = ["cpu"]  # a list: torch reads a plain string as the devices 'c', 'p' and 'u'


def register() -> None:
    """Make `init_process_group("phalanx")` known to torch; safe to call more than once."""
    import torch.distributed as dist

    if not dist.is_available() or "phalanx" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("phalanx", _create, extended_api=True, devices=DEVICES)
    _extend_env_rendezvous()


def _create(options: Any, backend_options: Any) -> Any:
    from phalanx.backend import create_process_group

    return create_process_group(options, backend_options)


def _extend_env_rendezvous() -> None:
    """Let `env://` also work where only our launcher or an MPI's says who we are; torch's handler does the rest."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the package shows a function of that name
    original = rendezvous._rendezvous_handlers["env"]

    def handler(url: str, timeout: Any = rendezvous.default_pg_timeout, **kwargs: Any) -> Any:
        from phalanx.backend.rendezvous import env_rendezvous

        return env_rendezvous(original, url, timeout, **kwargs)

    rendezvous._rendezvous_handlers["env"] = handler
