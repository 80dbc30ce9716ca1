"""Sharded learners over real gloo: updates, checkpoints and acting equal those of full models."""

from __future__ import annotations

import copy
import functools
import math
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import tiny_openvla_checkpoint
import tiny_pi0_checkpoint
import torch
import torch.distributed as dist
from torch import nn
from vla_policy_checks import random_observations

from embodied_envs.base import tree
from embodied_envs.base.errors import TrainingError
from embodied_ppo.cluster import memory_estimate
from embodied_ppo.cluster.fsdp import Sharded
from embodied_ppo.core.collectives import RankGroup, Ranks
from embodied_ppo.core.types import Policy, Trajectory
from embodied_ppo.options import loader
from embodied_ppo.options.schema import AlgorithmConfig
from embodied_ppo.policies import causal_lm
from embodied_ppo.ppo.ppo import PPO
from embodied_ppo.ppo.robot_actor import robot_ppo
from tests.policies import test_causal_lm as test_language
from tests.policies.vla import test_pi0, test_smolvla
from tests.policies.vla import test_pretrained as test_vla_checkpoints
from tests.policies.vla import test_trunk as test_vla
from tests.ppo import test_language_actor as test_split
from tests.ppo import test_robot_actor as test_learner
from tests.ppo.test_robot_actor_ranks import merged

pytestmark = pytest.mark.slow
T, N, TIMEOUT_S = 2, 8, 120
UPDATES = 2
# Modules that take seconds to import.
MODELS = [
    f"transformers.models.{name}.modeling_{name}"
    for name in ("dinov2_with_registers", "llama", "pi0")
]


# ---------------------------------------------------------------------------------------- processes
@dataclass(frozen=True)
class Processes:
    """``world`` processes with a process group."""

    world: int
    pool: ProcessPoolExecutor

    def __call__(self, function: Any, *args: Any) -> list[Any]:
        """Call ``function(*args)`` in all processes at once; return the results by rank.

        Arguments and results are pickled here: the pool would share the memory of each tensor in
        them, with a file descriptor and a connection per tensor.
        """
        call = pickle.dumps((function, args))
        calls = [self.pool.submit(_ranked, call) for _ in range(self.world)]
        results = dict(pickle.loads(call.result(TIMEOUT_S)) for call in calls)
        return [results[rank] for rank in range(self.world)]


def _join(file: str, world: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(file, world)
    rank = store.add("ranks", 1) - 1
    wait = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("all", store), rank=rank, world_size=world, timeout=wait
    )


def _ranked(call: bytes) -> bytes:
    function, args = pickle.loads(call)
    return pickle.dumps((dist.get_rank(), function(*args)))


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> Iterator[Callable[[int], Processes]]:
    """Return the processes of a world size, which are started at the first use.

    They are forked from a process that has imported what they need. It has the paths of this
    process from the environment only, and ignores modules that it does not find.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, *MODELS])
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

        @functools.cache
        def started(world: int) -> Processes:
            args = (str(tmp_path_factory.mktemp("store") / "file"), world)
            pool = ProcessPoolExecutor(world, context, _join, args)
            return Processes(world, stack.enter_context(pool))

        yield started


@pytest.fixture(params=[2, 4])
def processes(request, worlds: Callable[[int], Processes]) -> Processes:
    return worlds(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a directory of each kind of published model."""
    root = tmp_path_factory.mktemp("published")
    tiny_openvla_checkpoint.write_checkpoint(root / "openvla")
    tiny_pi0_checkpoint.write_checkpoint(root / "pi0")
    test_smolvla.write_checkpoint(root / "smolvla")
    return root


