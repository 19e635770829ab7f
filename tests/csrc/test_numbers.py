"""Statuses, operations, types, reductions and flags are written down once, in csrc/layout.h.

Ten Python files had copies by hand: `MISMATCH = 1  # enum plx_status`. A line between two others of
an enum would have renamed every status in every message, and nothing would have failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx import _core
from phalanx._base import core_numbers

ROOT = Path(__file__).parents[2]
LAYOUT = re.sub(r"/\*.*?\*/", " ", (ROOT / "csrc" / "layout.h").read_text(), flags=re.DOTALL)
ENUMS = {
    name: re.findall(r"PLX_(\w+)", body) for name, body in re.findall(r"enum (plx_\w+) \{(.*?)\}", LAYOUT, re.DOTALL)
}
NAMES = {
    "plx_kind": core_numbers.KIND_NAMES,
    "plx_dtype": core_numbers.DTYPE_NAMES,
    "plx_redop": core_numbers.REDUCTION_NAMES,
    "plx_status": core_numbers.STATUS_NAMES,
}


@pytest.mark.parametrize("enum", ENUMS)
def test_every_number_of_an_enum_is_exported_and_has_a_name(enum):
    names = [name for name in ENUMS[enum] if not name.startswith("NUM_")]
    assert len(names) > 2
    numbers = [getattr(_core, name) for name in names]
    assert numbers == sorted(set(numbers))
    if enum in NAMES:
        assert list(NAMES[enum]) == numbers


def test_the_flags_are_bits():
    flags = [getattr(_core, name) for name in re.findall(r"#define PLX_(FLAG_\w+)", LAYOUT)]
    assert sorted(flags) == [1 << place for place in range(len(flags))]


def test_without_the_core_each_name_has_a_number_of_its_own():
    program = (
        "import sys; sys.modules['phalanx._core'] = None\n"
        "from phalanx._base import core_numbers as n\n"
        "print(len(n.KIND_NAMES), len(n.DTYPE_NAMES), len(n.REDUCTION_NAMES), len(n.STATUS_NAMES))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(names)) for names in NAMES.values()]


def test_no_python_file_has_a_copy():
    copies = [
        p.name for p in (ROOT / "src" / "phalanx").rglob("*.py") if re.search(r"enum plx_|PLX_[A-Z]", p.read_text())
    ]
    assert copies == []
