import pytest

from phalanx.errors import LaunchError
from phalanx.launch.settings import OPTIONS, Settings, decide_num_ranks, format_help, parse
from phalanx.launch.target import Target


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
    assert parse(["train.py"]) == Settings(Target("script", "train.py"))


def test_everything_behind_the_script_belongs_to_the_script() -> None:
    settings = parse(["--nproc-per-node", "2", "train.py", "--nproc-per-node", "3", "-m", "--"])
    assert settings.nproc == "2"
    assert settings.target == Target("script", "train.py", ("--nproc-per-node", "3", "-m", "--"))


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
    assert parse([*words, "a.py"]).nproc == "2"


def test_every_option_reaches_its_field() -> None:
    words = (
        "--nproc-per-node gpu --log-dir d --grace 2.5 --no-affinity --no-preload --max-restarts 3 --exit-timeout 7 "
        "--master-addr h --master_port 99 --rdzv-id job7 --standalone --nnodes 1 --node_rank 0 -m pkg.mod x"
    )
    assert parse(words.split()) == Settings(
        Target("module", "pkg.mod", ("x",)),
        nproc="gpu", log_dir="d", grace_s=2.5, exit_timeout_s=7.0, affinity=False, preload=False, max_restarts=3,
        master_addr="h", master_port=99, run_id="job7", standalone=True,
    )  # fmt: skip


def test_a_program_keeps_its_own_flags() -> None:
    assert parse(["--no-python", "sh", "-c", "true"]).target == Target("program", "sh", ("-c", "true"))


def test_a_double_dash_ends_the_options() -> None:
    assert parse(["--", "-odd-name.py"]).target.name == "-odd-name.py"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--nproc-per-nod", "--nproc-per-node"),
        ("--nproc_pre_node", "--nproc-per-node"),
        ("--nproc", "--nproc-per-node"),
        ("--logdir", "--log-dir"),
        ("--max_restart", "--max-restarts"),
        ("--nopython", "--no-python"),
        ("-module", "--module"),
    ],
)
def test_a_mistyped_flag_suggests_the_right_one(given: str, meant: str) -> None:
    message = refuse(given, "2", "a.py")
    assert f"{given}: no such option. Did you mean {meant}?" in message


def test_a_flag_like_no_other_points_to_the_help() -> None:
    assert "`phalanx run --help` lists the options" in refuse("--zzz", "a.py")


@pytest.mark.parametrize("flag", ["--rdzv-backend=c10d", "--tee", "--start_method"])
def test_torchruns_flags_that_are_missing_say_what_to_do_instead(flag: str) -> None:
    assert "not in this version" in refuse(flag, "3", "a.py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nproc-per-node 0 a.py", "--nproc-per-node: must be at least 1, got 0"),
        ("--nproc-per-node -3 a.py", "--nproc-per-node: must be at least 1, got -3"),
        ("--nproc-per-node two a.py", "--nproc-per-node: must be a number, auto, cpu or gpu, got 'two'"),
        ("--grace soon a.py", "--grace: must be zero or more seconds, got 'soon'"),
        ("--grace -1 a.py", "--grace: must be zero or more seconds, got '-1'"),
        ("--grace nan a.py", "--grace: must be zero or more seconds, got 'nan'"),
        ("--grace 3e8 a.py", "--grace: must be at most 31536000 seconds, a year, got '3e8'"),
        ("--max-restarts 9999999999 a.py", "--max-restarts: must be below a thousand million, got '9999999999'"),
        ("--nproc-per-node 9999999999 a.py", "--nproc-per-node: must be below a thousand million, got 9999999999"),
        ("--max-restarts -1 a.py", "--max-restarts: must be a number, zero or more, got '-1'"),
        ("--master-port 70000 a.py", "--master-port: must be a port number, from 0 to 65535, got '70000'"),
        ("--nnodes 2 a.py", "--nnodes: this version runs on one host, got '2'"),
        ("--node-rank 1 a.py", "--node-rank: this version runs on one host, whose rank is 0, got '1'"),
        ("--no-python=yes a.py", "--no-python: takes no value, got 'yes'"),
        ("--log-dir", "--log-dir: needs a value: --log-dir DIR"),
        ("-m --no-python a", "-m and --no-python: a job is a module or a program, not both"),
        ("", "no script: say what to run"),
        ("--nproc-per-node 2", "no script: say what to run"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(words: str, message: str) -> None:
    assert message in refuse(*words.split())


def test_all_problems_are_told_at_once() -> None:
    message = refuse("--nproc-per-node", "0", "--grace", "x", "--nnodes", "4", "a.py")
    assert len(message.splitlines()) == 3


@pytest.mark.parametrize(
    ("nproc", "cpus", "gpus", "ranks"),
    [("auto", 4, 0, 4), ("auto", 4, 2, 2), ("cpu", 4, 2, 4), ("gpu", 4, 2, 2), ("3", 4, 2, 3), ("64", 1, 0, 64)],
)
def test_words_for_the_number_of_ranks(nproc: str, cpus: int, gpus: int, ranks: int) -> None:
    assert decide_num_ranks(nproc, cpus, gpus) == ranks


def test_gpu_without_a_gpu_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"no GPU that CUDA could use.*--nproc-per-node cpu for 4 ranks") as caught:
        decide_num_ranks("gpu", 4, 0)
    assert caught.value.exit_code == 2


def test_an_absurd_number_of_ranks_is_refused() -> None:
    with pytest.raises(LaunchError, match="more than 64 ranks for each of the 2 cores that this command may use, 128"):
        decide_num_ranks("129", 2, 0)


def test_the_help_names_every_option_within_80_columns() -> None:
    text = format_help()
    for option in OPTIONS:
        assert f"--{option.name}" in text
    assert max(len(line) for line in text.splitlines()) <= 80


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


def test_use_env_changes_nothing() -> None:
    assert parse(["--use_env", "a.py"]) == parse(["a.py"])
