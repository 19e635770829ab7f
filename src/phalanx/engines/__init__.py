"""What carries tensors between hosts. Phalanx has no network transport of its own: these are PyTorch's engines."""
