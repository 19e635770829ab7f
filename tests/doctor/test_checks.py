import dataclasses
import json

import pytest

from phalanx._tools.doctor.checks import CHECKS, CheckStatus, run_checks, would_train
from phalanx._tools.doctor.facts import DoctorFacts, Driver, Gpu, Kernel, MachineFacts, Probe, Torch
from phalanx._tools.doctor.report import as_json, as_text, conclude, print_table

WORKS = Probe(True, "works")
GIB = 1 << 30
HEALTHY = DoctorFacts(
    "0.1.0",
    host=MachineFacts(
        platform="linux",
        python="3.11.7",
        cores=8,
        usable_cores=8,
        available_bytes=32 * GIB,
        shm_bytes=16 * GIB,
        name="box",
        name_resolves=Probe(True, "10.0.0.7"),
        open_files=65536,
        open_files_hard=65536,
        processes=100000,
        clock_source="tsc",
    ),
    kernel=Kernel(core=WORKS, futex=WORKS, memfd=WORKS, pidfd=WORKS),
    torch=Torch(version="2.13.0+cpu", backends=("gloo",), registered=True),
    training=Probe(True, "two ranks met"),
)


def on(part, **changes):
    """The healthy host, with some facts changed."""
    return dataclasses.replace(HEALTHY, **{part: dataclasses.replace(getattr(HEALTHY, part), **changes)})


def the(topic, facts):
    (finding,) = [finding for finding in run_checks(facts) if finding.topic == topic]
    return finding


def test_a_missing_proc_is_a_problem_by_name():
    """It was told as a memfd that a sandbox forbids."""
    finding = the("kernel", on("kernel", proc=Probe(False, "no such file"), memfd=Probe(False, "no such file")))
    assert finding.status is CheckStatus.PROBLEM
    assert finding.fact == "/proc does not work (no such file)"
    assert "mount -t proc proc /proc" in finding.advice


def test_a_container_is_told_with_what_it_means():
    assert the("container", HEALTHY).fact == "none: the machine's own pids and users"
    inside = the("container", on("kernel", namespaces=("pid", "user")))
    assert inside.status is CheckStatus.OK
    assert "pid namespace of its own: ranks in other containers share memory with those here" in inside.fact
    assert "user namespace of its own: ranks in other containers count as another host" in inside.fact


def test_a_healthy_host_has_nothing_to_do():
    findings = run_checks(HEALTHY)
    assert len(findings) == len(CHECKS)
    assert {finding.status for finding in findings} == {CheckStatus.OK}
    assert not any(finding.advice for finding in findings)
    assert would_train(findings)


def test_the_network_is_told_with_who_can_listen():
    assert the("network", HEALTHY).fact == "no address but the loopback's: nothing leaves this host"
    private = the("network", on("host", addresses={"lo": ("127.0.0.1",), "eth0": ("10.0.0.7",)}))
    assert private.status is CheckStatus.OK
    assert private.fact.startswith(
        "10.0.0.7 (eth0): no public address; what ranks send to other hosts is not encrypted"
    )
    unknown = the("network", on("host", addresses=None))
    assert (unknown.status, unknown.advice) == (
        CheckStatus.WARNING,
        "Raise the limit of open files (see limits), and run this again.",
    )
    public = the("network", on("host", addresses={"eth0": ("10.0.0.7",), "eth1": ("8.8.8.8", "fe80::1")}))
    assert public.status is CheckStatus.WARNING
    assert public.fact == "8.8.8.8 (eth1) can be reached from the whole internet"
    assert "a group that would send them to a public address is refused" in public.advice


WITH_GPU = dataclasses.replace(HEALTHY, driver=Driver(WORKS, "535.1", "12.2", (Gpu("NVIDIA L4"),)))


