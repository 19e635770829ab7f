"""Explain schedules and their costs: as text, on a terminal, and as drawings."""
