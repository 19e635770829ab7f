"""A real server of the S3 protocol for tests: a process of moto's, whose wire can be cut."""

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "s3_server.py"


@dataclass
class S3:
    """A server: an address of a new folder for each test, and a wire to it."""

    endpoint: str
    _cut: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def new_folder(self) -> str:
        """Return an address below which nothing is."""
        return f"s3://runs/{next(self._numbers)}"

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Cut the wire: connections are reset, and new ones too."""
        self.cut_now()
        try:
            yield
        finally:
            self.mend()

    def cut_now(self) -> None:
        """Cut the wire, in any process."""
        self._cut.touch()

    def mend(self) -> None:
        """Let the wire carry again."""
        self._cut.unlink(missing_ok=True)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[S3]:
    """Yield a server that runs, with a bucket; clients find it in the environment."""
    cut = folder / "cut"
    process = subprocess.Popen(
        [sys.executable, os.fspath(PROGRAM), os.fspath(cut)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield S3(process.stdout.readline().strip(), cut)
        finally:
            cut.unlink(missing_ok=True)
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def environment(endpoint: str) -> dict[str, str]:
    """Return the variables by which s3fs finds the server; one attempt of its own, as ours are what is tested."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """One server for the tests of a file."""
    pytest.importorskip("moto.server", reason="the dev extra has it")
    pytest.importorskip("s3fs", reason="the s3 extra has it")
    with serving(tmp_path_factory.mktemp("s3")) as server:
        import urllib.request

        urllib.request.urlopen(urllib.request.Request(f"{server.endpoint}/runs", method="PUT")).close()
        yield server


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """The server, with the variables that lead to it."""
    for name, value in environment(s3_server.endpoint).items():
        monkeypatch.setenv(name, value)
    yield s3_server
    s3_server.mend()
