"""Actor-critic: ``evaluate`` recomputes ``act``; parameters, initialisation, errors."""

from __future__ import annotations

import itertools
import math
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from run_helpers import scale_policy
from torch import Tensor

from embodied_envs.adapters import spaces
from embodied_envs.base import tree
from embodied_envs.base.errors import ConfigError
from embodied_envs.types import ArraySpec, Box, Discrete, Obs, ObsSpec
from embodied_ppo.core.history import ObservationHistory
from embodied_ppo.core.recurrent_state import EpisodeMemory
from embodied_ppo.core.types import Decision
from embodied_ppo.options import loader
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies.actor_critic import CRITIC, ActorCritic
from embodied_ppo.policies.backbone import VECTOR, SpatialSoftmaxCNN

VECTOR_SPEC = ArraySpec((5,))
CHW, HWC = ArraySpec((3, 40, 36), torch.uint8), ArraySpec((40, 36, 3), torch.uint8)
SPECS: dict[str, ObsSpec] = {
    "vector": VECTOR_SPEC,
    "matrix": ArraySpec((2, 3)),
    "chw": CHW,
    "hwc": HWC,
    "dict": {"joints": VECTOR_SPEC, "camera": CHW, "goal": ArraySpec((2,))},
    "cameras": {
        "a.b": HWC,
        "a_b": CHW,
        "values": ArraySpec((1, 36, 36), torch.uint8),
        "vector": CHW,
        "x": VECTOR_SPEC,
    },
}
ACTIONS = {"box": Box((-1.0,) * 3, (1.0,) * 3), "discrete": Discrete(4)}
KINDS = [("box", "gaussian"), ("box", "squashed_gaussian"), ("box", "beta")]
KINDS += [("discrete", "categorical")]


def model(**options: Any) -> ModelConfig:
    return loader.load(ModelConfig, {"hidden": [16, 8], **options})


def make(spec: str, actions: str = "box", seed: int = 0, **options: Any) -> ActorCritic:
    torch.manual_seed(seed)
    policy = ActorCritic(SPECS[spec], ACTIONS[actions], model(**options))
    # The normaliser must not be the identity.
    policy.observe(observe(spec, 64, seed=99), torch.ones(64, dtype=torch.bool))
    return policy


def observe(spec: str, rows: int, seed: int = 0) -> Obs:
    generator = torch.Generator().manual_seed(seed)

    def one(s: ArraySpec) -> Tensor:
        if s.dtype == torch.uint8:
            return torch.randint(0, 256, (rows, *s.shape), generator=generator, dtype=torch.uint8)
        return torch.randn(rows, *s.shape, generator=generator) * 3 + 1

    specs = SPECS[spec]
    return {name: one(s) for name, s in specs.items()} if isinstance(specs, dict) else one(specs)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


# --------------------------------------------------------------------------------- act and evaluate
CASES = [
    (kind, spec, shared, dependent)
    for kind, spec, shared, dependent in itertools.product(
        KINDS, SPECS, (True, False), (False, True)
    )
    if not (dependent and kind[1] in ("beta", "categorical"))
]


