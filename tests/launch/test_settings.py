import re
from pathlib import Path

import pytest

from phalanx._job.agent.settings import Settings
from phalanx._job.agent.target import JobTarget
from phalanx._job.coordinator.rendezvous import Rendezvous, join_endpoint, split_endpoint
from phalanx._job.launch.command_line import parse, read_settings
from phalanx._job.launch.manual import format_help
from phalanx._job.launch.options import OPTIONS, REFUSED, Streams, find_names
from phalanx._job.launch.plan_job import count_ranks, count_ranks_on_gpus, plan_job
from phalanx.errors import LaunchError


def refuse(*words: str) -> str:
    with pytest.raises(LaunchError) as caught:
        parse(words)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("words", [["-h"], ["--help"], ["--nproc-per-node", "2", "--help"], ["-m", "-h", "x"]])
def test_help_is_asked_for_anywhere_before_the_script(words):
    assert parse(words) is None


def test_help_behind_the_script_is_the_scripts():
    settings = parse(["train.py", "--help"])
    assert settings is not None
    assert settings.target.arguments == ("--help",)


def test_a_script_alone_takes_all_defaults() -> None:
    assert parse(["train.py"]) == Settings(JobTarget("script", "train.py"))


def test_everything_behind_the_script_belongs_to_the_script() -> None:
    settings = parse(["--nproc-per-node", "2", "train.py", "--nproc-per-node", "3", "-m", "--"])
    assert settings.nproc_per_node == "2"
    assert settings.target == JobTarget("script", "train.py", ("--nproc-per-node", "3", "-m", "--"))


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc-per-node", "2"],
        ["--nproc_per_node", "2"],
        ["--nproc-per-node=2"],
        ["--nproc_per_node=2"],
    ],
)
def test_dashes_and_underscores_are_the_same(words: list[str]) -> None:
    assert parse([*words, "a.py"]).nproc_per_node == "2"


def test_every_option_reaches_its_field() -> None:
    words = (
        "--nproc-per-node gpu --log-dir d --shutdown-timeout 2.5 --no-affinity --no-preload --max-restarts 3 "
        "--exit-timeout 7 "
        "--master-addr h --master_port 99 --rdzv-id job7 --standalone --nnodes 1 --node_rank 0 --role trainer -r 3 "
        "--tee 0:1,1:2 --local_ranks_filter 0,2 --key-file k --start-method spawn --monitor_interval 0.5 --use_env "
        "--local-addr h --rdzv_conf timeout=3 --signals-to-handle SIGTERM,SIGINT -m pkg.mod x"
    )
    assert parse(words.split()) == Settings(
        JobTarget("module", "pkg.mod", ("x",)),
        nproc_per_node="gpu", log_dir="d", shutdown_timeout_s=2.5, exit_timeout_s=7.0, affinity=False,
        preload=False, max_restarts=3, master_addr="h", master_port=99, run_id="job7", standalone=True,
        role="trainer", redirects=Streams(3),
        tee=Streams(0, ((0, 1), (1, 2))), local_ranks_filter=(0, 2), key_file="k", signals_to_handle="SIGTERM,SIGINT",
    )  # fmt: skip


def test_a_program_keeps_its_own_flags() -> None:
    assert parse(["--no-python", "sh", "-c", "true"]).target == JobTarget("program", "sh", ("-c", "true"))


def test_a_double_dash_ends_the_options() -> None:
    assert parse(["--", "-odd-name.py"]).target.name == "-odd-name.py"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--nproc_pre_node", "--nproc-per-node"),
        ("--logdir", "--log-dir"),
        ("--nopython", "--no-python"),
        ("-module", "--module"),
    ],
)
def test_a_mistyped_flag_suggests_the_right_one(given: str, meant: str) -> None:
    message = refuse(given, "2", "a.py")
    assert f"{given}: no such option. Did you mean {meant}?" in message


def test_a_flag_like_no_other_points_to_the_help() -> None:
    assert "`phalanx run --help` lists the options" in refuse("--zzz", "a.py")


