"""Unregistered environments in the interfaces of other packages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import embodied_envs
from embodied_envs.base.errors import EnvError
from embodied_envs.checks import check_env
from embodied_envs.types import ArraySpec, Box, VectorEnv

pytestmark = pytest.mark.filterwarnings("ignore:.*final_observation=previous")


def make(name: str, n: int = 4, **options: Any) -> VectorEnv:
    options.setdefault("seeds", list(range(n)))
    return embodied_envs.make(f"foreign_interfaces:{name}", num_envs=n, **options)


def run(env: VectorEnv, steps: int = 12) -> list[Tensor]:
    """Return observations of ``steps`` steps with the largest action, rewards and masks."""
    rows = [torch.as_tensor(env.reset())]
    for _ in range(steps):
        step = env.step(torch.ones(env.num_envs, 1))
        rows += [torch.as_tensor(step.obs), step.reward, step.truncated, step.mask]
    return rows


@pytest.mark.parametrize("name", ["one", "OldGym", "Numbers", "Columns"])
def test_each_interface_gives_the_episodes_of_the_registered_class(name: str) -> None:
    """The same line has the same numbers in every interface of arrays."""
    expected, actual = run(make("foreign/Modern-v0")), run(make(name))
    assert all(torch.equal(x, y) for x, y in zip(expected, actual, strict=True))
    truncated = torch.stack(expected[3::4])
    assert truncated.sum() == 8 and truncated[4].all() and truncated[10].all()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Modern", {}),
        pytest.param("one", {"kwargs": {"vectorization_mode": "async"}}, marks=pytest.mark.slow),
        ("OldGym", {"max_episode_steps": 4}),
        ("Numbers", {}),
    ],
)
def test_the_contract_holds(name: str, options: dict[str, Any]) -> None:
    report = check_env(lambda seeds: make(name, seeds=seeds, **options), steps=30)
    assert report.longest == options.get("max_episode_steps", 5) and report.seeded

    if name == "OldGym":  # a class whose constructor alone takes a seed
        with pytest.warns(UserWarning, match="takes no seed"):
            env = make("Constructed")
        first = env.reset()
        assert isinstance(first, Tensor) and len(first[:, 0].unique()) == 4
        env.restart([7, 8, 9, 10])
        assert not torch.equal(torch.as_tensor(env.reset()), first)


# ---------------------------------------------------------------------------- legged_gym and rsl_rl
@pytest.mark.parametrize("name", ["Legged", "RslRl2", "RslRl3"])
def test_legged_gym_and_rsl_rl(name: str) -> None:
    env = make(name, obs_keys=["policy", "critic"])
    assert env.obs_spec == {"policy": ArraySpec((2,)), "critic": ArraySpec((1,))}
    assert env.max_episode_steps == 5 and isinstance(env.action_spec, Box)
    obs: Any = env.reset()
    ended = []
    for _ in range(5):
        before = obs
        step = env.step(torch.ones(4, 1))
        obs = step.obs
        assert torch.equal(obs["policy"][:, :1], obs["critic"])
        ended.append((step.terminated, step.truncated))
        # V(s_t) bootstraps a truncated episode, as in rsl_rl.
        final: Any = step.final_obs
        assert torch.equal(final["policy"], before["policy"])
    terminated, truncated = (torch.stack(x) for x in zip(*ended, strict=True))
    fell = terminated.any(0)
    assert truncated[4].equal(~fell) and not truncated[:4].any() and fell.any() and not fell.all()
    # The names are those of Isaac Lab, so that the critic's group is not given to the actor.
    with pytest.raises(EnvError, match=r"model\.actor_obs=\[policy\]"):
        make(name)
    assert make("Legged", kwargs={"privileged": False}).obs_spec == ArraySpec((2,))
