"""The coordinator holds a job's membership, keys and values."""
