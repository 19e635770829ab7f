"""Schedules and their costs for people: as text, on a terminal, and as drawings."""
