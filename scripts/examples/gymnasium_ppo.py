"""PPO in one file on a Gymnasium vector environment, without the trainer of this package.

    python scripts/examples/gymnasium_ppo.py embodied/Tabletop-v0 150

It needs torch, gymnasium and embodied-envs only, and trains any ``embodied/NAME-v0`` that reports
success and whose observation is one array. Like CleanRL's continuous PPO it is one file without
classes, on vector environments of Gymnasium with its wrappers. The environments reset an ended
episode in the next step (``autoreset_mode="next_step"``): the observation of a step that ends an
episode is its last one, whose value counts after a time limit.
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

import embodied_envs  # noqa: F401  registers embodied/NAME-v0

HORIZON, EPOCHS, MINIBATCHES = 32, 8, 8
GAMMA, LAMBDA, CLIP, LEARNING_RATE = 0.98, 0.95, 0.2, 1e-3


def network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Return a network with two hidden layers and orthogonal weights."""
    layers: list[nn.Module] = []
    for width, out, scale in ((inputs, 64, 2**0.5), (64, 64, 2**0.5), (64, outputs, gain)):
        linear = nn.Linear(width, out)
        nn.init.orthogonal_(linear.weight, scale)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def train(id: str, *, updates: int, num_envs: int = 64, seed: int = 0, **options: Any) -> float:
    """Train and return the share of the last 200 episodes that succeeded.

    Args:
        id: Id of Gymnasium.
        updates: Number of updates; each has HORIZON x num_envs steps.
        num_envs: Number of environments, N.
        seed: Seed of environments, weights and actions.
        options: Options of the environment.
    """
    torch.manual_seed(seed)
    envs = gym.make_vec(id, num_envs=num_envs, autoreset_mode="next_step", **options)
    envs = gym.wrappers.vector.NormalizeObservation(envs)
    size = int(np.prod(envs.single_observation_space.shape or ()))
    actions = int(np.prod(envs.single_action_space.shape or ()))
    actor, critic = network(size, actions, 0.01), network(size, 1, 1.0)
    log_std = nn.Parameter(torch.zeros(actions))
    parameters = [*actor.parameters(), *critic.parameters(), log_std]
    optimizer = torch.optim.Adam(parameters, LEARNING_RATE, eps=1e-5)
    successes: list[bool] = []

    def distribution(obs: Tensor) -> torch.distributions.Independent:
        return torch.distributions.Independent(
            torch.distributions.Normal(actor(obs), log_std.exp()), 1
        )

    obs = torch.from_numpy(envs.reset(seed=seed)[0]).float()
    ended = torch.zeros(num_envs, dtype=torch.bool)
    for update in range(updates):
        rows = []
        for _ in range(HORIZON):
            acts = ~ended  # the step after an episode's end resets it and is no experience
            with torch.no_grad():
                chosen = distribution(obs)
                action = chosen.sample()
                log_prob, value = chosen.log_prob(action), critic(obs).squeeze(1)
                next_obs, *results, info = envs.step(action.numpy())
                next_obs = torch.from_numpy(next_obs).float()
                reward, terminated, truncated = (torch.from_numpy(x).clone() for x in results)
                next_value = critic(next_obs).squeeze(1)
            ended = terminated | truncated
            successes += info["success"][ended.numpy()].tolist()
            delta = reward + GAMMA * next_value * ~terminated - value
            rows.append((obs, action, log_prob, value, acts, ended, delta.float()))
            obs = next_obs
        *columns, values, acts, ends, deltas = (torch.stack(x) for x in zip(*rows, strict=True))
        # GAE: the sum over later deltas stops at the episode's end.
        advantages, last = torch.zeros_like(deltas), torch.zeros(num_envs)
        for t in reversed(range(HORIZON)):
            last = deltas[t] + GAMMA * LAMBDA * last * ~ends[t]
            advantages[t] = last
        data = [x[acts] for x in (*columns, advantages, advantages + values)]
        for _ in range(EPOCHS):
            for index in torch.randperm(len(data[0])).chunk(MINIBATCHES):
                o, a, old, advantage, target = (x[index] for x in data)
                chosen = distribution(o)
                ratio = (chosen.log_prob(a) - old).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                policy_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
                loss = policy_loss + 0.5 * (critic(o).squeeze(1) - target).square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        if (update + 1) % 10 == 0:
            steps, recent = (update + 1) * HORIZON * num_envs, successes[-200:]
            print(f"{steps} steps, success {np.mean(recent) if recent else 0:.2f}", flush=True)
    envs.close()
    return float(np.mean(successes[-200:])) if successes else 0.0


if __name__ == "__main__":
    train(sys.argv[1], updates=int(sys.argv[2]), families=["reach"])
