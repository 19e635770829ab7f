"""Where a failure of a rank is placed: in the user's program, not in the library that raised."""

import json
import linecache
import os

import pytest

from phalanx._job.agent.reporter import find_place, format_own_lines


def _place_of(program: str, folder: str) -> str:
    path = os.path.join(folder, "train.py")
    try:
        exec(compile(program, path, "exec"), {})
    except Exception as error:
        return find_place(error)
    raise AssertionError("nothing was raised")


def test_what_a_library_raises_is_placed_where_the_user_called_it(tmp_path) -> None:
    """The summary of a failed job said "shared_memory.py:139" or "graph.py:979": lines that nobody knew."""
    library = "import json\n\n\njson.loads('{')\n"
    ours = "import phalanx._base.deadline\n\nphalanx._base.deadline.Deadline.after(-1)\n"
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
    assert find_place(caught.value).startswith("decoder.py:")


def _lines_of(program: str, folder: str) -> str:
    path = os.path.join(folder, "train.py")
    with open(path, "w") as file:
        file.write(program)
    linecache.checkcache(path)
    try:
        exec(compile(program, path, "exec"), {})
    except Exception as error:
        error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
        return format_own_lines(error).replace(folder + os.sep, "")
    raise AssertionError("nothing was raised")


def test_the_users_lines_are_shown_with_the_innermost_line_of_the_library_that_raised(tmp_path) -> None:
    lines = _lines_of("import json\n\n\njson.loads('{')\n", str(tmp_path)).splitlines()
    assert lines[0] == "Traceback (most recent call last; --traceback shows the lines of libraries):"
    assert lines[1:3] == ['  File "train.py", line 4, in <module>', "    json.loads('{')"]
    assert "decoder.py" in lines[3]
    assert lines[-1].startswith("json.decoder.JSONDecodeError: ")
    assert sum("File" in line for line in lines) == 2, "__init__.py and another line of decoder.py are left out"


def test_our_own_lines_are_not_shown_and_causes_without_the_users_lines_neither(tmp_path) -> None:
    """One mistaken line gave 70 lines: three chained tracebacks of ours."""
    program = "import phalanx._base.deadline\n\nphalanx._base.deadline.Deadline.after(-1)\n"
    assert _lines_of(program, str(tmp_path)).splitlines()[1:3] == [
        '  File "train.py", line 3, in <module>',
        "    phalanx._base.deadline.Deadline.after(-1)",
    ]
    chained = (
        "import json\ntry:\n    json.loads('{')\nexcept ValueError as error:\n    raise KeyError('x') from error\n"
    )
    assert _lines_of(chained, str(tmp_path)).count("Traceback") == 2, "both have a line of the user's"


def test_frames_in_the_message_of_an_exception_from_c_plus_plus_are_left_out(tmp_path) -> None:
    text = "It failed.\\n\\nAt:\\n  /a place/session.py(158): check\\n  /x/work.py(4): <lambda>\\n"
    assert _lines_of(f"raise RuntimeError('{text}')\n", str(tmp_path)).endswith("RuntimeError: It failed.\n")
