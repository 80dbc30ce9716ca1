"""Action chunks: rewards, values, advantages and ratios per action, against a float64 reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
import toy_envs
from torch import Tensor

from embodied_envs.adapters.action_chunking import ChunkedActions
from embodied_envs.base.errors import ConfigError
from embodied_envs.types import ArraySpec, Box
from embodied_ppo.commands import main
from embodied_ppo.core import compile
from embodied_ppo.core.types import Decision, Trajectory
from embodied_ppo.options import loader
from embodied_ppo.options.schema import AlgorithmConfig, ModelConfig
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.ppo.ppo import PPO
from embodied_ppo.ppo.robot_actor import robot_ppo
from embodied_ppo.programs import compilation
from embodied_ppo.rollout.simulation import Rollout
from embodied_ppo.training.logging import numbers

T, N, C, A, OBS = 4, 3, 3, 2, 5
# One optimiser step on the complete rollout, so that a test can compute its gradient.
STEP = {"normalize_advantages": False, "max_grad_norm": None, "update_epoch": 1}


def make_learner(options: dict[str, Any], *, values: int = C, samples: int = T * N) -> PPO:
    """Return the learner of chunks of C actions; ``values`` is the number of value outputs."""
    torch.manual_seed(0)
    model = loader.load(ModelConfig, {"hidden": [8], "normalize_obs": False})
    box = Box((-1.0,) * (C * A), (1.0,) * (C * A))
    policy = ActorCritic(ArraySpec((OBS,)), box, model, chunk=C, values=values)
    run_helpers.scale_policy(policy, 0.5)
    config = loader.load(AlgorithmConfig, {"global_batch_size": samples, **STEP, **options})
    return robot_ppo(policy, config, num_envs=N, updates=10, seed=0)


def test_action_level_advantages_by_hand() -> None:
    """Discount 0.5, trace 0.5 x 0.5 = 0.25, two decisions of 3 actions; the first ends at its
    second action.

    Column 0 terminates there, column 1 is cut by the clock and its true successor has V = 10.
    """
    values = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    trajectory = run_helpers.trajectory(
        torch.tensor([[1.0, 4, 0], [1, 1, 1]]).unsqueeze(1).expand(2, 2, C),
        obs=torch.zeros(2, 2, OBS),
        action=torch.zeros(2, 2, C * A),
        log_prob=torch.zeros(2, 2, C, A),
        value=values.unsqueeze(1).expand(2, 2, C),
        # V of what follows each action: the plan's next action, or the true successor of the last
        # one executed
        next_value=torch.tensor([[[2.0, 0, 0], [2, 10, 0]], [[5, 6, 8], [5, 6, 8]]]),
        terminated=torch.tensor([[[0, 1, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]]).bool(),
        truncated=torch.tensor([[[0, 0, 0], [0, 1, 0]], [[0, 0, 0], [0, 0, 0]]]).bool(),
        mask=torch.tensor([[[1, 1, 0], [1, 1, 0]], [[1, 1, 1], [1, 1, 1]]]).bool(),
    )
    options = run_helpers.options("""reward_type=action_level gamma=0.5 gae_lambda=0.5
        minibatch_unit=column""")
    batch, _ = make_learner(options, samples=4).prepare(trajectory)
    # decision 1 of both: deltas 1 + 2.5 - 4, 1 + 3 - 5, 1 + 4 - 6
    last = [-0.5 + 0.25 * -1.25, -1.0 + 0.25 * -1.0, -1.0]
    # decision 0: deltas 1 + 1 - 1 = 1 and, where it terminates, 4 - 2 = 2; where the clock cuts it,
    # 4 + 5 - 2 = 7
    expected = [[[1 + 0.25 * 2, 2.0, 0.0], [1 + 0.25 * 7, 7.0, 0.0]], [last, last]]
    torch.testing.assert_close(batch.advantage, torch.tensor(expected))
    torch.testing.assert_close(batch.returns, torch.tensor(expected) + trajectory.value)


def random_trajectory(learner: PPO, *, seed: int = 0) -> Trajectory:
    """Return decisions of the learner's policy with random rewards, ends and masks of actions."""
    g = torch.Generator().manual_seed(seed)
    obs = torch.randn(T, N, OBS, generator=g)
    flat = learner.policy.encode(obs.flatten(0, 1))
    decision = learner.policy.act(flat, noise=learner.policy.noise(T * N, g))
    executed = torch.ones(T, N, C, dtype=torch.bool)
    executed[1, 0, 1:], executed[2, 1, 2:] = False, False
    ends = torch.zeros(T, N, C, dtype=torch.bool)
    ends[1, 0, 0], ends[2, 1, 1] = True, True
    noise = 0.1 * torch.randn(T, N, C, A, generator=g)
    value = decision.value.unflatten(0, (T, N)) + 0.3 * torch.randn(T, N, C, generator=g)
    next_value = torch.randn(T, N, C, generator=g)
    return run_helpers.trajectory(
        torch.randn(T, N, C, generator=g) * executed,
        obs=obs,
        action=decision.action.unflatten(0, (T, N)),
        log_prob=decision.log_prob.unflatten(0, (T, N)) + noise,
        value=value,
        next_value=next_value,
        terminated=ends & torch.tensor([True, False, True]).view(1, N, 1),
        truncated=ends & torch.tensor([False, True, False]).view(1, N, 1),
        mask=executed,
    )


