import re
import sys
from pathlib import Path

import pytest

from phalanx._base.extras import require

ROOT = Path(__file__).parents[1]


def test_what_is_there_is_returned():
    assert require("json.decoder", extra="data", what="x") is sys.modules["json.decoder"]


def test_what_is_missing_is_named_with_its_extra():
    with pytest.raises(
        ModuleNotFoundError, match=r"x needs not_there, which is not installed: pip install 'phalanx\[y\]'"
    ):
        require("not_there.at_all", extra="y", what="x")


def test_every_extra_that_an_error_may_name_is_there():
    named = set()
    for module in (ROOT / "src").rglob("*.py"):
        named |= set(re.findall(r"extra=\"(\w+)\"", module.read_text()))
    table = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert named | {"s3", "gcs", "azure"} <= set(re.findall(r"^(\w+) =", table, re.M))


def test_what_a_package_lacks_itself_is_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "lacks_something.py").write_text("import something_else_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'something_else_that_is_not_there'"):
        require("lacks_something", extra="y", what="x")
