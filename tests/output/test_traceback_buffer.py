"""Which of the ranks' tracebacks are shown, and which are told once for several ranks."""

import pytest

from phalanx._job.output.traceback_buffer import TracebackBuffer, without_numbers

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line {line}, in <module>\n    load()\n{error}\n'


def hold(**errors: str) -> TracebackBuffer:
    """Return what holds the traceback of each rank (r0, r1, ...), which has printed it."""
    held = TracebackBuffer()
    for name, error in errors.items():
        rank, text = int(name[1:]), TRACEBACK.format(line=9, error=error)
        held.expect(rank, text)
        assert held.feed(rank, text.encode().splitlines()) == []
    return held


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("ValueError: rank 1: sample 20 is broken", "ValueError: rank 2: sample 37 is broken", True),
        ("loss was 1.5e-3", "loss was 0.25", True),
        ("at 0x7f00ab", "at 0x7f00cd", True),
        ("expected float32", "expected float64", False),
        ("rank 1 was lost in all_reduce (train.py:7)", "rank 1 was lost in all_reduce (train.py:9)", False),
        ('  File "train.py", line 7, in f', '  File "train.py", line 9, in f', False),
    ],
)
def test_numbers_are_no_difference_but_places_in_code_and_types_are(one: str, other: str, alike: bool) -> None:
    assert (without_numbers(one.encode()) == without_numbers(other.encode())) == alike


def test_of_several_that_are_alike_one_is_shown_and_a_line_for_each_of_the_others() -> None:
    held = hold(r1="KeyError: 5", r2="KeyError: 6", r3="IndexError: 7")
    shown = held.release()
    assert shown == [
        *((1, line) for line in TRACEBACK.format(line=9, error="KeyError: 5").encode().splitlines()),
        (2, b"the same traceback as rank 1's, perhaps with other numbers"),
        *((3, line) for line in TRACEBACK.format(line=9, error="IndexError: 7").encode().splitlines()),
    ]
    assert held.release() == []


def test_a_quiet_one_is_never_shown() -> None:
    held, text = TracebackBuffer(), TRACEBACK.format(line=9, error="KeyboardInterrupt")
    held.expect(0, text, quiet=True)
    assert held.feed(0, [*text.encode().splitlines(), b"saved"]) == [b"saved"]
    assert held.release() == []


def test_a_lost_ranks_traceback_was_reported_and_is_never_shown_but_its_replacements_is() -> None:
    held, text = TracebackBuffer(), TRACEBACK.format(line=9, error="KeyError: 5").encode().splitlines()
    held.expect(1, b"\n".join(text).decode())
    assert held.feed(1, text[:1]) == []
    held.hide(1)
    assert held.feed(1, text[1:]) == []  # the rank prints while it exits
    assert held.release() == []
    other = TRACEBACK.format(line=9, error="IndexError: 7")
    held.expect(1, other)
    assert held.feed(1, other.encode().splitlines()) == []
    assert held.release() == [(1, line) for line in other.encode().splitlines()]