def test_the_script_chooses_the_backend() -> None:
    message = refuse("--backend", "gloo", "a.py")
    assert message == "phalanx run: --backend: no such option. The script chooses the backend, in init_process_group."


@pytest.mark.parametrize("flag", ["--logs-specs", "--virtual-local-rank", "--numa_binding"])
def test_torchruns_flags_that_are_missing_say_what_to_do_instead(flag: str) -> None:
    assert "not in this version" in refuse(flag, "3", "a.py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nproc-per-node 0 a.py", "--nproc-per-node: must be at least 1, got 0"),
        ("--nproc-per-node -3 a.py", "--nproc-per-node: must be at least 1, got -3"),
        ("--nproc-per-node two a.py", "--nproc-per-node: must be a number, auto, cpu or gpu, got 'two'"),
        ("--shutdown-timeout soon a.py", "--shutdown-timeout: must be zero or more seconds, got 'soon'"),
        ("--shutdown-timeout -1 a.py", "--shutdown-timeout: must be zero or more seconds, got '-1'"),
        ("--shutdown-timeout nan a.py", "--shutdown-timeout: must be zero or more seconds, got 'nan'"),
        ("--shutdown-timeout 3e8 a.py", "--shutdown-timeout: must be at most 31536000 seconds, a year, got '3e8'"),
        ("--max-restarts 9999999999 a.py", "--max-restarts: must be below 1,000,000,000, got '9999999999'"),
        ("--nproc-per-node 9999999999 a.py", "--nproc-per-node: must be below 1,000,000,000, got 9999999999"),
        ("--max-restarts -1 a.py", "--max-restarts: must be a number, zero or more, got '-1'"),
        ("--master-port 70000 a.py", "--master-port: must be a port number, from 0 to 65535, got '70000'"),
        ("--nnodes 0 a.py", "--nnodes: must be at least 1, and MIN at most MAX, got '0'"),
        ("--nnodes 3:2 a.py", "--nnodes: must be at least 1, and MIN at most MAX, got '3:2'"),
        ("--nnodes two a.py", "--nnodes: must be a number of hosts, or MIN:MAX, got 'two'"),
        ("--nnodes 2 --node-rank 1 a.py", "--node-rank 1: needs the address of node 0. Give --master-addr HOST"),
        (
            "--nnodes 2 --node-rank 2 --master-addr h a.py",
            "--node-rank: hosts are numbered from 0 to 1 with --nnodes 2",
        ),
        ("--nnodes 1:2 --master-addr h a.py", "--nnodes 1:2 with --node-rank or --master-addr"),
        ("--nnodes 2 --standalone a.py", "--standalone and --nnodes: a standalone job runs on one host"),
        ("--rdzv-backend etcd --rdzv-endpoint h:1 a.py", "--rdzv-backend etcd: hosts connect to the first host"),
        ("--rdzv-backend zeus a.py", "--rdzv-backend: must be static or c10d, got 'zeus'"),
        ("--rdzv-endpoint h:99999 a.py", "--rdzv-endpoint: must be HOST or HOST:PORT, with a port"),
        ("--rdzv-conf timeout a.py", "--rdzv-conf: must be KEY=VALUE,KEY=VALUE, got 'timeout'"),
        ("--nnodes 2 --rdzv-conf timeout=x a.py", "--rdzv-conf timeout: must be a number, zero or more, got 'x'"),
        ("--host-timeout 0.1 a.py", "--host-timeout: must be at least 1 second, got '0.1'"),
        ("--witness h:1 a.py", "--witness: a job of one host cannot survive the loss of its host"),
        ("--nnodes 2 --witness h a.py", "--witness: must be HOST:PORT or etcd://HOST:PORT, with a port, got 'h'"),
        ("--nnodes 2 --witness etcd://h a.py", "or etcd://HOST:PORT, with a port, got 'etcd://h'"),
        ("--nnodes 2 --witness consul://h:1 a.py", "or etcd://HOST:PORT, got 'consul://h:1'"),
        ("--nnodes 2 --witness lease://train a.py", "or etcd://HOST:PORT, got 'lease://train'"),
        ("--nnodes 2 --witness etcd://u@h:1 a.py", "--witness: has a user, but logging in to etcd is not"),
        ("-r 4 a.py", "-r: must be 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both)"),
        ("--tee 0:1,x a.py", "--tee: must be 0 (nothing)"),
        ("--local-ranks-filter a a.py", "--local-ranks-filter: must be local ranks, such as 0,1,2, got 'a'"),
        ("--start-method thread a.py", "--start-method: must be spawn, fork or forkserver, got 'thread'"),
        ("--signals-to-handle SIGUSR1 a.py", "SIGUSR1 and SIGUSR2 are relayed"),
        ("--no-python=yes a.py", "--no-python: takes no value, got 'yes'"),
        ("--log-dir", "--log-dir: needs a value: --log-dir DIR"),
        ("-m --no-python a", "-m and --no-python: a job is a module or a program, not both"),
        ("", "no script. Name one: phalanx run train.py"),
        ("--nproc-per-node 2", "no script. Name one: phalanx run train.py"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(words: str, message: str) -> None:
    assert message in refuse(*words.split())


def test_all_problems_are_told_at_once() -> None:
    message = refuse("--nproc-per-node", "0", "--shutdown-timeout", "x", "--nnodes", "4:3", "a.py")
    assert len(message.splitlines()) == 3


def test_problems_of_the_command_line_and_of_the_script_are_raised_together() -> None:
    problems: list[str] = []
    settings = read_settings(["--nproc-per-node", "0", "missing.py"], {}, problems)
    assert settings is not None
    with pytest.raises(LaunchError) as caught:
        plan_job(settings, {}, problems=problems)
    number, script = str(caught.value).splitlines()
    assert number == "phalanx run: --nproc-per-node: must be at least 1, got 0"
    assert "phalanx run: script 'missing.py': no such file" in script


@pytest.mark.parametrize(
    ("nproc_per_node", "cpus", "gpus", "ranks"),
    [("auto", 4, 0, 4), ("auto", 4, 2, 2), ("cpu", 4, 2, 4), ("gpu", 4, 2, 2), ("3", 4, 2, 3), ("64", 1, 0, 64)],
)
def test_words_for_the_number_of_ranks(nproc_per_node: str, cpus: int, gpus: int, ranks: int) -> None:
    problems: list[str] = []
    assert (count_ranks(nproc_per_node, cpus, gpus, problems), problems) == (ranks, [])


@pytest.mark.parametrize(
    ("nproc_per_node", "gpus", "per_gpu", "ranks"),
    [("auto", 2, 3, 6), ("gpu", 1, 4, 4), ("4", 1, 4, 4), ("3", 2, 2, 3)],
)
def test_ranks_that_share_gpus_are_counted_by_gpus(nproc_per_node: str, gpus: int, per_gpu: int, ranks: int) -> None:
    problems: list[str] = []
    assert (count_ranks_on_gpus(nproc_per_node, gpus, per_gpu, problems), problems) == (ranks, [])


@pytest.mark.parametrize(
    ("nproc_per_node", "gpus", "message"),
    [
        ("auto", 0, "--ranks-per-gpu 2: this host has no GPU for CUDA"),
        ("cpu", 1, "--ranks-per-gpu 2 and --nproc-per-node cpu: ranks are counted by GPUs or by cores"),
        ("5", 1, "1 GPU has room for 2 ranks, but --nproc-per-node is 5. Give --ranks-per-gpu 5."),
        ("5", 2, "2 GPUs have room for 4 ranks, but --nproc-per-node is 5. Give --ranks-per-gpu 3."),
    ],
)
def test_more_ranks_than_the_gpus_are_to_have_are_refused(nproc_per_node: str, gpus: int, message: str) -> None:
    problems: list[str] = []
    assert count_ranks_on_gpus(nproc_per_node, gpus, 2, problems) == 0
    assert message in problems[0]


def test_no_gpu_has_no_ranks_at_all() -> None:
    assert "--ranks-per-gpu: must be from 1 to 64, got '0'" in refuse("--ranks-per-gpu", "0", "x.py")


def test_gpu_without_a_gpu_is_refused() -> None:
    problems: list[str] = []
    assert count_ranks("gpu", 4, 0, problems) == 0
    assert re.search(r"no GPU for CUDA.*--nproc-per-node cpu for 4 ranks", problems[0])


def test_an_absurd_number_of_ranks_is_refused() -> None:
    problems: list[str] = []
    assert count_ranks("129", 2, 0, problems) == 0
    assert "more than 64 ranks for each of the 2 cores that this command may use, 128" in problems[0]


def test_the_help_names_every_option_on_two_screens() -> None:
    lines = format_help().splitlines()
    for option in OPTIONS:
        assert f"--{option.name}" in " ".join(lines)
    assert len(lines) <= 2 * 24
    assert max(map(len, lines)) <= 80


def test_every_option_of_torchrun_and_its_predecessor_is_taken_or_explained() -> None:
    from torch.distributed.run import get_args_parser

    flags = [flag for action in get_args_parser()._actions for flag in action.option_strings]
    unknown = []
    for flag in {*flags, "--use-env", "--use_env"} - {"-h", "--help"}:
        for words in ([flag, "1", "a.py"], [f"{flag}=1", "a.py"], [flag, "a.py"]):
            try:
                parse(words)
            except LaunchError as error:
                if "no such option" in str(error):
                    unknown.append(flag)
    assert unknown == []


def test_torchruns_options_can_be_shortened_as_its_own_parser_allows() -> None:
    """`--nproc-per 1` and `--redirect=3`, which argparse takes for their only meaning, were no options here."""
    from torch.distributed.run import get_args_parser

    torchrun = get_args_parser()
    # The options of torch 2.15 that this torch lacks.
    newer = {"log-line-prefix-template"} - {action.dest.replace("_", "-") for action in torchrun._actions}
    for action in torchrun._actions:
        if action.dest in ("help", "training_script", "training_script_args"):
            continue
        full = action.dest.replace("_", "-")
        for flag in (one for one in action.option_strings if one.startswith("--")):
            for length in range(3, len(flag)):
                try:
                    matches = {one[0].dest for one in torchrun._get_option_tuples(flag[:length])}
                except SystemExit:
                    matches = set()
                names = find_names(flag[2:length])
                if matches == {action.dest} and names != [flag[2:length].replace("_", "-")]:
                    assert set(names) - newer == {full}, flag[:length]
                elif len(matches) > 1:
                    assert len(names) != 1 or names[0] in {option.name for option in OPTIONS}, flag[:length]
    assert parse(["--nproc-per", "1", "--redirect=3", "--max_r", "2", "a.py"]) == parse(
        ["--nproc-per-node", "1", "--redirects=3", "--max-restarts", "2", "a.py"]
    )
    assert "--log: may be any of --log-dir, --log-line-prefix-template, --logs-specs" in refuse("--log", "x", "a.py")
    assert "no such option" in refuse("--evict", "3", "a.py")  # ours cannot be shortened


def test_refused_options_are_refused_as_variables_too() -> None:
    """PET_VIRTUAL_LOCAL_RANK=1 and PET_NUMA_BINDING were silently ignored."""
    for name in REFUSED:
        variable = f"PET_{name.replace('-', '_').upper()}"
        with pytest.raises(LaunchError, match=f"{variable} in the environment: not in this version"):
            parse(["a.py"], {variable: "1"})
    assert parse(["a.py"], {"PET_VIRTUAL_LOCAL_RANK": "0", "PET_EVENT_LOG_HANDLER": "null"}) == parse(["a.py"])


def test_the_shutdown_timeout_is_torchruns() -> None:
    assert parse(["a.py"]).shutdown_timeout_s == 30.0
    assert parse(["a.py"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}).shutdown_timeout_s == 7.0
    environ = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7", "PET_SHUTDOWN_TIMEOUT": "8"}
    assert parse(["a.py"], environ).shutdown_timeout_s == 8.0
    assert parse(["--shutdown-timeout", "9", "a.py"], environ).shutdown_timeout_s == 9.0


def test_the_page_lists_every_difference_from_torchrun() -> None:
    """What torchrun's own parser has is taken as it is there, or stands on the page; the page names nothing else."""
    from torch.distributed.run import get_args_parser

    torchruns = {
        action.dest.replace("_", "-"): action.default
        for action in get_args_parser()._actions
        if action.option_strings and action.dest != "help"
    }
    page = (Path(__file__).parents[2] / "docs/reference/launching.md").read_text(encoding="utf-8")
    section = page.partition("## torchrun's options")[2].partition("The launcher before torchrun")[0]
    listed = {name for line in section.splitlines() if line.startswith("| `--")
              for name in re.findall(r"`--([a-z-]+)`", line.split("|")[1])}  # fmt: skip
    assert listed <= torchruns.keys() | {"print-completion"}  # from torch 2.15 on
    by_name = {option.name: option for option in OPTIONS}
    for name in torchruns.keys() - by_name.keys():
        assert name in REFUSED, name
    differing = {name for name in torchruns if name in REFUSED or by_name[name].field is None}
    assert differing <= listed
    # What is neither refused, without effect nor listed has the same meaning and default.
    same = torchruns.keys() - listed
    assert same <= {
        "rdzv-id", "standalone", "role", "module", "no-python", "run-path", "shutdown-timeout",
        "log-line-prefix-template",  # from torch 2.15 on
    }  # fmt: skip
    assert all(by_name[name].torchruns for name in torchruns.keys() & by_name.keys())


def test_completion_has_a_command_of_its_own() -> None:
    assert "--print-completion: not in this version: use `phalanx completion`" in refuse("--print-completion", "bash")


def test_use_env_changes_nothing() -> None:
    assert parse(["--use_env", "a.py"]) == parse(["a.py"])


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("--nnodes 2", Rendezvous(leads=True, min_nodes=2, max_nodes=2)),
        ("--nnodes 1:4", Rendezvous(leads=True, min_nodes=1, max_nodes=4)),
        ("--nnodes 2 --host-timeout 3", Rendezvous(leads=True, min_nodes=2, max_nodes=2, host_timeout_s=3.0)),
        *(
            (f"--nnodes 2 --witness {place}", Rendezvous(leads=True, min_nodes=2, max_nodes=2, witness=place))
            for place in ("h:1", "etcd://h:1", "etcds://h:1")
        ),
        ("--nnodes 2 --master-port 7", Rendezvous(":7", leads=True, min_nodes=2, max_nodes=2)),
        (
            "--nnodes=2 --node_rank=1 --master_addr=n1 --master_port=29501",
            Rendezvous("n1:29501", False, 1, 2, 2),
        ),
        ("--nnodes=2 --node_rank=0 --master_addr=n1", Rendezvous("n1:29500", True, 0, 2, 2)),
        ("--nnodes=2 --node_rank=0 --master_addr=[fe80::1%eth0]", Rendezvous("[fe80::1%eth0]:29500", True, 0, 2, 2)),
        ("--nnodes=2 --rdzv-endpoint n1:5 --node-rank 1", Rendezvous("n1:5", False, 1, 2, 2)),
        ("--nnodes=2 --rdzv-backend c10d --rdzv-endpoint n1", Rendezvous("n1:29400", None, None, 2, 2)),
        (
            "--nnodes=2:3 --rdzv_backend=c10d --rdzv_endpoint=n1:1 --local_addr 10.0.0.2 "
            "--rdzv-conf is_host=1,join_timeout=9,last_call_timeout=4",
            Rendezvous("n1:1", True, None, 2, 3, None, 9.0, 4.0, 9.0, "10.0.0.2"),
        ),
        (
            "--nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=n1:1 --rdzv-conf is_host=false,keep_alive_interval=2",
            Rendezvous("n1:1", False, None, 2, 2, host_timeout_s=6.0),
        ),
        *(
            (f"--nnodes=2 {where} --rdzv-conf {conf}", Rendezvous(*meets, join_timeout_s=wait_s))
            for where, meets, static in (
                ("--rdzv_backend=c10d --rdzv_endpoint=n1:1", ("n1:1", None, None, 2, 2), False),
                ("--node-rank 1 --master-addr n1 --master-port 1", ("n1:1", False, 1, 2, 2), True),
            )
            for conf, wait_s in (
                ("timeout=8", 8.0),
                ("join_timeout=9", 9.0),
                ("timeout=8,join_timeout=9", 8.0 if static else 9.0),
            )
        ),
        ("--nnodes 1 --node-rank 0 --master-addr n1 --master-port 7", None),
        ("--nnodes 1:1 --rdzv-backend c10d --rdzv-endpoint localhost:0", None),
        ("--rdzv-id x", None),
    ],
)
def test_hosts_meet_where_torchruns_options_say(words: str, where: Rendezvous | None) -> None:
    assert parse([*words.split(), "a.py"]).rendezvous == where