def reference_loss(learner: PPO, t: Trajectory, level: str) -> Tensor:
    """Compute L_policy + L_value - 0.01 H in float64 by loops over all actions."""
    c = learner.config
    policy: Any = learner.policy
    view = policy.evaluate(policy.encode(t.obs.flatten(0, 1)), t.action.flatten(0, 1), {})
    log_prob, entropy = (x.unflatten(0, (T, N)).double() for x in (view.log_prob, view.entropy))
    value = view.value.unflatten(0, (T, N)).double()
    policy_terms, value_terms, entropy_terms = [], [], []
    for n in range(N):
        following = 0.0
        for step in reversed(range(T * C)):
            k, i = divmod(step, C)
            if not t.mask[k, n, i]:
                continue
            end = bool(t.terminated[k, n, i] | t.truncated[k, n, i])
            bootstrap = 0.0 if t.terminated[k, n, i] else float(t.next_value[k, n, i])
            old = float(t.value[k, n, i])
            delta = float(t.reward[k, n, i]) + c.gamma * bootstrap - old
            advantage = delta + (0.0 if end else c.gamma * c.gae_lambda * following)
            following = advantage
            now, before = log_prob[k, n, i], t.log_prob[k, n, i].double()
            parts = list(zip(now, before, strict=True))
            for new, acted in [(now.sum(), before.sum())] if level == "action_level" else parts:
                ratio = (new - acted).exp()
                clipped = ratio.clamp(0.8, 1.2)
                policy_terms.append(-torch.minimum(ratio * advantage, clipped * advantage))
            near = old + (value[k, n, i] - old).clamp(-0.2, 0.2)
            errors = ((old + advantage - x) ** 2 / 2 for x in (value[k, n, i], near))
            value_terms.append(torch.maximum(*errors))
            entropy_terms.append(entropy[k, n, i].sum())
    mean = [torch.stack(terms).mean() for terms in (policy_terms, value_terms, entropy_terms)]
    return mean[0] + mean[1] - 0.01 * mean[2]


