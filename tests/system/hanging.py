"""A script whose ranks wait for one that does not come."""

from __future__ import annotations

_HANG = """
import threading, torch, torch.distributed as dist
dist.init_process_group("phalanx")
for _ in range(7):
    dist.all_reduce(torch.ones(1))
print("running", flush=True)
if dist.get_rank() == 1:
    threading.Event().wait()
dist.all_reduce(torch.ones(1))
"""
