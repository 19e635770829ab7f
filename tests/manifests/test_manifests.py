"""`phalanx manifest`: the files to submit. Slurm's is submitted to a real one in tests/system/test_slurm.py."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.cli.commands import group

yaml = pytest.importorskip("yaml", reason="reads the manifest as Kubernetes would: PyYAML")

IMAGE = ("--image", "registry.example/train:1")


def manifest(*words):
    result = CliRunner().invoke(group, ["manifest", *words])
    return result.exit_code, result.output


def test_the_batch_script_starts_the_command_once_on_each_node(tmp_path):
    path = tmp_path / "job.sh"
    code, out = manifest("slurm", "--nodes=3", "--cpus=8", "--gpus=2", "--memory=64G", "--time=1:00:00",
                         "--partition=long", "-o", str(path), "my train.py", "--nodes", "9")  # fmt: skip
    assert (code, out) == (0, "")
    text = path.read_text()
    for option in ("job-name=my-train", "nodes=3", "ntasks-per-node=1", "cpus-per-task=8", "gpus-per-node=2", "mem=64G",
                   "time=1:00:00", "partition=long", "output=%x-%j.log"):  # fmt: skip
        assert f"#SBATCH --{option}\n" in text
    subprocess.run(["bash", "-n", path], check=True)
    command = shlex.split(text[text.index("exec srun") :].replace("\\\n", ""))
    assert command[:5] == ["exec", "srun", "--kill-on-bad-exit=1", "--wait=0", "--cpus-per-task=8"]
    assert command[5].endswith("/phalanx")
    assert command[6:] == ["run", "my train.py", "--nodes", "9"]


def test_a_name_with_a_blank_is_one_word_for_sbatch():
    _, text = manifest("slurm", "--nodes=1", "--name=my job", "train.py")
    assert "#SBATCH '--job-name=my job'\n" in text


def test_without_a_number_of_cores_a_node_is_whole():
    _, text = manifest("slurm", "--nodes=1", "train.py")
    assert "#SBATCH --exclusive\n" in text
    assert "--cpu-bind=none" in text


def test_the_key_is_in_no_manifest(monkeypatch):
    monkeypatch.setenv("PHALANX_KEY", "the-words-of-a-key")
    for words in (("slurm", "--nodes=2"), ("kubernetes", "--nodes=2", *IMAGE)):
        code, text = manifest(*words, "train.py")
        assert code == 0
        assert "the-words-of-a-key" not in text


def kubernetes(*words):
    code, text = manifest("kubernetes", *words)
    assert code == 0, text
    service, job = yaml.safe_load_all(text)
    return text, service, job


def test_the_job_of_kubernetes_has_a_pod_for_each_node_that_finds_the_first():
    text, service, job = kubernetes("--nodes=2", "--gpus=8", "--memory=64Gi", "--namespace=ml", *IMAGE, "--",
                                    "--max-restarts=3", "train.py", "--flag", "no", "1e3", "a: b")  # fmt: skip
    assert (service["kind"], service["spec"]["clusterIP"], job["kind"]) == ("Service", "None", "Job")
    assert service["metadata"] == job["metadata"] == {"name": "train", "namespace": "ml"}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert (pod["subdomain"], pod["restartPolicy"]) == (service["metadata"]["name"], "Never")
    (container,) = pod["containers"]
    assert container["command"] == ["phalanx", "run", "--max-restarts=3", "train.py", "--flag", "no", "1e3", "a: b"]
    variables = {one["name"]: one for one in container["env"]}
    assert {name: one["value"] for name, one in variables.items() if "value" in one} == {
        "PET_NNODES": "2",
        "MASTER_ADDR": "train-0.train",
        "MASTER_PORT": "29400",
        "HOME": "/tmp",
        "USER": "phalanx",
    }
    assert variables["PHALANX_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "phalanx-key", "key": "key"}
    assert "kubectl -n ml create secret generic phalanx-key --from-file=key=" in text
    assert container["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "8"}


def test_kubernetes_expands_nothing_in_the_words_of_a_user():
    """`$(PHALANX_KEY)` would have put the key on the command line, where `ps` shows it; and `$$` became `$`."""
    words = ["train.py", "$(PHALANX_KEY)", "$$", "${local_rank}", "5$", "$$(MASTER_ADDR)"]
    container = kubernetes("--nodes=2", *IMAGE, *words)[2]["spec"]["template"]["spec"]["containers"][0]
    expanded = [
        re.sub(r"\$(\$|\(\w+\))", lambda m: "$" if m[1] == "$" else "EXPANDED", w) for w in container["command"]
    ]
    assert expanded == ["phalanx", "run", *words]


def test_a_restricted_namespace_takes_the_pods_and_their_memory_has_a_limit():
    """The fields are those that the Pod Security Standards ask for under "restricted"."""
    pod = kubernetes("--nodes=2", *IMAGE, "train.py")[2]["spec"]["template"]["spec"]
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    limits = [
        kubernetes("--nodes=2", *words, *IMAGE, "a.py")[2]["spec"]["template"]["spec"]["volumes"][0]["emptyDir"]
        for words in ([], ["--memory=64Gi"], ["--memory=64Gi", "--shm=2Gi"])
    ]
    assert [one["sizeLimit"] for one in limits] == ["8Gi", "64Gi", "2Gi"]
    root = kubernetes("--nodes=2", "--user=0", *IMAGE, "train.py")[2]["spec"]["template"]["spec"]
    assert root["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}


def test_a_lost_pod_does_not_end_the_other_where_there_is_a_witness():
    for words, most in (((), 0), (("--", "--witness", "etcds://etcd.ml:2379"), 6)):
        _, _, job = kubernetes("--nodes=2", *IMAGE, *words, "train.py")
        assert job["spec"]["backoffLimit"] == most


def test_a_lost_task_does_not_end_the_other_where_there_is_a_witness():
    """--witness had no place: without --nnodes the job was one of one host, and --nnodes was to be left out."""
    for words, kills in (((), True), (("--", "--witness", "h:29481"), False)):
        code, text = manifest("slurm", "--nodes=2", *words, "train.py")
        assert code == 0, text
        assert f"srun {'' if kills else '--no-kill '}--kill-on-bad-exit={int(kills)} --wait=0" in text
        assert ("#SBATCH --no-kill\n" in text) != kills


def test_cores_without_gpus_say_how_many_ranks():
    """A pod that may use two cores' time sees all cores of the machine, and would start a rank on each."""
    container = kubernetes("--nodes=2", "--cpus=2", *IMAGE, "train.py")[2]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][2:] == ["--nproc-per-node=2", "train.py"]
    assert container["resources"]["limits"] == {"cpu": "2"}


