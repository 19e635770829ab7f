"""Retry operations that may fail because of a network, within a stated time."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from phalanx._base.deadline import Deadline
from phalanx._base.log import get_logger

T = TypeVar("T")
_logger = get_logger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0

# Waiting does not mend these.
_LASTING = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_LASTING_NUMBERS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.EINVAL, errno.EFBIG))


def is_transient(error: BaseException) -> bool:
    """Return whether the operation may succeed if it is done again: the error is one of a network or a device."""
    return isinstance(error, OSError) and not isinstance(error, _LASTING) and error.errno not in _LASTING_NUMBERS


def retry(
    function: Callable[[], T],
    what: str,
    deadline: Deadline,
    *,
    fails_for_now: Callable[[BaseException], bool] = is_transient,
    pause: Callable[[float], None] = time.sleep,
) -> T:
    """Return what `function` returns, which is called again, after a pause that doubles, while it fails for now.

    The first failure is told as a warning, with how long it will be tried; so is how it ended.

    Raises:
        What `function` raises last, when the time is over, or what will not go away.
    """
    pause_s, failures = FIRST_PAUSE_S, 0
    while True:
        try:
            result = function()
        except Exception as error:
            if not fails_for_now(error):
                raise
            if deadline.passed:
                if failures:
                    _logger.warning("%s: given up after %d failures in %.0f s.", what, failures + 1, deadline.timeout_s)
                raise
            failures += 1
            if failures == 1:
                _logger.warning(
                    "%s: %s: %s. It is tried again for %.0f s.", what, type(error).__name__, error, deadline.left_s
                )
            pause(min(pause_s, deadline.left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            continue
        if failures:
            _logger.warning(
                "%s: it has succeeded, after %d %s.", what, failures, "failures" if failures > 1 else "failure"
            )
        return result
