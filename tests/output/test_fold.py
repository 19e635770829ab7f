import random

import pytest

from phalanx._comm.diagnostics.rank_list import format_ranks
from phalanx._job.output.display import LineFolder


def show(folder: LineFolder, now: float) -> list[str]:
    return [f"{format_ranks(line.ranks)}:{line.text.decode()}" for line in folder.release(now)]


def test_a_line_of_all_ranks_is_released_at_once_and_once() -> None:
    folder = LineFolder(range(3))
    for rank in (2, 0, 1):
        assert show(folder, 0.0) == []
        folder.add(rank, 1, b"same", 0.0)
    assert show(folder, 0.0) == ["0-2:same"]
    assert folder.next_due is None


def test_a_line_of_some_ranks_waits_for_the_window() -> None:
    folder = LineFolder(range(4), window_s=0.1)
    folder.add(0, 1, b"mine", 0.0)
    folder.add(2, 1, b"mine", 0.05)
    assert folder.next_due == 0.1
    assert show(folder, 0.09) == []
    assert show(folder, 0.1) == ["0,2:mine"]


def test_a_rank_keeps_its_own_order() -> None:
    folder = LineFolder(range(2))
    for rank, text in [(0, b"a"), (0, b"b"), (1, b"b"), (1, b"a")]:
        folder.add(rank, 1, text, 0.0)
    # rank 1 said b before a: it may share the b, and its a must come behind
    assert show(folder, 1.0) == ["0:a", "0-1:b", "1:a"]


def test_a_repeated_line_is_counted_as_often_as_it_was_printed() -> None:
    folder = LineFolder(range(2))
    for rank in (0, 0, 1, 1, 1):
        folder.add(rank, 1, b"x", 0.0)
    assert show(folder, 1.0) == ["0-1:x", "0-1:x", "1:x"]


def test_stdout_and_stderr_do_not_fold_together() -> None:
    folder = LineFolder(range(2))
    folder.add(0, 1, b"x", 0.0)
    folder.add(1, 2, b"x", 0.0)
    assert [(line.stream, line.ranks) for line in folder.release(1.0)] == [(1, {0}), (2, {1})]


def test_nobody_waits_for_a_rank_that_has_ended() -> None:
    folder = LineFolder(range(2))
    folder.end(1)
    folder.add(0, 1, b"alone", 0.0)
    assert show(folder, 0.0) == ["0:alone"]


def test_a_flood_is_not_held_back() -> None:
    folder = LineFolder(range(2))
    for i in range(10_000):
        folder.add(0, 1, b"%d" % i, 0.0)
    assert len(folder.release(0.0)) > 5000


def test_equal_lines_of_one_rank_cost_the_same_each(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every line was compared with all equal ones that were waiting: 60,000 blank lines took half a minute.
    compared = [0]

    class Order(int):
        def __lt__(self, other: int) -> bool:
            compared[0] += 1
            return int(self) < int(other)

        def __gt__(self, other: int) -> bool:
            compared[0] += 1
            return int(self) > int(other)

        def __add__(self, other: int) -> "Order":
            return Order(int(self) + int(other))

    folder = LineFolder(range(2))
    monkeypatch.setattr(folder, "_order", Order(0))
    for _ in range(20_000):
        folder.add(0, 1, b"", 0.0)
    assert compared[0] < 20 * 20_000
    for _ in range(20_000):
        folder.add(1, 1, b"", 0.0)
    assert compared[0] < 2 * 20 * 20_000
    assert len(folder.release(0.0)) == 20_000


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_nothing_is_lost_invented_or_reordered(world_size: int) -> None:
    choose = random.Random(world_size)
    folder = LineFolder(range(world_size), window_s=0.1)
    said: dict[int, list[bytes]] = {rank: [] for rank in range(world_size)}
    heard: dict[int, list[bytes]] = {rank: [] for rank in range(world_size)}
    now = 0.0
    for _ in range(2000):
        now += choose.random() * 0.03
        rank, text = choose.randrange(world_size), choose.choice([b"a", b"b", b"c"])
        said[rank].append(text)
        folder.add(rank, 1, text, now)
        for line in folder.release(now):
            for hearer in line.ranks:
                heard[hearer].append(line.text)
    for line in folder.release(float("inf")):
        for hearer in line.ranks:
            heard[hearer].append(line.text)
    assert heard == said


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([0], "0"), ([3, 1, 2], "1-3"), ([0, 1, 3, 7, 8, 9], "0-1,3,7-9")]
)
def test_ranks_are_written_as_ranges(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text