# ------------------------------------------------------------------------------ functions of a rank
def policy_of(kind: str, folder: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """Return a policy and observations [T·N, ..] for it.

    The policy is a copy, which has its own trained parameters. Building one takes longer.
    """
    policy, obs, _ = _policy_and_experience(kind, folder, tuple(options.items()))
    return copy.deepcopy(policy), obs


@functools.cache
def _policy_and_experience(
    kind: str, folder: Path, options: tuple[tuple[str, Any], ...]
) -> tuple[Any, Any, list[Trajectory]]:
    """Return a policy, observations and ``UPDATES`` + 1 trajectories of it."""
    policy, obs = _build_policy(kind, folder, dict(options))
    return policy, obs, [experience(policy, obs, seed) for seed in range(UPDATES + 1)]


def _build_policy(kind: str, folder: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    if kind == "mlp":
        obs = torch.randn(T * N, test_learner.OBS, generator=torch.Generator().manual_seed(3))
        return test_learner.make(model=options).policy, obs
    if kind in test_vla.FAMILIES:
        return test_vla.make(**test_vla.FAMILIES[kind], **options), test_vla.observations(T * N)
    if kind == "pi0":
        return test_pi0.make(folder / kind, **options), test_pi0.observations(T * N)
    if kind == "smolvla":
        obs = random_observations(test_smolvla.SPEC, T * N, 0)
        return test_smolvla.make(folder / kind, **options), obs
    policy = test_vla_checkpoints.policy_of(folder / kind, **options)
    return policy, test_vla_checkpoints.observations(T * N)


@torch.no_grad()
def experience(policy: Policy, obs: Any, seed: int) -> Trajectory:
    """Return a random trajectory, [T, N, ..]."""
    g = torch.Generator().manual_seed(seed)
    d = policy.act(policy.encode(obs), noise=policy.noise(T * N, g))
    obs, d = (tree.map(lambda x: x.unflatten(0, (T, N)), part) for part in (obs, d))
    return run_helpers.trajectory(
        torch.randn(T, N, generator=g),
        obs=obs,
        action=d.action,
        log_prob=d.log_prob + 0.1 * torch.randn(d.log_prob.shape, generator=g),
        value=d.value,
        replay=d.replay,
        next_value=torch.randn(T, N, generator=g),
        terminated=torch.rand(T, N, generator=g) < 0.15,
        mask=torch.rand(T, N, generator=g) < 0.9,
    )


def learner_of(
    kind: str,
    folder: Path,
    model: dict[str, Any],
    algorithm: dict[str, Any],
    ranks: Ranks,
    **options: Any,
) -> tuple[PPO, list[Trajectory]]:
    """Return a learner, and this rank's columns of three trajectories."""
    policy, _ = policy_of(kind, folder, model)
    *_, rollouts = _policy_and_experience(kind, folder, tuple(model.items()))
    values = {"global_batch_size": T * N // 2, "update_epoch": 1, "lr": 1e-3, **algorithm}
    c = loader.load(AlgorithmConfig, values)
    parts = [tree.map(lambda x: x.chunk(ranks.world, 1)[ranks.rank].clone(), t) for t in rollouts]
    return robot_ppo(policy, c, num_envs=N, updates=10, seed=0, ranks=ranks, **options), parts


def ranks_of(sharded: bool) -> Ranks:
    return Sharded(dist.group.WORLD, "cpu") if sharded else RankGroup(dist.group.WORLD)


def local_bytes(learner: PPO) -> tuple[int, int]:
    """Return the bytes of this rank: parameters; gradients and the optimiser's moments."""
    parameters = list(learner.optimizer.model.parameters())
    moments = [x for s in learner.optimizer.adamw.state.values() for x in s.values() if x.ndim]
    others = [*moments, *(p.grad for p in parameters if p.grad is not None)]
    local = learner.ranks.local_tensor
    return memory_estimate.nbytes([local(p) for p in parameters]), memory_estimate.nbytes(
        [local(x) for x in others]
    )


def learned(
    kind: str, folder: Path, model: dict[str, Any], algorithm: dict[str, Any], sharded: bool
) -> Any:
    """Return full state (of the first rank), metrics and local bytes after UPDATES updates."""
    learner, rollouts = learner_of(kind, folder, model, algorithm, ranks_of(sharded))
    if learner.actor.reference is not None:
        disturb(learner)
    metrics = [learner.update(t, update=i) for i, t in enumerate(rollouts[:UPDATES])]
    sizes = local_bytes(learner)
    state = learner.ranks.full_state(
        {"policy": learner.optimizer.model.state_dict(), "training": learner.state()}
    )
    return (None if learner.ranks.rank else state), metrics, sizes


@torch.no_grad()
def disturb(learner: PPO) -> None:
    """Scale the reference's weights, so that the KL divergence is not zero."""
    assert isinstance(learner.actor.reference, nn.Module)
    for p in learner.actor.reference.parameters():
        if p.requires_grad:  # unsharded models share frozen parameters
            p.mul_(0.9)


# --------------------------------------------------------------------------------------- the update
EVERYTHING = {"use_kl_loss": True, "use_kl_in_reward": True, "clip_ratio_c": 1.5}
EVERYTHING |= {"entropy_bonus": 0.01}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mlp": ("mlp", {}, {}),
    "mlp, everything": ("mlp", {"shared_backbone": False}, EVERYTHING),
    "tokens": ("tokens", {}, {"max_grad_norm": 0.1}),
    "tokens, reference": ("tokens", {}, EVERYTHING | {"max_grad_norm": None}),
    "tokens, one by one": ("tokens, one by one", {}, {"micro_batch_size": 2}),
    "tokens, value apart": ("tokens", {"detach_value": True}, {"critic_warmup": 1}),
    "tokens, frozen trunk": ("tokens", {"freeze_trunk": True}, {"minibatch_unit": "column"}),
    "gaussian": ("gaussian", {}, {"off_policy_correction": "token"}),
    "flow": ("flow, all steps", {}, {}),
    "openvla": ("openvla", {"gradient_checkpointing": True}, {}),
    "openvla, adapters": ("openvla", {"lora_rank": 4, "decode": "autoregressive"}, {}),
    "openvla, adapters, reference": (
        "openvla",
        {"lora_rank": 4, "gradient_checkpointing": True},
        EVERYTHING,
    ),
    "openvla, frozen trunk": ("openvla", {"freeze_trunk": True}, {}),
    "pi0": ("pi0", {"gradient_checkpointing": True}, {}),
    "pi0, value apart": (
        "pi0",
        {"detach_value": True, "flow_chain": "sum"},
        {"micro_batch_size": 2},
    ),
    "pi0, frozen trunk": ("pi0", {"freeze_trunk": True, "gradient_checkpointing": True}, {}),
    "pi0, adapters": ("pi0", {"lora_rank": 4, "dtype": "bfloat16"}, {}),
    "smolvla": ("smolvla", {"gradient_checkpointing": True}, {}),
}


FOR_FOUR = ("mlp, everything", "tokens, reference", "openvla, adapters, reference", "pi0")
# DTensor takes a second per process for each list of shapes that it clips for the first time.
UNCLIPPED: dict[str, Any] = {"max_grad_norm": None}
# World size -> a case with a policy over tokens, all of whose parameters are trained.
TOKENS = {2: "tokens", 4: "tokens, reference"}


def with_world_sizes(two: Iterable[str], four: Iterable[str]) -> Any:
    """Parametrise ``processes`` and ``case``: cases with two processes, and with four."""
    pairs = [*((2, case) for case in two), *((4, case) for case in four)]
    return pytest.mark.parametrize(("processes", "case"), pairs, indirect=["processes"])


@pytest.fixture(scope="module")
def results(worlds: Callable[[int], Processes], folder: Path) -> Callable[[int, str, bool], Any]:
    """Return a function from world size, case and ``sharded`` to what ``learned`` returned."""

    @functools.cache
    def result(world: int, case: str, sharded: bool) -> list[Any]:
        kind, model, algorithm = CASES[case]
        return worlds(world)(learned, kind, folder, model, algorithm, sharded)

    return result


@with_world_sizes([case for case in CASES if case not in FOR_FOUR], FOR_FOUR)
def test_sharded_update_equals_unsharded_one(
    case: str, processes: Processes, results: Callable[[int, str, bool], Any]
) -> None:
    full, sharded = (results(processes.world, case, sharded) for sharded in (False, True))
    run_helpers.assert_states_close(sharded[0][0], full[0][0])
    for update in range(UPDATES):
        one, many = (merged([metrics[update] for _, metrics, _ in x]) for x in (full, sharded))
        assert one.keys() == many.keys()
        for tag, value in one.items():
            assert many[tag] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), tag


LANGUAGE_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "a token budget": (
        {"use_kl_loss": True, "use_kl_in_reward": True},
        {"tokens": 8, "recompute": True},
    ),
    "a rank without tokens": (
        {"off_policy_correction": "token", "max_grad_norm": 0.1},
        {"tokens": 16},
    ),
    "layers and logits computed again": (
        {"global_batch_size": 8},
        {"columns": 8, "critic_columns": 8},
    ),
}


