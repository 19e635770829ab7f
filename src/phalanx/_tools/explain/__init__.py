"""Explain schedules and their costs to people: as text, on a terminal, and as drawings."""
