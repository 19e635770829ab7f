"""Describe an error of the disk, with advice."""

from __future__ import annotations

import errno


def describe_disk_error(error: BaseException) -> tuple[str, str]:
    """Return a description of the disk's error and advice; both "" if `error` is another error."""
    disk = _disk_error(error)
    if disk is None:
        return "", ""
    return disk.strerror or str(disk), _ADVICE.get(disk.errno or 0, "Fix that, or save to another folder.")


def _disk_error(error: BaseException | None) -> OSError | None:
    """Return the disk's own error, which torch.save replaces by one about positions in its archive."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


_ADVICE = {
    errno.ENOENT: "Create the folder first.",
    errno.ENOTDIR: "Save to a path whose folders are folders.",
    errno.EISDIR: "Give the checkpoint a file name.",
    errno.ELOOP: "Fix the symbolic links, or save to another path.",
    errno.ENAMETOOLONG: "Give the checkpoint a shorter file name.",
    errno.EPIPE: "The reader of the pipe has ended; start it again, or save to a file.",
    **dict.fromkeys((errno.ENOTBLK, errno.ENXIO), "Give the checkpoint a file name."),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Make room, or save to another disk."),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Save to a folder that this user may write to."),
}
