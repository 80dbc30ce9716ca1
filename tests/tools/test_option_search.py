"""Search for options: ranges, draws, pruning, continuing, refusals."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

import embodied_ppo as ep
from embodied_envs.base.errors import ConfigError
from embodied_ppo.commands import main
from embodied_ppo.options import sweeps
from embodied_ppo.options.schema import Config
from embodied_ppo.options.sweeps import Choice, Interval
from embodied_ppo.tools import option_search
from embodied_ppo.training.progress import Progress

TINY = [
    "experiment=cartpole",
    "env.num_envs=4",
    "algorithm.horizon=8",
    "algorithm.global_batch_size=32",
    "algorithm.update_epoch=1",
    "evaluation.episodes=2",
    "evaluation.num_envs=2",
    "evaluation.video_episodes=0",
    "device=cpu",
    "compile=never",
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in its own empty folder."""
    monkeypatch.chdir(tmp_path)


def ranges(*lines: str) -> tuple[list[str], dict[str, Choice | Interval]]:
    args = argparse.Namespace(
        command="train", config_name=None, config_dir=None, overrides=[*lines]
    )
    return sweeps.search_ranges(args)


def test_ranges_of_the_command_line() -> None:
    common, found = ranges(
        "experiment=cartpole",
        "algorithm.lr=tag(log,interval(1e-4,1e-2))",
        "algorithm.gamma=interval(0.9,0.99)",
        "algorithm.update_epoch=interval(2,8)",
        "algorithm.horizon=16,32",
        "env.num_envs=range(4,13,4)",
    )
    assert common == ["experiment=cartpole"]
    assert found == {
        "algorithm.lr": Interval(1e-4, 1e-2, log=True),
        "algorithm.gamma": Interval(0.9, 0.99),
        "algorithm.update_epoch": Interval(2, 8, integer=True),
        "algorithm.horizon": Choice(("16", "32")),
        "env.num_envs": Choice(("4", "8", "12")),
    }
    with pytest.raises(ConfigError, match=r"the limits must increase, and be above 0"):
        ranges("algorithm.lr=tag(log,interval(0,1))")


def test_a_range_without_values_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"write 1 to 10000 values, for example algorithm.lr=1,2 .*glob"
    ):
        ranges("experiment=cartpole", "algorithm.lr=glob(*)")


def test_ranges_of_an_experiment() -> None:
    file = Path("mine/experiment/own.yaml")
    file.parent.mkdir(parents=True)
    file.write_text(
        "# @package _global_\ndefaults: [cartpole]\nhydra:\n  sweeper:\n    params:\n"
        "      algorithm.horizon: 8,16\n      algorithm.gamma: 0.9,0.99\n"
    )
    args = argparse.Namespace(
        command="train",
        config_name=None,
        config_dir="mine",
        overrides=["experiment=own", "algorithm.gamma=0.95"],
    )
    common, found = sweeps.search_ranges(args)
    assert common == args.overrides, "an option of the command line replaces its range"
    assert found == {"algorithm.horizon": Choice(("8", "16"))}


def test_default_ranges() -> None:
    found = option_search.default_ranges(Config())
    lr = Config().algorithm.lr
    assert found["algorithm.lr"] == Interval(lr / 4, lr * 4, log=True)
    assert {*found["model.normalize_obs"].values} == {"true", "false"}
    with pytest.raises(ConfigError, match="mode = reasoning has no default ranges"):
        option_search.default_ranges(Config(mode="reasoning"))


def settings(**changes: object) -> option_search.Settings:
    values = {"algorithm.lr": Interval(1e-4, 1e-2, log=True), "algorithm.gamma": Choice(("0.9",))}
    options = {"lines": TINY, "ranges": values, "trials": 6, "seeds": 1, "jobs": 1}
    return option_search.Settings(**options | changes)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_draws() -> None:
    study = option_search.Search(settings(), Path("found"), Progress(quiet=True))
    drawn = [study._draw() for _ in range(7)]
    assert drawn[6] is None, "there are six trials"
    lines = [trial.user_attrs["lines"] for trial in drawn[:6] if trial is not None]
    assert lines[0] == [], "trial 0 has the options of the user"
    assert len({tuple(x) for x in lines}) == 6
    assert all("algorithm.gamma=0.9" in x and len(x) == 2 for x in lines[1:])
    # 32 samples of a rollout cannot be divided into batches of 5.
    refused = {"algorithm.global_batch_size": Choice(("5",))}
    study = option_search.Search(settings(ranges=refused), Path("other"), Progress(quiet=True))
    assert study._draw() is not None
    with pytest.raises(ConfigError, match=r"the last that was refused: .*global_batch_size"):
        study._draw()


def test_settings_of_a_continued_search_are_compared() -> None:
    quiet = Progress(quiet=True)
    option_search.Search(settings(), Path("found"), quiet)
    option_search.Search(settings(trials=20, jobs=3, budget_s=3.0), Path("found"), quiet)
    with pytest.raises(ConfigError, match="other ranges"):
        option_search.Search(settings(ranges={}), Path("found"), quiet)
    Path("found/study.log").write_text("{")
    Path("file").write_text("")
    Path("full").mkdir()
    Path("full/x").touch()
    for folder in ("file", "full"):
        with pytest.raises(ConfigError, match=folder):
            option_search.Search(settings(), Path(folder), quiet)


