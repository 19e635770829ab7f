"""Seed the random generators for each micro-batch, and send their state from stage to stage.

Micro-batch i of a step begins with the seed s + i, where s is drawn from the program's own generator at the step's
beginning. The seed is sent along through the stages, and so is the state once a stage has drawn a number. So dropout
works as in this loop, however the model is cut:

    s = torch.randint(2**62, ()).item()
    for i, (x, y) in enumerate(zip(inputs.chunk(m), targets.chunk(m))):
        torch.manual_seed(s + i)
        loss_fn(model(x), y).backward()
"""

from __future__ import annotations

import torch
from torch import Tensor


class MicroBatchRandom:
    """`MicroBatchRandom` reads and sets the state of the generators of layers on `device`, as one tensor of bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def draw_seed(self) -> int:
        """Draw a seed from the program's own generator, which advances by one number, as without a cut."""
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
        # A copy: torch 2.13 reads from the beginning of a tensor's memory, wherever in it the tensor begins.
        torch.set_rng_state(state[:size].clone())
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state[size:].clone(), self._device)
