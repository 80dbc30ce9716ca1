"""Python API: the names that ``embodied_ppo`` offers, and their results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from run_helpers import metric_rows, run_command, run_process

import embodied_ppo as ep
from embodied_envs.base import errors
from embodied_ppo import api
from embodied_ppo.evaluation import trained_policy, video
from embodied_ppo.evaluation.episodes import evaluation_seeds
from embodied_ppo.options.compose import override_lines
from embodied_ppo.training import checkpoint
from embodied_ppo.training.trained_run import TrainedRun

# A run of two updates; the simulator's actions are in [-2, 2].
OPTIONS: dict[str, Any] = {
    "seed": 3,
    "updates": 2,
    "compile": "never",
    "env": {"id": "Pendulum-v1", "num_envs": 4, "simulator": "gymnasium"},
    "algorithm__horizon": 16,
    "algorithm": {"global_batch_size": 32, "update_epoch": 2},
    "model__hidden": [16],
    "evaluation": {"episodes": 2, "video_episodes": 0},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> ep.Run:
    return ep.train(run_dir=tmp_path_factory.mktemp("api") / "run", progress=False, **OPTIONS)


def test_import_does_not_load_torch() -> None:
    code = "import sys, embodied_ppo as ep; ep.train, ep.load, ep.config; ep.ConfigError"
    code += "; print(ep.__version__, 'torch' in sys.modules, 'hydra' in sys.modules)"
    assert run_process(sys.executable, "-c", code).split() == [ep.__version__, "False", "False"]


def test_names_are_those_of_the_modules() -> None:
    assert ep.train is api.train and ep.load is api.load
    assert ep.ConfigError is errors.ConfigError
    with pytest.raises(AttributeError, match="comparison"):
        _ = ep.comparison  # pyright: ignore[reportAttributeAccessIssue]


def test_options_become_overrides() -> None:
    options = {
        "seed": np.int64(3),
        "env__kwargs": {"a": 1e-5, "b": [1, (2, "x,y")]},
        "model": {"hidden": (8, 8)},
        "run_dir": Path("it's/${here}"),
        "algorithm.value_clip": None,
        "device": "cpu",
    }
    assert override_lines("train", options) == [
        "seed=3",
        r"env.kwargs='{a: 1.0e-05, b: [1, [2, \'x,y\']]}'",
        "model.hidden=[8,8]",
        r"run_dir='it\'s/${here}'",
        "algorithm.value_clip=null",
        "device='cpu'",
    ]


def test_config_has_the_values() -> None:
    config = ep.config("halfcheetah", seed=3, env__kwargs={"gravity": 1e-5}, name="a, 'b'")
    assert (config.seed, config.env.kwargs, config.name) == (3, {"gravity": 1e-5}, "a, 'b'")
    assert config.env.id == "HalfCheetah-v4"
    assert ep.config("halfcheetah", placement="fused").placement == "fused"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm__lrr": 3}, r"algorithm\.lrr.*3.*algorithm\.lr"),
        ({"seed": "three"}, "seed.*three"),
        ({"experiment": "cart_pole"}, "cart_pole"),
    ],
)
def test_refused_options_raise_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ep.ConfigError, match=message) as info:
        ep.train(**options)
    assert "\n" not in str(info.value)


@pytest.mark.slow
def test_a_config_is_trained_as_its_options_are(run: ep.Run, tmp_path) -> None:
    config = ep.config(**{**OPTIONS, "run_dir": str(tmp_path / "run")})
    with pytest.raises(ep.ConfigError, match="seed: is not read beside a Config"):
        ep.train(config, seed=1)
    assert ep.train(config, progress=False).final_return == run.final_return


@pytest.mark.slow
def test_result_equals_that_of_the_command_line(run: ep.Run, tmp_path, capsys) -> None:
    lines = [f"run_dir={tmp_path / 'run'}", *override_lines("train", OPTIONS)]
    summary = run_command(capsys, "train", *lines)
    assert summary["final_return"] == run.final_return
    expected = checkpoint.open_checkpoint(summary["run_dir"]).policy()
    weights = checkpoint.open_checkpoint(run.checkpoint).policy()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    rows = metric_rows(tmp_path / "run")
    assert len(rows) == len(run.metrics) == 3
    for row, other in zip(run.metrics, rows, strict=True):
        losses = [tag for tag in row if tag.startswith(("policy/", "value/", "rollout/", "eval/"))]
        assert losses and all(row[tag] == other[tag] for tag in losses)
    arguments = ("episodes=3", "seed=5", "video=false")
    measured = run_command(capsys, "evaluate", f"checkpoint={tmp_path / 'run'}", *arguments)
    result = run.evaluate(episodes=3, seed=5, video=False, progress=False)
    assert result["eval/return"] == measured["eval/return"]
    assert Path(result["report"]).is_file() and run.report.is_file()


def test_evaluation_with_a_folder_writes_only_there(run: ep.Run, tmp_path, monkeypatch) -> None:
    def record(*_: Any, path: Path, **__: Any) -> video.Video:
        path.write_bytes(b"")
        return video.Video(path)

    monkeypatch.setattr(video, "record_video", record)
    result = ep.evaluate(run, episodes=1, out=tmp_path, progress=False)
    assert result["video"] == str(tmp_path / "video.mp4")
    (tmp_path / "report.json.new").symlink_to("/dev/full")
    with pytest.raises(errors.ConfigError, match="No space left"):
        ep.evaluate(run, episodes=1, out=tmp_path, progress=False)


def test_actions_in_gymnasium_are_those_of_the_evaluation(run: ep.Run) -> None:
    env, total = gymnasium.make("Pendulum-v1"), 0.0
    obs, _ = env.reset(seed=evaluation_seeds(7, 1)[0])
    done = False
    while not done:
        action = run.policy.act(obs)
        assert action.shape == (1,) and action.dtype == np.float32
        obs, reward, terminated, truncated, _ = env.step(action)
        total += float(np.float32(reward))
        done = terminated or truncated
    result = ep.evaluate(run, episodes=1, seed=7, video=False, progress=False)
    assert total == result["eval/return"]


def test_batches_tensors_and_samples(run: ep.Run) -> None:
    obs = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    actions = run.policy.act(obs)
    assert actions.shape == (20, 1) and abs(actions).max() <= 2
    assert np.array_equal(run.policy.act(obs[0]), actions[0])
    assert np.array_equal(run.policy.act(torch.from_numpy(obs)).numpy(), actions)
    assert np.array_equal(run.policy.act(obs.astype(np.float64)), actions)
    samples = ep.load(run, seed=1).act(obs, deterministic=False)
    assert not np.array_equal(samples, actions)
    assert np.array_equal(ep.load(run, seed=1).act(obs, deterministic=False), samples)
    assert not np.array_equal(ep.load(run, seed=2).act(obs, deterministic=False), samples)


def test_a_policy_trained_with_delays_acts_without_them(tmp_path) -> None:
    env = {**OPTIONS["env"], "realism": {"action_delay": 1}}
    options = {**OPTIONS, "updates": 1, "env": env, "run_dir": tmp_path / "run"}
    action = ep.train(progress=False, **options).policy.act(np.zeros(3))
    assert action.shape == (1,)


def test_wrong_observations_are_refused(run: ep.Run) -> None:
    with pytest.raises(ep.EnvError, match=r"obs is float64 \[4\]; the policy reads float32 \[3\]"):
        run.policy.act(np.zeros(4))
    with pytest.raises(ep.EnvError, match="obs is state; the policy reads one array"):
        run.policy.act({"state": np.zeros(3)})
    with pytest.raises(ep.EnvError, match=r"act: observation \[1\] is nan; pass finite numbers"):
        run.policy.act(np.array([[0.0, 0.0, 0.0], [0.0, np.nan, 0.0]]))


def test_a_language_model_is_refused(run: ep.Run) -> None:
    source = checkpoint.open_checkpoint(run.checkpoint)
    trained = TrainedRun(ep.config(mode="reasoning"), source, run.run_dir, print)
    with pytest.raises(ep.ConfigError, match="is a language model; write embodied-ppo export"):
        trained_policy.policy_of(trained, torch.device("cpu"))
    with pytest.raises(ep.CheckpointError, match="does not exist"):
        ep.load(run.run_dir / "missing")


CYCLE: dict[str, Any] = {}
CYCLE["a"] = CYCLE
WRONG = {
    "None": None,
    "integer": 3,
    "bytes": b"run",
    "nested mapping": {"a": {"b": 1}},
    "list": ["run"],
    "missing path": Path("does/not/exist"),
    "NaN": float("nan"),
    "empty text": "",
    "function": print,
    "class": object,
    "long text": "x/" * 3000,
    "null character": "a\0b",
    "cycle": CYCLE,
}
REFUSALS = (ep.ConfigError, ep.CheckpointError, ep.EnvError, ep.PlacementError)


@pytest.mark.parametrize("kind", WRONG)
def test_every_wrong_type_is_refused(tmp_path, monkeypatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    value: Any = WRONG[kind]
    calls: list[Any] = [
        lambda: ep.evaluate(value),
        lambda: ep.load(value),
        lambda: ep.verify(value),
        lambda: ep.config("cartpole", seed=value) if value != 3 else ep.config("cartpole", seed=-1),
        lambda: ep.config("cartpole", env=value) if value else ep.config("cartpole", env=[1]),
    ]
    if value is not None:
        calls += [lambda: ep.train(value), lambda: ep.config(value)]
    for n, call in enumerate(calls):
        with pytest.raises(REFUSALS) as refusal:
            call()
        assert "\n" not in str(refusal.value), n
    assert not list(tmp_path.iterdir())
