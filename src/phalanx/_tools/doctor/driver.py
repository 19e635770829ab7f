"""Query NVIDIA's driver through NVML, in a separate process, because a stuck driver never answers.

The process prints the answer as one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from typing import Any

from phalanx._tools.doctor.facts import Driver, Gpu, Probe

_TIMEOUT_S = 10.0
_SM, _P2P_READ, _EXCLUSIVE, _PROHIBITED = 1, 0, 3, 2
# Reasons for unintended throttling of a GPU; idleness and the owner's settings do not count.
_SLOWED = {0x4: "its power limit", 0x8: "hardware", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "the power supply"}


def query_driver(python: str = sys.executable) -> Driver:
    """Return information on the driver and its GPUs; `Driver()` on a host without NVML."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return Driver()
    command = [python, "-m", __name__]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Driver(Probe(False, f"NVML did not answer within {_TIMEOUT_S:.0f} s"))
    except OSError as error:
        return Driver(Probe(False, f"NVML could not be asked: {error.strerror or error}"))
    line = run.stdout.strip().rpartition("\n")[2]
    if run.returncode or not line.startswith("{"):
        facts = run.stderr.strip().rpartition("\n")[2]
        return Driver(Probe(False, f"NVML failed: exit code {run.returncode} {facts}".rstrip()))
    words: dict[str, Any] = json.loads(line)
    gpus = tuple(Gpu(**{**gpu, "slowed_by": tuple(gpu["slowed_by"])}) for gpu in words["gpus"])
    apart = tuple((one, other) for one, other in words["apart"])
    return Driver(Probe(**words["nvml"]), words["version"], words["cuda"], gpus, apart)


def main() -> None:
    """Run as the process that queries the driver."""
    print(json.dumps(_query(ctypes.CDLL("libnvidia-ml.so.1"))), flush=True)


def _query(nvml: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"nvml": {"works": False, "detail": ""}, "version": "", "cuda": "", "gpus": [], "apart": []}
    if error := nvml.nvmlInit_v2():
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        facts["nvml"]["detail"] = f"NVML failed: {nvml.nvmlErrorString(error).decode()}"
        return facts
    facts["nvml"]["works"] = True
    facts["version"] = _text(nvml.nvmlSystemGetDriverVersion) or ""
    cuda = ctypes.c_int(0)
    if nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda)) == 0:
        facts["cuda"] = f"{cuda.value // 1000}.{cuda.value % 1000 // 10}"
    count = ctypes.c_uint(0)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    handles = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0:
            handles.append(handle)
            facts["gpus"].append(_query_gpu(nvml, handle))
    for one in range(len(handles)):
        for other in range(one + 1, len(handles)):
            status = ctypes.c_int(0)
            answer = nvml.nvmlDeviceGetP2PStatus(handles[one], handles[other], _P2P_READ, ctypes.byref(status))
            if answer == 0 and status.value:
                facts["apart"].append((one, other))
    nvml.nvmlShutdown()
    return facts


def _query_gpu(nvml: Any, handle: ctypes.c_void_p) -> dict[str, Any]:
    mig = _number(nvml.nvmlDeviceGetMigMode, handle, ctypes.byref(ctypes.c_uint(0)))
    mode = _number(nvml.nvmlDeviceGetComputeMode, handle)
    reasons = ctypes.c_ulonglong(0)
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(reasons))
    return {
        "name": _text(nvml.nvmlDeviceGetName, handle) or "unknown",
        "uuid": _text(nvml.nvmlDeviceGetUUID, handle) or "",
        "mig": None if mig is None else bool(mig),
        "exclusive": None if mode is None else mode in (_EXCLUSIVE, _PROHIBITED),
        "clock_mhz": _number(lambda device, at: nvml.nvmlDeviceGetClockInfo(device, _SM, at), handle),
        "max_clock_mhz": _number(lambda device, at: nvml.nvmlDeviceGetMaxClockInfo(device, _SM, at), handle),
        "slowed_by": [words for bit, words in _SLOWED.items() if reasons.value & bit],
    }


def _number(call: Any, handle: ctypes.c_void_p, *more: Any) -> int | None:
    value = ctypes.c_uint(0)
    return value.value if call(handle, ctypes.byref(value), *more) == 0 else None


def _text(call: Any, *handle: ctypes.c_void_p) -> str | None:
    buffer = ctypes.create_string_buffer(96)
    return buffer.value.decode(errors="replace") if call(*handle, buffer, ctypes.c_uint(96)) == 0 else None


if __name__ == "__main__":
    main()
