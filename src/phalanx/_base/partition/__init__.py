"""Find where a model can be cut, measure the costs of its layers, and decide where to cut it."""
