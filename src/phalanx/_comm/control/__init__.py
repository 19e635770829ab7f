"""Authenticated control messages: the job's key, connections to the coordinator, and its client."""