def test_variables_of_torchrun_stand_behind_the_command_line() -> None:
    environ = {
        "PET_NPROC_PER_NODE": "3", "PET_NNODES": "2", "PET_MASTER_ADDR": "n1", "PET_MASTER_PORT": "5", "PET_NODE_RANK":
        "1", "PET_MODULE": "1", "PET_STANDALONE": "0", "PET_MAX_RESTARTS": "2", "PET_ROLE": "", "PET_EVICT_AFTER": "99",
        "PET_RDZV_ID": "job",
    }  # fmt: skip
    settings = parse(["--max-restarts", "7", "pkg"], environ)
    assert settings == Settings(
        JobTarget("module", "pkg"), nproc_per_node="3", max_restarts=7, master_addr="n1", master_port=5, run_id="job",
        rendezvous=Rendezvous("n1:5", False, 1, 2, 2),
    )  # fmt: skip


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(LaunchError, match="PET_NNODES in the environment: must be a number of hosts, or MIN:MAX"):
        parse(["a.py"], {"PET_NNODES": "many"})
    with pytest.raises(LaunchError, match="PET_STANDALONE in the environment: must be 0 or 1, got 'yes'"):
        parse(["a.py"], {"PET_STANDALONE": "yes"})


def test_the_old_launcher_starts_one_rank_and_tells_it_its_local_rank() -> None:
    words = "--nproc_per_node=4 --nnodes=1 --node_rank=0 --master_addr=127.0.0.1 --master_port=29501 a.py --x"
    settings = parse(words.split(), old_launcher=True)
    assert (settings.nproc_per_node, settings.local_rank_argument) == ("4", True)
    assert parse(["a.py"], old_launcher=True).nproc_per_node == "1"
    assert not parse(["--use_env", "a.py"], old_launcher=True).local_rank_argument
    with pytest.raises(LaunchError, match=r"a program gets no --local-rank\. Add --use-env"):
        parse(["--no-python", "ls"], old_launcher=True)
    assert parse(["--no-python", "--use-env", "ls"], old_launcher=True).target.kind == "program"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("h", "h", 9), ("h:1", "h", 1), ("[::1]", "::1", 9), ("[::1]:5", "::1", 5), ("10.0.0.1:0", "10.0.0.1", 0)],
)
def test_an_endpoint_is_a_host_and_perhaps_a_port(text: str, host: str, port: int) -> None:
    assert split_endpoint(text, 9) == (host, port)
    assert split_endpoint(join_endpoint(host, port), 0) == (host, port)


def test_short_flags_take_their_value_attached() -> None:
    assert parse(["-r3", "-t0:1", "a.py"]).redirects == Streams(3)
    assert parse(["-r3", "-t0:1", "a.py"]).tee == Streams(0, ((0, 1),))


def test_a_password_of_the_witness_on_the_command_line_is_not_repeated() -> None:
    for scheme in ("etcd", "etcds", "consul"):
        with pytest.raises(LaunchError) as caught:
            parse(["--nnodes", "2", "--witness", f"{scheme}://u:the-word@h:1", "a.py"])
        assert "the-word" not in str(caught.value)
