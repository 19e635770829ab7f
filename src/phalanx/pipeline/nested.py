"""Flatten and unflatten values that are nested in tuples, lists and dicts, with torch's pytree functions."""

from __future__ import annotations

from typing import Any

from phalanx._base.torch_names import find

_LOSES = "phalanx.Pipeline does not work"
tree_flatten: Any = find("torch.utils._pytree.tree_flatten", loses=_LOSES)
tree_map: Any = find("torch.utils._pytree.tree_map", loses=_LOSES)
tree_unflatten: Any = find("torch.utils._pytree.tree_unflatten", loses=_LOSES)
treespec_dumps: Any = find("torch.utils._pytree.treespec_dumps", loses=_LOSES)
treespec_loads: Any = find("torch.utils._pytree.treespec_loads", loses=_LOSES)