@pytest.mark.slow
def test_search(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*TINY, "updates=18", "algorithm.lr=1e-2,1e38"]
    flags = ["search", "--trials", "3", "--out", "found", "--jobs", "2"]
    assert main.main([*flags, "--json", *options, "algorithm.gamma=0.9,0.91"]) == 0
    result = json.loads(capsys.readouterr().out)
    trials = result["trials"]
    assert sorted(row["number"] for row in trials) == [0, 1, 2], "every trial is kept"
    for row in trials:
        diverges = any("1e+38" in line or "1e38" in line for line in row["lines"])
        assert (row["state"] == "failed") == diverges == (row["error"] is not None)
        assert row["state"] != "complete" or len(row["scores"]) == 9
    best = trials[0]
    assert best["state"] == "complete" and best["number"] == result["best_trial"]
    assert best["scores"][-1] == max(r["scores"][-1] for r in trials if r["state"] == "complete")

    # The run of the best trial equals the one that the printed command trains.
    assert {*best["lines"], "eval_every=2", "seed=0"} <= {*result["command"]}
    assert main.main(["train", *result["command"], "--quiet", "run_dir=own"]) == 0
    run_dir = Path(result["run_dirs"][0])
    weights = [
        torch.load(folder / "checkpoints" / "step_000018" / "policy.pt")
        for folder in (run_dir, Path("own"))
    ]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert main.main([*flags, *options]) == 2
    assert "other ranges" in capsys.readouterr().err


@pytest.mark.slow
def test_interrupted_search_continues_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run that the interrupt stops is saved, and the second search resumes it."""
    updates = 900
    options = {"algorithm": {"horizon": 8, "global_batch_size": 32}, "env__num_envs": 4}
    options |= {"evaluation": {"episodes": 1, "num_envs": 1, "video_episodes": 0}}
    options |= {"device": "cpu", "compile": "never"}
    arguments = {"ranges": {"algorithm.gamma": "0.9"}, "trials": 2, "seeds": 2, "out": "found"}
    arguments |= {"updates": updates, "progress": False, **options}

    def rows() -> dict[Path, int]:
        logs = Path("found").glob("trial-0_*/metrics.jsonl")
        return {log.parent: log.read_text().count("\n") for log in logs}

    scores = option_search._scores

    def interrupt(run_dir: Path) -> list[float]:
        if any(rows().values()):
            raise KeyboardInterrupt
        return scores(run_dir)

    with monkeypatch.context() as patch:
        patch.setattr(option_search, "_scores", interrupt)
        with pytest.raises(KeyboardInterrupt, match="continues"):
            ep.search("cartpole", **arguments)
    stopped = [run for run, count in rows().items() if 0 < count < updates]
    assert stopped and all((run / "checkpoints").exists() for run in stopped)
    result = ep.search("cartpole", **arguments)
    assert {row["number"]: row["state"] for row in result["trials"]}[0] == "complete"
    assert all("resume" in (run / "log.txt").read_text() for run in stopped)
    assert len(result["run_dirs"]) == 2


@pytest.mark.slow
def test_budget_ends_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["search", "--budget", "1s", "--jobs", "1", "--out", "found"]
    assert main.main([*flags, *TINY, "algorithm.gamma=0.9"]) == 3
    assert "before the first evaluation" in capsys.readouterr().err


def test_missing_optuna(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main.main(["search", "experiment=cartpole"]) == 2
    assert "pip install 'embodied-ppo[search]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--budget", "fast"], "--budget fast"),
        (["--trials", "1"], "--trials 1"),
        (["seed=1"], "--seed"),
        (["save_every=3"], "save_every"),
        (["placement=fused"], "placement=local"),
        (["mode=reasoning"], "write ranges"),
        (["evaluation.episodes=0"], "evaluation.episodes=10"),
        (["--trials", "4", "algorithm.gamma=2,3"], "algorithm.gamma"),
        (["nosuch=interval(1,2)"], "nosuch"),
        (["--out", "file"], "--out"),
    ],
)
def test_refusals(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert main.main(["search", "--quiet", *arguments]) == 2
    err = capsys.readouterr().err
    assert named in err and err.count("\n") == 1
    assert not list(Path().rglob("trial-*")) and not list(Path().rglob("study.log"))


@pytest.mark.parametrize("command", [("search",), ("train", "--multirun")])
def test_endless_ranges_are_refused_before_they_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    arguments = [
        *command,
        "experiment=cartpole",
        "algorithm.lr=range(1,1000000000)",
        "seed=range(0,9)",
    ]
    assert main.main(arguments[: 3 if command == ("search",) else None]) == 2
    line = capsys.readouterr().err.strip()
    assert "algorithm.lr" in line and len(line) <= 300 and not list(tmp_path.iterdir())
