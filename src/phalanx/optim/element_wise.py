"""Which optimizers may be given a part of a parameter."""

from __future__ import annotations

from torch import optim

# Each element's update depends on that element's gradient and state alone, and on numbers that are the same for all.
# These very classes: a subclass may do anything.
_ELEMENT_WISE = frozenset(
    {
        optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta,
        optim.RMSprop, optim.Rprop, optim.ASGD,
    }
)  # fmt: skip

_REFUSED = {optim.LBFGS: "its direction and its line search depend on all parameters at once; use it without sharding"}


def decide_cut(optimizer_class: type[optim.Optimizer]) -> bool:
    """Whether parameters may be cut anywhere for this class; if not, each goes to one rank, whole.

    Whole is what every class gets that is not known to be element-wise: Adafactor and Muon look at rows, columns or
    norms of a parameter, SparseAdam at sparse gradients, and the user's own at who knows what.

    Raises:
        TypeError: it is not a class of optimizers.
        ValueError: it can't even be given whole parameters.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, optim.Optimizer)):
        raise TypeError(
            "ZeroRedundancyOptimizer: optimizer_class must be a subclass of torch.optim.Optimizer, "
            f"got {optimizer_class!r}"
        )
    for refused, reason in _REFUSED.items():
        if issubclass(optimizer_class, refused):
            raise ValueError(f"ZeroRedundancyOptimizer does not support {refused.__name__}: {reason}")
    return optimizer_class in _ELEMENT_WISE
