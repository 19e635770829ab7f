"""A pickle that runs code where it is loaded."""

import os


class Code:
    """What runs where its pickle is read: it creates a folder that is named after the process."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return _make_folder, (self.path,)


def _make_folder(path):
    os.makedirs(os.path.join(path, str(os.getpid())))
