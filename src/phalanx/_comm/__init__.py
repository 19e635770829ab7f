"""How tensors move between ranks, and how the ranks find each other."""
