"""Read webdataset's tar files, in which files that differ only in the extension are one sample."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx._base.extras import require
from phalanx._base.storage import is_address, open_for_reading
from phalanx.data.stream import Stream, list_shards

_COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst")
_METADATA = re.compile(r"__[^/]*__($|/)")  # webdataset skips these files


def from_webdataset(urls: str | Sequence[str], **options: Any) -> Stream:
    """Return a stream over webdataset's tar files. As in webdataset, a sample is a dict of `__key__`, `__url__` and the
    bytes of each file by extension.

        decode = webdataset.autodecode.Decoder([webdataset.imagehandler("pil")])
        stream = from_webdataset("data/{000..999}.tar", index="index.json", transform=decode)

    Arguments:
        urls: a list, or a string in webdataset's notation. fsspec opens URLs; webdataset opens everything that is
            neither a file nor a URL (`pipe:...`).
        options: options of `Stream`. Without `lengths`, samples are counted: by the headers in an uncompressed local
            file, and by reading any other file in full.

    Cost: an uncompressed local tar file is indexed by its headers, and read by index. All others are read in sequence.

    Raises:
        ModuleNotFoundError: webdataset is not installed.
    """
    webdataset = require("webdataset", extra="data", what="from_webdataset")
    names = (
        webdataset.shardlists.expand_urls(urls)
        if isinstance(urls, str)
        else list_shards("from_webdataset", "urls", urls)
    )
    return Stream(names, read_tar, count=_count, **options)


def read_tar(url: str) -> Any:
    """Return the samples of a tar file: a sequence if the file can be read by index, otherwise an iterator."""
    return IndexedTar(url) if _is_here(url) and not url.endswith(_COMPRESSED) else _iterate_tar(url)


def _count(url: str) -> int:
    samples = read_tar(url)
    if not isinstance(samples, IndexedTar):
        return sum(1 for _ in samples)
    try:
        return len(samples)
    finally:
        samples.close()


def _is_here(url: str) -> bool:
    return not is_address(url) and os.path.exists(_path(url))


def _path(url: str) -> str:
    return url.removeprefix("file://").removeprefix("file:")


class IndexedTar:
    """`IndexedTar` reads the samples of a local tar file by number."""

    def __init__(self, url: str) -> None:
        self._fd = os.open(_path(url), os.O_RDONLY)
        # webdataset itself groups the files into samples, but receives the files' positions instead of their contents.
        self._samples = list(_iterators().group_by_keys(_places(self._fd, url)))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> dict[str, Any]:
        sample = self._samples[number]
        return {name: self._read(*one) if isinstance(one, tuple) else one for name, one in sample.items()}

    def _read(self, offset: int, size: int) -> bytes:
        data = os.pread(self._fd, size, offset)
        while len(data) < size:
            more = os.pread(self._fd, size - len(data), offset + len(data))
            if not more:
                raise tarfile.ReadError(f"it is truncated: {size - len(data)} bytes of a member are missing")
            data += more
        return data

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _places(fd: int, url: str) -> Iterator[dict[str, Any]]:
    for name, offset, size in list_files(fd):
        if not _METADATA.match(name):
            yield {"fname": name, "data": (offset, size), "__url__": url}


def _iterate_tar(url: str) -> Iterator[dict[str, Any]]:
    iterators = _iterators()
    if not is_address(url) and not _is_here(url):
        yield from iterators.tarfile_samples([{"url": url}])
        return
    with open_for_reading(_path(url)) as file:
        yield from iterators.group_by_keys(iterators.tar_file_expander([{"url": url, "stream": file}]))


def _iterators() -> Any:
    return require("webdataset.tariterators", extra="data", what="from_webdataset")


# List the files in a tar archive: names, and positions of their bytes, several times as fast as `tarfile`.
#
# A header is a block of 512 bytes: name (0 to 100), size in octal digits (124 to 136), kind (156), "ustar" (257),
# prefix of the name (345 to 500). A PAX header (kind x) precedes a header whose name or size does not fit, or whose
# time is a fraction, as webdataset writes it.

BLOCK = 512


def list_files(fd: int) -> Iterator[tuple[str, int, int]]:
    """Yield (name, offset, size) of each regular file in the archive `fd`.

    Raises:
        tarfile.ReadError: `fd` is not an archive, or is damaged.
    """
    size_of_all = os.fstat(fd).st_size
    offset, records = 0, dict[str, str]()
    while header := os.pread(fd, BLOCK, offset):
        if not any(header):  # the archive ends here
            return
        kind = header[156:157]
        if header[257:262] != b"ustar" or kind not in (b"0", b"\0", b"5", b"x") or header[124] & 0x80:
            yield from _list_rest(fd, offset)
            return
        try:
            size = int(header[124:136].rstrip(b"\0 ") or b"0", 8)
        except ValueError as error:
            raise tarfile.ReadError(f"bad header at byte {offset}") from error
        size = int(records.get("size", size))
        begin = offset + BLOCK
        if begin + size > size_of_all:
            raise tarfile.ReadError(f"it is truncated: {begin + size - size_of_all} bytes of a member are missing")
        if kind == b"x":
            records = _records(os.pread(fd, size, begin))
        else:
            if kind != b"5":
                yield records.get("path") or _name(header), begin, size
            records = {}
        offset = begin + -(-size // BLOCK) * BLOCK


def _name(header: bytes) -> str:
    prefix, name = header[345:500].partition(b"\0")[0], header[:100].partition(b"\0")[0]
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")


def _records(data: bytes) -> dict[str, str]:
    """Return the entries of a PAX header, which are lines of "length key=value"."""
    found = {}
    while data and data[:1] != b"\0":
        length = int(data.partition(b" ")[0])
        key, _, value = data[:length].partition(b" ")[2].rstrip(b"\n").partition(b"=")
        found[key.decode()] = value.decode("utf-8", "surrogateescape")
        data = data[length:]
    return found


def _list_rest(fd: int, offset: int) -> Iterator[tuple[str, int, int]]:
    """Yield the rest with `tarfile`, which supports all kinds of headers."""
    with open(fd, "rb", closefd=False) as file:
        file.seek(offset)
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.isreg():
                    yield member.name, member.offset_data, member.size
                tar.members = []  # type: ignore[attr-defined]  # otherwise `tar` keeps all members in memory
            end = tar.offset
    if any(os.pread(fd, BLOCK, end)):  # tarfile takes a damaged header for the end of the archive
        raise tarfile.ReadError(f"bad header at byte {end}")
