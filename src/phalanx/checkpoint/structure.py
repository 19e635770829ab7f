"""Encode and decode `structure.pt`: a state without its tensors, in a file that torch.load opens with weights_only."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import torch

from phalanx.checkpoint.tree import Node, Tree, merge, tensor_names
from phalanx.checkpoint.whole import refuse_unreadable

METADATA = ".metadata"  # torch's own
STRUCTURE = "structure.pt"


def encode_structure(tree: Tree) -> bytes:
    """Encode the structure of `tree` as the content of the file.

    Raises:
        UnreadableError: a value in the structure could not be loaded.
    """
    encoded = _encode(tree.structure, tree.aliases)
    refuse_unreadable(encoded)
    return encoded


def decode_structure(content: bytes) -> tuple[Node, Mapping[str, str]]:
    """Return the structure, and its aliases: the tensors that share another tensor's memory."""
    structure, aliases = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return structure, aliases


def merge_structures(encoded: Sequence[bytes]) -> tuple[bytes, Mapping[str, str]]:
    """Merge the structures of ranks whose states have different names; return one file's content, and its aliases."""
    if not encoded:
        return b"", {}
    decoded = [decode_structure(one) for one in encoded]
    structure, _ = decoded[0]
    for other, _ in decoded[1:]:
        structure = merge(structure, other)
    # A name that is an alias on one rank and a tensor on another is not an alias: the second rank writes the tensor.
    written = {name for one, aliases in decoded for name in tensor_names(one) if name not in aliases}
    merged = {name: same for _, aliases in decoded for name, same in aliases.items() if name not in written}
    return _encode(structure, merged), merged


def _encode(structure: Node, aliases: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    torch.save((structure, dict(aliases)), buffer)
    return buffer.getvalue()
