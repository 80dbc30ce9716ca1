"""Tests of the console command: refusals, composition of options, sweeps, exit codes."""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import run_helpers
import yaml
from run_helpers import assert_refused, run_command, tables

from embodied_envs.base.errors import LONGEST_LINE, ConfigError, ProcessLost, show
from embodied_ppo.commands import main, output, train
from embodied_ppo.commands.arguments import split_runs
from embodied_ppo.commands.experiments import experiments
from embodied_ppo.options import loader as strict
from embodied_ppo.options import readers
from embodied_ppo.options.compose import prepare
from embodied_ppo.options.config_folders import shipped
from embodied_ppo.options.schema import OWN_OPTIONS, Config, EvaluateConfig
from embodied_ppo.training import checkpoint, run_directory

TINY = run_helpers.words("""experiment=cartpole env.num_envs=4 algorithm.horizon=8
    algorithm.global_batch_size=32 algorithm.update_epoch=1 updates=1 evaluation.episodes=1
    evaluation.num_envs=1 device=cpu""")


# Options of experiment=gsm8k_qwen2_5_0_5b that the user must set.
GSM8K = ["actor.model.path", "data.eval", "data.train"]


pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def user_configs(tmp_path) -> Path:
    """Write configs of a user: primary configs, experiments and groups; return the folder."""
    files = {
        "mine.yaml": (
            "defaults:\n  - train\n  - override experiment: hopper\n  - _self_\nalgorithm:\n "
            " vf_coef: 0.25\n"
        ),
        "experiment/own.yaml": (
            "# @package _global_\n# My own task\nalgorithm:\n  clip_ratio_low: 0.1\n  gamma: 0.9\n"
        ),
        "experiment/tuned.yaml": (
            "# @package _global_\ndefaults: [override /algorithm: fast]\nalgorithm: {lr: 2e-3}\n"
        ),
        "experiment/derived.yaml": (
            "# @package _global_\ndefaults: [/experiment/own, _self_]\nseed: 5\n"
        ),
        "algorithm/fast.yaml": "lr: 1.0e-2\ngamma: 0.95\n",
        "algorithm/slow.yaml": "lr: 1.0e-5\ngamma: 0.97\n",
        "env/pole.yaml": "id: CartPole-v1\nnum_envs: 8\n",
        "lost.yaml": "defaults:\n  - train\n  - override experiment: nowhere\n",
        "broken.yaml": "defaults: [train, _self_]\nalgorithm: {gamma: [}\n",
        "listed.yaml": "- train\n",
        "twice.yaml": (
            "defaults: [train, _self_]\nalgorithm: {clip_ratio: 0.1, clip_ratio_low: 0.3}\n"
        ),
        "typo.yaml": "defaults: [train, _self_]\nalgorithm: {gama: 0.1}\n",
        "loop.yaml": "defaults: [loop, _self_]\n",
    }
    for name, text in files.items():
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "mine"


def files_in_cwd() -> list[str]:
    return sorted(str(p) for p in Path.cwd().rglob("*"))


def config(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, dict[str, Any]]:
    """Return the output of ``embodied-ppo config --json``."""
    return run_command(capsys, "config", *argv)


def values(rows: dict[str, dict[str, Any]], *paths: str) -> list[Any]:
    return [rows[path]["value"] for path in paths]


# Largest number of CPU seconds of a refusal. The first ones import torch (2 s) and Ray (1 s).
LONGEST_REFUSAL_S = 8.0


