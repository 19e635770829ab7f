"""Comparisons that run on the reader's own machine, behind `phalanx bench`; those of the project lie in benchmarks/."""
