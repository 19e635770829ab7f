"""Implement the command-line tools doctor, bench and explain."""
