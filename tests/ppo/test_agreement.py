"""The first minibatch agrees with its rollout, or the run ends and names what differs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import assert_refused
from torch import nn

from embodied_ppo.core import compile
from embodied_ppo.core.errors import RolloutMismatch
from embodied_ppo.core.types import Trajectory
from embodied_ppo.options import schema
from embodied_ppo.ppo import agreement, losses
from embodied_ppo.ppo.agreement import Tolerances, tolerances
from embodied_ppo.ppo.ppo import PPO
from embodied_ppo.programs import robot
from embodied_ppo.programs.run_spec import RunSpec
from embodied_ppo.rollout.simulation import Rollout
from embodied_ppo.training.progress import Messages
from tests.ppo import test_language_actor as language
from tests.run_helpers import tiny_config, tiny_rollout

NETWORKS = """
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self, shapes, layer=None):
        super().__init__()
        inputs = sum(shape[0] for shape in shapes.values())
        self.body = nn.Sequential(nn.Linear(inputs, 16), layer or nn.Tanh())

    def forward(self, inputs):
        return self.body(torch.cat(list(inputs.values()), -1))

class Dropout(Plain):  # its default is training=True, in evaluation mode, too
    def forward(self, inputs):
        return nn.functional.dropout(super().forward(inputs), 0.1)

class Batch(Plain):
    def __init__(self, shapes):
        super().__init__(shapes, nn.BatchNorm1d(16, track_running_stats=False))
