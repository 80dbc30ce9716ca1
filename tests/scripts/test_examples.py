"""Each example in scripts/examples runs and has the documented result."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from embodied_ppo.options.loader import load
from embodied_ppo.options.schema import Config
from embodied_ppo.programs import runs

EXAMPLES = Path(__file__).resolve().parents[2] / "scripts" / "examples"


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "run"
    result = example("train_and_evaluate")["main"](str(folder), updates=2)
    assert result["eval/return"] >= 8 and Path(result["report"]).is_file()
    return folder


@pytest.mark.slow
def test_plot_runs(run_dir: Path, tmp_path) -> None:
    plot = example("plot_runs")
    steps, values = plot["curve"](run_dir, "eval/return")
    assert steps == [0, 512] and len(values) == 2
    plot["main"]("eval/return", str(tmp_path / "curves.png"), [str(run_dir)])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_own_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    options = {
        "run_dir": str(tmp_path / "run"),
        "updates": 1,
        "env": {"id": "own_environment:make", "simulator": "torch", "num_envs": 4},
        "algorithm": {"horizon": 64, "global_batch_size": 64, "update_epoch": 1},
        "evaluation": {"episodes": 2, "num_envs": 2, "video_episodes": 0},
    }
    summary = runs.train(load(Config, options), quiet=True)
    assert -100 < summary["final_return"] < 0


@pytest.mark.slow
def test_gymnasium_ppo(capsys) -> None:
    train = example("gymnasium_ppo")["train"]
    options = {"num_envs": 8, "max_episode_steps": 12, "families": ["reach"]}
    success = train("embodied/Tabletop-v0", updates=10, **options)
    assert 0 < success < 1
    assert f"2560 steps, success {success:.2f}" in capsys.readouterr().out


def test_own_reward() -> None:
    grade = example("own_reward")["close_enough"]
    scores = [grade("example", response, "42") for response in ("42", " 41\n", "forty-two")]
    assert scores == [1.0, 0.5, 0.0]


def test_own_placement() -> None:
    plan = example("own_placement")["main"]()
    assert len(plan["devices"]) >= 3 and plan["memory"]


@pytest.mark.slow
def test_search_options(tmp_path) -> None:
    search = example("search_options")["search"]
    tiny = ["updates=3", "eval_every=1", "env.num_envs=4", "algorithm.global_batch_size=128"]
    tiny += ["evaluation.episodes=2", "evaluation.num_envs=2", "evaluation.video_episodes=0"]
    for _ in range(2):  # the second call continues the search
        best = search("cartpole", tmp_path / "search", 1, 1, tiny)
    assert (best / "summary.json").is_file()
    assert sorted(path.name for path in (tmp_path / "search").glob("trial-*"))[-1] == "trial-1"
