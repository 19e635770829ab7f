"""The releases of torch with which Phalanx is tested; pyproject.toml, `make matrix` and the documents must agree."""

from __future__ import annotations

import re

TESTED = ("2.13.0", "2.14.1", "2.15.0")


def release_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (2, 15, 0) for "2.15.0+cu132" and for "2.15.0a0+git12"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


OLDEST = release_of(TESTED[0])[:2]
"""The first minor release that is tested, from its first patch release on."""


def describe_untested(version: str) -> str:
    """Return a sentence if this version of torch is newer than all tested releases; otherwise ""."""
    if release_of(version) <= release_of(TESTED[-1]):
        return ""
    return f"torch {version} is newer than {TESTED[-1]}, the newest version that Phalanx is tested with"
