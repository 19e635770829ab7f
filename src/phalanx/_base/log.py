"""Log messages of Phalanx through `logging`."""

from __future__ import annotations

import logging

_logged: set[str] = set()


def get_logger(name: str) -> logging.Logger:
    """Return the logger for a module of Phalanx, which the application configures."""
    return logging.getLogger(name if name.startswith("phalanx") else f"phalanx.{name}")


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log `message` as a warning, once per process."""
    if message not in _logged:
        _logged.add(message)
        logger.warning(message)