@pytest.mark.parametrize(
    ("facts", "topic", "fact", "advice"),
    [
        (on("host", usable_cores=1), "cores", "1 of 8 usable", "Lift the affinity"),
        (on("host", usable_cores=1, cores=1), "cores", "1 of 1 usable", "Use a larger machine"),
        (on("host", cpu_quota=2.5), "cores", "grants only 2.5 cores' worth", "--nproc-per-node 2"),
        (on("host", cpu_quota=0.5), "cores", "grants only 0.5 cores' worth", "--nproc-per-node 1"),
        (on("host", available_bytes=2 * GIB), "memory", "2.0 GiB available", "--nproc-per-node 4"),
        (
            on("host", available_bytes=0, memory_limited=True),
            "memory",
            "within the control group",
            "--nproc-per-node 1",
        ),
        (on("host", commit_headroom_bytes=GIB), "memory", "only 1.0 GiB can be committed", "vm.overcommit_memory to 0"),
        (on("host", shm_bytes=64 << 20), "/dev/shm", "64 MiB; Phalanx needs none", "--shm-size=1g"),
        (
            on("host", name_resolves=Probe(False, "gaierror")),
            "host name",
            "box does not resolve: gaierror",
            "/etc/hosts",
        ),
        (on("host", open_files=256, open_files_hard=4096), "limits", "256 open files", "need more: ulimit -n 4096"),
        (on("host", open_files=256, open_files_hard=None), "limits", "256 open files", "need more: ulimit -n 4096"),
        # under `ulimit -n 40`, soft and hard, it advised `ulimit -n 40`
        (on("host", open_files=512, open_files_hard=512), "limits", "no more than 512 are allowed", "LimitNOFILE="),
        (on("host", open_files=256, open_files_hard=512), "limits", "no more than 512", "Until then: ulimit -n 512"),
        (on("host", processes=200, processes_running=150), "limits", "50 more processes", "--pids-limit"),
        (on("host", clock_source="hpet"), "clock", "reads hpet", "clocksource=tsc"),
        (on("host", variables={"RANK": "0", "MASTER_ADDR": "a"}), "variables", "RANK=0 set", "unset RANK"),
        (on("host", scheduler=Probe(False, "PMI_RANK=7")), "scheduler", "PMI_RANK=7", "correct this first"),
        (
            on("host", unused_hosts=2),
            "scheduler",
            "Slurm gave this job 2 hosts",
            "srun --ntasks-per-node=1 phalanx run",
        ),
        (
            WITH_GPU,
            "GPUs",
            "this PyTorch is built without CUDA",
            "install the CUDA build",
        ),
        (on("kernel", core=Probe(False, "no module")), "C core", "cannot be imported: no module", "gcc"),
        (on("kernel", pidfd=Probe(False, "EPERM")), "kernel", "pidfd does not work (EPERM)", "seccomp"),
        (on("kernel", pidfd=Probe(False, "EPERM")), "kernel", "pidfd does not work (EPERM)", "through pipes"),
        (
            on("kernel", memfd=Probe(False, "EPERM")),
            "kernel",
            "memfd does not work (EPERM)",
            "unlinked files in /dev/shm",
        ),
        (on("kernel", unix_sockets=Probe(False, "EPERM")), "kernel", "Unix socket does not work", "run over Gloo"),
        (on("torch", backends=()), "torch", "gloo is missing", "official build"),
    ],
)
def test_what_costs_something_is_a_warning_with_advice_and_training_still_works(facts, topic, fact, advice):
    finding = the(topic, facts)
    assert finding.status is CheckStatus.WARNING
    assert fact in finding.fact
    assert advice in finding.advice
    assert would_train(run_checks(facts))


