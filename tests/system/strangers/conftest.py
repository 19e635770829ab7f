"""How long the strangers' tests may take: minutes in CI, and as long as they need by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

_USUAL_S = 600


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Set the time for this folder's tests, which a mark in the file would fix for runs by hand as well."""
    is_long = config.getoption("effort") > 1
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(0 if is_long else _USUAL_S))
