"""Language models that train in several processes: results do not depend on their number, nor on
the processes of critic and reference.

Ranks are threads that communicate over gloo and real connections.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_ppo.cluster import remote_models
from embodied_ppo.cluster.channels import Client, Exchange, Server, connect
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.types import Metrics
from embodied_ppo.data.prompts import Prompt
from embodied_ppo.options.schema import AlgorithmConfig, KLControlConfig
from embodied_ppo.ppo.ppo import PPO
from embodied_ppo.rollout.rewards.graders import Grade, Limits, Sample
from embodied_ppo.rollout.rewards.worker_pool import GraderPool
from tests.ppo.test_language_actor import (
    BASE,
    OPTIONS,
    N,
    critic_of,
    experience,
    learner,
    reference_of,
)
from tests.ppo.test_robot_actor_ranks import merged, run_ranks

CPU = torch.device("cpu")
KL = {"use_kl_loss": True, "use_kl_in_reward": True, "kl_penalty": "k2"}
CASES: dict[str, AlgorithmConfig] = {
    "gae": BASE,
    "kl": replace(BASE, kl_ctrl=KLControlConfig(type="adaptive", kl_coef=0.1, horizon=100), **KL),
    "whitened": replace(BASE, whiten_rewards=True, reward_norm="running"),
    "corrected": replace(BASE, off_policy_correction="token", off_policy_cap=1.2),
    "VAPO": replace(BASE, **OPTIONS["VAPO"]),
    "adaptive": replace(BASE, lr_schedule="adaptive", desired_kl=1e-4, entropy_target=1.0),
}
WITHOUT: dict[str, AlgorithmConfig] = {
    "grpo": replace(BASE, adv_type="grpo", group_size=2, gamma=1.0),
    "rloo": replace(BASE, adv_type="rloo", group_size=4, gamma=1.0),
}


def disturbed(x: PPO) -> PPO:
    """Disturb the reference, so that it differs from the policy."""
    if x.actor.reference is not None:
        with torch.no_grad():
            reference_of(x).model.lm_head.weight.mul_(0.9)
    return x


def state(x: PPO) -> dict[str, Tensor]:
    results = {f"actor {name}": p.detach().clone() for name, p in x.policy.named_parameters()}
    if x.critic is not None:
        results |= {
            f"critic {name}": p.clone() for name, p in x.critic.state()["critic_weights"].items()
        }
    return results


def learned(
    world: int, config: AlgorithmConfig, *, critic: bool
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Return weights, equal on all ranks, and metrics after two updates."""
    full_batch = replace(config, global_batch_size=N)
    learners = [
        disturbed(learner(full_batch, critic=critic, columns=N, critic_columns=N))
        for _ in range(world)
    ]
    trajectory = experience(learners[0].policy, noise=0.2)

    def work(ranks: Ranks) -> tuple[dict[str, Tensor], list[Metrics]]:
        x = learners[ranks.rank]
        x.optimizer.ranks = ranks
        if critic:
            critic_of(x).optimizer.ranks = ranks
        part = tree.map(lambda t: t.chunk(world, dim=1)[ranks.rank].contiguous(), trajectory)
        return state(x), [x.update(part, update=update) for update in range(2)]

    results = run_ranks(world, work)
    for other in learners[1:]:
        for name, p in state(learners[0]).items():
            assert torch.equal(p, state(other)[name]), name
    return state(learners[0]), [
        merged([metrics_of_updates[update] for _, metrics_of_updates in results])
        for update in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *WITHOUT])
@pytest.mark.parametrize("world", [2, 4])
def test_number_of_ranks_does_not_change_result(case: str, world: int) -> None:
    config, critic = (CASES | WITHOUT)[case], case in CASES
    (single, metrics_of_updates), (many, metrics) = (
        learned(n, config, critic=critic) for n in (1, world)
    )
    for name, p in single.items():
        torch.testing.assert_close(many[name], p, rtol=1e-4, atol=2e-6, msg=name)
    for one, other in zip(metrics_of_updates, metrics, strict=True):
        assert one.keys() == other.keys()
        for tag, value in one.items():
            assert other[tag] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), tag


