"""Rendezvous: the ranks of a job find each other, whatever launched them."""
