"""Import PyTorch and train for one step in a separate process, because either may crash the process.

The process prints a line of JSON for each completed stage; if the process dies, the current stage has no line.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from phalanx._tools.doctor.facts import Probe, Torch
from phalanx.errors import PhalanxError
from phalanx.testing import RankFailed, run_ranks

_TIMEOUT_S = 60.0
_STEP_TIMEOUT_S = 30.0
_REPEATS = 25
_COPIED_BYTES = 64 << 20


def try_training() -> tuple[Torch | str, Probe]:
    """Return information on PyTorch (or why it could not be imported), and the result of a step on two ranks."""
    try:
        run = subprocess.run(
            [sys.executable, "-m", __name__],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S + _STEP_TIMEOUT_S,
            check=False,
        )
        how, output, complaint = _describe(run.returncode), run.stdout, run.stderr
    except subprocess.TimeoutExpired as expired:
        how, output, complaint = f"it was stopped after {expired.timeout:.0f} s", _text(expired.stdout), ""
    except OSError as error:  # too few descriptors, processes or memory for one more process
        reason = f"no process could be started to try it: {error.strerror or error}"
        return reason, Probe(False, reason)
    facts = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    torch: Torch | str = f"{how}: {_last_line(complaint)}" if complaint else how
    words: dict[str, Any] = {name: value for line in facts for name, value in line.items()}
    if "torch" in words:
        torch = _read_torch(words["torch"])
    if "training" in words:
        if isinstance(torch, Torch) and torch.cuda.works:
            unknown = Probe(False, f"{how} while it was tried")
            gpu = words.get("gpu", {"nccl": torch.nccl})
            pinned = Probe(**gpu["pinned"]) if "pinned" in gpu else unknown
            torch = replace(torch, nccl=gpu["nccl"], pinned=pinned)
        return torch, Probe(**words["training"])
    return torch, Probe(False, f"{how} before two ranks had taken a step\n{complaint.strip()}".strip())


def main() -> None:
    """Run as the separate process: print a line for PyTorch, one for the training, and one for the GPU if usable."""
    _print_facts(torch=_examine_torch())
    _print_facts(training=_train())
    import torch

    if torch.cuda.is_available():
        _print_facts(gpu=_try_gpu())


def _print_facts(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def _examine_torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    backends = [name for name in ("gloo", "nccl", "mpi") if dist.is_available() and _has(name)]
    usable = torch.cuda.is_available()
    detail = f"{torch.cuda.device_count()} devices" if usable else "built without CUDA"
    if torch.version.cuda and not usable:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            detail = "no device was found"
        except Exception as error:
            detail = str(error)
    return {
        "version": torch.__version__,
        "backends": backends,
        "registered": dist.is_available() and "phalanx" in dist.Backend.backend_list,
        "cuda_version": torch.version.cuda,
        "cuda": {"works": usable, "detail": detail},
    }


def _try_gpu() -> dict[str, Any]:
    """Try what the exchange of CUDA tensors requires, on the first GPU."""
    import torch

    nccl: Any = getattr(torch.cuda, "nccl", None)
    return {
        "nccl": ".".join(map(str, nccl.version())) if _has("nccl") and nccl is not None else "",
        "pinned": _try(_copy_pinned),
    }


def _try(what: Callable[[], str]) -> dict[str, Any]:
    try:
        return {"works": True, "detail": what()}
    except Exception as error:
        return {"works": False, "detail": f"{type(error).__name__}: {error}".partition("\n")[0]}


def _copy_pinned() -> str:
    import torch

    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        on_gpu.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    if not bool((on_gpu == 1).all()):
        raise RuntimeError("a copy to the GPU arrived wrong")
    return f"{_COPIED_BYTES / min(times) / 1e9:.1f} GB/s to the GPU"


def _has(backend: str) -> bool:
    import torch.distributed as dist

    return bool(getattr(dist, f"is_{backend}_available")())


def _read_torch(words: dict[str, Any]) -> Torch:
    return Torch(**{**words, "backends": tuple(words["backends"]), "cuda": Probe(**words["cuda"])})


def _train() -> dict[str, Any]:
    try:
        begin = time.perf_counter()
        times = run_ranks(_step, 2, timeout=_STEP_TIMEOUT_S)
        total = time.perf_counter() - begin
    except RankFailed as failure:
        return {"works": False, "detail": _summarise(failure)}
    # as in `try_training`; how many descriptors are free by now depends on the Python version
    except OSError as error:
        return {"works": False, "detail": f"no process could be started for a rank: {error.strerror or error}"}
    return {
        "works": True,
        "detail": f"two ranks took a step in {total:.2f} s; an all_reduce takes {1e6 * max(times):.0f} µs",
    }


def _step(rank: int, world_size: int) -> float:
    """Run one training step of y = w x, each rank on its own x; return the median seconds of an all_reduce."""
    import torch
    import torch.distributed as dist

    weight = torch.zeros(1, requires_grad=True)
    x = float(rank + 1)
    (weight * x - x).square().sum().backward()  # type: ignore[no-untyped-call]
    gradient = weight.grad
    assert gradient is not None
    dist.all_reduce(gradient)
    expected = sum(-2.0 * (other + 1) ** 2 for other in range(world_size))
    if gradient.item() != expected:
        raise RuntimeError(f"all_reduce gave {gradient.item()}, but the sum of the ranks' gradients is {expected}")
    return statistics.median(_seconds(dist.all_reduce, gradient) for _ in range(_REPEATS))


def _seconds(call: Callable[..., Any], *args: Any) -> float:
    begin = time.perf_counter()
    call(*args)
    return time.perf_counter() - begin


def _summarise(failure: RankFailed) -> str:
    """Return one line if all ranks report the same error, otherwise all details."""
    texts = {f"{type(error).__name__}: {error}" for error in failure.errors.values()}
    if len(failure.errors) == 2 and len(texts) == 1:
        return f"every rank raised {texts.pop()}"
    if len(failure.errors) == 2 and all(isinstance(error, PhalanxError) for error in failure.errors.values()):
        # The messages say everything; each traceback would add twenty of our own frames.
        return "\n".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in failure.errors.items())
    return str(failure)


def _describe(exit_code: int) -> str:
    if exit_code < 0:
        return f"the process died by {signal.Signals(-exit_code).name}"
    return f"the process ended with exit code {exit_code}"


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


if __name__ == "__main__":
    main()