def language_update(case: str, sharded: bool) -> Any:
    """Return state and metrics of a language model and its critic after UPDATES updates."""
    algorithm, options = LANGUAGE_CASES[case]
    x = test_split.learner(
        replace(test_split.BASE, **algorithm), ranks=ranks_of(sharded), **options
    )
    for decoder in (x.policy.decoder.module, test_split.critic_of(x).module.decoder):
        decoder.recompute = case == "layers and logits computed again"
    t = test_split.experience(test_language.make(), noise=0.2)
    if case == "a rank without tokens":
        t.mask[:, : test_split.N // x.ranks.world] = False
    columns = tree.map(lambda x_: x_.chunk(x.ranks.world, dim=1)[x.ranks.rank].contiguous(), t)
    with pytest.MonkeyPatch.context() as patch:
        if case == "layers and logits computed again":
            patch.setattr(causal_lm, "LOGIT_BYTES", 4 * 50 * 3)  # 3 tokens
        metrics = [x.update(columns, update=i) for i in range(UPDATES)]
    state = x.ranks.full_state({"policy": x.policy.state_dict(), "training": x.state()})
    return (None if x.ranks.rank else state), metrics


@with_world_sizes([case for case in LANGUAGE_CASES if case != "a token budget"], ["a token budget"])
def test_sharded_language_model_equals_unsharded_one(case: str, processes: Processes) -> None:
    full, sharded = processes(language_update, case, False), processes(language_update, case, True)
    run_helpers.assert_states_close(sharded[0][0], full[0][0])
    for update in range(UPDATES):
        one, many = (merged([metrics[update] for _, metrics in x]) for x in (full, sharded))
        assert many == pytest.approx(one, rel=1e-4, abs=1e-6, nan_ok=True)


# ------------------------------------------------------------------------------------------- memory
def gathered_blocks(folder: Path) -> tuple[int, int, int, int]:
    """Return bytes before and after ``shard``, blocks, and the most that were gathered at once."""
    policy, _ = policy_of("tokens", folder, {"depth": 4})
    before = memory_estimate.nbytes([*policy.parameters()])
    learner, (t, *_) = learner_of("tokens", folder, {"depth": 4}, UNCLIPPED, ranks_of(True))
    blocks: Any = learner.policy.units()
    most = 0

    def count(*_: Any) -> None:
        nonlocal most
        most = max(
            most, sum(learner.ranks.local_tensor(b.qkv.weight) is b.qkv.weight for b in blocks)
        )

    for block in blocks:
        block.down.register_forward_hook(count)
        block.down.register_full_backward_hook(count)
    learner.update(t, update=0)
    return before, local_bytes(learner)[0], len(blocks), most


def test_at_most_two_blocks_are_gathered_at_once(processes: Processes, folder: Path) -> None:
    results = processes(gathered_blocks, folder)
    (total,) = {before for before, *_ in results}
    assert sum(after for _, after, *_ in results) == total
    for _, after, blocks, most in results:
        assert after < 1.2 * total / processes.world
        assert blocks == 4 and 1 <= most <= 2


def test_gradients_and_moments_are_sharded(
    processes: Processes, results: Callable[[int, str, bool], Any]
) -> None:
    full, sharded = (
        [sizes for *_, sizes in results(processes.world, TOKENS[processes.world], shard)]
        for shard in (False, True)
    )
    assert all(sizes == full[0] for sizes in full) and full[0][1] == 3 * full[0][0]
    for i in range(2):
        assert sum(sizes[i] for sizes in sharded) == full[0][i]
        assert max(sizes[i] for sizes in sharded) < 1.2 * full[0][i] / processes.world


def test_memory_estimate_equals_allocated_memory(
    processes: Processes, folder: Path, results: Callable[[int, str, bool], Any]
) -> None:
    policy, obs = policy_of("tokens", folder, {})
    learner = robot_ppo(
        policy, AlgorithmConfig(global_batch_size=T * N), num_envs=N, updates=1, seed=0
    )
    full = memory_estimate.estimate_update(policy, learner, experience(policy, obs, 0))
    sharded = full | memory_estimate.sharded_bytes(policy, processes.world)
    largest = max(sizes for *_, sizes in results(processes.world, TOKENS[processes.world], True))
    # Two moments, and gradients of half their size.
    assert sharded["optimiser"] * 1.5 == pytest.approx(largest[1], rel=0.1)
    unit = memory_estimate.nbytes([*policy.units()[0].parameters()])
    outside_units = full["gradients"] - memory_estimate.nbytes(
        [p for u in policy.units() for p in u.parameters()]
    )
    assert sharded["weights"] - full["weights"] // processes.world == pytest.approx(
        outside_units + 2 * unit, rel=0.01
    )
    assert all(sharded[name] == full[name] for name in ("activations", "experience"))
    acting = memory_estimate.sharded_bytes(policy, processes.world, acts=True)
    assert acting["weights"] == pytest.approx(full["weights"] * (1 + 1 / processes.world), rel=0.01)


