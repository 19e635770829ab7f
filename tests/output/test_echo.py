from phalanx._job.output.traceback_buffer import Echo

TEXT = b"Traceback:\n  here\n\nValueError: x\n"


def feed(echo: Echo, *lines: bytes) -> list[bytes]:
    return [shown for line in lines for shown in echo.feed(line)]


def test_the_lines_of_the_text_are_kept_and_others_are_not() -> None:
    echo = Echo(TEXT)
    assert feed(echo, b"before", b"  here") == [b"before", b"  here"]
    assert feed(echo, b"Traceback:", b"  here", b"", b"ValueError: x") == []
    assert feed(echo, b"after", b"Traceback:") == [b"after", b"Traceback:"]
    assert echo.release() == [b"Traceback:", b"  here", b"", b"ValueError: x"]
    assert echo.release() == []


def test_what_stood_on_the_first_line_already_is_shown() -> None:
    echo = Echo(TEXT)
    assert feed(echo, b" 50%|##  Traceback:", b"  here") == [b" 50%|##  "]


def test_a_text_that_comes_otherwise_is_shown_whole() -> None:
    echo = Echo(TEXT)
    assert feed(echo, b"Traceback:", b"  here", b"from a thread", b"", b"ValueError: x") == [
        b"Traceback:", b"  here", b"from a thread", b"", b"ValueError: x",
    ]  # fmt: skip


def test_once_released_the_rest_is_shown() -> None:
    echo = Echo(TEXT)
    assert feed(echo, b"Traceback:") == []
    assert echo.release() == [b"Traceback:"]
    assert feed(echo, b"  here") == [b"  here"]


def test_the_tag_of_torchs_own_hook_is_no_difference() -> None:
    echo = Echo(TEXT)
    lines = [b"[rank1]: Traceback:", b"[rank1]:   here", b"[rank1]: ", b"[rank1]: ValueError: x"]
    assert feed(echo, *lines) == []
    assert echo.release() == lines
    assert feed(Echo(TEXT), *lines[:2], b"other") == [*lines[:2], b"other"]
