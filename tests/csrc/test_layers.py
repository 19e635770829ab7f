"""The C core, from the bottom to the top: a file includes, and calls, only what lies below it.

Seven files formed one circle, so none of them could be read, tested or replaced without the other six.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"

# From the bottom. A name stands for NAME.h and NAME.c; those of one line know nothing of each other.
LAYERS = """
    futex  word  copy  interpose  crc32
    layout  ready
    reduce  pool  group  sums
    wait
    sync  recorder  p2p
    agreement  mailbox
    call  send  match
    collectives  reducer  progress
    all_reduce  move
    early
    py_arguments
    py_pairs
    py_call
    py_group.h  py_types
    py_collectives  py_messages  py_state  py_pool  py_memory  py_ready  py_fold  py_crc32  py_event_log  py_sums
    py_group.c  py_numbers
    py_reducer
    py_module
"""
LAYER_OF = {name: layer for layer, line in enumerate(LAYERS.strip().splitlines()) for name in line.split()}

# Bodies that are compiled as part of one file.
PARTS = {"reduce_body.h": "reduce"}

MOST_LINES = 450


def sources():
    return sorted(path for path in CSRC.iterdir() if path.suffix in (".c", ".h"))


def unit(path):
    """What a file is drawn as."""
    return PARTS.get(path.name) or (path.name if path.name in LAYER_OF else path.stem)


def code(path):
    """Without comments and strings."""
    return re.sub(r'/\*.*?\*/|"[^"\n]*"', " ", path.read_text(), flags=re.DOTALL)


def test_every_file_is_drawn_and_every_drawn_file_is_there():
    assert {unit(path) for path in sources()} == LAYER_OF.keys()


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_includes_only_go_down(path):
    included = re.findall(r'#include "(\w+\.h)"', path.read_text())
    others = [unit(CSRC / name) for name in included]
    wrong = [name for name in others if name != unit(path) and LAYER_OF[name] >= LAYER_OF[unit(path)]]
    assert wrong == []


def defined_in(path):
    """The functions that other files may call."""
    return {name for name in re.findall(r"(?m)^(?!static)[\w *]+?\b((?:plx|py)_\w+)\([^;{]*\{", code(path))}


def test_calls_only_go_down():
    """A declaration in a header below would hide a call that goes up."""
    unit_of = {name: unit(path) for path in sources() if path.suffix == ".c" for name in defined_in(path)}
    assert len(unit_of) > 100
    wrong = []
    for path in sources():
        if path.suffix != ".c":
            continue
        own = unit(path)
        for name in set(re.findall(r"\b(?:plx|py)_\w+\b", code(path))) & unit_of.keys():
            if unit_of[name] != own and LAYER_OF[unit_of[name]] >= LAYER_OF[own]:
                wrong.append(f"{path.name} calls {name} of {unit_of[name]}")
    assert wrong == []


def test_only_the_files_that_say_so_know_python():
    assert {path.name for path in sources() if "<Python.h>" in path.read_text()} == {"py_arguments.h"}
    assert [p.name for p in sources() if not p.name.startswith("py_") and re.search(r'"py_', p.read_text())] == []


def test_no_file_is_longer_than_one_can_read():
    assert [path.name for path in sources() if len(path.read_text().splitlines()) > MOST_LINES] == []