# --------------------------------------------------------------------------- acting and checkpoints
def acting_alone(folder: Path, acts: bool) -> Any:
    learner, rollouts = learner_of("tokens, one by one", folder, {}, UNCLIPPED, ranks_of(True))
    policy, ranks = learner.policy, learner.ranks
    assert isinstance(policy, nn.Module)
    log_prob = None
    for i, t in enumerate(rollouts[:UPDATES]):
        learner.update(t, update=i)
        ranks.unshard(policy)
        if acts and ranks.rank == 0:  # the other ranks do not act
            log_prob = first_log_prob(policy, t, i)
    return ranks.full_state(policy.state_dict()), log_prob


def first_log_prob(policy: Any, t: Trajectory, seed: int) -> torch.Tensor:
    """Return the log-probabilities of actions that are sampled for the first row."""
    noise = policy.noise(len(t.mask[0]), torch.Generator().manual_seed(seed))
    return policy.act(policy.encode(tree.index(t.obs, 0)), noise=noise).log_prob


def test_one_rank_can_act_alone_with_gathered_weights(processes: Processes, folder: Path) -> None:
    (state, log_prob), *_ = processes(acting_alone, folder, True)
    (other, none), *_ = processes(acting_alone, folder, False)
    assert none is None and all(torch.equal(x, other[name]) for name, x in state.items())
    local, rollouts = learner_of("tokens, one by one", folder, {}, {}, Ranks())
    local.optimizer.model.load_state_dict(state)
    t = tree.map(lambda x: x.chunk(processes.world, dim=1)[0], rollouts[UPDATES - 1])
    assert torch.equal(log_prob, first_log_prob(local.policy, t, UPDATES - 1))


