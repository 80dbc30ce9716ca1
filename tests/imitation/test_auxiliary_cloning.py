"""The cloning loss that PPO adds to every minibatch of the actor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embodied_envs.base import tree
from embodied_ppo.cluster import run_plan
from embodied_ppo.commands import main
from embodied_ppo.core.types import Mean, Trajectory
from embodied_ppo.imitation import behavior_cloning
from embodied_ppo.options.schema import AlgorithmConfig
from embodied_ppo.ppo.robot_actor import robot_ppo
from embodied_ppo.training import checkpoint
from tests.imitation.test_behavior_cloning import STEPS, demonstrations
from tests.policies.vla.test_trunk import FAMILIES, SENTENCES, B, C, make, observations


@pytest.fixture(autouse=True)
def no_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory estimates take half of the time of these runs."""
    monkeypatch.setattr(run_plan, "can_estimate", lambda *_, **__: False)


def test_auxiliary_loss_is_the_cloning_loss_with_the_demonstrations_sentences() -> None:
    demos = replace(demonstrations(), instructions=("go there", "go away"))
    policy = make()
    beside = behavior_cloning.AuxiliaryCloningLoss(
        policy, demos, replace(STEPS, coef=0.3, batch_size=len(demos.state))
    )
    loss = beside(torch.Generator().manual_seed(0))
    assert policy.sentences == SENTENCES
    frames = torch.randint(
        len(demos.state), (len(demos.state),), generator=torch.Generator().manual_seed(0)
    )
    policy.set_sentences(demos.instructions)
    obs = {
        "front": demos.images["front"].permute(0, 3, 1, 2),
        "state": demos.state,
        "instruction": demos.instruction,
    }
    expected, _ = policy.bc_loss(policy.encode(tree.index(obs, frames)), *demos.chunk(frames, C))
    assert torch.allclose(loss, 0.3 * expected)
    policy.set_sentences(SENTENCES)
    other, _ = policy.bc_loss(policy.encode(tree.index(obs, frames)), *demos.chunk(frames, C))
    assert not torch.allclose(other, expected)


def rollout(policy: torch.nn.Module, columns: int = 2) -> Trajectory:
    """One step of B environments, twice, without any advantage."""
    obs = tree.map(lambda x: torch.stack([x] * columns), observations())
    d = policy.act(
        policy.encode(observations()), noise=policy.noise(B, torch.Generator().manual_seed(1))
    )
    zeros, no = torch.zeros(columns, B), torch.zeros(columns, B, dtype=torch.bool)
    action, log_prob, replay = tree.map(
        lambda x: torch.stack([x] * columns), (d.action, d.log_prob, d.replay)
    )
    return Trajectory(
        obs=obs,
        action=action,
        replay=replay,
        log_prob=log_prob,
        value=zeros,
        next_value=zeros,
        reward=zeros,
        terminated=no,
        truncated=no,
        mask=~no,
        # Of older weights, so that their values are not compared with those of the policy.
        version=torch.full((columns, B), -1),
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tokens", "gaussian", "flow"])
def test_every_actor_minibatch_adds_the_auxiliary_loss(family: str) -> None:
    config = AlgorithmConfig(
        horizon=2,
        global_batch_size=B,
        update_epoch=3,
        critic_warmup=1,
        lr=3e-3,
        logprob_type="token_level",
    )

    def trained(coef: float, updates: int) -> tuple[list[float], list[float]]:
        """Return the auxiliary loss of each update, and the sum of all weights after it."""
        policy = make(**FAMILIES[family])
        beside = (
            behavior_cloning.AuxiliaryCloningLoss(
                policy, demonstrations(), replace(STEPS, coef=coef, batch_size=64)
            )
            if coef
            else None
        )
        learner = robot_ppo(policy, config, num_envs=B, updates=20, seed=0, auxiliary_loss=beside)
        losses, weights = [], []
        for update in range(updates):
            metrics = learner.update(rollout(policy), update=update)
            loss_metric = metrics.get("policy/cloning_loss")
            losses.append(loss_metric.value if isinstance(loss_metric, Mean) else float("nan"))
            weights.append(sum(float(p.detach().double().abs().sum()) for p in policy.parameters()))
        return losses, weights

    losses, weights = trained(0.5, 12)
    assert losses[0] != losses[0]  # NaN: no loss while the value head warms up
    assert losses[-1] < 0.8 * losses[1]
    assert trained(0.5, 3) == (pytest.approx(losses[:3], nan_ok=True), weights[:3])
    without, other = trained(0.0, 3)
    assert all(x != x for x in without) and other[2] != weights[2]


@pytest.mark.slow
def test_command_trains_and_resumes_with_the_auxiliary_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBODIED_PPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    words = ["experiment=tabletop_token", "eval_every=0", "env.num_envs=4", "env.image_size=16"]
    words += [f"evaluation.{x}" for x in ("episodes=4", "num_envs=4", "video_episodes=0")]
    words += [f"cloning.{x}" for x in ("coef=0.1", "steps=0", "episodes=6", "batch_size=4")]
    words += ["algorithm.horizon=2", "algorithm.global_batch_size=8", "model.width=16"]
    words += ["algorithm.critic_warmup=0", "algorithm.lr_schedule=constant"]
    assert main.main(["train", *words, "updates=4", "run_dir=whole"]) == 0
    assert main.main(["train", *words, "updates=2", "run_dir=part"]) == 0
    assert main.main(["train", *words, "updates=4", "resume=part", "run_dir=rest"]) == 0
    a, b = (checkpoint.open_checkpoint(run).policy() for run in ("whole", "rest"))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    rows = [json.loads(line) for line in Path("whole/metrics.jsonl").read_text().splitlines()]
    losses = [row["policy/cloning_loss"] for row in rows if "policy/cloning_loss" in row]
    assert len(losses) == 4 and all(0 < x < 1 for x in losses)
