import random

import pytest

from phalanx._job.output.pump import MAX_LINE_BYTES, LineSplitter


def split(*chunks: bytes) -> list[bytes]:
    splitter = LineSplitter()
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    return lines + splitter.finish()


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\n\nb\n", [b"a", b"", b"b"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"\r\n", [b""]),
        (b"10%\r20%\r30%\n", [b"30%"]),
        (b"\r10%\r20%\n", [b"20%"]),
        (b"10%\r", [b"10%"]),
        (b"10%\r      \rdone\n", [b"done"]),
        (b"10%\r      \r", []),
        (b"10%\r\x1b[K\n", []),
        (b"\x1b[31mred\x1b[0m\x1b[2K\n", [b"\x1b[31mred\x1b[0m"]),
        (b"\xff\xfe\n", [b"\xff\xfe"]),
    ],
)
def test_only_the_final_state_of_a_line_counts(data: bytes, lines: list[bytes]) -> None:
    assert split(data) == lines


def test_lines_do_not_depend_on_how_the_bytes_were_cut() -> None:
    choose = random.Random(7)
    pieces = [b"a", b"bc", b"\n", b"\r", b"\r\n", b"  ", b"\x1b[K", b"\x1b[31m", b"50%"]
    for _ in range(500):
        data = b"".join(choose.choice(pieces) for _ in range(choose.randrange(12)))
        cuts = sorted(choose.randrange(len(data) + 1) for _ in range(4))
        chunks = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert split(*chunks) == split(data), (data, cuts)


def test_the_status_follows_carriage_returns_and_ends_with_the_line() -> None:
    splitter = LineSplitter()
    seen = []
    for chunk in (b"text", b" more\n", b"\r10%", b"\r20", b"%", b"\r   \r", b"30%\r", b"\rend\n"):
        splitter.feed(chunk)
        seen.append(splitter.status)
    assert seen == [b"", b"", b"10%", b"20", b"20%", b"", b"30%", b""]


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    splitter = LineSplitter()
    lines = splitter.feed(b"x" * (MAX_LINE_BYTES + 1))
    assert [len(line) for line in lines] == [MAX_LINE_BYTES + 1]
    assert splitter.finish() == []


def test_a_progress_bar_that_never_ends_its_line_does_not_fill_the_memory() -> None:
    splitter = LineSplitter()
    for i in range(10_000):
        assert splitter.feed(b"\r%d%%" % i) == []
    assert len(splitter._rest) < 20
    assert splitter.finish() == [b"9999%"]
