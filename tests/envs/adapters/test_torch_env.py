"""TorchVectorEnv on one physics task with the interfaces of Gymnasium, ManiSkill and Isaac Lab."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import embodied_envs
from embodied_envs.base import tree
from embodied_envs.base.errors import EnvError
from embodied_envs.checks import check_env
from embodied_envs.types import ArraySpec, VectorEnv


def make(name: str, n: int = 3, seeds: list[int] | None = None, **options: Any) -> VectorEnv:
    options |= {"num_envs": n, "seeds": seeds or list(range(n)), "simulator": "torch"}
    return embodied_envs.make(f"torch_tasks:{name}", **options)


def full_force(n: int = 3) -> Tensor:
    """Return full force to the right for all carts: they reach 2 m within 14 steps."""
    return torch.ones(n, 1)


# ------------------------------------------------------------------------------------- the contract
@pytest.mark.parametrize(
    ("name", "kwargs", "spec"),
    [
        ("cart", {}, ArraySpec((2,))),
        ("isaac", {"compute_final_obs": True}, ArraySpec((2,))),
        ("maniskill", {"partial_reset": True}, None),
    ],
)
def test_each_interface_satisfies_the_contract(
    name: str, kwargs: dict[str, Any], spec: Any
) -> None:
    report = check_env(lambda seeds: make(name, 4, seeds, kwargs=kwargs), steps=60)
    assert report.episodes > 8 and report.longest == 20 and report.seeded and report.rows == 240
    can_stagger = not any("staggered" in note for note in report.notes)
    assert can_stagger == ("partial_reset" in kwargs)
    env = make(name, kwargs=kwargs)
    assert spec is None or env.obs_spec == spec
    assert env.max_episode_steps == (20 if name == "maniskill" else None)


@pytest.mark.parametrize("name", ["cart", "maniskill"])
def test_final_obs_is_the_state_before_the_reset(name: str) -> None:
    env = make(name)
    env.reset()
    for _ in range(14):
        step = env.step(full_force())
        ended = step.terminated | step.truncated
        if bool(ended.any()):
            both: Any = (step.final_obs, step.obs)
            final, obs = ((x["agent/qpos"] if isinstance(x, dict) else x)[ended, 0] for x in both)
            assert bool((final > 2).all()) and bool((obs.abs() <= 1).all())
            assert torch.equal(step.reward[ended], 2 - final)  # computed before the reset
            return
    raise AssertionError("no cart fell off")


def test_groups_of_policy_and_critic_must_be_named() -> None:
    """Isaac Lab returns privileged observations for the critic in another group."""
    with pytest.raises(EnvError, match=r"actor_obs=\[policy\].*critic_obs=\[policy,critic\]"):
        make("isaac", kwargs={"critic": True})
    groups = make("isaac", kwargs={"critic": True}, obs_keys=["policy", "critic"])
    assert groups.obs_spec == {"policy": ArraySpec((2,)), "critic": ArraySpec((3,))}
    critic = make("isaac", kwargs={"critic": True}, obs_keys=["critic"])
    assert critic.obs_spec == {"critic": ArraySpec((3,))}


def test_reset_where_resets_selected_environments() -> None:
    env = make("maniskill", kwargs={"partial_reset": True})
    env.reset()
    before: Any = env.step(full_force()).obs
    after: Any = env.reset_where(torch.tensor([False, True, False]))
    assert (after["agent/qpos"] == before["agent/qpos"]).flatten().tolist() == [True, False, True]
    other = make("maniskill", kwargs={"partial_reset": True})
    other.reset()
    other.step(full_force())
    other.reset_where(torch.tensor([False, True, False]))
    unchanged: Any = env.reset_where(torch.zeros(3, dtype=torch.bool))
    assert {k: x.shape for k, x in unchanged.items()} == {k: x.shape for k, x in after.items()}
    x, y = (e.step(full_force()) for e in (env, other))
    assert all(map(torch.equal, tree.leaves(x.obs), tree.leaves(y.obs)))
    assert make("cart").reset_where(torch.tensor([True, False, False])) is None


def test_random_numbers_are_independent_of_other_users_of_the_generator() -> None:
    """Isaac Lab draws from torch's global generator, and seeds it in every seeded reset."""

    def observations(disturb: bool) -> list[Tensor]:
        env = make("isaac", kwargs={"compute_final_obs": True})
        result = [torch.as_tensor(env.reset())]
        for _ in range(2):
            if disturb:
                make("isaac", seeds=[9, 9, 9], kwargs={"compute_final_obs": True}).reset()
                torch.rand(3)
            result += [torch.as_tensor(env.step(full_force()).obs) for _ in range(20)]
        return result

    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    undisturbed = observations(False)
    assert torch.equal(torch.rand(4), expected)
    assert all(torch.equal(a, b) for a, b in zip(undisturbed, observations(True)))


# ------------------------------------------------------------------------ without last observations
def test_end_without_final_obs_is_rejected() -> None:
    env = make("isaac")
    env.reset()
    with pytest.raises(
        EnvError, match=r"final_obs.*compute_final_obs=True.*final_observation=prev"
    ):
        for _ in range(20):
            env.step(full_force())


def test_previous_observation_replaces_final_obs_with_a_warning() -> None:
    """A truncated row is then bootstrapped with V(s_t), as rsl_rl's r + gamma V(s_t)."""
    with pytest.warns(UserWarning, match="final_observation=previous.*biased by one step"):
        env = make("isaac", kwargs={"final_observation": "previous"})
    obs: Any = env.reset()
    for _ in range(20):
        step = env.step(torch.zeros(3, 1))
        assert torch.equal(torch.as_tensor(step.final_obs), obs)
        obs = torch.as_tensor(step.obs).clone()
        torch.as_tensor(step.obs).zero_()  # the adapter keeps its own copy
    with warnings.catch_warnings(action="ignore"):
        check_env(
            lambda seeds: make("isaac", 4, seeds, kwargs={"final_observation": "previous"}),
            steps=60,
        )


# ----------------------------------------------------------------------------------------- training
@pytest.mark.gpu
@pytest.mark.parametrize("kwargs", [{"compute_final_obs": True}, {"final_observation": "previous"}])
@pytest.mark.filterwarnings("ignore:.*final_observation=previous")
def test_step_does_not_synchronize_with_the_gpu(kwargs: dict[str, Any]) -> None:
    env = make("isaac", 256, device="cuda", kwargs=kwargs)
    env.reset()
    action = torch.zeros(256, 1, device="cuda")
    step = env.step(action)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(30):
            step = env.step(action)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.as_tensor(step.obs).is_cuda and step.reward.is_cuda
    check_env(lambda seeds: make("isaac", 4, seeds, device="cuda", kwargs=kwargs), steps=60)
