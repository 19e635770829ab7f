"""Keep the shards that a process is reading open; read them by index if possible, otherwise in sequence."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from phalanx._base.deadline import Deadline
from phalanx._base.log import get_logger
from phalanx._base.storage import is_transient, retry
from phalanx.errors import DataError, summary_of

_logger = get_logger(__name__)
_END = object()
_FEW_JUMPS = 16
_of_parents: list[Any] = []  # shards that this worker has inherited: only the process that opened them may close them


class _OpenShard(Protocol):
    def get(self, numbers: Sequence[int]) -> list[Any]:
        """Return the samples with these numbers."""

    def close(self) -> None:
        """Release the shard's resources."""

    @property
    def is_used_up(self) -> bool:
        """Return whether all samples have been returned."""


class IndexedShard:
    """`IndexedShard` is a shard with `len()` and `[number]`; it uses `__getitems__(numbers)` if available."""

    is_used_up = False

    def __init__(self, name: str, samples: Any, length: int) -> None:
        if len(samples) != length:
            raise DataError(_wrong_length(name, len(samples), length))
        self._name, self._samples = name, samples
        self._get_several = getattr(samples, "__getitems__", None)

    def get(self, numbers: Sequence[int]) -> list[Any]:
        if self._get_several is not None:
            return list(self._get_several(list(numbers)))
        return [self._samples[number] for number in numbers]

    def close(self) -> None:
        _close(self._samples)


class IteratedShard:
    """`IteratedShard` is a shard that is read in sequence.

    Samples of the current window that were passed over are kept, because they may be requested later. Samples before
    the window are skipped: with the iterator's `skip(count)` if it has this method, otherwise by reading them.
    """

    def __init__(self, name: str, begin: Callable[[], Any], samples: Any, length: int, window: int) -> None:
        self._name, self._begin, self._length, self._window = name, begin, length, window
        self._skipped: dict[int, Any] = {}
        self._skipped_window = -1
        self.num_jumps = 0
        """The number of times that reading restarted, because a sample before the current position was requested."""
        self._source = samples
        self._iterator: Iterator[Any] = iter(samples)
        self._next = 0
        self._is_counted = True  # whether every sample before `_next` was read, none skipped

    def get(self, numbers: Sequence[int]) -> list[Any]:
        found = {number: self._get(number) for number in sorted(set(numbers))}
        return [found[number] for number in numbers]

    def _get(self, number: int) -> Any:
        window = number // self._window
        if window != self._skipped_window:
            self._skipped.clear()
            self._skipped_window = window
        if number in self._skipped:
            return self._skipped.pop(number)
        if number < self._next:
            self.num_jumps += 1
            self._restart()
        self._skip_to(window * self._window)
        while self._next < number:
            skipped = self._next
            self._skipped[skipped] = self._read()
        return self._read()

    def _restart(self) -> None:
        _close(self._source)
        self._skipped.clear()
        self._source = self._begin()
        self._iterator, self._next, self._is_counted = iter(self._source), 0, True

    def _skip_to(self, number: int) -> None:
        if number <= self._next:
            return
        skip = getattr(self._iterator, "skip", None)
        if skip is not None:
            skip(number - self._next)  # past the end, too
            self._next, self._is_counted = number, False
        while self._next < number:
            self._read()

    def _read(self) -> Any:
        sample = next(self._iterator, _END)
        if sample is _END:
            found = self._next if self._is_counted else f"at most {self._next}"
            raise DataError(_wrong_length(self._name, found, self._length))
        self._next += 1
        if self._next == self._length and next(self._iterator, _END) is not _END:
            raise DataError(_wrong_length(self._name, f"more than {self._length}", self._length))
        return sample

    @property
    def is_used_up(self) -> bool:
        return self._next == self._length and not self._skipped

    def close(self) -> None:
        self._skipped.clear()
        _close(self._iterator)
        _close(self._source)


