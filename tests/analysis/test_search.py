"""Tests of the search for options: ranges, draws, successive halving, continuing."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch

import embodied_ppo as ep
from embodied_ppo.analysis import search
from embodied_ppo.commands import main
from embodied_ppo.config import compose
from embodied_ppo.config.compose import Choice, Interval
from embodied_ppo.config.schema import Config
from embodied_ppo.core.errors import ConfigError

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
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in its own empty folder."""
    monkeypatch.chdir(tmp_path)


def ranges(*lines: str) -> tuple[list[str], dict[str, Choice | Interval]]:
    args = argparse.Namespace(
        command="train", config_name=None, config_dir=None, overrides=[*lines]
    )
    return compose.search_ranges(args)


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
    # The logarithm of 1e-3 is in the middle of those of the limits.
    middle = {name: values.draw(0.5) for name, values in found.items()}
    assert middle == {
        "algorithm.lr": "0.001",
        "algorithm.gamma": "0.945",
        "algorithm.update_epoch": "5",
        "algorithm.horizon": "32",
        "env.num_envs": "8",
    }
    with pytest.raises(ConfigError, match=r"the limits must increase, and be above 0"):
        ranges("algorithm.lr=tag(log,interval(0,1))")


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
    common, found = compose.search_ranges(args)
    assert common == args.overrides, "an option of the command line replaces its range"
    assert found == {"algorithm.horizon": Choice(("8", "16"))}


def test_default_ranges() -> None:
    found = search.default_ranges(Config())
    lr = Config().algorithm.lr
    assert found["algorithm.lr"] == Interval(lr / 4, lr * 4, log=True)
    assert found["model.normalize_obs"] == Choice(("false",)), "the value of the run is left out"
    with pytest.raises(ConfigError, match=r"mode = reasoning: has no default ranges; write them"):
        search.default_ranges(Config(mode="reasoning"))


def test_lengths_of_successive_halving() -> None:
    assert search.rungs(9) == pytest.approx([1 / 27, 1 / 9, 1])
    assert [search.survivors(9, i) for i in range(3)] == [9, 3, 1]
    # Nine trials of 1/27, then three of 2/27 more, then one of 8/9 more.
    assert search.work(9) == pytest.approx(9 / 27 + 6 / 27 + 8 / 9)
    assert search.rungs(4) == pytest.approx([1 / 9, 1])
    assert [search.survivors(4, i) for i in range(2)] == [4, 1]
    assert search.work(4) == pytest.approx(4 / 9 + 8 / 9)
    assert search.rungs(2) == [1]


@pytest.mark.slow
def test_draws() -> None:
    values = {"algorithm.lr": Interval(1e-4, 1e-2, log=True), "algorithm.horizon": Choice(("8",))}
    settings = search.Settings(TINY, values, change_probability=0.5, trials=12, seeds=1, jobs=1)
    trials = search.draw(settings)
    assert trials[0] == [] and len(trials) == 12 and search.draw(settings) == trials
    assert len({tuple(lines) for lines in trials}) == 12
    assert any(len(lines) == 2 for lines in trials) and ["algorithm.horizon=8"] in trials
    few = search.Settings(TINY, {"seed": Choice(("1", "2"))}, 1.0, trials=4, seeds=1, jobs=1)
    with pytest.raises(ConfigError, match=r"--trials 4: the ranges have 3 valid combinations only"):
        search.draw(few)
    # 32 samples of a rollout cannot be divided into batches of 5.
    batch = {"algorithm.global_batch_size": Choice(("5",))}
    refused = search.Settings(TINY, batch, 1.0, trials=2, seeds=1, jobs=1)
    with pytest.raises(ConfigError, match=r"1 valid combinations .*the last that was refused"):
        search.draw(refused)


def test_training_episodes_rank_trials_with_equal_evaluations() -> None:
    scores = [
        {"return": 0.0, "rollout_return": 0.0},
        {"return": 0.0, "rollout_return": 5.0},
        {"return": 1.0, "rollout_return": 0.0},
        {"return": 9.0, "rollout_return": 9.0, "success": 0.0},
    ]
    trials = [search.Trial(i, [], scores=[score]) for i, score in enumerate(scores)]
    assert [t.number for t in sorted(trials, key=search.Trial.key)] == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("options", "compiled"),
    [
        # compile=auto compiles after 4096 updates here, and the second rung is after 4098.
        ([f"updates={27 * 1366}"], True),
        ([f"updates={27 * 1365}"], False),
        ([f"updates={27 * 1366}", "compile=auto"], False),
        ([f"updates={27 * 1366}", "compile=never"], False),
        ([f"updates={27 * 1366}", "placement=colocated"], False),
    ],
)
def test_long_runs_are_compiled_from_their_first_update_on(
    options: list[str], compiled: bool
) -> None:
    settings = search.Settings([*TINY, *options], {}, 1.0, trials=9, seeds=1, jobs=1)
    found = object.__new__(search.Search)
    found.settings, found.env_steps = settings, None
    lines = found.config_lines(search.Trial(0, []), 0)
    assert ("compile=always" in lines) == compiled


