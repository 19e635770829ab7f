"""Import packages that `import phalanx` does not need when they are used, or raise an error that names the extra."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, *, extra: str, what: str) -> Any:
    """Return the module of that name, which `what` needs.

    Raises:
        ModuleNotFoundError: its package is not installed; with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # it is there, and lacks something itself
        package = module.partition(".")[0]
        raise ModuleNotFoundError(
            f"{what} needs {package}, which is not installed: pip install 'phalanx[{extra}]' (or {package} itself).",
            name=error.name,
        ) from error