@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None, reason="needs kubernetes-validate")
@pytest.mark.parametrize("words", [(), ("--", "--witness", "h:1")])
def test_the_manifest_is_valid_by_the_schema_of_kubernetes(tmp_path, words):
    path = tmp_path / "job.yaml"
    each = ("--gpus=8", "--cpus=4", "--memory=64Gi")
    manifest("kubernetes", "--nodes=2", *each, *IMAGE, "-o", str(path), *words, "train.py")
    code = "import sys, kubernetes_validate, yaml\nfor one in yaml.safe_load_all(open(sys.argv[1])):\n"
    code += "    kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)"
    subprocess.run([sys.executable, "-c", code, path], check=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("slurm", "--nodes=2", "--", "--nnodes", "2", "train.py"), "phalanx manifest: --nnodes: leave it out."),
        (("slurm", "--nodes=2", "--", "-r", "3", "--nnode=2", "train.py"), "phalanx manifest: --nnodes: leave it out."),
        (("slurm", "--nodes=2", "--", "--ranks", "2", "train.py"), "phalanx run: --ranks: no such option"),
        (("slurm", "--nodes=0", "train.py"), "Invalid value for '--nodes'"),
        (("kubernetes", "--nodes=2", "train.py"), "Missing option '--image'"),
        (
            ("kubernetes", "--nodes=2", *IMAGE, "--name=My_Job", "train.py"),
            "--name 'My_Job': the name of a job",
        ),
        (
            ("kubernetes", "--nodes=2", *IMAGE, "--memory=lots", "train.py"),
            "--memory 'lots': must be a Kubernetes quantity",
        ),
        (("kubernetes", "--nodes=2", "--image", " ", "train.py"), "--image ' ': name the image"),
        (("slurm", "--nodes=1", "--", "--witness", "h:1", "a.py"), "--witness: a job of one host cannot"),
        (("kubernetes", "--nodes=1", *IMAGE, "--", "--witness", "h:1", "a.py"), "--witness: a job of one host cannot"),
    ],
)
def test_what_no_scheduler_would_take_is_refused(words, said):
    code, out = manifest(*words)
    assert code == 2
    assert said in out


def test_the_examples_of_the_documentation_write_files(tmp_path):
    """All but `kubectl`, which is not here."""
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "kubernetes.md").read_text()
    (block,) = re.findall(r"```bash\n(phalanx key.*?)```", text, re.DOTALL)
    lines = [line for line in block.replace("\\\n", " ").splitlines() if line.startswith("phalanx")]
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert [one["kind"] for one in yaml.safe_load_all((tmp_path / "job.yaml").read_text())] == ["Service", "Job"]
    assert (tmp_path / ".config" / "phalanx" / "key").exists()