"""


def test_differences_by_hand() -> None:
    log_ratio = torch.tensor([0.02, -0.01, 0.0, 5.0])
    mask = torch.tensor([True, True, True, False])
    stats = losses.ratio_statistics(log_ratio.exp(), torch.where(mask, log_ratio, 0.0), mask)
    # (0 − 0)²/1 = 0, (3.5 − 3)²/10 = 0.025, (0.5 + 0.5)²/1.25 = 0.8; the fourth is masked.
    value, old = torch.tensor([0.0, 3.5, 0.5, 9.0]), torch.tensor([0.0, 3.0, -0.5, 0.0])
    total = losses.value_difference(value, old, mask)
    assert total.item() == pytest.approx(0.825)
    sums = {"value_difference": total.item(), "rows": 3.0}
    measured = agreement.differences(sums | {k: float(x) for k, x in stats.items()})
    # float64: sqrt((0.02² + 0.01²)/3) is 0.01291; the cubic term of k3 is below 1 % of it.
    assert measured.log_prob == pytest.approx(math.sqrt(5e-4 / 3), rel=0.01)
    assert measured.value == pytest.approx(math.sqrt(0.825 / 3))
    assert agreement.differences({"rows": 0.0}) == Tolerances(0.0, 0.0)


def test_tolerances_follow_the_precision() -> None:
    low = Tolerances(agreement.LOW_PRECISION, agreement.LOW_PRECISION)
    assert tolerances(schema.Config()) == Tolerances(agreement.ROUNDING, agreement.ROUNDING)
    actor = schema.ActorConfig(model=schema.LanguageModelConfig(dtype="bfloat16"))
    assert tolerances(schema.Config(mode="reasoning", actor=actor)) == low
    shifted = schema.Config(algorithm=schema.AlgorithmConfig(rpo_alpha=0.5))
    assert tolerances(shifted) == Tolerances(math.inf, agreement.ROUNDING)
    vllm = schema.Config(mode="reasoning", rollout=schema.RolloutConfig(engine="vllm"))
    assert tolerances(vllm) == Tolerances(agreement.LOW_PRECISION, agreement.ROUNDING)


# -------------------------------------------------------------------------------------------- robot
def make(**options: Any) -> tuple[Rollout, PPO]:
    """Return rollout and learner of a run in one process."""
    config = tiny_config({"env.id": "CartPole-v1", **options})
    rollout = tiny_rollout(config)
    spec = RunSpec(config, rollout.env.device, Path(), 3)
    never = compile.CompileSchedule(None)
    return rollout, robot.make_learner(spec, rollout.policy, never, Messages(print))


def update(rollout: Rollout, learner: PPO, number: int = 0) -> Trajectory:
    trajectory, _ = rollout.collect(8, update=number, version=number)
    learner.update(trajectory, update=number)
    return trajectory


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("Dropout", r"trunk\.network \(Dropout\).*called again"),
        ("Batch", r"trunk\.network\.body\.1 \(BatchNorm1d\).*other samples"),
        ("Plain", None),
    ],
)
def test_network_of_a_user(tmp_path, name: str, cause: str | None) -> None:
    file = tmp_path / "networks.py"
    file.write_text(NETWORKS)
    rollout, learner = make(**{"model.network": f"{file}:{name}"})
    if cause is None:
        update(rollout, learner)
        update(rollout, learner, 1)
        return
    before = [p.clone() for p in learner.policy.parameters()]
    with pytest.raises(RolloutMismatch, match=f"{cause}.*values by"):
        update(rollout, learner)
    assert all(torch.equal(x, p) for x, p in zip(before, learner.policy.parameters()))
    # Without tolerances, as in a learner that a script builds, nothing is compared.
    learner.optimizer.tolerances = None
    update(rollout, learner)


def test_wrong_recurrent_state() -> None:
    options = {"model.recurrent": "gru", "algorithm.minibatch_unit": "column"}
    rollout, learner = make(**options)
    update(rollout, learner)

    def forget(state: torch.Tensor, start: torch.Tensor | None = None) -> None:
        rollout.memory.state = torch.zeros_like(state)
        rollout.memory.start = torch.zeros_like(rollout.memory.start) if start is None else start

    rollout, learner = make(**options)
    rollout.memory.store = forget  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RolloutMismatch, match=r"stored state of recurrent"):
        update(rollout, learner)


def test_normaliser_that_changes_while_acting() -> None:
    rollout, learner = make(**{"model.normalize_obs": True})
    update(rollout, learner)
    trajectory, _ = rollout.collect(8, update=1, version=1)
    learner.policy.encoder.moments.mean.add_(1.0)
    with pytest.raises(RolloutMismatch, match=r"what writes encoder\.moments\.mean between"):
        learner.update(trajectory, update=1)


def test_other_weights_have_acted() -> None:
    rollout, learner = make()
    trajectory, _ = rollout.collect(8, update=3, version=3)
    wrong = replace(trajectory, value=trajectory.value + 0.1)
    with pytest.raises(RolloutMismatch, match=f"{agreement.UNKNOWN}.*values by"):
        learner.update(wrong, update=3)
    wrong = replace(trajectory, log_prob=trajectory.log_prob + 0.1)
    with pytest.raises(RolloutMismatch, match="in log-probabilities by"):
        learner.update(wrong, update=3)
    # A rollout of an older version differs legitimately.
    learner.update(replace(wrong, version=wrong.version - 1), update=3)


@pytest.mark.slow
def test_command_ends_with_exit_code_2(tmp_path, capsys) -> None:
    file = tmp_path / "networks.py"
    file.write_text(NETWORKS)
    options = ["env.id=CartPole-v1", "env.num_envs=4", "updates=2", "compile=never"]
    options += ["algorithm.horizon=16", "algorithm.global_batch_size=32", "evaluation.episodes=0"]
    options += [f"model.network={file}:Dropout", f"run_dir={tmp_path / 'run'}"]
    last = assert_refused(capsys, ["train", "--quiet", *options])
    assert last.startswith("error: remove trunk.network (Dropout)") and len(last) <= 300


# ----------------------------------------------------------------------------------------- language
class Noise(nn.Module):
    """A layer with noise."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return nn.functional.dropout(self.layer(*args, **kwargs), 0.1)


@pytest.mark.parametrize("which", ["actor", "critic"])
def test_language_model(which: str) -> None:
    limits = Tolerances(agreement.ROUNDING, agreement.ROUNDING)

    def make(noisy: bool) -> PPO:
        learner = language.learner()
        critic = language.critic_of(learner)
        learner.optimizer.tolerances = critic.optimizer.tolerances = limits
        decoder = learner.policy.decoder.module if which == "actor" else critic.module.decoder
        if noisy:
            decoder.layers[0].mlp.down_proj = Noise(decoder.layers[0].mlp.down_proj)
        return learner

    learner = make(False)
    learner.update(language.experience(learner.policy), update=0)
    learner = make(True)
    name = "log-probabilities" if which == "actor" else "values"
    with pytest.raises(RolloutMismatch, match=rf"down_proj \(Noise\).*in {name} by"):
        learner.update(language.experience(learner.policy), update=0)
