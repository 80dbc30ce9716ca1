"""TorchVectorEnv on one physics task with the interfaces of Gymnasium, ManiSkill and Isaac Lab."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import run_helpers
import torch
import torch_tasks
from torch import Tensor

from embodied_envs.adapters import torch_env
from embodied_envs.adapters.base import AdapterOptions
from embodied_envs.adapters.torch_env import TorchVectorEnv
from embodied_envs.checks import check_env
from embodied_ppo.core import tree
from embodied_ppo.core.types import ArraySpec, Box, EnvError


def make(name: str, n: int = 3, seeds: list[int] | None = None, **options: Any) -> TorchVectorEnv:
    if name == "isaac" and "obs_keys" not in options:
        options["kwargs"] = {"observe": "policy"} | options.get("kwargs", {})
    adapter_options = AdapterOptions(num_envs=n, seeds=seeds or list(range(n)), **options)
    return TorchVectorEnv(f"torch_tasks:{name}", adapter_options)


def full_force(n: int = 3) -> Tensor:
    """Return full force to the right for all carts: they reach 2 m within 14 steps."""
    return torch.ones(n, 1)


# ------------------------------------------------------------------------------------- the contract
@pytest.mark.parametrize(
    ("name", "kwargs", "spec"),
    [
        ("cart", {}, ArraySpec((2,))),
        ("isaac", {"compute_final_obs": True}, ArraySpec((2,))),
        ("isaac", {"compute_final_obs": True, "observe": ["critic", "policy"]}, None),
        ("maniskill", {"partial_reset": True}, None),
        ("maniskill", {"observe": "agent"}, {"qpos": ArraySpec((1,)), "qvel": ArraySpec((1,))}),
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


def test_nested_observations_become_tensors_of_the_spec() -> None:
    env = make("maniskill")
    assert env.obs_spec == {
        "agent/qpos": ArraySpec((1,)),
        "agent/qvel": ArraySpec((1,)),
        "extra/near": ArraySpec((1,)),
        "extra/where": ArraySpec((3,)),
        "rgb": ArraySpec((4, 4, 3), torch.uint8),
    }
    obs: Any = env.reset()
    x = obs["agent/qpos"]
    assert obs["agent/qvel"].dtype == torch.float32
    assert obs["extra/near"].tolist() == (x.abs() < 0.1).float().tolist()
    # Discrete(3, start=-1): -1, 0 and 1 have the indices 0, 1 and 2.
    indices = [0 if v < 0 else 2 for v in x.flatten().tolist()]
    assert obs["extra/where"].argmax(1).tolist() == indices
    assert obs["rgb"].dtype == torch.uint8
    assert env.action_spec == Box((-1.0,), (1.0,))


@pytest.mark.parametrize(("name", "kwargs"), [("cart", {}), ("maniskill", {"observe": "agent"})])
def test_final_obs_is_the_state_before_the_reset(name: str, kwargs: dict[str, Any]) -> None:
    env = make(name, kwargs=kwargs)
    env.reset()
    for _ in range(14):
        step = env.step(full_force())
        ended = step.terminated | step.truncated
        if bool(ended.any()):
            both: Any = (step.final_obs, step.obs)
            final, obs = ((x["qpos"] if isinstance(x, dict) else x)[ended, 0] for x in both)
            assert bool((final > 2).all()) and bool((obs.abs() <= 1).all())
            assert torch.equal(step.reward[ended], 2 - final)  # computed before the reset
            return
    raise AssertionError("no cart fell off")


def test_groups_of_policy_and_critic_must_be_named() -> None:
    """Isaac Lab returns privileged observations for the critic in another group."""
    with pytest.raises(
        EnvError,
        match=r"model.actor_obs=\[policy\] model.critic_obs=\[policy,critic\] .* or"
        r" env.obs_keys=\[policy\]",
    ):
        make("isaac", kwargs={"compute_final_obs": True, "observe": None})
    groups = make("isaac", kwargs={"compute_final_obs": True}, obs_keys=["policy", "critic"])
    assert groups.obs_spec == {"policy": ArraySpec((2,)), "critic": ArraySpec((3,))}
    both = make("isaac", kwargs={"compute_final_obs": True, "observe": ["policy", "critic"]})
    assert both.obs_spec == {"policy": ArraySpec((2,)), "critic": ArraySpec((3,))}
    critic = make("isaac", kwargs={"compute_final_obs": True}, obs_keys=["critic"])
    assert critic.obs_spec == {"critic": ArraySpec((3,))}
    with pytest.raises(
        EnvError,
        match=r"env.obs_keys and env.kwargs.observe both select observations; leave one out",
    ):
        make("isaac", kwargs={"observe": "policy"}, obs_keys=["critic"])


def test_seed_list_is_used_if_the_simulator_accepts_it() -> None:
    a, b = make("maniskill", seeds=[5, 5, 7]), make("cart", seeds=[5, 5, 7])
    x: Any = a.reset()
    assert x["agent/qpos"][0] == x["agent/qpos"][1] != x["agent/qpos"][2]
    y: Any = b.reset()
    assert y[0, 0] != y[1, 0]  # one seed for all environments
    before = y.clone()
    b.restart([5, 1, 2])
    assert torch.equal(torch.as_tensor(b.reset()), before)
    assert not torch.equal(torch.as_tensor(b.reset()), before)  # other episodes


def test_reset_where_resets_selected_environments() -> None:
    env = make("maniskill", kwargs={"partial_reset": True})
    env.reset()
    before: Any = env.step(full_force()).obs
    after: Any = env.reset_where(torch.tensor([False, True, False]))
    is_equal = (after["agent/qpos"] == before["agent/qpos"]).flatten().tolist()
    assert is_equal == [True, False, True]
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
        EnvError,
        match=r"not in info\['final_obs'\].*compute_final_obs=True.*final_observation=prev",
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
        step.obs.zero_()  # the adapter keeps its own copy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env(
            lambda seeds: make("isaac", 4, seeds, kwargs={"final_observation": "previous"}),
            steps=60,
        )


def test_time_limit_terminates_with_a_finite_horizon() -> None:
    for finite in (False, True):
        env = make("isaac", kwargs={"compute_final_obs": True, "is_finite_horizon": finite})
        env.reset()
        steps = [env.step(torch.zeros(3, 1)) for _ in range(20)]
        assert bool(torch.stack([s.truncated for s in steps]).any()) != finite


# ---------------------------------------------------------------------------------- success, errors
@pytest.mark.parametrize(
    ("name", "key"), [("cart", None), ("maniskill", None), ("maniskill", "success")]
)
def test_success_is_read_before_the_reset(name: str, key: str | None) -> None:
    env = make(
        name, 64, success_key=key, kwargs={"observe": "agent"} if name == "maniskill" else {}
    )
    env.reset()
    values = set()
    for _ in range(25):
        step = env.step(torch.zeros(64, 1))
        final: Any = step.obs if step.final_obs is None else step.final_obs
        x: Any = final["qpos"] if isinstance(final, dict) else final
        ended = step.terminated | step.truncated
        assert step.success is not None
        assert step.success[ended].tolist() == (x[ended, 0].abs() < 0.1).tolist()
        values |= set(step.success[ended].tolist())
    assert values == {False, True}


def test_missing_success_key_is_rejected() -> None:
    env = make("maniskill", success_key="episode/won")
    env.reset()
    with pytest.raises(
        EnvError,
        match=r"success_key='episode/won' is not in the info.*it has elapsed_steps, reconf",
    ):
        for _ in range(20):
            env.step(full_force())
    without_success = make("isaac", kwargs={"compute_final_obs": True})
    without_success.reset()
    assert without_success.step(full_force()).success is None


@pytest.mark.parametrize(
    ("id", "options", "message"),
    [
        ("torch_tasks:missing", {}, "names no function; simulator=torch needs"),
        ("Ant-v5", {}, "names no function"),
        ("no_such_module:make", {}, "cannot import 'no_such_module'"),
        (
            "torch_tasks:cart",
            {"kwargs": {"far": 3}},
            "its function fails with .*'far': 3.*TypeError",
        ),
        ("torch_tasks:cart", {"kwargs": {"seed": 3}}, "kwargs seed are set by the adapter"),
        (
            "torch_tasks:Config",
            {},
            "its Config lacks single_observation_space, single_action_space, reset, step, close",
        ),
        ("torch_tasks:cart", {"num_threads": 2}, "num_threads=2 is an option of EnvPool"),
        (
            "torch_tasks:cart",
            {"kwargs": {"final_observation": "none"}},
            "choose one of info, previous",
        ),
        (
            "torch_tasks:maniskill",
            {"kwargs": {"observe": "state"}},
            "observe='state' is not in.*it has agent, extra",
        ),
        ("torch_tasks:cart", {"kwargs": {"observe": "state"}}, "it has no entries"),
        ("torch_tasks:cart", {"action_mapping": "tanh"}, "choose one of rescale, clip, none"),
        (
            "torch_tasks:next_step",
            {},
            "autoreset_mode=AutoresetMode.NEXT_STEP; only AutoresetMode.SAME_STEP",
        ),
        ("torch_tasks:one", {}, "num_envs=2, but its vector has 1"),
    ],
)
def test_invalid_arguments_are_rejected(id: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        TorchVectorEnv(id, AdapterOptions(num_envs=2, seeds=[0, 1], **options))


def test_observations_of_wrong_type_or_shape_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_tasks.Cart, "reset", lambda self, **_: (self.state.numpy(), {}))
    with pytest.raises(
        EnvError, match=r"is a ndarray, not a torch.Tensor; use simulator=gymnasium"
    ):
        make("cart").reset()
    monkeypatch.setattr(torch_tasks.Cart, "reset", lambda self, **_: (self.state[:, :1], {}))
    with pytest.raises(
        EnvError, match=r"has shape \[3, 1\], its single_observation_space has \[2\]"
    ):
        make("cart").reset()


def test_calls_before_reset_and_after_close_are_rejected() -> None:
    env = make("cart")
    with pytest.raises(EnvError, match=r"step\(\) before reset\(\)"):
        env.step(full_force())
    env.reset()
    with pytest.raises(EnvError, match=r"actions of shape \[4, 1\]; it takes \[3, 1\]"):
        env.step(full_force(4))
    with pytest.raises(EnvError, match="rendering is disabled"):
        env.render()
    with pytest.raises(EnvError, match="cannot be loaded"):
        env.load_state({})
    env.close()
    env.close()
    with pytest.raises(EnvError, match="it was closed"):
        env.reset()


def test_render_returns_the_image_of_one_environment() -> None:
    for name, value in (("cart", 7), ("isaac", 9)):
        env = make(name, render=True, render_size=(2, 4))
        image = env.render()
        assert image.shape == (2, 4, 3) and image.dtype == torch.uint8
        assert bool((image == value).all())


def test_factory_accepts_functions_only() -> None:
    assert torch_env.factory("torch_tasks:cart") is torch_tasks.cart
    assert torch_env.factory("torch_tasks:Cart-v0") is None and torch_env.factory("Ant-v5") is None


# ----------------------------------------------------------------------------------------- training
@pytest.mark.slow
def test_ppo_learns_to_center_the_cart() -> None:
    """The mean distance from the center is 0.7 m with random forces, at most 0.3 m when learned."""
    c = run_helpers.tiny_config(
        {
            "env.num_envs": 64,
            "algorithm.horizon": 16,
            "algorithm.global_batch_size": 256,
            "algorithm.lr": 3e-3,
            "algorithm.gamma": 0.95,
            "model.hidden": (32, 32),
            "updates": 60,
        }
    )
    rewards = run_helpers.train_mean_rewards(c, make("cart", 64))
    assert sum(rewards[:3]) / 3 < 1.4 and sum(rewards[-5:]) / 5 > 1.7, rewards


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
