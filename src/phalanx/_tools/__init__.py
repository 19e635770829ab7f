"""Tools that a person starts: doctor, bench, explain."""
