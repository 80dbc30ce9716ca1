"""Predicted memory of robot policies: VLA families, the end of a rollout, the group filter."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import tiny_pi0_checkpoint
import tiny_smolvla_checkpoint
import torch
from torch import Tensor

from embodied_envs.adapters import libero_env
from embodied_ppo.algorithms import losses
from embodied_ppo.algorithms.actor_critic_learner import actor_critic_learner
from embodied_ppo.config import placement
from embodied_ppo.config.schema import AlgorithmConfig, Config, ModelConfig
from embodied_ppo.core import tree
from embodied_ppo.core.types import ArraySpec, Box, ConfigError, ObsSpec, Trajectory
from embodied_ppo.models.vla import published
from embodied_ppo.models.vla.pi05 import PI05
from embodied_ppo.models.vla.smolvla import SmolVLA
from embodied_ppo.modes.embodied import components
from embodied_ppo.modes.embodied.memory import EmbodiedMemoryEstimator
from embodied_ppo.placement import memory_estimate
from embodied_ppo.placement.memory_estimate import AllocationCounter, nbytes
from embodied_ppo.rollout.group_filter import GroupFilter, peak_copies

ROOT = Path(__file__).parents[3]
ROWS = 4
SPEC: ObsSpec = {"state": ArraySpec((3,)), "front": ArraySpec((3, 16, 16), torch.uint8)}


class Spaces:
    obs_spec = SPEC
    action_spec = Box((-1.0,) * 4, (1.0,) * 4)
    instructions = ("push the red block",)


# --------------------------------------------------------------------------------------------- VLA
def observations(rows: int) -> dict[str, Tensor]:
    assert isinstance(SPEC, dict)
    return {name: torch.zeros(rows, *s.shape, dtype=s.dtype) for name, s in SPEC.items()}


def cut(decision: Any) -> Any:
    """Return the decisions of two steps."""
    return tree.map(lambda x: x.unflatten(0, (2, ROWS)), decision)


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("kind", ["pi05", "smolvla"])
def test_estimate_without_weights_equals_a_micro_batch(
    kind: str, keeps: bool, tmp_path: Path
) -> None:
    """Bytes of a real forward and backward pass, and of the real experience, to the byte.

    The estimate reads config.json; words have other numbers of tokens there, so that both policies
    get one word table.
    """
    pytest.importorskip("transformers")
    folder = tmp_path / kind
    families: dict[str, Any] = {"pi05": PI05, "smolvla": SmolVLA}
    if kind == "smolvla":
        tiny_smolvla_checkpoint.write_checkpoint(folder)
    else:
        statistics = {
            f"{name}.{end}": torch.full((size,), value)
            for name, size in (("observation.state", 3), ("action", 2))
            for end, value in (("q01", -1.0), ("q99", 1.0))
        }
        tiny_pi0_checkpoint.write_checkpoint(folder, kind=kind, statistics=statistics)
    options: dict[str, Any] = {"freeze_trunk": True, "dtype": "bfloat16", "checkpoint": str(folder)}
    config = ModelConfig(policy="flow", **options)
    args = SPEC, Spaces.action_spec, config
    policy = families[kind](*args, chunk=2, sentences=Spaces.instructions)
    sizes: Any = published.policy_of_sizes(Spaces(), config, chunk=2, values=1)
    sizes.trunk.table = policy.trunk.table
    if kind == "pi05":
        sizes.trunk.numbers, sizes.trunk.end = policy.trunk.numbers, policy.trunk.end
    for p in (policy, sizes):
        p.planned_memory_gb = 8.0 if keeps else 0.0
    algorithm = AlgorithmConfig(horizon=2, global_batch_size=2 * ROWS, micro_batch_size=ROWS)
    obs = observations(2 * ROWS)
    d: Any = policy.act(policy.encode(obs), noise=policy.noise(2 * ROWS))
    obs, d = tree.map(lambda x: x.unflatten(0, (2, ROWS)), obs), cut(d)
    zero, no = torch.zeros(2, ROWS), torch.zeros(2, ROWS, dtype=torch.bool)
    t = Trajectory(
        obs=obs,
        action=d.action,
        log_prob=d.log_prob,
        value=d.value,
        replay=d.replay,
        next_value=zero,
        reward=zero,
        terminated=no,
        truncated=no,
        mask=~no,
        version=torch.zeros(2, ROWS, dtype=torch.int64),
    )
    cpu = torch.device("cpu")
    learners = [
        actor_critic_learner(p, algorithm, num_envs=ROWS, updates=1, seed=0)
        for p in (sizes, policy)
    ]
    memory = memory_estimate.estimate_update(sizes, learners[0], cpu, t)
    learner = learners[1]
    prepared, _ = learner._prepare(t)
    batch = tree.index(prepared, slice(0, ROWS))
    assert ("/keys" in prepared.inputs) == keeps
    denominator = losses.denominator(batch.mask)
    known = [*policy.parameters(), *policy.buffers(), *tree.leaves(prepared)]
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        for p in policy.parameters()
        if p.requires_grad
    ]
    with AllocationCounter(known) as counter:
        loss, _ = learner.optimizer.loss(batch, denominator, denominator, entropy_coef=0.0)
        loss.backward()
        del loss
    for hook in hooks:
        hook.remove()
    assert memory.activations == counter.peak > 1e5
    observed = {x.untyped_storage()._cdata for x in tree.leaves(t.obs)}
    inputs = tree.leaves(prepared.inputs)
    encoded = [x for x in inputs if x.untyped_storage()._cdata not in observed]
    minibatch = tree.index(prepared, slice(0, 2 * ROWS))
    assert memory.experience == nbytes((t, encoded, minibatch))
    assert memory.weights == nbytes([*policy.parameters(), *policy.buffers()])


def test_spaces_of_libero_are_those_of_its_task() -> None:
    """``LiberoTask`` builds no scene before its first reset."""
    task = libero_env.LiberoTask("libero_spatial", 0, assets="", image_size=(32, 48))
    config = run_helpers.tiny_config({"env.id": "libero/libero_spatial", "env.action_chunk": 5})
    config = replace(config, env=replace(config.env, image_size=48, cameras=("agentview",)))
    spaces = components.describe_spaces(config)
    assert spaces["obs"] == {"state": [[8], "float32"], "agentview": [[3, 48, 48], "uint8"]}
    assert spaces["max_episode_steps"] == 220 // 5
    assert len(spaces["actions"][0]) == 5 * task.action_space.shape[0]  # pyright: ignore
    both = components.describe_spaces(replace(config, env=replace(config.env, cameras=())))
    assert set(both["obs"]) == set(task.observation_space.keys())  # pyright: ignore


# ------------------------------------------------------------------------------------------ rollout
def needs(config: Config) -> dict[str, int]:
    plan = placement.plan({"env,rollout,actor": 0}, placement.Hardware())
    return EmbodiedMemoryEstimator(config).needs(plan)["env,rollout,actor"]


VLA: dict[str, Any] = {"env.id": "Tabletop", "env.cameras": ["front"], "env.num_envs": 8}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model.hidden": [400, 300], "algorithm.global_batch_size": 2048},
        {"env.id": "CartPole-v1", "algorithm.horizon": 512, "model.history": 8},
        {"model.recurrent": "gru", "algorithm.minibatch_unit": "column", "env.num_envs": 16},
        {"env.id": "Pong-v5", "env.num_envs": 8, "algorithm.global_batch_size": 64},
        {**VLA, "model.policy": "token"},
        {**VLA, "model.policy": "flow"},
    ],
)
def test_two_small_batches_give_the_memory_of_a_traced_one(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = {"env.id": "HalfCheetah-v4", "env.num_envs": 64, "algorithm.horizon": 32}
    config = run_helpers.tiny_config({**defaults, "algorithm.global_batch_size": 256, **options})
    with monkeypatch.context() as patch:
        patch.delattr(memory_estimate, "fake_tensors")  # tracing would fail
        small = needs(config)
    monkeypatch.setattr(memory_estimate, "MAX_COMPUTED_BYTES", 0)
    assert small == needs(config)


@pytest.mark.slow
def test_estimate_of_a_small_model_does_not_import_the_compiler() -> None:
    code = (
        "import sys, run_helpers, tests.modes.embodied.test_memory as memory;"
        " memory.needs(run_helpers.tiny_config()); sys.exit('torch._dynamo' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    process = subprocess.run([sys.executable, "-c", code], check=False, env=environment)
    assert process.returncode == 0


@pytest.mark.parametrize(("rounds", "groups"), [(1, 4), (2, 4), (8, 32)])
def test_group_filter_holds_what_is_predicted(rounds: int, groups: int) -> None:
    """The worst case: one group is missing before the last round, in which all groups are mixed."""
    size, horizon = 2, 64

    def batch() -> Trajectory:
        x, no = torch.zeros(horizon, groups * size), torch.zeros(horizon, groups * size).bool()
        obs = torch.zeros(horizon, groups * size, 256)
        fields: dict[str, Any] = dict.fromkeys(("action", "log_prob", "value"), x)
        fields |= dict.fromkeys(("replay", "next_value", "reward"), x)
        fields |= {"terminated": no, "truncated": no, "mask": ~no, "version": x.long()}
        return Trajectory(obs=obs, **fields)

    mixed = torch.tensor([True, False]).repeat(groups)
    group_filter = GroupFilter(groups, size, rounds)
    each = nbytes(batch().obs)
    with AllocationCounter() as counter:
        for round in range(rounds):
            success = mixed.clone()
            if rounds > 1:  # G - 1 groups before the last round
                kept = groups - 1 if round == 0 else groups if round == rounds - 1 else 0
                success[2 * kept :] = False
            trajectory = batch()
            group_filter.add(trajectory, success, 0)
        taken, _ = group_filter.take()
        peak, held = peak_copies(groups, rounds)
        assert counter.peak == pytest.approx(peak * each, rel=0.08)
        surplus = nbytes([part.obs for part in group_filter.parts])
        assert surplus == held * each and nbytes(taken.obs) == each


def test_group_filter_is_counted() -> None:
    """Rollouts of 4 groups: (6 · 4 - 2) / 4 = 5.5 trajectories, twice without a filter."""
    options: dict[str, Any] = {
        "env.num_envs": 16,
        "algorithm.adv_type": "grpo",
        "env.restart_each_rollout": True,
        "algorithm.group_size": 4,
        "algorithm.horizon": 64,
        "algorithm.global_batch_size": 64,
        "model.normalize_obs": False,  # so that the end of the rollout needs the most
        "updates": 2,
    }
    plain = needs(run_helpers.tiny_config(options))
    filtered = needs(run_helpers.tiny_config({**options, "algorithm.group_filter": "success"}))
    t = plain["experience"]
    assert filtered["experience"] > 1.5 * t
    one_round = {"algorithm.group_filter": "success", "algorithm.group_filter_rounds": 1}
    single = needs(run_helpers.tiny_config({**options, **one_round}))
    assert filtered["experience"] / single["experience"] == pytest.approx(5.5 / 4)


def test_pipeline_needs_rollout_and_update_at_the_same_time() -> None:
    """With three sets of weights: those that learn, act, and act in the next rollout."""
    options: dict[str, Any] = {"algorithm.off_policy_correction": "token"}
    plain = needs(run_helpers.tiny_config(options))
    both = needs(run_helpers.tiny_config({**options, "pipeline": True}))
    assert both["weights"] == 3 * plain["weights"]
    larger, sum_of_both = (x["experience"] + x["activations"] for x in (plain, both))
    assert larger < sum_of_both <= 2 * larger  # without a pipeline the larger one counts
    assert all(both[name] == plain[name] for name in ("gradients", "optimiser"))


def test_weights_that_exceed_the_memory_are_not_allocated() -> None:
    """The message names the option; it was a failed allocation in the constructor of a layer."""
    c = run_helpers.tiny_config({"model.hidden": [100_000] * 26})
    message = r"model: the weights alone need 1000\.\d GB .*model\.hidden"
    with pytest.raises(ConfigError, match=message):
        EmbodiedMemoryEstimator(c)


def test_normalisation_of_long_histories_is_counted() -> None:
    """The observations of a rollout are encoded at once, which needs copies of them."""
    options = {"model.history": 50, "algorithm.horizon": 256, "algorithm.global_batch_size": 64}
    c = run_helpers.tiny_config(options)
    rollout = run_helpers.tiny_rollout(c)
    learner = actor_critic_learner(rollout.policy, c.algorithm, num_envs=4, updates=3, seed=1)
    trajectory, _ = rollout.collect(c.algorithm.horizon, update=0, version=0)
    with AllocationCounter() as counter:
        learner.update(trajectory, update=0)
    rollout.close()
    need = needs(c)
    predicted = need["experience"] + need["activations"]
    assert predicted == pytest.approx(nbytes(trajectory) + counter.peak, rel=0.2)
