"""Savers that are killed, and what they must have left whole."""

import signal

import torch


def die_after(seconds):
    """By the kernel's hand, wherever the process is then: a timer whose signal nobody handles."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def state_of(step, size):
    return {"w": torch.full((size,), step), "v": [torch.full((size,), -step)], "step": step}


def assert_whole(restored):
    assert restored.state["step"] == restored.step
    assert restored.state["w"].eq(restored.step).all()
    assert restored.state["v"][0].eq(-restored.step).all()