@pytest.mark.parametrize(
    ("facts", "topic", "fact", "advice"),
    [
        (dataclasses.replace(HEALTHY, torch="died by SIGILL"), "torch", "imported: died by SIGILL", "pip install"),
        (on("torch", version="2.12.1"), "torch", "2.13 or later is needed", "pip install --upgrade 'torch>=2.13'"),
        (on("torch", version="1.13"), "torch", "2.13 or later is needed", "--upgrade"),
        (on("host", open_files=40, open_files_hard=40), "limits", "no more than 40", "`phalanx run` needs"),
        (on("host", folder=None), "folder", "was removed", "cd to an existing folder"),
        (on("torch", registered=False), "torch", "does not know the backend 'phalanx'", "entry point"),
        (on("training", works=False, detail="rank 1 hung"), "training", "rank 1 hung", "report"),
    ],
)
def test_what_makes_training_impossible_is_a_problem(facts, topic, fact, advice):
    finding = the(topic, facts)
    assert finding.status is CheckStatus.PROBLEM
    assert fact in finding.fact
    assert advice in finding.advice
    assert not would_train(run_checks(facts))


def test_without_core_and_without_gloo_nothing_carries_a_tensor():
    facts = dataclasses.replace(on("kernel", core=Probe(False, "no compiler")), torch=on("torch", backends=()).torch)
    assert the("torch", facts).status is CheckStatus.PROBLEM


def test_a_driver_that_does_not_fit_is_told_with_what_torch_says():
    facts = dataclasses.replace(
        WITH_GPU,
        torch=dataclasses.replace(HEALTHY.torch, cuda_version="13.0", cuda=Probe(False, "the driver is too old")),
    )
    finding = the("GPUs", facts)
    assert finding.status is CheckStatus.WARNING
    assert "PyTorch (CUDA 13.0) cannot use them: the driver is too old" in finding.fact


def test_gpus_that_torch_can_use_are_listed():
    facts = dataclasses.replace(
        WITH_GPU,
        torch=dataclasses.replace(HEALTHY.torch, cuda_version="13.0", cuda=Probe(True, "1 devices")),
    )
    assert the("GPUs", facts).status is CheckStatus.OK
    assert "NVIDIA L4" in the("GPUs", facts).fact


def test_a_platform_that_says_little_is_healthy_as_far_as_it_says():
    facts = dataclasses.replace(
        HEALTHY,
        host=MachineFacts(platform="darwin", python="3.12.1", cores=8, usable_cores=8),
        kernel=Kernel(core=Probe(False, "no module")),
    )
    assert the("C core", facts).fact == "not built on darwin"
    assert {finding.status for finding in run_checks(facts) if finding.topic != "C core"} == {CheckStatus.OK}


def test_the_text_has_a_line_per_finding_and_the_advice_below():
    text = as_text(run_checks(on("host", cpu_quota=2.5)))
    assert "warning  cores      8 of 8 usable, but" in text
    assert "\n                    -> Ranks beyond that" in text
    assert text.endswith("\n\nTraining works here, with 1 warning.")


def test_the_conclusion_counts():
    assert conclude(run_checks(HEALTHY)) == "Training works here."
    broken = dataclasses.replace(on("host", cpu_quota=2.5, clock_source="hpet"), torch="gone")
    assert conclude(run_checks(broken)) == "Training would not work here: 1 problem, 2 warnings."


def test_the_json_holds_the_findings_and_the_facts():
    words = json.loads(as_json(HEALTHY, run_checks(HEALTHY)))
    assert words["would_train"] is True
    assert {finding["status"] for finding in words["findings"]} == {"ok"}
    assert words["facts"]["host"]["cores"] == 8
    assert words["facts"]["torch"]["version"] == "2.13.0+cpu"


def test_the_table_shows_square_brackets_as_they_are(capsys):
    print_table(run_checks(on("training", works=False, detail="KeyError: [bold]x[/bold]")))
    assert "[bold]x[/bold]" in capsys.readouterr().out


def test_a_torch_that_nobody_has_tried_is_a_warning():
    finding = the("torch", on("torch", version="9.0.0.dev3+cpu"))
    assert finding.status is CheckStatus.WARNING
    assert "torch 9.0.0.dev3+cpu is newer than" in finding.fact
    assert "pip install 'torch==" in finding.advice
