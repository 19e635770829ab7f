"""Engines send tensors between hosts. They are PyTorch's: Phalanx has no network transport of its own."""
