"""Policies with memory through whole runs: resume, evaluation, Python API, compiled code."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_helpers
import torch
import yaml

import embodied_ppo as ep
from embodied_ppo.evaluation import checkpoint_evaluation
from embodied_ppo.evaluation.episodes import evaluation_seeds
from embodied_ppo.options.schema import EvaluateConfig
from embodied_ppo.rollout import environments
from embodied_ppo.training import trained_run
from tests.integration.test_resume import check_resume

RECURRENT = run_helpers.options("""model.recurrent=gru model.recurrent_size=8
    algorithm.minibatch_unit=column""")
MEMORIES: dict[str, dict[str, Any]] = {
    "lstm": {**RECURRENT, "model.recurrent": "lstm"},
    "history": {"model.history": 3},
    "both": {**RECURRENT, "model.history": 3, "model.shared_backbone": False},
}
BASE = run_helpers.options("""env.id=InvertedPendulum-v4 env.max_episode_steps=11
    algorithm.horizon=8 evaluation.episodes=3 evaluation.video_episodes=0 compile=never updates=4
    save_every=2""")


def train(run_dir: Path, **options: Any) -> Path:
    run_helpers.train(run_dir, {**BASE, **options})
    return run_dir


@pytest.fixture(scope="module", params=MEMORIES)
def trained(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return train(folder / "run", **MEMORIES[request.param])


@pytest.mark.slow
def test_resumed_run_equals_an_uninterrupted_one(trained: Path, tmp_path) -> None:
    """The episodes of the fourth update began before the checkpoint of the second."""
    check_resume(trained, tmp_path / "half", at=2, updates=4)


def test_evaluation_does_not_depend_on_the_number_of_environments(trained: Path, tmp_path) -> None:
    episodes = []
    for n in (1, 3):
        options = EvaluateConfig(
            str(trained), episodes=3, num_envs=n, video=False, out=str(tmp_path / str(n))
        )
        checkpoint_evaluation.evaluate(options, quiet=True)
        episodes.append(json.loads((tmp_path / str(n) / "report.json").read_text())["episodes"])
    assert episodes[0] == episodes[1]


def test_loaded_policy_gives_the_reports_return(trained: Path, tmp_path) -> None:
    """``load`` is called with what the simulator returns, without history or state."""
    config = trained_run.open_run(str(trained)).config
    options = EvaluateConfig(str(trained), episodes=2, video=False, out=str(tmp_path))
    checkpoint_evaluation.evaluate(options, quiet=True)
    report = json.loads((tmp_path / "report.json").read_text())
    policy = ep.load(trained)
    assert policy.has_memory
    plain = replace(config.env, action_mapping="none")
    env = environments.make_env(evaluation_seeds(0, 2), config=plain, device=torch.device("cpu"))
    for _ in range(2):  # after reset() the same again
        env.restart(evaluation_seeds(0, 2))
        obs, total, running = env.reset(), np.zeros(2), np.ones(2)
        policy.reset()
        for _ in range(11):
            assert isinstance(obs, torch.Tensor)
            step = env.step(torch.from_numpy(policy.act(obs.numpy())))
            total += step.reward.numpy() * running
            running *= ~(step.terminated | step.truncated).numpy()
            obs = step.obs
        assert total.tolist() == [e["return"] for e in report["episodes"]]
    env.close()


@pytest.mark.slow
def test_results_do_not_depend_on_micro_batches(tmp_path) -> None:
    options = {**MEMORIES["lstm"], "updates": 1}
    whole = run_helpers.stored(train(tmp_path / "whole", **options), 1)
    parts = {"algorithm.micro_batch_size": 8, "algorithm.logprob_forward_micro_batch_size": 8}
    parted = run_helpers.stored(train(tmp_path / "parts", **options, **parts), 1)
    run_helpers.assert_states_close(parted.policy(), whole.policy())


@pytest.mark.slow
def test_reference_policy_and_off_policy_correction_read_columns(tmp_path) -> None:
    """With one epoch of one minibatch, the policy is its own reference: the KL is 0 at first."""
    options = RECURRENT | run_helpers.options("""algorithm.use_kl_loss=true updates=2
        algorithm.off_policy_correction=token algorithm.update_epoch=1
        algorithm.global_batch_size=32""")
    train(tmp_path / "run", **options)
    rows = run_helpers.metric_rows(tmp_path / "run")
    assert rows[-2]["kl/to_reference"] == pytest.approx(0, abs=1e-7)
    assert rows[-1]["kl/to_reference"] > 1e-7
    assert rows[-1]["policy/off_policy_weight"] == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_t_maze_is_solved_with_memory(tmp_path, monkeypatch) -> None:
    """The first observation decides the turn 20 steps later. The command is that of the example."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts" / "examples")
    description = importlib.import_module("t_maze").__doc__ or ""
    command = description.split("embodied-ppo train ")[1].split("\n\n")[0].split()
    overrides = dict(option.split("=") for option in command)
    result = ep.train(
        **{name.replace(".", "__"): yaml.safe_load(value) for name, value in overrides.items()},
        run_dir=tmp_path / "run",
        compile="never",
        evaluation={"episodes": 64, "video_episodes": 0},
        progress=False,
    )
    assert result.summary["final_success"] > 0.95
