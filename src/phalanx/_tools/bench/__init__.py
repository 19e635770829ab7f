"""`phalanx bench` makes these measurements on the reader's own machine; those of the project are in benchmarks/."""
