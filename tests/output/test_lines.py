import io
import random

import pytest

from phalanx._job.output.pump import MAX_LINE_BYTES, PARTIAL_S, REDRAW_S, LineSplitter


def split(*chunks: bytes) -> list[bytes]:
    splitter = LineSplitter()
    lines = [line for chunk in chunks for line in splitter.feed(chunk, 0.0)]
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
    pieces = [b"a", b"bc", b"\n", b"\r", b"\r\n", b"  ", b"\x1b[K", b"\x1b[A", b"\x1b[31m", b"50%"]
    for _ in range(2000):
        data = b"".join(choose.choice(pieces) for _ in range(choose.randrange(12)))
        cuts = sorted(choose.randrange(len(data) + 1) for _ in range(4))
        chunks = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert split(*chunks) == split(data), (data, cuts)


def test_the_status_follows_carriage_returns_and_ends_with_the_line() -> None:
    splitter = LineSplitter()
    seen = []
    for chunk in (b"text", b" more\n", b"\r10%", b"\r20", b"%", b"\r   \r", b"30%\r", b"\rend\n", b"text\n"):
        splitter.feed(chunk, 0.0)
        seen.append(splitter.status)
    assert seen == [b"", b"", b"10%", b"20", b"20%", b"", b"30%", b"end", b""]


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    splitter = LineSplitter()
    lines = splitter.feed(b"x" * (MAX_LINE_BYTES + 1), 0.0)
    assert [len(line) for line in lines] == [MAX_LINE_BYTES + 1]
    assert splitter.finish() == []


def test_a_progress_bar_that_never_ends_its_line_does_not_fill_the_memory() -> None:
    splitter = LineSplitter()
    for i in range(10_000):
        assert splitter.feed(b"\r%d%%" % i, 0.0) == []
    assert len(splitter._rest) < 20
    assert splitter.finish() == [b"9999%"]


