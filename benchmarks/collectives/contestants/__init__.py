"""How each contestant is called, one file per programming interface.

These files run under the contestant's own Python, which has numpy and that contestant's library, and nothing of ours
but this folder. Each has `connect(rank, world_size, max_count, options) -> Contestant`.
"""
