"""`phalanx bench` makes these comparisons on the reader's own machine; those of the project lie in benchmarks/."""
