"""Seed the random generators for each micro-batch, and send their state from stage to stage.

Micro-batch i of a step begins with the seed s + i, where s is drawn from the program's own generator when the step
begins. The seed is sent with the values from stage to stage, and so is the generator's state once a stage has drawn a
number. So dropout draws the same numbers as in this loop, however the model is cut:

    s = torch.randint(2**62, ()).item()
    for i, (x, y) in enumerate(zip(inputs.tensor_split(m), targets.tensor_split(m))):
        torch.manual_seed(s + i)
        loss_fn(model(x), y).backward()
"""

from __future__ import annotations

import torch
from torch import Tensor


class MicroBatchRandom:
    """`MicroBatchRandom` gets and sets the state of the CPU generator, and of a CUDA `device`'s, as one byte tensor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def draw_seed(self) -> int:
        """Draw a seed from the program's own generator, which advances by that one number however the model is cut."""
        return int(torch.randint(2**62, ()).item())

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)

    def get(self) -> Tensor:
        state = torch.get_rng_state()
        if self._device.type == "cuda":
            state = torch.cat([state, torch.cuda.get_rng_state(self._device)])
        return state

    def set(self, state: Tensor) -> None:
        size = len(torch.default_generator.get_state()) if self._device.type == "cuda" else len(state)
        # Clone: set_rng_state of torch 2.13 ignores a tensor's storage offset.
        torch.set_rng_state(state[:size].clone())
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state[size:].clone(), self._device)
