"""Measurements of jobs that never ran, for reports."""

from phalanx._job.report.measurements import Lateness, Measurements, RankRun

GIB = 2**30


STEP = {"data": 0.002, "forward": 0.03, "backward": 0.055, "update": 0.008, "waiting": 0.002, "communication": 0.002,
        "other": 0.001}  # fmt: skip


def rank(number, host="one", **changes):
    parts = {**STEP, **changes.pop("parts", {})}
    facts = {"cores": 8, "threads": 1, "cpus": [number], "backend": "phalanx", "memory_bytes": 64 * GIB}
    fields = {
        "rank": number, "attempt": 0, "pid": 100 + number, "host": host, "node": 0, "facts": facts, "begin": 1.0,
        "end": 61.0, "first_step": 2.0, "steps": 500, "first_number": 1, "step_s": sum(parts.values()),
        "longest_s": 0.12, "parts": parts, "samples_per_step": 32.0, "num_workers": 2, "last_phase": "other",
        "ended": True, "cpu_share": 0.98, "preemptions_per_s": 0.5, "resident_bytes": GIB, "shared_bytes": 0.0,
        "peak_bytes": GIB, "device_bytes": 0.0, "memory_curve": tuple((i, float(GIB)) for i in range(40)),
    }  # fmt: skip
    return RankRun(**{**fields, **changes})


def measured(*ranks, **changes):
    fields = {
        "name": "train.py", "command": "", "begun_unix": 0.0, "duration_s": 60.0, "end": "well", "end_text": "",
        "exit_code": 0, "world_size": len(ranks), "max_restarts": 0, "ranks": ranks, "has_samples": True,
        "loss": tuple((i, 1 / (1 + i)) for i in range(100)), "throughput": tuple((i, 640.0) for i in range(60)),
        "lateness": tuple(Lateness(r.rank, 500 // len(ranks), 0.0002) for r in ranks), "num_matched": 500,
    }  # fmt: skip
    return Measurements(**{**fields, **changes})
