"""An intrinsic reward for states that the policy has rarely visited: random network distillation.

A network of fixed random weights maps each observation to FEATURES numbers, and a second one learns
to predict them. The prediction error is large where it has not learned, and decays where it has.
T steps, N environments, B samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from embodied_envs.base import tree
from embodied_envs.base.random import sampling_key
from embodied_envs.base.tree import apply_in_parts
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.running_stats import masked_sum, read_numbers
from embodied_ppo.core.types import Batch, Mean, Metrics, Trajectory
from embodied_ppo.options.reward_groups import RewardGroup
from embodied_ppo.options.schema import AlgorithmConfig, ModelConfig
from embodied_ppo.policies.backbone import VECTOR, Encoder, linear, make_trunk
from embodied_ppo.ppo.minibatches import take

FEATURES = 64
HIDDEN = ModelConfig(hidden=(256, 256), activation="elu")
LEARNING_RATE = 1e-4
# Bound of normalised observations. The values above are those of Burda et al., section 2.
OBS_CLIP = 5.0
# Rollouts over which the deviation of intrinsic returns is averaged. Over the whole run, as in the
# paper, the error of the first updates made later rewards 1000 times too small for control tasks.
RECENT_ROLLOUTS = 10
ROWS = 8192  # rows of a forward pass without gradient


class Curiosity:
    """Computes the intrinsic reward of a rollout and trains its predictor.

    r(s) = mean over FEATURES of (f(s) − g(s))², with the random target f and the predictor g, which
    minimises r over the minibatches of PPO with its own Adam.

    Source: Burda et al. 2018, "Exploration by random network distillation", section 2.2; here the
    reward of a row is that of its own observation s_t and not of s_{t+1}, whose novelty V(s_{t+1})
    contains, so that ends of episodes and of the rollout need no observation of their own. The
    reward is divided by the deviation of its newest discounted returns (section 2.4), see
    RECENT_ROLLOUTS.
    """

    def __init__(
        self, encoder: Encoder, config: AlgorithmConfig, *, seed: int, ranks: Ranks
    ) -> None:
        """Create both networks, which are the same on every rank.

        Args:
            encoder: The policy's encoder; its outputs are the inputs of both networks.
            config: Options of the algorithm.
            seed: Seed of the run.
            ranks: Ranks that learn together.
        """
        self.config, self.ranks = config, ranks
        self.inputs = [*([VECTOR] if encoder.vectors else []), *encoder.images]
        self.normalized = encoder.moments is not None
        with torch.random.fork_rng():
            torch.manual_seed(sampling_key(seed, "curiosity"))
            self.target, self.predictor = (
                nn.Sequential(trunk, linear(trunk.features, FEATURES, 1.0))
                for trunk in (make_trunk(encoder, HIDDEN), make_trunk(encoder, HIDDEN))
            )
        self.target.requires_grad_(False)
        self.adam = torch.optim.Adam(self.predictor.parameters(), lr=LEARNING_RATE)
        self.losses: list[Tensor] = []

    def to(self, device: torch.device) -> Curiosity:
        """Move both networks to a device."""
        self.target.to(device)
        self.predictor.to(device)
        return self

    def error(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return r [B] of model inputs [B, ..], with gradients of the predictor."""
        return (self.target(inputs) - self.predictor(inputs)).square().mean(-1)

    def _own(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the networks read of a policy's inputs [.., D]."""
        own = {name: inputs[name] for name in self.inputs}
        if self.normalized:
            own[VECTOR] = own[VECTOR].clamp(-OBS_CLIP, OBS_CLIP)
        return own

    def groups_at(self, groups: tuple[RewardGroup, ...], update: int) -> tuple[RewardGroup, ...]:
        """Return the reward groups, the last of which has the weight w·max(0, 1 − update/decay)."""
        c = self.config.curiosity
        rest = max(0.0, 1.0 - update / c.decay) if c.decay else 1.0
        return (*groups[:-1], replace(groups[-1], weight=c.weight * rest))

    @torch.no_grad()
    def with_reward(
        self, t: Trajectory, inputs: Mapping[str, Tensor]
    ) -> tuple[Trajectory, Metrics]:
        """Return a trajectory whose rewards [T, N, G] contain the intrinsic one as the last.

        Args:
            t: Experience; rewards are [T, N], or [T, N, G − 1] of groups.
            inputs: Its observations as inputs of the policy, [T, N, ..].
        """
        flat = tree.flatten_time(self._own(inputs))
        bonus = apply_in_parts(self.error, ROWS, flat).unflatten(0, t.mask.shape)
        reward = t.reward if t.reward.ndim == 3 else t.reward.unsqueeze(-1)
        total, count = read_numbers(masked_sum(bonus, t.mask), t.mask.sum())
        self.losses.clear()
        joined = torch.cat([reward, bonus.unsqueeze(-1)], dim=-1)
        return replace(t, reward=joined), {"curiosity/reward": Mean(total, count)}

    def step(self, batch: Batch, index: Tensor) -> None:
        """Take one step of Adam on the samples (or columns) ``index`` of a batch."""
        unit = self.config.minibatch_unit
        inputs, mask = take((self._own(batch.inputs), batch.mask), index, unit)  # pyright: ignore[reportArgumentType]
        if unit == "column":
            inputs, mask = tree.flatten_time((inputs, mask))
        rows = self.ranks.all_reduce_sum(mask.sum().double())
        loss = masked_sum(self.error(inputs), mask) / rows.clamp(min=1).float()
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        parameters = [*self.predictor.parameters()]
        gradients = [p.grad.flatten() for p in parameters if p.grad is not None]
        # One all-reduce for all gradients and the loss.
        flat = torch.cat([*gradients, loss.detach().reshape(1)])
        flat = self.ranks.all_reduce_sum(flat)
        for p, x in zip(parameters, flat[:-1].split([p.numel() for p in parameters]), strict=True):
            p.grad = x.view_as(p)
        if self.config.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
        self.adam.step()
        self.losses.append(flat[-1])

    def metrics(self) -> Metrics:
        """Return metrics of the steps since the last rollout."""
        if not self.losses:
            return {}
        return {"curiosity/loss": Mean(float(torch.stack(self.losses).sum()), len(self.losses))}

    def state(self) -> dict[str, Any]:
        """Return the weights of both networks and the state of Adam."""
        networks = {"target": self.target, "predictor": self.predictor, "adam": self.adam}
        return {name: x.state_dict() for name, x in networks.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state``."""
        for name, x in state.items():
            getattr(self, name).load_state_dict(x)
