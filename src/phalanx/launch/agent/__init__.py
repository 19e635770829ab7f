"""The process that the user started: it owns the job and is the last to go."""
