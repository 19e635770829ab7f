import fcntl
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks

from phalanx._base.deadline import Deadline
from phalanx._comm.backend.init_file import check_init_file, is_written_by_store
from phalanx.errors import DeadlineError
from phalanx.testing import run_ranks


def test_what_a_file_store_writes_is_taken_whatever_its_keys_hold(tmp_path) -> None:
    rng = random.Random(0)
    path = tmp_path / "store"
    store = dist.FileStore(str(path), 2)
    for _ in range(300):
        key = "".join(rng.choice("ab/é\0") for _ in range(rng.randrange(1, 9)))
        match rng.randrange(4):
            case 0:
                store.set(key, rng.randbytes(rng.choice((0, 1, 4, 300))))
            case 1:
                store.add(f"number of {key}", rng.randrange(-5, 1 << 40))
            case 2:
                store.delete_key(key)
            case 3:
                store.compare_set(f"compared {key}", "", "x" * rng.randrange(20))
        check_init_file(f"file://{path}", Deadline.after(1))


def _is_written_by_store(path, content):
    path.write_bytes(content)
    with path.open("rb") as file:
        return is_written_by_store(file.fileno())


def test_what_no_store_has_written_is_refused(tmp_path) -> None:
    rng = random.Random(0)
    path = tmp_path / "file"
    assert _is_written_by_store(path, b"")
    text = b"The quick brown fox jumps over the lazy dog.\n"
    contents = [text[:n] for n in range(1, len(text))] + [bytes(n) for n in range(1, 40)]
    contents += [rng.randbytes(rng.randrange(1, 5000)) for _ in range(200)]
    assert not any(_is_written_by_store(path, content) for content in contents)


def _meets(rank, world_size, path, seconds):
    try:
        dist.init_process_group(
            "phalanx", f"file://{path}", rank=rank, world_size=world_size, timeout=timedelta(seconds=seconds)
        )
    except (ValueError, DeadlineError) as error:
        return f"{type(error).__name__}: {error}"
    ones = torch.ones(2)
    dist.all_reduce(ones)
    dist.destroy_process_group()
    return ones.tolist()


def test_ranks_that_meet_in_a_foreign_file_are_told_so_at_once(tmp_path) -> None:
    """torch's FileStore takes the text for a length of 1.8 GB, and waits for the rest in spite of the timeout."""
    file = tmp_path / "an init file"
    file.write_text("lr: 0.1\nbatch_size: 32\n")
    for said in run_ranks(_meets, 2, file, 60, init=False):
        assert said.startswith(f"ValueError: init_method='file://{file}': the file holds 23 bytes that no FileStore")
        assert "Choose a path where no file exists" in said
    assert file.read_text() == "lr: 0.1\nbatch_size: 32\n"
    for said in run_ranks(_meets, 2, tmp_path, 60, init=False):
        assert (
            said == f"ValueError: init_method='file://{tmp_path}': not a regular file. Choose a path "
            "where no file exists."
        )
    file.write_bytes(b"")
    assert run_ranks(_meets, 2, file, 60, init=False) == [[2.0, 2.0]] * 2
    assert run_ranks(_meets, 2, tmp_path / "new", 60, init=False) == [[2.0, 2.0]] * 2


def test_a_folder_that_is_not_there_ends_the_wait_at_the_timeout(tmp_path) -> None:
    """torch looks for it for five minutes, whatever the timeout."""
    for said in run_ranks(_meets, 2, tmp_path / "no" / "file", 0.5, init=False):
        assert said.startswith("DeadlineError: ")
        assert f"there is no folder {tmp_path / 'no'}.\nCreate it before the ranks start" in said


@on_ranks(2, init=False)
def test_a_folder_that_one_rank_makes_late_is_waited_for(rank, world_size, tmp_path) -> None:
    folder = tmp_path / "late"
    if rank == 1:
        folder.mkdir()
    assert _meets(rank, world_size, folder / "file", 60) == [2.0, 2.0]


def test_a_path_is_read_as_torch_reads_it(tmp_path) -> None:
    """A folder named run%2042 was taken for another, and awaited."""
    (tmp_path / "run%2042").mkdir()
    check_init_file(f"file://{tmp_path}/run%2042/store", Deadline.after(0.05))


def test_a_file_that_another_process_has_locked_is_named(tmp_path) -> None:
    path = tmp_path / "locked"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DeadlineError, match="another process has locked this file"):
            check_init_file(f"file://{path}", Deadline.after(0.05))