@pytest.mark.parametrize(("kind", "spec", "shared", "dependent"), CASES)
def test_evaluate_reproduces_act(kind, spec, shared, dependent):
    actions, distribution = kind
    options = {"distribution": distribution, "state_dependent_std": dependent}
    policy = make(spec, actions, shared_backbone=shared, **options)
    scale_policy(policy, 1.0)  # means and scales depend on the state
    inputs = policy.encode(observe(spec, 7))
    decision = policy.act(inputs, noise=policy.noise(len(next(tree.leaves(inputs))), generator()))
    shape = (7,) if actions == "discrete" else (7, 1, 3)
    assert decision.log_prob.shape == shape and decision.log_prob.dtype == torch.float32
    assert decision.action.shape == ((7,) if actions == "discrete" else (7, 3))
    assert decision.value.shape == (7,)
    batch = inputs, decision.action, decision.replay
    out = policy.evaluate(*batch)
    assert out.log_prob.shape == out.entropy.shape == shape
    close(out.log_prob, decision.log_prob)
    close(out.value, decision.value)
    close(policy.value(inputs), decision.value)
    # Rows must differ for the comparison to be meaningful.
    assert out.log_prob.std() > 1e-3 and decision.value.std() > 1e-3
    assert (out.logits is not None) == (actions == "discrete")
    (out.log_prob.mean() + out.entropy.mean() + out.value.mean()).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in policy.parameters())

    # Rows are independent: any split and any order of the batch give equal results.
    parts = [policy.evaluate(*tree.index(batch, slice(i, i + 2))) for i in (0, 2)]
    close(torch.cat([p.log_prob for p in parts]), out.log_prob[:4])
    close(torch.cat([p.value for p in parts]), out.value[:4])
    flipped = policy.evaluate(*tree.map(lambda x: x.flip(0), batch))
    close(flipped.log_prob.flip(0), out.log_prob)

    # The generator is the only source of randomness, and the mode of the distribution needs none.
    for seed in (0, 1):
        again = policy.act(inputs, noise=policy.noise(7, generator(seed)))
        assert torch.equal(again.action, decision.action) == (seed == 0)
    mode = policy.act(inputs)
    assert torch.equal(mode.action, policy.act(inputs).action)
    if distribution == "beta":
        alpha, beta = policy.distribution(inputs)
        assert decision.action.abs().max() < 1 and alpha.min() > 1 and beta.min() > 1
        assert torch.equal(mode.action, 2 * alpha / (alpha + beta) - 1)
    if distribution == "squashed_gaussian":
        assert decision.action.abs().max() < 1
        assert torch.equal(decision.replay["pre_squash"].tanh(), decision.action)
    if out.logits is not None:
        assert torch.equal(mode.action, out.logits.argmax(-1))


# --------------------------------------------------------------------------------------- parameters
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("spec", ["vector", "dict"])
@pytest.mark.parametrize("kind", KINDS)
def test_parameter_groups_are_disjoint_and_complete(kind, spec, shared):
    policy = make(spec, kind[0], distribution=kind[1], shared_backbone=shared)
    groups = policy.parameter_groups()
    actor, critic = ({id(p) for p in groups[name]} for name in ("actor", "critic"))
    assert not actor & critic
    assert actor | critic == {id(p) for p in policy.parameters() if p.requires_grad}
    assert len(groups["actor"]) + len(groups["critic"]) == len(actor | critic)
    names = {name for name, p in policy.named_parameters() if id(p) in critic}
    assert all(name.startswith(("value_head.", "value_trunk.")) for name in names)
    assert any(name.startswith("value_trunk.") for name in names) == (not shared)


def test_orthogonal_gains():
    policy = make("vector", hidden=[8, 8])

    def gram(layer: torch.nn.Module) -> Tensor:
        assert isinstance(layer, torch.nn.Linear) and not layer.bias.detach().any()
        weight = layer.weight.detach()
        return weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight

    for layer, gain in (
        (policy.trunk.layers[0], 2**0.5),
        (policy.trunk.layers[2], 2**0.5),
        (policy.policy_head, 0.01),
    ):
        product = gram(layer)
        torch.testing.assert_close(product / gain**2, torch.eye(len(product)), rtol=0, atol=1e-5)
    assert policy.value_head is not None
    assert policy.value_head.weight.norm().item() == pytest.approx(1.0, rel=1e-5)
    cnn = next(make("chw").trunk.cnns.parameters()).detach().flatten(1)  # [32, 3·8·8]
    torch.testing.assert_close(cnn @ cnn.T, 2.0 * torch.eye(32), rtol=0, atol=1e-4)


def test_spatial_softmax_returns_where_a_map_responds():
    """A bright square at a position moves the mean position of a map that responds to it."""
    cnn = SpatialSoftmaxCNN((3, 64, 64))
    first, _, second, _, third = cnn.layers
    with torch.no_grad():
        for layer in (first, second, third):
            layer.weight.zero_()
            layer.bias.zero_()
        first.weight[0, 0] = 1.0  # map 0: brightness of channel 0
        first.bias[0] = 64.0
        second.weight[0, 0, 1, 1] = third.weight[0, 0, 0, 0] = 1.0
    image = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    image[0, 0, 28:36, 28:36] = 255  # in the middle
    image[1, 0, 8:16, 44:52] = 255  # above it and to the right
    x, y = cnn(image)[:, 0], cnn(image)[:, 32]
    # Cell i of 15 contains the pixels 4 i to 4 i + 7. The second layer removes the border, so that
    # the squares are in cells 6 (the middle), 1 and 10 of 13.
    torch.testing.assert_close(x, torch.tensor([0.0, (10 - 6) / 6]), atol=0.02, rtol=0)
    torch.testing.assert_close(y, torch.tensor([0.0, (1 - 6) / 6]), atol=0.02, rtol=0)
    assert bool((cnn(image)[:, 1:32] == 0).all())  # maps without a response: the middle


