"""`phalanx bench` measures the user's own machine; the project's benchmarks are in benchmarks/."""
