"""Trainings apart, drawn at random, and what the papers say of them."""

import phalanx

KINDS = {
    "local": lambda model, inner, outer, **options: phalanx.LocalSGD(model, inner, **options),
    "diloco": phalanx.DiLoCo,
}
