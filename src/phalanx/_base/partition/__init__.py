"""Find where a model can be cut, measure the costs of its layers, divide it into parts, and run its layers."""
