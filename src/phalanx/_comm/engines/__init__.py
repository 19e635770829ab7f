"""Engines send tensors between hosts, through PyTorch's Gloo or MPI: Phalanx has no network protocol of its own."""
