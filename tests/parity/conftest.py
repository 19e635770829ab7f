import torch._dynamo  # noqa: F401 - every optimizer imports it at its first step: once here, not once in each rank of each test