class Writes(io.StringIO):
    """`Writes` lists the writes of a program to a file."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[bytes] = []

    def write(self, text: str) -> int:
        self.all.append(text.encode())
        return len(text)


def train(levels: int, *, leave: bool) -> list[bytes]:
    """Return the writes of nested loops, each with a bar; the outer loop also prints lines."""
    tqdm = pytest.importorskip("tqdm").tqdm
    tqdm.monitor_interval = 0  # no thread
    file = Writes()

    def loop(level: int) -> None:
        steps = tqdm(
            range(3), desc=f"level{level}", file=file, mininterval=0, ncols=60, leave=leave or not level,
            bar_format="{desc}: {n_fmt}/{total_fmt}",
        )  # fmt: skip
        for i in steps:
            if level + 1 < levels:
                loop(level + 1)
            if level == 0:
                tqdm.write(f"epoch {i}", file=file)
            if level == 1:
                tqdm.write(f"batch {i}", file=file)

    loop(0)
    print("after", file=file)
    return file.all


def show_on_terminal(data: bytes) -> list[bytes]:
    """Return the rows of a terminal, which are not blank, after `data`."""
    rows, at, column = [bytearray()], 0, 0
    for code in data.replace(b"\x1b[A", b"\x00"):
        if code == 0:
            at = max(0, at - 1)
        elif code == ord("\r"):
            column = 0
        elif code == ord("\n"):
            at, column = at + 1, 0
            rows += [bytearray()] * (at == len(rows))
        else:
            rows[at] = rows[at].ljust(column)
            rows[at][column : column + 1] = bytes([code])
            column += 1
    return [bytes(row.rstrip()) for row in rows if row.strip()]


@pytest.mark.slow(but=("2-False", "2-True"))
@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_nested_bars_leave_the_lines_that_a_terminal_shows(levels: int, leave: bool) -> None:
    """Each redraw of an inner bar became a line: 138 lines for two ranks with 60 batches."""
    writes = train(levels, leave=leave)
    for end in range(len(writes) + 1):  # the rank may die after any of them
        lines = split(*writes[:end])
        assert [line.rstrip() for line in lines if line.strip()] == show_on_terminal(b"".join(writes[:end])), end
    whole = split(*writes)
    assert whole == split(b"".join(writes))
    assert (b"level1" in b"".join(whole)) == (leave and levels > 1)


def test_a_bar_of_a_lower_position_is_one_line() -> None:
    assert split(*[b"\n\n", b"\r10%", b"\x1b[A\x1b[A", b"\n\n", b"\r20%", b"\x1b[A\x1b[A"]) == [b"20%"]


def test_the_status_has_all_nested_bars() -> None:
    splitter = LineSplitter()
    seen = []
    for chunk in (b"\repoch 1", b"\n", b"\rbatch 1", b"\x1b[A", b"\repoch 2", b"\n\r       \x1b[A"):
        assert splitter.feed(chunk, 0.0) == []
        seen.append(splitter.status)
    assert seen == [b"epoch 1", b"epoch 1", *[b"epoch 1\nbatch 1"] * 2, b"epoch 2\nbatch 1", b"epoch 2"]


def test_only_redrawn_and_blank_lines_wait_and_only_for_a_moment() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"plain\nplain\r\n", 0.0) == [b"plain", b"plain"]
    assert splitter.due is None
    assert splitter.feed(b"\r100%\n", 1.0) == []
    assert splitter.due == 1.0 + REDRAW_S
    assert splitter.feed(b"\rnext", 1.05) == []
    assert splitter.release(1.0 + REDRAW_S) == [b"100%"]
    assert splitter.due is None
    assert splitter.feed(b"\r100%\n\rnext", 2.0) == []
    assert splitter.feed(b"\rnext 2", 3.0) == [b"100%"]
    assert splitter.feed(b"\n\nplain\n", 3.0) == [b"next 2", b"", b"plain"]


def test_many_redrawn_lines_do_not_fill_the_memory() -> None:
    splitter = LineSplitter()
    lines = splitter.feed(b"".join(b"\r%d\n" % i for i in range(1000)) + b"\x1b[A" * 2000, 0.0)
    assert lines == [b"%d" % i for i in range(1000 - 64)]
    assert [*lines, *splitter.finish()] == [b"%d" % i for i in range(1000)]


def test_text_without_a_line_end_is_shown_after_a_second_and_only_once() -> None:
    """`print("Loading ... ", end="", flush=True)` before a load that hangs was never shown."""
    splitter = LineSplitter()
    assert splitter.feed(b"start\nLoading ... ", 0.0) == [b"start"]
    assert splitter.due == PARTIAL_S
    assert splitter.show_partial(0.9 * PARTIAL_S) == b""
    assert splitter.show_partial(PARTIAL_S) == b"Loading ... "
    assert splitter.due is None
    lines = splitter.feed(b"done\nnext\nSaving ... ", 90.0)
    assert lines == [b"Loading ... done", b"next"]  # for the log
    assert splitter.drop_shown(lines) == [b"done", b"next"]
    assert splitter.due == 90.0 + PARTIAL_S
    assert splitter.drop_shown([b"Loading ... done"]) == [b"Loading ... done"]


def test_a_line_whose_whole_text_was_shown_leaves_no_blank_line() -> None:
    splitter = LineSplitter()
    splitter.feed(b"Loading", 0.0)
    assert splitter.show_partial(PARTIAL_S) == b"Loading"
    assert splitter.drop_shown(splitter.feed(b"\nnext\n", 2.0)) == [b"next"]
    splitter.feed(b"end", 3.0)
    assert splitter.show_partial(5.0) == b"end"
    assert splitter.drop_shown(splitter.finish()) == []


def test_slow_dots_are_shown_less_and_less_often() -> None:
    splitter = LineSplitter()
    shown = []
    for second in range(0, 600, 2):
        splitter.feed(b".", float(second))
        shown.append(splitter.show_partial(second + 1.9))
    assert [text for text in shown if text] == [b"."]
    assert splitter.show_partial(598 + 2 * PARTIAL_S) == b"." * 299
    assert splitter.drop_shown(splitter.feed(b" ready\n", 700.0)) == [b" ready"]


def test_only_plain_text_is_shown_before_its_line_ends() -> None:
    splitter = LineSplitter()
    for text in (b"  ", b"\r10%", b"\r20%\r", b"\n\r1\x1b[A"):
        splitter.feed(text, 0.0)
        assert splitter.show_partial(9.0) == b""
    splitter = LineSplitter()
    splitter.feed(b"Loading", 0.0)
    assert splitter.show_partial(9.0) == b"Loading"
    splitter.feed(b"\rLoading 100%\n", 10.0)
    assert splitter.drop_shown(splitter.release(11.0)) == [b"Loading 100%"]