@pytest.mark.parametrize("level", ["action_level", "token_level"])
@pytest.mark.parametrize(
    "more", [{}, {"minibatch_unit": "column"}, {"micro_batch_size": 5}], ids=str
)
def test_gradient_equals_float64_reference(level: str, more: dict[str, Any]) -> None:
    options = {"reward_type": "action_level", "logprob_type": level, "entropy_bonus": 0.01}
    learner = make_learner({**options, "huber_delta": None, **more})
    t = random_trajectory(learner)
    module: Any = learner.policy
    reference_loss(learner, t, level).backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters()])
    gradients: list[Tensor] = []
    learner.optimizer.adamw.register_step_pre_hook(
        lambda *_: gradients.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
    )
    metrics = learner.update(t, update=0)
    assert len(gradients) == 1
    torch.testing.assert_close(gradients[0], expected, rtol=1e-4, atol=1e-6)
    clipped: Any = metrics["policy/clip_fraction"]
    assert clipped.count == int(t.mask.sum()) * (1 if level == "action_level" else A)


def test_actions_after_episode_end_are_ignored() -> None:
    """Values of unexecuted actions, NaN included, change neither loss nor normaliser."""
    options = run_helpers.options("""reward_type=action_level normalize_advantages=true
        reward_norm=running use_kl_in_reward=true use_kl_loss=true""")
    outcomes = []
    for spoil in (False, True):
        learner = make_learner(options)
        t = random_trajectory(learner)
        if spoil:
            t.reward[~t.mask] = torch.nan
            t.next_value[~t.mask] = torch.inf
            t.log_prob[~t.mask] = -5.0
        outcomes.append(numbers(learner.update(t, update=0)))
    assert outcomes[0] == pytest.approx(outcomes[1])


class CountingActions(toy_envs.CountingPolicy):
    """V of action i of a plan is that of the observation and i/8; the plan is C actions of one
    number.
    """

    def _values(self, inputs: Tensor) -> Tensor:
        return toy_envs.value_of(inputs).unsqueeze(1) + torch.arange(C) / 8

    def noise(self, rows: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(rows, C, generator=generator)

    def act(self, inputs: Any, *, noise: Tensor | None = None) -> Decision:
        action = torch.zeros(len(inputs), C) if noise is None else noise
        return Decision(action, -action.unsqueeze(2), self._values(inputs))

    def value(self, inputs: Any) -> Tensor:
        return self._values(inputs)


@pytest.mark.parametrize("same_step", [False, True])
def test_rollout_has_action_rows_for_action_values(same_step: bool) -> None:
    """Episodes of 2 steps (terminates) and 4 (clock) in decisions of 3 actions; V = 1000 i + 100
    episode + step + 1/2
    + action/8. The simulator of column 0 begins episode 1 inside the chunk, where nothing counts,
      then episode 2.
    """
    env = ChunkedActions(toy_envs.ScriptedEnv([2, 4], [False, True], same_step=same_step), C)
    t, _ = Rollout(env, CountingActions(), seed=0, gamma=0.5).collect(2, update=0, version=0)
    assert t.steps is None and t.version.shape == (2, 2)
    assert t.mask.tolist() == [
        [[True, True, False], [True] * 3],
        [[True, True, False], [True, False, False]],
    ]
    assert t.reward.tolist() == [[[1, 2, 0], [101, 102, 103]], [[21, 22, 0], [104, 0, 0]]]
    assert t.terminated.tolist() == [
        [[False, True, False], [False] * 3],
        [[False, True, False], [False] * 3],
    ]
    assert t.truncated.tolist() == [[[False] * 3, [False] * 3], [[False] * 3, [True, False, False]]]
    torch.testing.assert_close(
        t.value[:, 0, :], torch.tensor([[0.5, 0.625, 0.75], [200.5, 200.625, 200.75]])
    )
    # column 0 ends at its second action, whose successor is step 2 of that episode
    torch.testing.assert_close(
        t.next_value[:, 0, :2], torch.tensor([[0.625, 2.5], [200.625, 202.5]])
    )
    # column 1: inside the plan its next action, then what the next decision sees; cut at step 4 of
    # its episode
    torch.testing.assert_close(t.next_value[0, 1], torch.tensor([1000.625, 1000.75, 1003.5]))
    assert float(t.next_value[1, 1, 0]) == 1004.5


CHUNKS = {"env.action_chunk": 4, "env.max_episode_steps": 10, "algorithm.entropy_bonus": 0.1}


ACTION_LEVEL = {"algorithm.reward_type": "action_level"}
COLUMNS = {"algorithm.minibatch_unit": "column"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {**ACTION_LEVEL, **COLUMNS, "algorithm.off_policy_correction": "sequence"},
            "reward_type=chunk_level: .*off_policy_correction = sequence",
        ),
        (
            {**ACTION_LEVEL, **COLUMNS, "algorithm.loss_agg_func": "seq-mean-token-sum"},
            "token-mean.*: .*loss_agg_func = seq-mean-token-sum",
        ),
        ({"model.detach_value": True}, "remove model.detach_value"),
    ],
    ids=lambda x: next(reversed(x)) if isinstance(x, dict) else "",
)
def test_incompatible_levels_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        run_helpers.tiny_config({**CHUNKS, "algorithm.entropy_bonus": 0.0, **options})
    assert len(str(error.value)) <= 300


