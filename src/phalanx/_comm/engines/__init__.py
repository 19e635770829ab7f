"""Engines send tensors between hosts: PyTorch's Gloo, beside which `MessageStreams` send what is short, and MPI."""