@pytest.mark.parametrize("dependent", [False, True])
def test_log_std_limits(dependent):
    policy = make(
        "vector", init_log_std=0.0, min_log_std=-0.1, max_log_std=0.1, state_dependent_std=dependent
    )
    inputs, normal = policy.encode(observe("vector", 8)), 0.5 * math.log(2 * math.pi * math.e)
    for shift, limit in ((10.0, 0.1), (-20.0, -0.1)):
        with torch.no_grad():
            (policy.policy_head.bias[3:] if policy.log_std is None else policy.log_std).add_(shift)
        entropy = policy.evaluate(inputs, torch.zeros(8, 3), {}).entropy
        torch.testing.assert_close(entropy, torch.full_like(entropy, limit + normal))


# --------------------------------------------------------------------------------------- normaliser
def test_observation_normaliser():
    torch.manual_seed(0)
    policy = ActorCritic(SPECS["dict"], ACTIONS["box"], model(obs_clip=2.0))
    observation = observe("dict", 50)
    assert isinstance(observation, dict)
    joined = torch.cat([observation["joints"], observation["goal"]], 1)
    # without statistics: unchanged
    torch.testing.assert_close(policy.encode(observation)[VECTOR], joined.clamp(-2, 2))
    mask = torch.arange(50) < 30
    observation["joints"][30:] = 1e9  # masked rows have no effect
    policy.observe(observation, mask)
    observed = joined[:30]
    expected = (observed - observed.mean(0)) / (observed.var(0, unbiased=False) + 1e-8).sqrt()
    encoded = policy.encode(observation)
    torch.testing.assert_close(encoded[VECTOR][:30], expected.clamp(-2, 2), rtol=1e-5, atol=1e-5)
    assert encoded[VECTOR].abs().max() == 2.0
    assert torch.equal(encoded["camera"], observation["camera"])

    # The normaliser is part of the state_dict.
    torch.manual_seed(1)
    other = ActorCritic(SPECS["dict"], ACTIONS["box"], model(obs_clip=2.0))
    assert "encoder.moments.mean" in policy.state_dict()
    other.load_state_dict(policy.state_dict())
    assert torch.equal(other.encode(observation)[VECTOR], encoded[VECTOR])
    assert torch.equal(other.value(other.encode(observation)), policy.value(encoded))


@pytest.mark.parametrize(
    ("spec", "limit", "factor"),
    [("vector", None, 1), ("vector", 5, 1), ("vector", 2, 0.4**0.5), ("dict", 1, 7**-0.5)],
)
def test_wide_observations_are_scaled(spec: str, limit: int | None, factor: float) -> None:
    """For two base inputs, five enter the first layer as x·√(2/5), with weights times √(5/2).

    A step of all weights by lr then moves the outputs by lr·Σx·2/5. The features of images are
    inputs of the first layer, too, but no vectors.
    """
    policy, plain = make(spec, base_inputs=limit), make(spec)
    inputs = plain.encode(observe(spec, 8))
    scaled = {**inputs, VECTOR: inputs[VECTOR] * factor}
    torch.testing.assert_close(policy.value(inputs), plain.value(scaled))
    moved = {**inputs, VECTOR: inputs[VECTOR] * factor**2}
    torch.testing.assert_close(policy.trunk.join(inputs), plain.trunk.join(moved))
    # The initial weights of recurrent layers are multiplied, too.
    options = {"recurrent": "gru", "shared_backbone": False}
    policy, plain = make("vector", base_inputs=2, **options), make("vector", **options)
    for name in ("recurrent", "value_recurrent"):
        wide, weight = (getattr(x, name).input_weight for x in (policy, plain))
        torch.testing.assert_close(wide, weight * 2.5**0.5)


# ------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("spec", "actions", "options", "message"),
    [
        (VECTOR_SPEC, Discrete(3), {"distribution": "gaussian"}, "categorical"),
        (ArraySpec((0,)), Discrete(3), {}, "empty"),
    ],
)
def test_refused_specs_and_options(spec, actions, options, message):
    with pytest.raises(ConfigError, match=message):
        ActorCritic(spec, actions, model(**options))


