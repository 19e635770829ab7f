import importlib

import pytest

import phalanx


@pytest.mark.parametrize("name", sorted(phalanx._MODULE_OF))
def test_every_public_name_is_found_where_the_facade_says(name):
    assert getattr(phalanx, name) is getattr(importlib.import_module(phalanx._MODULE_OF[name]), name)
    assert name in vars(phalanx), "the second use costs a dictionary lookup"


@pytest.mark.parametrize("name", phalanx._PACKAGES)
def test_a_package_that_is_used_by_its_name_is_found_without_an_import(name):
    assert getattr(phalanx, name) is importlib.import_module(f"phalanx.{name}")


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
