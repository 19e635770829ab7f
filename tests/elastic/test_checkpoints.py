"""`State.state_dict()` holds a model under its own names, whatever wraps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.on_ranks import on_ranks
from torch import nn

from phalanx import DistributedDataParallel, elastic


@pytest.mark.parametrize("is_inside", [True, False], ids=["inside the wrapper", "around it"])
@on_ranks(1)
def test_a_compiled_models_state_loads_into_the_model_itself(is_inside: bool) -> None:
    """Its keys began with "_orig_mod.", and only a compiled model could load them."""
    wrap: Any = (lambda m: DistributedDataParallel(torch.compile(m, backend="eager"))) if is_inside else (
        lambda m: torch.compile(DistributedDataParallel(m), backend="eager")
    )  # fmt: skip
    saved = elastic.State(model=wrap(nn.Linear(2, 1))).state_dict()
    plain = DistributedDataParallel(nn.Linear(2, 1))
    elastic.State(model=plain).load_state_dict(saved)
    torch.testing.assert_close(plain.module.state_dict(), saved["objects"]["model"])