# With one minibatch, results do not depend on the number of ranks.
ONE: dict[str, Any] = UNCLIPPED | {"global_batch_size": T * N, "use_kl_loss": True}


def resumed_states(
    kind: str, folder: Path, first: int, last: int, state: Any, sharded: bool, local: bool = False
) -> list[Any]:
    """Return the states after updates ``first`` + 1 to ``last``.

    The learner is resumed from ``state`` after update ``first``.
    """
    ranks = Ranks() if local else ranks_of(sharded)
    if kind == "language":
        config = replace(test_split.BASE, use_kl_loss=True, global_batch_size=test_split.N)
        learner = test_split.learner(
            config, columns=test_split.N, critic_columns=test_split.N, ranks=ranks
        )
        t = test_split.experience(test_language.make(), noise=0.2)
        rollouts = [tree.map(lambda x: x.chunk(ranks.world, dim=1)[ranks.rank].contiguous(), t)] * 3
        module: Any = learner.policy
    else:
        learner, rollouts = learner_of(kind, folder, {}, ONE, ranks)
        module = learner.optimizer.model
    if state is not None:
        state = copy.deepcopy(state)  # the learner may change its tensors
        module.load_state_dict(ranks.shard_state(module, state["policy"]))
        learner.load_state(state["training"])
    states = []
    for i in range(first, last):
        learner.update(rollouts[i], update=i)
        full = ranks.full_state({"policy": module.state_dict(), "training": learner.state()})
        states.append(None if ranks.rank else copy.deepcopy(full))
    return states


@with_world_sizes(["mlp", "openvla", "language"], ["tokens"])
def test_checkpoints_resume_sharded_and_unsharded(
    case: str, processes: Processes, folder: Path
) -> None:
    half, through = processes(resumed_states, case, folder, 0, 2, None, True)[0]
    (resumed,) = processes(resumed_states, case, folder, 1, 2, half, True)[0]
    assert all(torch.equal(x, through["policy"][name]) for name, x in resumed["policy"].items())
    moments, expected = (
        x["training"].get("critic", x["training"])["optimizer"]["state"] for x in (resumed, through)
    )
    for i, state in expected.items():
        assert all(torch.equal(x, moments[i][key]) for key, x in state.items())
    full, last = resumed_states(case, folder, 1, 3, half, False, local=True)  # in one process
    run_helpers.assert_states_close(full, through)
    (back,) = processes(resumed_states, case, folder, 2, 3, full, True)[0]
    run_helpers.assert_states_close(back, last)


def broken(folder: Path) -> str:
    learner, (t, *_) = learner_of("tokens", folder, {}, {}, ranks_of(True))
    if learner.ranks.rank == learner.ranks.world - 1:
        t.reward[0, 0], t.mask[0, 0] = math.nan, True
    with pytest.raises(TrainingError, match="not finite") as error:
        learner.update(t, update=0)
    return str(error.value)


def test_loss_that_is_not_finite_stops_all_ranks(processes: Processes, folder: Path) -> None:
    assert all("epoch 0" in text for text in processes(broken, folder))
