"""Write the ranks' log files. Once the job has begun, a full disk only loses lines; the job continues."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO

from phalanx._job.output.standard import encode
from phalanx.errors import LaunchError


@dataclass(frozen=True)
class Streams:
    """`Streams` selects the streams of each local rank: 1 is stdout, 2 stderr, 3 both."""

    all: int = 0
    by_rank: tuple[tuple[int, int], ...] = ()

    def of(self, local_rank: int) -> int:
        return dict(self.by_rank).get(local_rank, self.all)


NO_STREAMS = Streams()


class LogFile:
    """A `LogFile` is a file of lines. If it cannot be created or written, lines are lost; a later line reports that."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problem: OSError | None = None  # the latest problem
        self._file: FileIO | None = None
        self._gap = False
        self._write(b"")

    def put(self, lines: Sequence[bytes]) -> None:
        """Write `lines`, as far as that is possible; `problem` is set if lines are lost."""
        self._write(b"\n".join(lines) + b"\n")

    def close(self) -> None:
        """Close the file; some file systems report write errors only now."""
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            self.problem = error

    def _write(self, data: bytes) -> None:
        if self._gap:
            data = explain_gap(self.problem) + data
        try:
            if self._file is None:
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
                # unbuffered: the last lines of a rank must be in the file even if all processes are killed
                self._file = FileIO(self.path, "w")
            while data:
                written = self._file.write(data) or 0
                data = data[written:]
                self._gap = False
        except OSError as error:
            self.problem = error
            self._gap = bool(data)


def explain_gap(problem: OSError | None) -> bytes:
    """Return the text that replaces lost lines; it also ends a partly written line."""
    why = (problem.strerror if problem is not None else None) or os.strerror(0)
    return encode(f"\n[phalanx run: lines were lost here: {why}]\n")


class Logs:
    """`Logs` writes the log files of this host's ranks, and decides which streams the screen shows.

    DIR/rank_0.log, … contain both streams of a rank. The streams that --redirects and --tee select also go to files
    with torchrun's names, DIR/ID_XXXXXXXX/attempt_0/LOCAL_RANK/stdout.log, one per local rank, stream and attempt.
    """

    def __init__(
        self,
        log_dir: str | None,
        run_id: str,
        *,
        redirects: Streams,
        tee: Streams,
        local_ranks_filter: tuple[int, ...] | None,
    ) -> None:
        """Create the folders of the logs.

        Raises:
            LaunchError: a folder cannot be created.
        """
        self._folder = log_dir
        self._by_rank: dict[int, LogFile] = {}
        self._by_stream: dict[tuple[int, int], LogFile] = {}
        self._redirects, self._tee, self._local_ranks_filter = redirects, tee, local_ranks_filter
        self._first = 0
        self.attempts = ""  # the folder of the files by attempt and local rank; empty if there are none
        self.streams = redirects != NO_STREAMS or tee != NO_STREAMS
        try:
            if log_dir is not None:
                os.makedirs(log_dir, exist_ok=True)
            if log_dir is not None or self.streams:
                import tempfile

                name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in run_id) + "_"
                base = log_dir if log_dir is not None else tempfile.mkdtemp(prefix="torchelastic_")
                self.attempts = tempfile.mkdtemp(prefix=name, dir=base)
        except OSError as error:
            raise self._refuse(error) from error

    def begin(self, ranks: Sequence[int], attempt: int) -> None:
        """Open the logs of `ranks`, all ranks of this host that are about to start.

        Raises:
            LaunchError: a file cannot be created, and this is the first call.
        """
        is_first = not self._by_rank and not self._by_stream
        self._first = min(ranks, default=0)
        if self._folder is not None:
            for rank in ranks:
                if rank not in self._by_rank:
                    self._by_rank[rank] = LogFile(os.path.join(self._folder, f"rank_{rank}.log"))
        for file in self._by_stream.values():
            file.close()
        self._by_stream.clear()
        for local_rank in range(len(ranks)):
            wanted = self._redirects.of(local_rank) | self._tee.of(local_rank)
            folder = os.path.join(self.attempts, f"attempt_{attempt}", str(local_rank))
            for stream, name in ((1, "stdout.log"), (2, "stderr.log")):
                if wanted & stream:
                    self._by_stream[local_rank, stream] = LogFile(os.path.join(folder, name))
        problem = next((log.problem for log in self._files if log.problem is not None), None)
        if is_first and problem is not None:
            raise self._refuse(problem) from problem

    @property
    def _files(self) -> tuple[LogFile, ...]:
        return (*self._by_rank.values(), *self._by_stream.values())

    def _refuse(self, error: OSError) -> LaunchError:
        if self._folder is None:
            option, advice = "--redirects, --tee", "Give --log-dir a directory to which you can write."
        else:
            option, advice = f"--log-dir {self._folder}", "Choose a directory to which you can write."
        fact = f"cannot write {error.filename}: {error.strerror}" if error.filename else error.strerror
        return LaunchError(f"phalanx run: {option}: {fact}. {advice}", exit_code=2)

    def shows(self, rank: int, stream: int) -> bool:
        """Return whether the screen shows this rank's stream."""
        local_rank = rank - self._first
        redirected = self._redirects.of(local_rank) & stream and not self._tee.of(local_rank) & stream
        return not redirected and (self._local_ranks_filter is None or local_rank in self._local_ranks_filter)

    def put(self, rank: int, stream: int, lines: Sequence[bytes]) -> str:
        """Write `lines` to the rank's log files; return a message if lines were lost, otherwise ""."""
        said = ""
        for log in (self._by_rank.get(rank), self._by_stream.get((rank - self._first, stream))):
            if log is None:
                continue
            log.put(lines)
            if log.problem is not None:
                said = (
                    f"phalanx run: --log-dir: cannot write {log.path}: {log.problem.strerror}. The job continues; "
                    "lines are lost until the logs can be written again."
                )
        return said

    def close(self) -> None:
        for log in self._files:
            log.close()