# ------------------------------------------------------------------------- observations of a critic
# The critic alone reads the joints of the spec "dict".
GROUPS: dict[str, Any] = {
    "actor_obs": ["goal", "camera"],
    "critic_obs": ["joints", "goal", "camera"],
}


def grouped(**options: Any) -> ActorCritic:
    return scale_policy(make("dict", **{**GROUPS, **options}), 1.0)


@pytest.mark.parametrize("shared", [True, False])
def test_action_does_not_depend_on_what_only_the_critic_reads(shared: bool) -> None:
    policy = grouped(shared_backbone=shared)
    obs = observe("dict", 6)
    assert isinstance(obs, dict)
    inputs = policy.encode(obs)
    # A shared trunk encodes what only the critic reads, separate trunks all that it reads.
    own = inputs[CRITIC]
    assert own[VECTOR].shape == ((6, 5) if shared else (6, 7)) and inputs[VECTOR].shape == (6, 2)
    assert ("camera" in own) == (not shared)
    own[VECTOR].requires_grad_()
    inputs[VECTOR].requires_grad_()
    out = policy.evaluate(inputs, torch.zeros(6, 3), {})
    policy_outputs = (out.log_prob.sum() + out.entropy.sum(), [own[VECTOR], inputs[VECTOR]])
    unused, used = torch.autograd.grad(*policy_outputs, allow_unused=True, retain_graph=True)
    assert unused is None and used is not None and bool(used.abs().sum() > 0)
    assert bool(torch.autograd.grad(out.value.sum(), own[VECTOR])[0].abs().sum() > 0)

    # The same actions, bit for bit, without the observation; only the value is missing.
    noise, whole = policy.noise(6, generator()), policy.encode(obs)
    acting = policy.encode({name: x for name, x in obs.items() if name != "joints"})
    one, other = policy.act(whole, noise=noise), policy.act(acting, noise=noise)
    assert torch.equal(one.action, other.action) and torch.equal(one.log_prob, other.log_prob)
    assert bool(one.value.isfinite().all()) and bool(other.value.isnan().all())


# -------------------------------------------------------------------------------------- with memory
MEMORY_SPECS = {"state": ArraySpec((4,)), "privileged": ArraySpec((3,))}
STRUCTURES: dict[str, dict[str, Any]] = {
    "shared": {},
    "separate": {"shared_backbone": False},
    "tail": {"actor_obs": ["state"], "critic_obs": ["state", "privileged"]},
}
STRUCTURES["groups"] = STRUCTURES["tail"] | STRUCTURES["separate"]
LENGTH = 6


def remember(
    policy: ActorCritic, columns: int = 3
) -> tuple[dict[str, Any], list[Decision], torch.Tensor]:
    """Act for ``LENGTH`` steps with episodes that start at different steps.

    Returns:
        Inputs [T, B, ..], the decisions of each step, and the marks of first steps [T, B].
    """
    generator = torch.Generator().manual_seed(5)
    start = torch.zeros(LENGTH, columns, dtype=torch.bool)
    start[0] = start[2, 1] = start[4, 0] = start[5, 2] = True
    memory = EpisodeMemory(policy, columns, torch.device("cpu"))
    inputs, decisions = list[dict[str, Any]](), list[Decision]()
    for t in range(LENGTH):
        memory.start = start[t]
        sizes = {name: (columns, *s.shape) for name, s in MEMORY_SPECS.items()}
        obs: Obs = {k: torch.randn(*size, generator=generator) for k, size in sizes.items()}
        inputs.append(policy.encode(memory.attach(obs)))
        decisions.append(policy.act(inputs[-1], noise=policy.noise(columns, generator)))
        assert decisions[-1].memory is not None
        memory.store(decisions[-1].memory)
    return tree.stack(inputs), decisions, start


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("recurrent", ["gru", "lstm"])
@pytest.mark.parametrize(("actions", "distribution"), KINDS)
def test_acting_step_by_step_equals_evaluating_the_sequence(
    structure: str, recurrent: str, actions: str, distribution: str
) -> None:
    torch.manual_seed(0)
    options = {"recurrent": recurrent, "recurrent_size": 5, "distribution": distribution}
    policy = ActorCritic(MEMORY_SPECS, ACTIONS[actions], model(**options, **STRUCTURES[structure]))
    layers = 2 if structure in ("separate", "groups") else 1
    assert policy.memory_size == layers * (5 if recurrent == "gru" else 10)
    inputs, decisions, _ = remember(policy)
    acted = tree.stack(decisions)
    evaluated = policy.evaluate_columns(inputs, acted.action, acted.replay)
    for x, y in ((evaluated.log_prob, acted.log_prob), (evaluated.value, acted.value)):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
    rows: Any = tree.map(lambda x: x.flatten(0, 1), (inputs, acted.action, acted.replay))
    single = policy.evaluate(*rows)
    torch.testing.assert_close(single.value, acted.value.flatten(), rtol=0, atol=1e-5)
    torch.testing.assert_close(policy.value(rows[0]), acted.value.flatten(), rtol=0, atol=1e-5)


