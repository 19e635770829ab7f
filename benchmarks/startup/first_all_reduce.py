"""The smallest job: join, reduce one number, say when that was done."""

import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group(sys.argv[1])
value = torch.ones(1)
dist.all_reduce(value)
done = time.monotonic()  # one clock for all processes of a host
assert value.item() == dist.get_world_size(), "the all_reduce is wrong"
print(f"rank {os.environ['RANK']} done at {done:.6f}", flush=True)
dist.destroy_process_group()
