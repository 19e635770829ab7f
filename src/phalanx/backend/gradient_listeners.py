"""Who is told that a gradient holds its mean: said by whoever copies it elsewhere, asked by whoever averages it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from typing import Protocol

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class GradientListener(Protocol):
    """Takes a parameter's gradient once it is the mean over all ranks."""

    def on_launch(self, mean: Tensor, wait: Callable[[], object]) -> None:
        """`mean`, in the shape of the parameter, is being made on its device.

        `wait` lets the stream in which it is called wait for it.
        """

    def on_mean(self) -> None:
        """Hear that the parameter's `.grad` is the mean: with the values of what `on_launch` was given, if it was
        called.
        """


_listeners: MutableMapping[Tensor, weakref.ref[GradientListener]] = WeakIdKeyDictionary()


def tell_mean(parameter: Tensor, listener: GradientListener) -> None:
    """From the next backward on tell `listener`, as long as it lives, of the parameter's mean gradients."""
    _listeners[parameter] = weakref.ref(listener)


def find_listener(parameter: Tensor) -> GradientListener | None:
    """Who is to be told, if there is anybody."""
    listener = _listeners.get(parameter)
    return None if listener is None else listener()
