"""What a state is apart from its tensors, as the file `structure.pt`: torch.load opens it with weights_only."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import torch

from phalanx.checkpoint.tree import Node, Tree, merge
from phalanx.checkpoint.whole import refuse_unreadable

METADATA = ".metadata"  # torch's own
STRUCTURE = "structure.pt"


def encode_structure(tree: Tree) -> bytes:
    """The content of the file.

    Raises:
        UnreadableError: something in it could not be loaded again.
    """
    encoded = _encode(tree.structure, tree.aliases)
    refuse_unreadable(encoded)
    return encoded


def decode_structure(content: bytes) -> tuple[Node, Mapping[str, str]]:
    """The structure, and which of its tensors are the memory of which others."""
    structure, aliases = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return structure, aliases


def merge_structures(encoded: Sequence[bytes]) -> bytes:
    """Of ranks whose states have different names, the content of one file: what any of them has."""
    if not encoded:
        return b""
    (structure, aliases), *others = map(decode_structure, encoded)
    for other, _ in others:
        structure = merge(structure, other)
    return _encode(structure, aliases)


def _encode(structure: Node, aliases: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    torch.save((structure, dict(aliases)), buffer)
    return buffer.getvalue()
