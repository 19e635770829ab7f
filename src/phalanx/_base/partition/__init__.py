"""Find where a model can be cut, measure what its layers cost, and decide where to cut it."""
