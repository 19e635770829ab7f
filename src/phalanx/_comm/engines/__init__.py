"""Engines send tensors between hosts: MPI, and PyTorch's Gloo with `MessageStreams` for short messages."""
