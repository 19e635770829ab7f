"""Collectives as schedules: who combines what with whom in which step."""
