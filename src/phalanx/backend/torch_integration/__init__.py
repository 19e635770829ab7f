"""How torch learns of our groups: all that reaches into torch's own machinery of process groups."""
