import pytest

from phalanx._job.output.screen import MAX_STATUS_LINES, format_prefix, plan_status, wants_colour


def test_a_prefix_is_plain_in_a_pipe() -> None:
    assert format_prefix({2}, colour=False) == b"[2] "
    assert format_prefix({0, 1, 2, 5}, colour=False) == b"[0-2,5] "


def test_each_rank_has_a_colour_and_keeps_it() -> None:
    prefixes = [format_prefix({rank}, colour=True) for rank in range(6)]
    assert len(set(prefixes)) == 6
    assert all(prefix.startswith(b"\x1b[") and prefix.endswith(b"\x1b[0m ") for prefix in prefixes)


@pytest.mark.parametrize(
    ("environ", "terminal", "wanted"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
    ],
)
def test_colours_are_for_terminals_unless_the_user_says_otherwise(
    environ: dict[str, str], terminal: bool, wanted: bool
) -> None:
    assert wants_colour(environ, terminal) is wanted


def test_equal_states_share_a_status_line() -> None:
    lines = plan_status([(0, b"10%"), (1, b"20%"), (2, b"10%")], columns=80, rows=24, colour=False)
    assert lines == [b"[0,2] 10%", b"[1] 20%"]


def test_a_status_line_never_wraps() -> None:
    (line,) = plan_status([(0, b"x" * 200)], columns=20, rows=24, colour=False)
    assert line == b"[0] " + b"x" * 15
    (wide,) = plan_status([(0, "漢字漢字漢字漢字".encode())], columns=11, rows=24, colour=False)
    assert wide.decode() == "[0] 漢字漢"


def test_colours_take_no_room_and_end_with_the_line() -> None:
    (line,) = plan_status([(0, b"\x1b[31m" + b"x" * 50)], columns=10, rows=24, colour=False)
    assert line == b"[0] \x1b[31m" + b"x" * 5 + b"\x1b[0m"


@pytest.mark.parametrize(("rows", "count"), [(24, MAX_STATUS_LINES), (6, 3), (1, 1)])
def test_status_lines_leave_room_for_the_others(rows: int, count: int) -> None:
    states = [(rank, b"%d" % rank) for rank in range(50)]
    assert len(plan_status(states, columns=80, rows=rows, colour=False)) == count
