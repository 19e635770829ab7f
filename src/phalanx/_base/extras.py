"""Import optional packages when they are used, or raise an error that names the extra to install."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, *, extra: str, what: str) -> Any:
    """Import a module that the feature `what` needs.

    Raises:
        ModuleNotFoundError: its package is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the module exists, but lacks a dependency
        package = module.partition(".")[0]
        raise ModuleNotFoundError(
            f"{what} needs {package}, which is not installed: pip install 'phalanx[{extra}]' (or {package} itself).",
            name=error.name,
        ) from error
