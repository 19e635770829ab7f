"""The coordinator of a job: its members, its key-value store, and messages between members."""
