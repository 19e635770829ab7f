"""Where a failure of a rank is placed: in the user's program, not in the library that raised."""

import json
import os

import pytest

from phalanx.agent.worker import _find_place


def _place_of(program: str, folder: str) -> str:
    path = os.path.join(folder, "train.py")
    try:
        exec(compile(program, path, "exec"), {})
    except Exception as error:
        return _find_place(error)
    raise AssertionError("nothing was raised")


def test_what_a_library_raises_is_placed_where_the_user_called_it(tmp_path) -> None:
    """The summary of a failed job said "shared_memory.py:139" or "graph.py:979": lines that nobody knew."""
    library = "import json\n\n\njson.loads('{')\n"
    ours = "import phalanx.deadline\n\nphalanx.deadline.Deadline.after(-1)\n"
    installed = "import pytest\n\n\n\npytest.raises(1)\n"
    users = "def wrong():\n    raise LookupError\n\nwrong()\n"
    assert _place_of(library, str(tmp_path)) == "train.py:4"
    assert _place_of(ours, str(tmp_path)) == "train.py:3"
    assert _place_of(installed, str(tmp_path)) == "train.py:5"
    assert _place_of(users, str(tmp_path)) == "train.py:2"


def test_without_a_line_of_the_users_the_innermost_is_told() -> None:
    with pytest.raises(ValueError) as caught:
        json.loads("{")
    assert caught.value.__traceback__ is not None
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # without this file's line
    assert _find_place(caught.value).startswith("decoder.py:")