def test_memory_ends_where_an_episode_starts() -> None:
    """Column 1 starts an episode in step 2: its value depends on step 2, and not on steps 0, 1."""
    torch.manual_seed(0)
    policy = ActorCritic(MEMORY_SPECS, ACTIONS["box"], model(recurrent="gru", recurrent_size=5))
    inputs, decisions, _ = remember(policy)
    acted = tree.stack(decisions)
    inputs[VECTOR].requires_grad_()
    value = policy.evaluate_columns(inputs, acted.action, acted.replay).value
    (grad,) = torch.autograd.grad(value[3, 1], inputs[VECTOR], retain_graph=True)
    assert bool((grad[:2] == 0).all()) and bool((grad[2:4, 1] != 0).any(-1).all())
    (grad,) = torch.autograd.grad(value[3, 0], inputs[VECTOR])
    assert bool((grad[:4, 0] != 0).any(-1).all())


def test_actor_with_memory_acts_without_the_critic() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"recurrent": "gru", "recurrent_size": 5, **STRUCTURES["groups"]}
    policy = ActorCritic(MEMORY_SPECS, ACTIONS["box"], model(**options))
    actor = policy.actor_only()
    assert (policy.memory_size, actor.memory_size) == (10, 5)
    obs = {"state": torch.randn(2, 4), "privileged": torch.randn(2, 3)}
    whole, alone = (
        p.act(p.encode(EpisodeMemory(p, 2, torch.device("cpu")).attach(obs)))
        for p in (policy, actor)
    )
    assert torch.equal(whole.action, alone.action)
    assert whole.memory is not None and alone.memory is not None
    assert torch.equal(whole.memory[:, :5], alone.memory) and bool(alone.value.isnan().all())
    # Observations without those of the critic leave the state of its memory unchanged.
    memory = EpisodeMemory(policy, 2, torch.device("cpu"))
    decision = policy.act(policy.encode(memory.attach({"state": obs["state"]})))
    assert decision.memory is not None and torch.equal(decision.memory[:, :5], alone.memory)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "offset", "scale"), [(np.float64, 5.3e6, 0.1), (np.int64, 1.7e9, 3.0)]
)
def test_large_numbers_are_normalised_before_they_are_rounded(
    dtype: Any, offset: float, scale: float, steps: int, named: bool
) -> None:
    """A small number beside them has the bits of a task that returns float32."""
    device, actions = torch.device("cpu"), Box((-1.0,), (1.0,))
    box = gymnasium.spaces.Box(-(2.0**40), 2.0**40, (2,), dtype)
    values = np.random.default_rng(0).normal(size=(500, 2))
    values[:, 0] = offset + scale * values[:, 0]
    values = values.astype(dtype)
    inputs = []
    for wide in (True, False):
        spec, leaves = spaces.observations(
            gymnasium.spaces.Dict({"a": box}) if named else box,
            id="x",
            device=device,
            keep_float64=wide,
        )
        obs = spaces.reader(leaves)({"a": values} if named else values)
        if steps > 1:
            history = ObservationHistory(spec, actions, steps)
            spec, obs = history.obs_spec, history.stack(history.empty(500, device), obs)
        policy = ActorCritic(spec, actions, ModelConfig(hidden=(4,), history=steps))
        policy.observe(obs, torch.ones(500, dtype=torch.bool))
        inputs.append(policy.encode(obs)[VECTOR])
    newest = 2 * (steps - 1)
    expected = (values[:, 0] - values[:, 0].mean()) / values[:, 0].std()
    np.testing.assert_allclose(inputs[0][:, newest].numpy(), expected, atol=1e-5)
    assert torch.equal(inputs[0][:, newest + 1], inputs[1][:, newest + 1])
