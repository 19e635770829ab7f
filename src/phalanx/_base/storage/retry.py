"""Retry operations after network errors, for a limited time."""

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

# Errors that a retry cannot fix.
_LASTING = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_LASTING_NUMBERS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.EINVAL, errno.EFBIG))


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed, as after an error of the network or of a device."""
    return isinstance(error, OSError) and not isinstance(error, _LASTING) and error.errno not in _LASTING_NUMBERS


def retry(
    function: Callable[[], T],
    what: str,
    deadline: Deadline,
    *,
    fails_for_now: Callable[[BaseException], bool] = is_transient,
    pause: Callable[[float], None] = time.sleep,
) -> T:
    """Call `function` until it succeeds, with doubling pauses after transient errors, and return its result.

    The first failure logs a warning with the time limit; the outcome is logged as well.

    Raises:
        The last error of `function` when the time is up, or an error that is not transient.
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
                    _logger.warning("%s: gave up after %d failures in %.0f s.", what, failures + 1, deadline.timeout_s)
                raise
            failures += 1
            if failures == 1:
                _logger.warning(
                    "%s: %s: %s. Retrying for up to %.0f s.", what, type(error).__name__, error, deadline.left_s
                )
            pause(min(pause_s, deadline.left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            continue
        if failures:
            _logger.warning("%s: succeeded after %d %s.", what, failures, "failures" if failures > 1 else "failure")
        return result