def cpu_of_children() -> float:
    """Return the CPU seconds of child processes; wall time depends on the machine's load."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def command(*argv: object) -> list[str]:
    return [sys.executable, "-m", "embodied_ppo.commands.main", *map(str, argv)]


# ----------------------------------------------------------------------------------------- refusals
REFUSALS: list[tuple[str, str]] = tables(__file__)["refusals"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "parts"), REFUSALS, ids=[line or "(no arguments)" for line, _ in REFUSALS]
)
def test_refusal_is_one_line_and_writes_nothing(line: str, parts: str, capsys) -> None:
    before = time.process_time()
    code = main.main(line.split(" ") if line else [])
    seconds, out = time.process_time() - before, capsys.readouterr()
    assert code == 2, out.err
    assert seconds < LONGEST_REFUSAL_S, "seconds of processor time"
    assert out.out == "" and out.err.startswith("error: ") and out.err.count("\n") == 1, out.err
    assert len(out.err) <= LONGEST_LINE + 1, out.err
    for part in parts.split(" .. "):
        assert part in out.err
    assert files_in_cwd() == []


@pytest.mark.parametrize(
    "option", ["model.rnn_type", "env.robot", "algorithm.whatever", "optimizer"]
)
def test_unknown_option_without_a_similar_name_has_no_suggestion(option: str, capsys) -> None:
    assert "did you mean" not in assert_refused(capsys, f"config {option}=x", f"{option} = x")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("lost", "Could not find 'experiment/nowhere'; there are: ant, ant_gpu, arithmetic"),
        ("broken", "broken.yaml .. line 2"),
        ("listed", "listed"),
        ("twice", "clip_ratio = 0.1 .. clip_ratio_low = 0.3 .. twice.yaml"),
        ("typo", "algorithm.gama = 0.1 .. typo.yaml .. algorithm.gamma"),
        ("loop", "name each other for ever"),
        ("min", "did you mean mine?"),
    ],
)
def test_invalid_user_config_is_refused(name: str, parts: str, user_configs: Path, capsys) -> None:
    assert_refused(capsys, f"train --config-dir {user_configs} --config-name {name}", parts)
    assert files_in_cwd() == []


def test_unusable_directory_is_refused(monkeypatch, capsys) -> None:
    Path("theirs").mkdir(mode=0)
    run, user = Path("theirs/run"), os.geteuid()
    commands = {"train resume={}": "is no directory", "verify {}": "does not exist"}
    for command, message in commands.items():  # imports the modules
        assert_refused(capsys, command.format("nowhere"), message)
    os.seteuid(user or 65534)  # root may enter every folder
    try:
        for command, message in commands.items():
            assert_refused(capsys, command.format(run), message)
        assert checkpoint.steps(run / "checkpoints") == {}
        with pytest.raises(ConfigError, match="Permission denied"), run_directory.locked(run):
            pass
    finally:
        os.seteuid(user)
    with monkeypatch.context() as patch:
        error = OSError(errno.ENOSYS, "Function not implemented")  # a disk without locks
        patch.setattr(fcntl, "flock", mock.Mock(side_effect=error))
        with pytest.raises(ConfigError, match="cannot be locked"), run_directory.locked(Path("a")):
            pass
    Path("deleted").mkdir()
    parent = Path.cwd()
    monkeypatch.chdir("deleted")
    (parent / "deleted").rmdir()
    try:
        assert main.main(["train", "experiment=cartpole"]) == 2
    finally:
        os.chdir(parent)
    message = "error: the current folder has been deleted; change to an existing one\n"
    assert capsys.readouterr().err == message


@pytest.mark.slow
def test_refusals_of_a_process() -> None:
    for line, part in (
        ("train algorithm.gama=0.9", "algorithm.gamma"),
        ("trian", "did you mean train?"),
    ):
        before = cpu_of_children()
        process = subprocess.run(command(*line.split()), capture_output=True, text=True, timeout=60)
        assert (process.returncode, process.stdout) == (2, "")
        assert process.stderr.startswith("error: ") and process.stderr.count("\n") == 1
        assert part in process.stderr
        assert cpu_of_children() - before < 2, "seconds of processor time"
    assert files_in_cwd() == []


# --------------------------------------------------------------------------------------------- plan
@pytest.mark.slow
def test_plan_of_a_robot_policy(capsys) -> None:
    arguments = ["plan", "experiment=bench_wide", "compile=auto", "placement=pipelined"]
    arguments += ["cluster.devices_per_node=2", "device=cpu"]
    assert main.main(arguments) == 0
    table = capsys.readouterr().out
    assert "cpu 1   0     -       rank 0   rank 1" in table
    assert "weight transfer                               ipc (1)" in table
    assert main.main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["facts"]["samples per optimiser step and actor process"] == 512
    assert plan["facts"]["time sharing"][-1] == "actor with env and rollout"
    assert plan["memory"][0] == ["memory per process", "env", "rollout", "actor"]
    rows = {row[0]: row[1:] for row in plan["memory"]}
    assert rows["weights"][0] == "0 MB"
    assert rows["weights"][1] == rows["weights"][2] == rows["gradients"][2]
    assert rows["gradients"][1] == rows["optimiser"][1] == "0 MB"
    assert files_in_cwd() == []
    arguments[-1] = "cluster.device_memory_gb=0.001"
    assert_refused(capsys, arguments, "lower algorithm.micro_batch_size")


# -------------------------------------------------------------------------------------- composition
def test_source_of_defaults(capsys) -> None:
    rows = config(capsys, "experiment=null")
    composed = {path for path, row in rows.items() if row["source"] != "default"}
    assert composed == {"mode", "placement"}
    options = strict.describe(Config)
    assert set(rows) == {path for path in options if readers.mode_of(path) != "reasoning"}
    assert rows["algorithm.gamma"] == {
        "value": 0.99,
        "default": 0.99,
        "source": "default",
        "meaning": "Discount per primitive step.",
        "type": "a finite number",
        "limit": ">= 0 and <= 1",
    }


def test_unused_objects_in_reference_cycles_are_freed_soon() -> None:
    """A closed simulator in a cycle keeps megabytes, and every evaluation may leave one."""

    class Cycle: ...

    main.main(["--version"])
    cycle: Any = Cycle()
    cycle.itself = cycle
    closed = weakref.ref(cycle)
    del cycle
    allocated = [[] for _ in range(1_000)]
    assert closed() is None and allocated


def test_quickstart_is_the_default_experiment(capsys) -> None:
    assert config(capsys) == config(capsys, "experiment=quickstart")
    rows = config(capsys)
    assert rows["env.id"]["source"] == "configs/experiment/quickstart.yaml"
    assert rows["name"]["value"] == "quickstart"


def test_source_of_each_option(capsys, user_configs: Path) -> None:
    rows = config(
        capsys, "--config-dir", user_configs, "--config-name", "mine", "algorithm.lam=0.9", "seed=3"
    )
    sources = {path: row["source"] for path, row in rows.items()}
    assert sources["env.id"] == "configs/experiment/hopper.yaml"
    assert rows["env.id"]["value"] == "Hopper-v4"
    assert sources["algorithm.value_loss_coef"] == str(user_configs / "mine.yaml")
    assert sources["algorithm.gae_lambda"] == "command line"
    assert rows["algorithm.gae_lambda"]["value"] == 0.9
    assert sources["mode"] == "configs/mode/embodied.yaml"
    assert sources["algorithm.adam_betas"] == "default"
    assert sources["seed"] == "command line"
    assert rows["name"]["value"] == "hopper"
    rows = config(capsys, "--config-dir", user_configs, "experiment=derived")
    for path, file in (("algorithm.gamma", "own"), ("seed", "derived")):
        assert rows[path]["source"] == str(user_configs / "experiment" / f"{file}.yaml")
    Path("run").mkdir()
    Path("run/config.yaml").write_text("initial_policy: /a ${x}/run\n")  # a path, no interpolation
    args = argparse.Namespace(command="train", config_name=None, config_dir=None)
    assert prepare(args, ["resume=run"]).config.initial_policy == "/a ${x}/run"


def test_command_line_overrides_files_under_any_alias(capsys, user_configs: Path) -> None:
    rows = config(
        capsys,
        "--config-dir",
        user_configs,
        "experiment=own",
        "algorithm.pg_clip=0.3",
        "algorithm.dual_clip_loss=true",
    )
    names = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "gamma")
    assert values(rows, *(f"algorithm.{x}" for x in names)) == [0.3, 0.3, 1.6, 0.9]
    rows = config(
        capsys, "--config-dir", user_configs, "--config-name", "mine", "algorithm.value_loss_coef=2"
    )
    assert rows["algorithm.value_loss_coef"]["value"] == 2.0


def test_group_on_the_command_line_overrides_the_experiment(capsys, user_configs: Path) -> None:
    paths = ("algorithm.lr", "algorithm.gamma")
    assert values(config(capsys, "--config-dir", user_configs, "experiment=tuned"), *paths) == [
        2e-3,
        0.95,
    ]
    rows = config(capsys, "--config-dir", user_configs, "experiment=tuned", "algorithm=slow")
    assert values(rows, *paths) == [1e-5, 0.97]
    assert rows["algorithm.lr"]["source"] == str(user_configs / "algorithm" / "slow.yaml")
    rows = config(capsys, "--config-dir", user_configs, "env=pole", "env.num_envs=16")
    assert values(rows, "env.id", "env.num_envs") == ["CartPole-v1", 16]
    # The order of the arguments does not matter.
    flags = ["algorithm.lr=1e-4", "algorithm=slow", "experiment=tuned"]
    assert config(capsys, "--config-dir", user_configs, *flags)["algorithm.lr"]["value"] == 1e-4


def test_values_of_all_types(capsys) -> None:
    flags = run_helpers.words("""experiment=null env.kwargs.a=1 env.kwargs.b=[x,2] +seed=4
        model.hidden=[8,4] run_dir=runs/${algorithm.gamma}-${seed} ++updates=2""")
    rows = config(capsys, *flags, "algorithm={gamma: 0.5}")
    paths = ("env.kwargs", "model.hidden", "run_dir", "seed", "updates", "algorithm.gamma")
    assert values(rows, *paths) == [{"a": 1, "b": ["x", 2]}, [8, 4], "runs/0.5-4", 4, 2, 0.5]


def test_deletion_restores_the_default_and_an_empty_section_does_not(capsys) -> None:
    rows = config(capsys, "experiment=cartpole", "~algorithm.gamma")
    assert rows["algorithm.gamma"]["source"] == "default"
    assert config(capsys, "~experiment")["env.id"]["source"] == "default"
    command = "config experiment=tabletop_push env.kwargs={}"
    assert_refused(capsys, command, "write ~env.kwargs, which removes")
    assert config(capsys, "experiment=tabletop_push", "~env.kwargs")["env.kwargs"]["value"] == {}
    assert config(capsys, "experiment=null", "env.kwargs={}")["env.kwargs"]["value"] == {}


def test_config_shows_sections_as_they_are_written(capsys) -> None:
    groups = "algorithm.reward_groups={run: {terms: [forward]}, other: {weight: 2}}"
    value = config(capsys, groups)["algorithm.reward_groups"]["value"]
    assert value["run"]["terms"] == ["forward"] and value["other"]["weight"] == 2
    assert main.main(["config", groups, "--only", "reward_groups"]) == 0
    assert "{run: {terms: [forward], gamma: null" in capsys.readouterr().out


def test_env_steps_conflict_with_updates_of_a_file(capsys, user_configs: Path) -> None:
    (user_configs / "experiment" / "short.yaml").write_text("# @package _global_\nupdates: 3\n")
    flags = ["--config-dir", str(user_configs), "experiment=short", "env_steps=100000"]
    assert_refused(capsys, ["config", *flags], "updates = 3 .. add updates=null")
    assert config(capsys, *flags, "updates=null")["env_steps"]["value"] == 100000
    assert config(capsys, *flags, "updates=5")["updates"]["value"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", [e["name"] for e in experiments(None)])
def test_shipped_experiment_is_valid(name: str, capsys) -> None:
    language = ["actor.model.path=x", "data.train={x: 2}", "data.eval=[x]", "run_dir=runs/${seed}"]
    required = language if name == "gsm8k_qwen2_5_0_5b" else []
    text = (shipped() / "experiment" / f"{name}.yaml").read_text()
    for section, option in (("model", "checkpoint"), ("cloning", "dataset")):
        if f"  {option}: ???" in text:
            required.append(f"{section}.{option}=x")
    rows = config(capsys, f"experiment={name}", *required)
    assert rows["name"]["value"] == name and rows["description"]["value"]


def test_config_prints_value_source_and_meaning(capsys) -> None:
    arguments = ["experiment=cartpole", "algorithm.lam=0.9", "--only", "estimator's trace"]
    assert main.main(["config", *arguments]) == 0
    out = capsys.readouterr()
    row = "  gae_lambda  0.9  command line  Decay of the advantage estimator's trace.\n"
    assert out.out == f"algorithm\n{row}"
    assert out.err == "algorithm.lam is read as algorithm.gae_lambda\n"
    for mode, other in (("embodied", "reasoning"), ("reasoning", "embodied")):
        assert main.main(["config", f"mode={mode}"]) == 0
        text = capsys.readouterr().out
        assert "\x1b" not in text
        for path, option in strict.describe(Config).items():
            line = rf"^  {re.escape(path.rpartition('.')[2])} .*{re.escape(option.meaning[:30])}"
            assert readers.mode_of(path) == other or re.search(line, text, re.M), path
    assert files_in_cwd() == []


def test_config_of_evaluate(capsys) -> None:
    assert config(capsys, "evaluate", "episodes=3")["episodes"] == {
        "value": 3,
        "default": 100,
        "source": "command line",
        "meaning": strict.describe(EvaluateConfig)["episodes"].meaning,
        "type": "a whole number",
        "limit": ">= 1 and <= 1,000,000,000",
    }


def test_config_shows_options_without_a_value(capsys) -> None:
    assert main.main(["config", "--json", "experiment=gsm8k_qwen2_5_0_5b"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    missing = {path: row["source"] for path, row in rows.items() if row["value"] == "???"}
    assert missing == dict.fromkeys(GSM8K, "configs/experiment/gsm8k_qwen2_5_0_5b.yaml")
    assert err == f"without a value, so nothing is checked: {', '.join(GSM8K)}\n"
    arguments = ["experiment=gsm8k_qwen2_5_0_5b", "actor.model.path=x", "seed=-1"]
    assert_refused(capsys, ["config", "--json", *arguments], "seed = -1")


@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_help_lists_the_options_of_the_command(name: str, capsys) -> None:
    assert main.main([name, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for path, option in strict.describe(OWN_OPTIONS[name]).items():
        if "." not in path:
            assert f" {path}={show(option.default)} " in text
            assert " ".join(option.meaning.split()) in text


@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_config_name_selects_the_command(name: str, capsys) -> None:
    assert config(capsys, "--config-name", name) == config(capsys, name)
    assert set(config(capsys, name)) == set(strict.describe(OWN_OPTIONS[name]))


@pytest.mark.slow
def test_closed_pipe_is_not_an_error() -> None:
    script = f"{' '.join(command('config', '--json'))} | true; exit ${{PIPESTATUS[0]}}"
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (0, "")


def test_json_is_strict() -> None:
    value = {"a": [float("nan"), 1.5], "b": (float("inf"), Path("x"))}
    assert output.as_json(value) == '{"a": [null, 1.5], "b": [null, "x"]}'


# -------------------------------------------------------------------------------------- experiments
def test_closed_streams_are_not_an_error(monkeypatch) -> None:
    for name in ("stdout", "stderr"):  # the values after >&- 2>&-
        monkeypatch.setattr(sys, name, None)
    assert main.main(["experiments"]) == 0 and main.main(["experiments", "x"]) == 2
    for stream in (sys.stdout, sys.stderr):
        stream.close()


def test_experiments_lists_shipped_and_user_experiments(capsys, user_configs: Path) -> None:
    assert main.main(["experiments"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match(r"quickstart +\S.*", line) for line in lines)
    assert main.main(["experiments", "--json", "--config-dir", str(user_configs)]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["own"]["description"] == "My own task"
    assert rows["own"]["file"] == str(user_configs / "experiment" / "own.yaml")
    assert len(rows) == len(lines) + 3 and files_in_cwd() == []


HELP = ("--help", "--version", "train --help", "evaluate --help", "experiments")
# Command line -> part of its refusal, "" for help and lists, which load Hydra neither.
BEFORE_TORCH: dict[str, str] = {**dict.fromkeys(HELP, ""), **tables(__file__)["before_torch"]}


@pytest.mark.slow
@pytest.mark.parametrize("line", BEFORE_TORCH)
def test_help_and_refusals_load_no_torch(line: str) -> None:
    code = (
        "import sys; from embodied_ppo.commands import main;"
        f" print(main.main({line.split()!r}), *sorted(sys.modules))"
    )
    before = cpu_of_children()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    exit_code, *modules = done.stdout.splitlines()[-1].split()
    part = BEFORE_TORCH[line]
    assert "torch" not in modules and part in done.stderr and exit_code == ("2" if part else "0")
    if line in (*HELP, "trian", "train --jsn"):
        assert "hydra" not in modules and cpu_of_children() - before < 1.0, "seconds of processor"
    else:
        assert len(done.stderr.splitlines()) == 1


def test_help_lists_all_commands(capsys) -> None:
    assert main.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in main.COMMANDS:
        assert re.search(rf"^  {name} ", text, re.M)
        assert main.main([name, "--help"]) == 0
        assert f"usage: embodied-ppo {name}" in capsys.readouterr().out
    assert main.main(["--version"]) == 0
    assert re.match(r"embodied-ppo \d+\.\d+", capsys.readouterr().out)


# ---------------------------------------------------------------------------------------- real runs
@pytest.mark.slow
def test_train_resume_and_evaluate(capsys) -> None:
    pole = "gymnasium.envs.classic_control:CartPoleEnv"
    register = f"import gymnasium\ngymnasium.register('Pole-v0', '{pole}')\n"
    Path("printing.py").write_text(f"print('output of a simulator')\n{register}")
    options = [*TINY, "env.id=printing:Pole-v0", "env.max_episode_steps=20"]
    assert main.main(["train", "--json", *options, "run_dir=run", "algorithm.vf_coef=0.7"]) == 0
    out = capsys.readouterr()
    summary = json.loads(out.out)
    assert "output of a simulator" in out.err
    assert (summary["updates"], summary["env_steps"]) == (1, 32)
    assert "algorithm.vf_coef is read as algorithm.value_loss_coef" in out.err
    reason = "compile=auto starts after 4096 optimiser steps or 262144 samples, in update 4097, and"
    assert f"compiled code: never ({reason}" in out.err
    stored = Path("run/config.yaml")
    assert yaml.safe_load(stored.read_text())["algorithm"]["value_loss_coef"] == 0.7

    # Without an experiment, a resumed run keeps its configuration.
    for resume in ("run", "run/checkpoints/latest"):
        rows = config(capsys, f"resume={resume}", "seed=0", "updates=2")
        paths = ("env.num_envs", "algorithm.value_loss_coef", "updates", "resume")
        assert values(rows, *paths) == [4, 0.7, 2, resume]
        assert rows["env.num_envs"]["source"] == f"{strict.STORED}, {resume}/config.yaml"
        assert rows["updates"]["source"] == "command line" and rows["run_dir"]["value"] is None
    assert config(capsys, "resume=run", "experiment=hopper")["env.id"]["value"] == "Hopper-v4"
    line = assert_refused(capsys, "train run")
    assert line.endswith("run is not of the form option=value; write resume=run")
    assert main.main(["train", "--quiet", "resume=run", "updates=2"]) == 0
    out = capsys.readouterr()
    assert re.search(r"^updates +2$", out.out, re.M) and out.err == ""

    options = ["checkpoint=run", "episodes=2", "num_envs=2", "video=false", "out=report"]
    assert main.main(["evaluate", "--json", *options]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["episodes"] == 2 and summary["ci95"].keys() == {"eval/return", "eval/length"}
    low, high = summary["ci95"]["eval/return"]
    assert low <= summary["eval/return"] <= high
    output.print_summary(summary)
    row = rf"^eval/return +\S+ \({low:.6g} to {high:.6g}, 95 %\)$"
    assert re.search(row, capsys.readouterr().out, re.M)
    names = {path.name for path in Path.cwd().iterdir()}
    assert names - {"__pycache__"} == {"printing.py", "report", "run"}


@pytest.mark.parametrize("text", [None, "", "{", "- 1", "\x00"])
def test_run_with_a_damaged_config_is_refused(text: str | None, capsys) -> None:
    Path("run").mkdir()
    if text is not None:
        Path("run/config.yaml").write_text(text)
    before = files_in_cwd()
    assert_refused(capsys, "train resume=run", "error: name a .. config.yaml")
    assert files_in_cwd() == before


def test_last_line_of_a_failed_run_states_the_cause(capsys) -> None:
    assert main.main(["train", *TINY, "algorithm.lr=1e38", "updates=20", "run_dir=run"]) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and len(last) > 20


LONG = "a" * 300
PATHS = (
    ["train", *TINY, f"run_dir=folder/{LONG}"],
    ["train", *TINY, f"name={LONG}"],
    ["train", "--config-dir", LONG],
    ["import-config", "verl", LONG],
)


@pytest.mark.parametrize("arguments", PATHS, ids=lambda arguments: arguments[-1][:12])
def test_long_path_is_refused(arguments: list[str], capsys) -> None:
    assert_refused(capsys, arguments, "error: shorten the path .. has 300 bytes")
    assert not list(Path.cwd().iterdir())
    assert split_runs(["a", f"env.kwargs={{b:{LONG}}}"])[0] == ["a"]


def test_config_that_is_not_utf8_is_refused(capsys) -> None:
    Path("mine/experiment").mkdir(parents=True)
    Path("mine/experiment/latin.yaml").write_bytes('name: "caf\xe9"\n'.encode("latin-1"))
    for flags in ([], ["-m"]):
        command = ["train", *flags, "--config-dir", "mine", "experiment=latin"]
        assert_refused(capsys, command, "save all files as UTF-8")
    assert main.main(["experiments", "--config-dir", "mine"]) == 0
    assert "(not UTF-8)" in capsys.readouterr().out


LOST = "no answer for 8 s: actor rank 0, update"
THREADS = (
    "error: out of memory (RuntimeError: Resource temporarily unavailable); embodied-ppo plan shows"
    " what a run needs; lower env.num_envs or algorithm.horizon"
)


@pytest.mark.parametrize(
    ("error", "first", "last"),
    [
        (KeyError("requested"), "Traceback", "error: KeyError: 'requested'"),
        (ProcessLost(f"{LOST}\n--- actor rank 0\nFile x.py"), f"error: {LOST}", f"error: {LOST}"),
        (RuntimeError("Resource temporarily unavailable"), THREADS, THREADS),
    ],
    ids=["bug", "stacks of other processes", "no thread for a simulator"],
)
def test_only_a_bug_has_a_traceback(error, first, last, monkeypatch, capsys) -> None:
    monkeypatch.setattr(train, "run", mock.Mock(side_effect=error))
    assert main.main(["train"]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(first) and lines[-1] == last


@pytest.mark.slow
def test_interrupt_saves_and_exits_130() -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    flags = [*TINY[:-4], "updates=100000", "evaluation.episodes=1", "device=cpu", "run_dir=run"]
    process = subprocess.Popen(command("train", *flags), stderr=subprocess.PIPE, text=True, env=env)
    metrics, deadline = Path("run/metrics.jsonl"), time.monotonic() + 60
    while (
        process.poll() is None
        and time.monotonic() < deadline
        and not (metrics.exists() and metrics.stat().st_size)
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and any(Path("run/checkpoints").glob("step_*"))


# A value that does not fit in a message.
LONG = "x" * 700
HINTS = [
    (f"train run_dir={LONG}", "shorten the path"),
    (f"train env.num_envs={'9' * 900}", "env.num_envs"),
    (f"config seed={'9' * 5000}", "is not understood (Exceeds the limit (4300 digits)"),
    (f"train experiment={LONG}", "experiment"),
    (f"train algorithm={{a:{LONG}}}", "algorithm"),
    (f"new-task robot --mjcf {'z/' * 300}robot.xml", "no such file"),
    (f"{LONG}", "commands"),
]


@pytest.mark.parametrize(("line", "hint"), HINTS, ids=[line[:24] for line, _ in HINTS])
def test_hint_survives_a_long_value(line: str, hint: str, capsys) -> None:
    error = assert_refused(capsys, line, hint)
    assert len(error) <= LONGEST_LINE and not error.endswith((".", "…")), error
    assert files_in_cwd() == []