def test_detach_value_of_actor_critic() -> None:
    """null and false are what it does: the value loss trains the shared trunk. A stored ``true`` of
    an earlier version is read as before."""
    run_helpers.tiny_config({"model.detach_value": False})
    options = run_helpers.nested({"updates": 1, "model.detach_value": True})
    stored = loader.load(loader.Config, options, source=loader.STORED)
    assert stored.model.detach_value is True
    policy: Any = make_learner({}, values=1).policy
    policy.value_head(policy.trunk(policy.encode(torch.ones(1, OBS)))).sum().backward()
    assert sum(float(p.grad.abs().sum()) for p in policy.trunk.parameters()) > 0


# ------------------------------------------------------------------------- rows of one forward pass
# The options of PPO on RLinf's page about embodied tasks.
BLOCK = """
# @package _global_
algorithm: {normalize_advantages: True, group_size: 1, adv_type: gae, loss_type: actor_critic,
  loss_agg_func: token-mean, rollout_micro_batch_size: 256,
  logprob_forward_micro_batch_size: 16, entropy_bonus: 0, clip_ratio_high: 0.2,
  clip_ratio_low: 0.2, value_clip: 0.2, gamma: 0.99, gae_lambda: 0.95, huber_delta: 10.0}
"""


def test_rlinf_options_train_unchanged(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine/experiment").mkdir(parents=True)
    Path("mine/experiment/block.yaml").write_text(BLOCK.lstrip())
    few = run_helpers.words("""env.num_envs=4 algorithm.horizon=8 algorithm.global_batch_size=16
        env.max_episode_steps=10 updates=1 evaluation.episodes=1 run_dir=run threads=1""")
    assert main.main(["train", "--quiet", "--config-dir", "mine", "experiment=block", *few]) == 0
    stored = Path("run/config.yaml").read_text()
    assert "rollout_micro_batch_size: 256" in stored
    assert "logprob_forward_micro_batch_size: 16" in stored
    assert "  micro_batch_size: null" in stored


def test_forward_limits_exclude_compilation() -> None:
    c = run_helpers.tiny_config({"algorithm.rollout_micro_batch_size": 3, "updates": 2000})
    notices: list[str] = []
    assert compilation.compile_from(c, torch.device("cpu"), notices.append)[0] is None
    assert "rollout_micro_batch_size" in notices[0]
    with pytest.raises(ConfigError, match="rollout_micro_batch_size"):
        compilation.compile_from(replace(c, compile="always"), torch.device("cpu"), notices.append)
    enough = run_helpers.tiny_config({"algorithm.rollout_micro_batch_size": 256, "updates": 2000})
    if not compile.unavailable_reason():
        assert compilation.compile_from(enough, torch.device("cpu"), notices.append)[0] is not None