@pytest.mark.slow
def test_search(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*TINY, "updates=27", "algorithm.lr=1e-2,1e38"]
    flags = ["search", "--trials", "3", "--out", "found", "--jobs", "2"]
    assert main.main([*flags, *options, "algorithm.gamma=0.9,0.91"]) == 0
    out = capsys.readouterr()
    assert out.out.splitlines()[-1].startswith("train its first run again: embodied-ppo train ")
    content = json.loads(Path("found/search.json").read_text())
    results = content["results"]
    assert [len(row["scores"]) for row in results].count(2) == 1, "one trial reaches the end"
    best = next(i for i, row in enumerate(results) if len(row["scores"]) == 2)
    first = [
        tuple(row["scores"][0][name] for name in ("return", "rollout_return"))
        if row["scores"]
        else (float("-inf"),)
        for row in results
    ]
    assert first[best] == max(first)
    for row in results:
        diverges = any("1e+38" in line or "1e38" in line for line in row["lines"])
        assert (row["error"] is not None) == diverges
    assert sorted(p.name for p in Path("found").glob("trial-*_seed-0")) == [
        f"trial-{i}_seed-0" for i in range(3)
    ], "every trial is kept"

    # The run of the best trial equals the one that the printed command trains.
    command = shlex.split(out.out.splitlines()[-1].partition(": ")[2])
    assert command[:2] == ["embodied-ppo", "train"]
    assert {*results[best]["lines"], "eval_every=3", "seed=0"} <= {*command}
    assert main.main([*command[1:], "--quiet", "run_dir=own"]) == 0
    run_dir = Path(f"found/trial-{best}_seed-0")
    weights = [
        torch.load(folder / "checkpoints" / "step_000027" / "policy.pt")
        for folder in (run_dir, Path("own"))
    ]
    torch.testing.assert_close(*weights, rtol=0, atol=0)

    # The last rung is lost as by an interruption: the same command reaches it again.
    for row in results:
        row["scores"] = row["scores"][:1]
    Path("found/search.json").write_text(json.dumps(content))
    (run_dir / "summary.json").unlink()
    shutil.rmtree(run_dir / "checkpoints" / "step_000027")
    capsys.readouterr()
    again = [*flags, "--json", "--quiet", *options, "algorithm.gamma=0.9,0.91"]
    assert main.main(again) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["best_trial"] == best and result["run_dirs"] == [str(run_dir.absolute())]
    weights[0] = torch.load(run_dir / "checkpoints" / "step_000027" / "policy.pt")
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert main.main([*flags, *options]) == 2
    assert "holds a search with other ranges" in capsys.readouterr().err


def test_budget_sets_the_length_of_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = search.Settings(TINY, {}, 1.0, trials=9, seeds=2, jobs=2, budget_s=100.0)
    found = object.__new__(search.Search)
    found.settings, found.out, found.env_steps = settings, Path("out"), None
    found.progress = search.Progress(quiet=True)

    def start(pool: object, name: str, log: Path, lines: list[str], stop: int) -> None:
        folder = Path("out/speed") / name
        folder.mkdir(parents=True)
        rows = [{"update": i, "time/collect_s": 0.03, "time/update_s": 0.01} for i in range(5)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "metrics.jsonl").write_text(text)

    monkeypatch.setattr(found, "_start", start)
    found.measure_length()
    # Updates of 32 steps take 0.04 s: 800 steps/s in each of two processes for 100 s are 160,000
    # steps, and the search of nine trials with two seeds trains 2 (9/27 + 6/27 + 8/9) runs.
    assert found.env_steps == int(160_000 / (26 / 9)) // 32 * 32


@pytest.mark.slow
def test_budget_of_a_real_search(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["search", "--trials", "2", "--budget", "2s", "--jobs", "1", "--out", "found", "--json"]
    assert main.main([*flags, *TINY, "algorithm.gamma=0.9"]) == 0
    out = capsys.readouterr()
    result = json.loads(out.out)
    assert f"{result['env_steps']} steps per run" in out.err
    rows = (Path(result["run_dirs"][0]) / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["env_steps"] == result["env_steps"]


@pytest.mark.slow
def test_python_api() -> None:
    result = ep.search(
        "cartpole",
        ranges={"algorithm.gamma": "0.9,0.91"},
        trials=2,
        seed=3,
        out="found",
        progress=False,
        updates=1,
        env__num_envs=4,
        algorithm={"horizon": 8, "global_batch_size": 32, "update_epoch": 1},
        evaluation={"episodes": 2, "num_envs": 2, "video_episodes": 0},
        device="cpu",
    )
    assert sorted(row["number"] for row in result["trials"]) == [0, 1]
    assert all(row["error"] is None and len(row["scores"]) == 1 for row in result["trials"])
    assert result["run_dirs"] == [
        str(Path(f"found/trial-{result['best_trial']}_seed-3").absolute())
    ]
    with pytest.raises(ep.ConfigError, match=r"--trials 1: must be 2 to 729"):
        ep.search("cartpole", trials=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "fast"], "--budget fast: is no duration of at least 1s"),
        (["--trials", "1"], "--trials 1: must be 2 to 729"),
        (["seed=1"], "seed=1: is set by the search for each run; use --seed or --seeds"),
        (["--budget", "2s", "updates=3"], "updates=3: is set by the search"),
        (["placement=fused"], "placement = fused: a search starts several runs at the same time"),
        (["mode=reasoning"], "mode = reasoning: has no default ranges; write them"),
        (["--trials", "4", "algorithm.gamma=2,3"], "valid combinations only"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["search", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not Path("runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--out", "{file}"], "is a file; name a folder"),
        (["--out", "{new}", "nosuch=interval(1,2)"], "error: nosuch = "),
    ],
)
def test_file_and_unknown_option_are_refused(tmp_path, capsys, arguments, message):
    (tmp_path / "file").write_text("")
    texts = [x.format(file=tmp_path / "file", new=tmp_path / "new") for x in arguments]
    assert main.main(["search", "--quiet", "experiment=cartpole", *texts]) == 2
    assert message in capsys.readouterr().err