class OpenShards:
    """`OpenShards` opens shards on demand, and keeps at most `most` of them open.

    A read that fails with a network error is retried for `retry_s` seconds, each time from a newly opened shard.
    """

    def __init__(
        self,
        read: Callable[[Any], Any],
        shards: Sequence[Any],
        lengths: Sequence[int],
        *,
        window: int,
        most: int,
        retry_s: float,
    ) -> None:
        self._read, self._shards, self._lengths = read, shards, lengths
        self._window, self._most, self._retry_s = window, most, retry_s
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._process = os.getpid()
        self._num_jumps = self._num_samples = 0

    def get(self, shard: int, numbers: Sequence[int]) -> list[Any]:
        """Return the samples with these numbers in shard number `shard`.

        Raises:
            DataError: the shard cannot be read, or does not have the given number of samples.
        """
        # In a DataLoader's worker, inherited open files share the parent's file position.
        if self._process != os.getpid():
            _of_parents.append(self._open)
            self._open, self._process = OrderedDict(), os.getpid()

        def get() -> list[Any]:
            try:
                return self._find(shard).get(numbers)
            except OSError:
                self._drop(shard)
                raise

        try:
            samples = retry(get, f"reading {_name(self._shards[shard])}", Deadline.after(self._retry_s))
        except DataError:
            raise
        except Exception as error:
            again = f" Retries went on for {self._retry_s:g} s." if is_transient(error) else ""
            raise DataError(
                f"Stream: samples {min(numbers)} to {max(numbers)} of shard {shard}, {_name(self._shards[shard])}, "
                f"cannot be read: {summary_of(error)}.{again}"
            ) from error
        if self._open[shard].is_used_up:
            self._drop(shard)
        self._warn_of_jumps(len(numbers))
        return samples

    def _find(self, shard: int) -> _OpenShard:
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        name = self._shards[shard]

        def begin() -> Any:
            return self._read(name)

        samples, length = begin(), self._lengths[shard]
        if hasattr(samples, "__getitem__") and hasattr(samples, "__len__"):
            found: _OpenShard = IndexedShard(_name(name), samples, length)
        else:
            found = IteratedShard(_name(name), begin, samples, length, self._window)
        while len(self._open) >= self._most:
            self._drop(next(iter(self._open)))
        self._open[shard] = found
        return found

    def _drop(self, shard: int) -> None:
        dropped = self._open.pop(shard, None)
        if dropped is not None:
            self._num_jumps += getattr(dropped, "num_jumps", 0)
            dropped.close()

    def _warn_of_jumps(self, num_samples: int) -> None:
        self._num_samples += num_samples
        jumps = self._num_jumps + sum(getattr(one, "num_jumps", 0) for one in self._open.values())
        if jumps >= _FEW_JUMPS and 4 * jumps > self._num_samples:
            self._num_jumps = -(1 << 60)
            _logger.warning(
                "Stream: samples are not requested in the stream's own order, so shards without an index are read from "
                "their beginning again and again: for %d of %d samples so far. Pass the DataLoader "
                "sampler=phalanx.DistributedSampler(stream), which requests samples in that order.",
                jumps,
                self._num_samples,
            )

    def close(self) -> None:
        """Close all shards, in the process that opened them."""
        if self._process != os.getpid():
            _of_parents.append(self._open)
            self._open = OrderedDict()
        while self._open:
            self._drop(next(iter(self._open)))

    def __del__(self) -> None:
        self.close()


def _wrong_length(name: str, found: int | str, given: int) -> str:
    return (
        f"Stream: shard {name} has {found} samples, but its length was given as {given}, so samples would be lost or "
        "repeated. Correct `lengths`, or remove the index file, so that samples are counted again. (`read` must return "
        "all samples: an iterable that divides itself among a DataLoader's workers returns only a part.)"
    )


def _name(shard: Any) -> str:
    return str(shard) if isinstance(shard, str | os.PathLike | int) else repr(shard)[:80]


def _close(thing: Any) -> None:
    close = getattr(thing, "close", None)
    if close is not None:
        close()
