import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", sorted(phalanx._MODULE_OF))
def test_every_public_name_is_found_where_the_facade_says(name):
    assert getattr(phalanx, name) is getattr(importlib.import_module(phalanx._MODULE_OF[name]), name)
    assert name in vars(phalanx), "the second use costs a dictionary lookup"


@pytest.mark.slow
def test_a_package_that_is_used_by_its_name_is_found_without_an_import():
    """`phalanx.rpc.rpc_sync`, as the documents have it, was an AttributeError until something imported phalanx.rpc."""
    code = "import sys, phalanx\nfor name in phalanx._PACKAGES: print(getattr(phalanx, name).__name__)"
    shown = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True, timeout=600).stdout
    assert shown.split() == [f"phalanx.{name}" for name in phalanx._PACKAGES]


def test_what_documents_write_behind_the_packages_name_is_found():
    missing = set()
    for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for block in re.findall(r"```(?:python|diff)\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
            code = re.sub(r"(?m)^.*(import phalanx\.|from phalanx\.|#).*$", "", block)
            missing |= set(re.findall(r"(?<![\w./])phalanx\.(\w+)", code)) - set(phalanx.__all__)
    assert not missing


def test_every_public_name_is_listed():
    assert set(phalanx.__all__) == {"__version__", *phalanx._MODULE_OF, *phalanx._PACKAGES}
    assert set(phalanx.__all__) <= set(dir(phalanx))


def test_the_facade_does_not_invent_names():
    with pytest.raises(AttributeError, match="module 'phalanx' has no attribute 'DistributedDataParalel'"):
        phalanx.DistributedDataParalel  # noqa: B018


def test_a_star_import_gives_the_public_names():
    names: dict[str, object] = {}
    exec("from phalanx import *", names)
    assert set(phalanx.__all__) <= names.keys()
