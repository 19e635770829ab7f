import errno
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx._job.output.display import Writer
from phalanx._job.output.logs import NO_STREAMS, LogFile, Logs, Streams
from phalanx._job.output.standard import encode, show
from phalanx.errors import LaunchError


@contextmanager
def files_no_longer_than(size: int) -> Iterator[None]:
    """As a disk that is full: what reaches over `size` is not written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_log_goes_on_when_there_is_room_again_and_says_that_lines_are_missing(tmp_path: Path) -> None:
    log = LogFile(str(tmp_path / "log"))
    log.put([b"first", b"second"])
    with files_no_longer_than(16):
        for _ in range(3):
            log.put([b"torn and lost"])
    assert log.problem is not None
    assert log.problem.errno == errno.EFBIG
    log.put([b"later"])
    log.close()
    text = (tmp_path / "log").read_text()
    assert text == "first\nsecond\ntor\n[phalanx run: lines were lost here: File too large]\nlater\n"


def test_a_log_that_cannot_be_created_is_created_later_and_says_that_lines_are_missing(tmp_path: Path) -> None:
    (tmp_path / "attempt_1").touch()
    log = LogFile(str(tmp_path / "attempt_1" / "0" / "stdout.log"))
    assert log.problem is not None
    log.put([b"lost"])
    (tmp_path / "attempt_1").unlink()
    log.put([b"later"])
    log.close()
    assert Path(log.path).read_text() == f"\n[phalanx run: lines were lost here: {log.problem.strerror}]\nlater\n"


def test_our_own_output_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb") as file:
        writer = Writer(file.fileno())
        with files_no_longer_than(3):
            for _ in range(2):
                writer.put(b"torn\n")
                writer.write_some()
        assert not writer.broken
        assert not writer.waiting
        writer.put(b"later\n")
        writer.write_some()
        assert writer.problem is not None
    assert (tmp_path / "out").read_text() == "tor\n[phalanx run: lines were lost here: File too large]\nlater\n"


def test_text_never_fails() -> None:
    assert encode("ü") == "ü".encode()
    assert encode("a\udc80\ud800") == b"a\\udc80\\ud800"
    read, write = os.pipe()
    assert show(write, "\udc80")
    assert os.read(read, 100) == b"\\udc80\n"
    os.close(read)
    assert not show(write, "nobody reads")
    os.close(write)
    assert not show(write, "nobody is there")


def test_streams_without_a_folder_are_refused_under_their_own_options(monkeypatch):
    """The message began with "--log-dir None"."""
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    both = Streams(3)
    with pytest.raises(LaunchError, match=r"run: --redirects, --tee: cannot write /dev/null/\S+: .* Give --log-dir"):
        Logs(None, "job", redirects=both, tee=NO_STREAMS, local_ranks_filter=None)