@pytest.mark.parametrize("world", [1, 2])
def test_minibatch_size_is_total_over_ranks(world: int) -> None:
    config = replace(BASE, global_batch_size=N // 2, update_epoch=1)
    learners = [learner(config, columns=N // 2, critic_columns=N // 2) for _ in range(world)]
    trajectory = experience(learners[0].policy)

    def work(ranks: Ranks) -> list[float]:
        x = learners[ranks.rank]
        x.optimizer.ranks = critic_of(x).optimizer.ranks = ranks
        part = tree.map(lambda t: t.chunk(world, dim=1)[ranks.rank].contiguous(), trajectory)
        x.update(part, update=0)
        optimizers = (x.optimizer.adamw, critic_of(x).optimizer.adamw)
        return [float(next(iter(o.state.values()))["step"]) for o in optimizers]

    assert run_ranks(world, work) == [[2.0, 2.0]] * world  # two minibatches of N / 2 sequences


# ---------------------------------------------------------------------------------- other processes
@contextmanager
def serving(services: remote_models.ModelService) -> Iterator[Client]:
    """Yield a client of a server that answers in a thread, over a real connection."""
    exchange = Exchange("127.0.0.1", "secret", 20.0)
    server = Server(services, exchange)
    failed: list[BaseException] = []

    def serve() -> None:
        torch.set_num_threads(1)
        try:
            server.serve(1)
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    client = Client(connect(exchange.address, "secret", "client", peer="services", timeout_s=20.0))
    try:
        yield client
    finally:
        client.finish()
        thread.join(20.0)
        server.close()
    assert not failed and not thread.is_alive()


@pytest.mark.parametrize("case", CASES)
def test_remote_critic_and_reference_equal_local_ones(case: str) -> None:
    config = CASES[case]
    local, remote = disturbed(learner(config)), disturbed(learner(config))
    values, reference = critic_of(remote), remote.actor.reference
    services = remote_models.ModelService(device=CPU, critic=values, reference=reference)  # pyright: ignore[reportArgumentType]
    with serving(services) as client:
        remote.critic = remote_models.RemoteCritic(client, CPU, pretrained=True)
        if reference is not None:
            remote.actor.reference = remote_models.RemoteReference(client, CPU, pretrained=True)
        for update in range(2):
            local_metrics, remote_metrics = (
                x.update(experience(x.policy, noise=0.2), update=update) for x in (local, remote)
            )
            assert local_metrics == remote_metrics
        a, b = state(local), state(remote)
        assert all(torch.equal(a[name], b[name]) for name in a)
        saved = copy.deepcopy(remote.state())  # an optimiser keeps what it is given
        assert saved.keys() == local.state().keys()
        local.load_state(saved)  # from remote to local
        remote.load_state(copy.deepcopy(local.state()))
        last = [x.update(experience(x.policy, noise=0.2), update=2) for x in (local, remote)]
        assert last[0] == last[1]


def test_remote_models_start_as_copies_of_actor() -> None:
    config = CASES["kl"]
    x, other = learner(config), learner(config)
    with torch.no_grad():
        for p in x.policy.parameters():
            p.mul_(1.1)
    values, reference = critic_of(other), other.actor.reference
    services = remote_models.ModelService(device=CPU, critic=values, reference=reference)  # pyright: ignore[reportArgumentType]
    t = experience(x.policy)
    assert isinstance(t.obs, dict)
    with serving(services) as client:
        x.critic = remote_models.RemoteCritic(client, CPU, pretrained=False)
        x.actor.reference = remote_models.RemoteReference(client, CPU, pretrained=False)
        x.initialize()
        view = x.actor.reference.view(t.obs, t.mask, t.action, hidden=False)["log_prob"]
        torch.testing.assert_close(view[t.mask], t.log_prob[t.mask], rtol=0, atol=1e-5)
        body = dict(x.policy.model.model.named_parameters())
        results = other.critic.module.decoder.base.named_parameters()  # pyright: ignore
        assert all(torch.equal(p, body[name]) for name, p in results)


def fails(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    if solution_str == "crash":
        raise RuntimeError("no")
    return float(solution_str == ground_truth)


def test_remote_graders_equal_local_graders() -> None:
    prompts = [Prompt((1,), f"{i}", str(i), "sums", {"when": object()}, 0) for i in range(3)]
    chosen = [prompts[i] for i in (2, 0, 0, 1)]
    texts = ["2", "no", "crash", "1\ud800"]
    samples: list[Sample] = [
        (p.data_source, text, p.ground_truth, p.extra)
        for p, text in zip(chosen, texts, strict=True)
    ]
    local = GraderPool(fails, workers=0, limits=Limits(1.0))
    services = remote_models.ModelService(
        device=CPU, graders=GraderPool(fails, workers=0, limits=Limits(1.0)), prompts=prompts
    )
    with serving(services) as client:
        remote = remote_models.RemoteGraders(client, prompts)
        for _ in range(2):
            assert str(remote.grade(samples, chosen)) == str(local.grade(samples, chosen))  # NaN
            assert remote.failures == local.failures and remote.last_failure == local.last_failure
        assert isinstance(remote.grade(samples[:1], chosen[:1])[0], Grade)
