"""``model.network``: a user's network trains, resumes, is evaluated and is refused in one line."""

from __future__ import annotations

import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_helpers import assert_refused

import embodied_ppo as ep
from embodied_envs.types import ArraySpec, Box
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.training import checkpoint

SOURCE = Path(__file__).resolve().parents[2] / "scripts" / "examples" / "own_network.py"
OPTIONS: dict[str, Any] = {
    "updates": 2,
    "compile": "never",
    "env": {"id": "CartPole-v1", "num_envs": 4, "num_threads": 1},
    "algorithm": {"horizon": 16, "global_batch_size": 32, "update_epoch": 1},
    "model": {"network_options": {"width": 8, "blocks": 1}},
    "evaluation": {"episodes": 2, "video_episodes": 0},
}


@pytest.fixture
def file(tmp_path) -> Path:
    return Path(shutil.copy(SOURCE, tmp_path / "my_network.py"))


def train(file: Path, run_dir: Path, **options: Any) -> ep.Run:
    network = {"model__network": f"{file}:Residual"}
    return ep.train(run_dir=run_dir, progress=False, **{**OPTIONS, **network, **options})


def weights(run: ep.Run) -> dict[str, torch.Tensor]:
    return checkpoint.open_checkpoint(run.checkpoint).policy()


def change(file: Path) -> None:
    """Double the output; the weights have the same shapes."""
    file.write_text(file.read_text().replace("        return x\n", "        return 2 * x\n"))


@pytest.mark.slow
def test_a_run_keeps_the_file(file: Path, tmp_path, capsys) -> None:
    run_dir = tmp_path / "run"
    run = train(file, run_dir)
    (copy,) = (run_dir / "network").iterdir()
    assert copy.read_text() == SOURCE.read_text()
    assert checkpoint.open_checkpoint(run_dir).manifest["network_hash"] == copy.stem
    assert ep.config(resume=run_dir).model.network == f"{file}:Residual"
    names = [name for name in weights(run) if name.startswith("trunk.network.blocks.")]
    assert len(names) == 6

    obs = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    network: Any = run.policy.network
    expected = network.trunk(network.encode(torch.from_numpy(obs)))
    result = run.evaluate(episodes=2, video=False, progress=False)
    change(file)
    capsys.readouterr()
    assert run.evaluate(episodes=2, video=False, progress=False)["ci95"] == result["ci95"]
    for allow, factor in ((False, 1), (True, 2)):
        changed: Any = ep.load(run, allow_changed_task=allow).network
        features = changed.trunk(changed.encode(torch.from_numpy(obs)))
        assert torch.equal(features, factor * expected)
    assert "changed since training; executing the run's copy" in capsys.readouterr().err
    moved = tmp_path / "moved"
    run_dir.rename(moved)
    file.unlink()
    assert ep.load(moved).act(obs).shape == (8,)
    (moved / "network" / copy.name).write_text("raise SystemExit\n")
    with pytest.raises(ep.CheckpointError, match="the run wrote another file"):
        ep.load(moved)


@pytest.mark.slow
def test_resuming_equals_an_uninterrupted_run(file: Path, tmp_path) -> None:
    run = train(file, tmp_path / "run", updates=3, save_every=2)
    resume = {"resume": run.run_dir / "checkpoints" / "step_000002", "progress": False}
    original = file.read_text()
    change(file)
    with pytest.raises(ep.ConfigError, match=r"changed since the checkpoint.*allow_changed_task"):
        ep.train(run_dir=tmp_path / "changed", **resume)
    assert not (tmp_path / "changed").exists()
    file.write_text(original)
    resumed, expected = weights(ep.train(run_dir=tmp_path / "resumed", **resume)), weights(run)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_critic_reads_more_than_the_actor(file: Path) -> None:
    spec = {"state": ArraySpec((2, 3)), "eye": ArraySpec((3, 8, 8), torch.uint8)}
    spec["force"] = ArraySpec((1,))
    config = ModelConfig(
        network=f"{file}:Residual",
        network_options={"width": 8},
        shared_backbone=False,
        actor_obs=("state", "eye"),
        critic_obs=("state", "force"),
    )
    policy = ActorCritic(spec, Box((-1.0,), (1.0,)), config)
    obs = {
        "state": torch.randn(5, 2, 3),
        "eye": torch.zeros(5, 3, 8, 8, dtype=torch.uint8),
        "force": torch.randn(5, 1, requires_grad=True),
    }
    shapes = {name: tuple(x.shape) for name, x in policy.state_dict().items()}
    assert shapes["trunk.network.first.weight"] == (8, 6 + 3 * 8 * 8)
    assert shapes["value_trunk.network.first.weight"] == (8, 7)
    decision = policy.act(policy.encode(obs))
    assert decision.action.shape == (5, 1) and decision.value.shape == (5,)
    data = pickle.dumps(policy)
    for name in [name for name in sys.modules if name.startswith("embodied_ppo_network_")]:
        del sys.modules[name]  # as in the processes of the compiler and of videos
    restored = pickle.loads(data)
    assert torch.equal(restored.act(restored.encode(obs)).action, decision.action)
    shared = ModelConfig(
        network=config.network, actor_obs=("state",), critic_obs=("state", "force")
    )
    with pytest.raises(ep.ConfigError, match=r"write model.shared_backbone=false$"):
        ActorCritic(spec, Box((-1.0,), (1.0,)), shared)
    recurrent = ModelConfig(network=config.network, recurrent="gru")
    with pytest.raises(ep.ConfigError, match="rename the observation memory"):
        ActorCritic({"memory": ArraySpec((3,))}, Box((-1.0,), (1.0,)), recurrent)


FAULTS = """
import torch
from torch import nn

class Flat(nn.Module):
    def __init__(self, shapes):
        super().__init__()
    def forward(self, inputs):
        return inputs["obs"].mean(1)

class Twice(Flat):
    def forward(self, inputs):
        return inputs["obs"].double()

class Nothing(Flat):
    def forward(self, inputs):
        return None

class Named(Flat):
    def forward(self, inputs):
        return inputs["camera"]

def function(shapes):
    return Flat(shapes)
"""


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("missing.py:Net", "faults.py"),
        ("faults.py:Flatt", "Flat"),
        ("faults.py:Flat", "float32 [2]"),
        ("faults.py:Named", "KeyError"),
    ],
)
def test_faults_are_refused_in_one_line(network: str, message: str, tmp_path, capsys) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    lines = [f"model.network={tmp_path}/{network}", f"run_dir={tmp_path}/run", "env.id=CartPole-v1"]
    assert_refused(capsys, ["train", "--quiet", *lines], message)
    assert not (tmp_path / "run").exists()
