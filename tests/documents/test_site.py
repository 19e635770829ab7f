"""What the documentation promises of itself: a frame around each page, and a reference without gaps.

`make docs` builds the site, strictly, and opens it in a browser; these checks need neither.
"""

from __future__ import annotations

import importlib
import re

import pytest
import yaml
from tests.documents.blocks import ROOT, blocks, documents

import phalanx
from phalanx import errors

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
PACKAGE = ROOT / "src" / "phalanx"
REFERENCE = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").rglob("*.md"))
# Packages whose own names are in the reference, beside those of `phalanx` itself.
PACKAGES = [*phalanx._PACKAGES]
# Variables of other programs that are read only to be compared or passed on.
FOREIGN = re.compile(r"(SLURM|LSB|JSM|PBS|PMI|OMPI|PET|JOB|PYTHON)_")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))


@each_page
def test_a_page_opens_with_what_it_gives_and_ends_with_next_steps(page):
    title, begin, *_ = page.read_text(encoding="utf-8").split("\n\n")
    assert re.match(r"# \S", title)
    assert re.match(r"[A-Z`].*[.:]$", begin, re.S), "a sentence, which is what search shows of the page"
    assert len(begin) < 250
    assert "this page" not in begin.lower(), "what the page gives, not for whom it is"
    *_, end = re.split(r"^## (.*)$", page.read_text(encoding="utf-8"), flags=re.M)[1:]
    heading = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.M)[-1]
    assert heading == "Next steps"
    assert re.search(r"\]\([^)]+\)", end), "a link"


@each_page
def test_scripts_and_commands_fit_a_window_of_1280_pixels(page):
    """A column of code shows 84 characters there."""
    long = []
    for block in blocks(page):
        lines = block.code.splitlines()
        if block.language == "console":  # what a program prints is as wide as it is
            lines = [line for line in lines if line.startswith("$ ")]
        elif block.language not in ("python", "bash", "sh", "diff"):
            continue
        long += [f"{block}: {line}" for line in lines if len(line) > 80]
    assert long == []


@pytest.mark.parametrize("part", ["tutorials", "how-to", "reference", "explanation"])
def test_the_index_of_a_part_has_each_of_its_pages(part):
    index = (DOCS / part / "index.md").read_text(encoding="utf-8")
    pages = {str(path.relative_to(DOCS / part)) for path in (DOCS / part).rglob("*.md")} - {"index.md"}
    assert pages <= set(re.findall(r"\]\(([^)#]+)", index))


def test_the_sites_address_is_the_packages_and_each_page_that_moved_leads_to_its_place():
    class Loader(yaml.SafeLoader):
        """mkdocs.yml without what mkdocs alone can build."""

    Loader.add_multi_constructor("!", lambda *_: None)
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'Documentation = "{config["site_url"]}"' in project
    assert f'Source = "{config["extra"]["repository"]}"' in project
    assert config["repo_url"] == config["extra"]["repository"]
    (redirects,) = (plugin["redirects"] for plugin in config["plugins"] if "redirects" in plugin)
    assert len(redirects["redirect_maps"]) == 31
    assert all((DOCS / target).exists() for target in redirects["redirect_maps"].values())


def documented() -> set[str]:
    """The names that a page of the reference shows, each by the object that it stands for."""
    return set(re.findall(r"^::: (phalanx[\w.]*)$", REFERENCE, re.M))


def find(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError):
        return importlib.import_module(name)


def test_every_name_of_the_reference_exists():
    for name in documented() - {"phalanx.launch.Launch.__call__"}:
        find(name)


def test_every_public_name_is_in_the_reference():
    shown = [find(name) for name in documented() if ".Launch." not in name]
    wanted = {f"phalanx.{name}" for name in phalanx._MODULE_OF} - {"phalanx.launch"}
    for package in PACKAGES:
        module = importlib.import_module(f"phalanx.{package}")
        wanted |= {f"phalanx.{package}.{name}" for name in getattr(module, "__all__", ())}
    missing = {name for name in wanted if not any(find(name) is one for one in shown)}
    assert missing == set()


def test_every_error_is_in_the_reference_and_says_what_to_do():
    for name in ("PhalanxError", *(one for one in phalanx._MODULE_OF if one.endswith("Error"))):
        assert f"::: phalanx.errors.{name}" in REFERENCE
        assert "What to do: " in (getattr(errors, name).__doc__ or ""), name


def test_the_two_texts_of_an_error_that_torch_knows_are_one():
    source = (PACKAGE / "errors.py").read_text(encoding="utf-8")
    for name in ("MismatchError", "PeerLostError"):
        first, second = re.findall(rf'class {name}\(.*?\n        """(.*?)"""', source, re.S)
        assert first == second, name


def test_every_variable_is_on_its_page():
    page = (DOCS / "reference" / "variables.md").read_text(encoding="utf-8")
    named = set()
    for path in [*PACKAGE.rglob("*.py"), ROOT / "setup.py"]:
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r"\b_?PHALANX_[A-Z_]+\b", text))
        named |= set(re.findall(r"environ(?:\.get\(|\[|\.pop\()\"([A-Z_]+)\"", text))
    named = {name for name in named if not FOREIGN.match(name) and name not in {"TERM", "USE_LIBUV"}}
    assert {name for name in named if f"`{name}`" not in page} == set()
    said = set(re.findall(r"`(_?PHALANX_[A-Z_]+)`", page))
    assert said <= named


def test_the_readme_is_one_screen_after_another_and_no_more():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert max(len(re.findall(r"\]\(", paragraph)) for paragraph in text.split("\n\n")) < 12, (
        "no paragraph of thirty links"
    )
    ratios = [float(ratio) for ratio in re.findall(r"^\| .* \| ([\d.]+) \| `benchmarks/", text, re.M)]
    assert len(ratios) == 7
    assert any(0.8 < ratio < 1 for ratio in ratios), "a row where a peer is nearly as fast"
    assert max(ratios) > 1, "and one where it is faster"


def test_every_page_that_names_the_pythons_names_those_of_the_package():
    """README named 3.10 to 3.15, and the page on installation 3.10 to 3.14."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    first, behind = re.findall(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', project)[0]
    named = re.findall(
        r"Python (3\.\d+ to 3\.\d+)", "\n".join(path.read_text(encoding="utf-8") for path in documents())
    )
    assert set(named) == {f"3.{first} to 3.{int(behind) - 1}"}


def test_what_is_unreleased_fits_twenty_lines():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased = text.split("## [Unreleased]\n")[1].split("\n## ")[0]
    assert len([line for line in unreleased.splitlines() if line]) <= 20
