"""Checkpoints of other libraries become policies of ours, or are refused with one line."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from embodied_envs.base.errors import ConfigError
from embodied_envs.types import ActionSpec, ArraySpec, Box, Composite, Discrete
from embodied_ppo.options import loader
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.tools.import_policy import libraries
from embodied_ppo.tools.import_policy.imported import ImportedPolicy
from tests.tools.import_policy import foreign_checkpoints as foreign
from tests.tools.import_policy.foreign_checkpoints import ACTIONS, COUNT, MEAN, OBS, VAR

SPEC = ArraySpec((OBS,), torch.float32)
BOX = Box((-1.0,) * ACTIONS, (1.0,) * ACTIONS)
RAW = torch.randn(64, OBS, generator=torch.Generator().manual_seed(3)) * 3
MEAN_, VAR_ = torch.from_numpy(MEAN), torch.from_numpy(VAR)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


def read(library: str, file: Path, normalizer: Path | None = None, *, critic: bool = True) -> Any:
    return libraries.read(library, file, normalizer, critic=critic)


def ours(policy: ImportedPolicy, action: ActionSpec = BOX, **options: Any) -> ActorCritic:
    """Return our network with the weights of an imported policy."""
    derived = policy.fixed_options() | policy.suggested_options() | {"model.activation": "tanh"}
    section = {k.removeprefix("model."): x for k, x in derived.items() if k.startswith("model.")}
    network = ActorCritic(SPEC, action, loader.read(ModelConfig, [("", section)]).config)
    policy.check_sizes(network, "HalfCheetah-v4")
    policy.load_into(network, normalized_rewards=True, **options)
    return network


def actions(network: ActorCritic, obs: Tensor = RAW) -> Tensor:
    return network.act(network.encode(obs)).action


# ------------------------------------------------------------------------------------------ actions
@pytest.mark.parametrize("kind", ["MultiDiscrete", "MultiBinary"])
def test_sb3_with_several_choices(kind: str, tmp_path) -> None:
    """One choice of 4 and one of 2; or six elements, each with p(1) = sigmoid(l)."""
    space = {":type:": f"<class 'gymnasium.spaces.{kind}'>"}
    actor = foreign.sb3(tmp_path / "model.zip", choices=True, action_space=space)
    spec = Composite((4, 2) if kind == "MultiDiscrete" else (2,) * ACTIONS)
    network = ours(read("sb3", tmp_path / "model.zip", Path("none")), spec)
    logits = actor(RAW)
    if kind == "MultiDiscrete":
        expected = torch.stack([logits[:, :4].argmax(1), logits[:, 4:].argmax(1)], 1)
        log_prob = logits[:, :4].log_softmax(1).amax(1) + logits[:, 4:].log_softmax(1).amax(1)
    else:
        expected = logits > 0
        log_prob = logits.abs().sigmoid().log().sum(1)
    decision = network.act(network.encode(RAW))
    assert torch.equal(decision.action, expected.float())
    torch.testing.assert_close(decision.log_prob.sum((1, 2)), log_prob, rtol=1e-5, atol=1e-5)


def root(x: Tensor, eps: float, clip: float) -> Tensor:
    """Normalise as Stable-Baselines3 and Gymnasium do."""
    return ((x - MEAN_) / (VAR_ + eps).sqrt()).clamp(-clip, clip).float()


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "sb3": lambda x: root(x, 1e-8, 2.0),
    "rsl_rl": lambda x: ((x - MEAN_) / (VAR_.sqrt() + 0.01)).float(),
    "cleanrl": lambda x: root(x, 1e-8, 10.0),
}


def written(library: str, folder: Path) -> tuple[nn.Module, Path, Path | None]:
    """Write a checkpoint; return its actor, the file, and that of the normaliser."""
    file, normalizer = folder / "policy.bin", None
    actor = getattr(foreign, library)(file)
    if library == "sb3":
        foreign.vec_normalize(normalizer := folder / "normalizer.pkl")
    if library == "cleanrl":
        np.savez(normalizer := folder / "rms.npz", mean=MEAN, var=VAR, count=COUNT)
    return actor, file, normalizer


@pytest.mark.parametrize("library", CASES)
def test_actions_are_those_of_the_formula(library: str, tmp_path) -> None:
    actor, file, normalizer = written(library, tmp_path)
    policy = read(library, file, normalizer)
    expected = actor(CASES[library](RAW))
    assert (actions(ours(policy)) - expected).abs().max() < 1e-5
    assert expected.std() > 0.1
    assert policy.normalizer.count == COUNT


@pytest.mark.parametrize(("layout", "critic"), [(1, True), (3, True), (5, False)])
def test_layouts_of_rsl_rl(layout: int, critic: bool, tmp_path) -> None:
    """critic=new keeps the policy and its normaliser."""
    actor = foreign.rsl_rl(tmp_path / "x.pt", layout)
    network = ours(read("rsl_rl", tmp_path / "x.pt", critic=critic))
    assert (actions(network) - actor(CASES["rsl_rl"](RAW))).abs().max() < 1e-5
    assert network.log_std is not None
    torch.testing.assert_close(network.log_std.exp(), torch.full((ACTIONS,), 0.7))


def test_beta_distribution_of_rsl_rl(tmp_path) -> None:
    actor = foreign.rsl_rl(tmp_path / "x.pt", beta=True)
    network = ours(read("rsl_rl", tmp_path / "x.pt"))
    alpha, beta = (1 + nn.functional.softplus(actor(CASES["rsl_rl"](RAW)))).chunk(2, dim=-1)
    assert (actions(network) - (2 * alpha / (alpha + beta) - 1)).abs().max() < 1e-5
    assert network.log_std is None and actions(network).std() > 0.05


def test_choices(tmp_path) -> None:
    """ppo.py of CleanRL: no normaliser; the action is the most likely choice."""
    actor = foreign.cleanrl(tmp_path / "x", choices=4)
    policy = read("cleanrl", tmp_path / "x")
    network = ours(policy, Discrete(4))
    assert (actions(network) == actor(RAW).argmax(-1)).all() and policy.normalizer is None


def test_value_of_normalised_rewards(tmp_path) -> None:
    """Units: sb3 divides rewards by sqrt(9 + 1e-8) = 3.

    A training with normalised rewards has V / std, another one V.
    """
    _, file, normalizer = written("sb3", tmp_path)
    policy = read("sb3", file, normalizer)
    assert policy.value_scale.std == pytest.approx(3)
    assert policy.suggested_options()["algorithm.reward_clip"] == 10.0
    network = ours(policy)
    values = network.value(network.encode(RAW))
    policy.load_into(network, normalized_rewards=False)
    torch.testing.assert_close(network.value(network.encode(RAW)), 3 * values)


def test_units_of_values_without_normalised_rewards(tmp_path) -> None:
    """rsl_rl: values of the rewards; CleanRL: of rewards divided by an unknown deviation."""
    foreign.rsl_rl(tmp_path / "x.pt")
    assert read("rsl_rl", tmp_path / "x.pt").suggested_options()["algorithm.reward_norm"] is None
    new = read("rsl_rl", tmp_path / "x.pt", critic=False).suggested_options()
    assert "algorithm.reward_norm" not in new
    foreign.cleanrl(tmp_path / "x")
    policy = read("cleanrl", tmp_path / "x", Path("none"))
    options = policy.suggested_options()
    assert options["algorithm.reward_norm"] == "running" and options["algorithm.reward_clip"] == 10
    values = {"mean": MEAN, "var": VAR, "count": COUNT, "return_var": 9.0, "return_count": 5.0}
    np.savez(tmp_path / "n.npz", **values)  # pyright: ignore[reportArgumentType]
    scale = read("cleanrl", tmp_path / "x", tmp_path / "n.npz").value_scale
    assert scale.std == pytest.approx(3) and scale.count == 5


def test_activation(tmp_path) -> None:
    """It is read where the file has it; else the library's default, or the user must write it."""
    kwargs = {":type:": "<class 'dict'>", ":serialized:": "x"}
    name = "<class 'torch.nn.modules.activation.ELU'>"
    foreign.sb3(tmp_path / "x.zip", policy_kwargs={**kwargs, "activation_fn": name})
    policy = read("sb3", tmp_path / "x.zip")
    assert policy.checked_activation(None) == "elu"
    with pytest.raises(ConfigError, match=r"remove model.activation = relu: .* has elu"):
        policy.checked_activation("relu")
    foreign.sb3(tmp_path / "x.zip")
    policy = read("sb3", tmp_path / "x.zip")
    assert policy.checked_activation(None) == "tanh" and policy.checked_activation("elu") == "elu"
    module = {"__module__": "stable_baselines3.common.policies"}
    foreign.sb3(tmp_path / "x.zip", policy_class=module)
    assert read("sb3", tmp_path / "x.zip").activation == "tanh"
    foreign.sb3(tmp_path / "x.zip", policy_kwargs={"activation_fn": "<class 'my.Mish'>"})
    message = r"name a policy with Tanh, .*: the activation of .* is <class 'my.Mish'>"
    refused(message, "sb3", tmp_path / "x.zip")


# --------------------------------------------------------------------------------------- normaliser
def test_normalisers_in_files_of_their_own(tmp_path) -> None:
    """obs_rms of Gymnasium as a pickle of an object or a dictionary, and of numpy."""
    foreign.cleanrl(tmp_path / "x")
    values: dict[str, Any] = {"mean": MEAN, "var": VAR, "count": COUNT}
    rms = foreign.named("gymnasium.wrappers.utils.RunningMeanStd", **values)
    files = [tmp_path / name for name in ("a.pkl", "b.pkl", "c.npz")]
    files[0].write_bytes(pickle.dumps(rms, protocol=2))
    files[1].write_bytes(pickle.dumps(values, protocol=5))
    np.savez(files[2], **values)
    policies = [read("cleanrl", tmp_path / "x", file) for file in files]
    for policy in policies:
        assert torch.equal(policy.normalizer.var, VAR_) and policy.normalizer.clip == 10
    none = read("cleanrl", tmp_path / "x", Path("none"))
    assert none.normalizer is None and not none.fixed_options()["model.normalize_obs"]


# ---------------------------------------------------------------------------------------- refusals
class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        import os

        return os.system, ("touch /tmp/embodied-ppo-was-here",)


def refused(match: str, library: str, file: Path, *args: Any, **kwargs: Any) -> None:
    """Check for one line that names the file."""
    with pytest.raises(ConfigError, match=match) as error:
        read(library, file, *args, **kwargs)
    assert "\n" not in str(error.value) and str(file.name) in str(error.value)


def test_code_is_refused_and_not_executed(tmp_path) -> None:
    marker = Path("/tmp/embodied-ppo-was-here")
    marker.unlink(missing_ok=True)
    torch.save({"model_state_dict": {}, "infos": Evil()}, tmp_path / "x.pt")
    message = r"save the weights .*x.pt needs (posix|os).system, and only numbers are read"
    for library in ("rsl_rl", "cleanrl"):
        refused(message, library, tmp_path / "x.pt")
    foreign.sb3(tmp_path / "x.zip", extra={"log_std": Evil()})  # pyright: ignore
    refused("needs posix.system", "sb3", tmp_path / "x.zip")
    foreign.sb3(tmp_path / "x.zip")
    (tmp_path / "n.pkl").write_bytes(pickle.dumps({"mean": Evil()}))
    with pytest.raises(ConfigError, match=r"normalizer=.*n.pkl needs posix.system"):
        read("sb3", tmp_path / "x.zip", tmp_path / "n.pkl")
    assert not marker.exists()


def test_allowed_names_cannot_be_used_for_more(tmp_path) -> None:
    """Functions of the reader cannot be changed by a pickle, and make arrays of numbers only."""
    foreign.cleanrl(tmp_path / "x")
    build = b"cnumpy.core.multiarray\n_reconstruct\n}(S'__defaults__'\nNub."
    contents = {
        "copy the file again: .* is damaged": build,
        "copy the file|needs posix.system": pickle.dumps(np.array([Evil()], dtype=object)),
        "needs builtins.getattr": pickle.dumps(getattr),
        "needs builtins.eval": pickle.dumps(eval),
    }
    for match, content in contents.items():
        (tmp_path / "n.pkl").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{match}") as error:
            read("cleanrl", tmp_path / "x", tmp_path / "n.pkl")
        assert "\n" not in str(error.value) and "n.pkl" in str(error.value)


@pytest.mark.parametrize("library", libraries.LIBRARIES)
def test_damaged_and_missing_files(library: str, tmp_path) -> None:
    _, file, normalizer = written(library, tmp_path)
    data = file.read_bytes()
    for part in (b"", data[: len(data) // 2], b"\x80\x05hello" + data[:50], b"no checkpoint"):
        file.write_bytes(part)
        refused("copy|save|name", library, file, normalizer)
    file.write_bytes(pickle.dumps([1, 2, 3, 4]))
    refused("copy|save|name", library, file, normalizer)
    refused("is a directory", library, tmp_path, normalizer)
    refused("cannot be read", library, tmp_path / "missing.zip", normalizer)
    os.mkfifo(tmp_path / "pipe.zip")
    refused("is not a regular file", library, tmp_path / "pipe.zip", normalizer)


def test_compressed_archives(tmp_path) -> None:
    """Stable-Baselines3 writes none: they could be of any size."""
    with zipfile.ZipFile(tmp_path / "y", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data", "{}")
    refused("is compressed", "sb3", tmp_path / "y")
    foreign.cleanrl(tmp_path / "x")
    np.savez_compressed(tmp_path / "n.npz", mean=MEAN, var=VAR, count=COUNT)
    assert read("cleanrl", tmp_path / "x", tmp_path / "n.npz").normalizer.count == COUNT


def test_unknown_layers(tmp_path) -> None:
    lstm = {"lstm_actor.weight_ih_l0": torch.zeros(4, 4)}
    foreign.sb3(tmp_path / "x.zip", extra=lstm)
    refused("has layers that no network of ours contains: lstm_actor", "sb3", tmp_path / "x.zip")
    cnn = {"features_extractor.cnn.0.weight": torch.zeros(8, 3, 8, 8)}
    foreign.sb3(tmp_path / "x.zip", extra=cnn)
    refused("of ours contains: features_extractor.cnn.0", "sb3", tmp_path / "x.zip")
    foreign.sb3(tmp_path / "x.zip", use_sde=True)
    refused("gSDE", "sb3", tmp_path / "x.zip")


def test_normaliser_that_is_missing_or_of_another_policy(tmp_path) -> None:
    foreign.sb3(tmp_path / "x.zip", _last_original_obs={":type:": "x"})
    refused(
        r"write normalizer=.* VecNormalize, which is a file of its own", "sb3", tmp_path / "x.zip"
    )
    assert read("sb3", tmp_path / "x.zip", Path("none")).normalizer is None
    foreign.cleanrl(tmp_path / "x")
    refused(r"write normalizer=FILE, of np.savez", "cleanrl", tmp_path / "x")
    np.savez(tmp_path / "n.npz", mean=MEAN[:5], var=VAR[:5], count=1.0)
    policy = read("cleanrl", tmp_path / "x", tmp_path / "n.npz")
    with pytest.raises(ConfigError, match=r"that of .* has 5 numbers, and the policy reads 17"):
        policy.check_sizes(ActorCritic(SPEC, BOX, ModelConfig()), "HalfCheetah-v4")
    np.savez(tmp_path / "n.npz", mean=MEAN)
    with pytest.raises(ConfigError, match=r"save mean, var and count .* has no var"):
        read("cleanrl", tmp_path / "x", tmp_path / "n.npz")
    foreign.rsl_rl(tmp_path / "x.pt")
    with pytest.raises(ConfigError, match="a file of rsl_rl contains its normaliser"):
        read("rsl_rl", tmp_path / "x.pt", tmp_path / "n.npz")


def test_task_with_other_sizes(tmp_path) -> None:
    foreign.rsl_rl(tmp_path / "x.pt")
    policy = read("rsl_rl", tmp_path / "x.pt")
    spec = ArraySpec((11,), torch.float32)
    with pytest.raises(ConfigError, match=r"an observation of 11 numbers .* reads 17"):
        policy.check_sizes(ActorCritic(spec, BOX, ModelConfig()), "Hopper-v4")
    with pytest.raises(ConfigError, match=r"an action of 3 dimensions, .* returns 6"):
        network = ActorCritic(SPEC, Box((-1.0,) * 3, (1.0,) * 3), ModelConfig())
        policy.check_sizes(network, "Walker2d-v4")
    with pytest.raises(ConfigError, match=r"an action of 6 choices, .* returns 6 dimensions"):
        policy.check_sizes(ActorCritic(SPEC, Discrete(6), ModelConfig()), "Acrobot-v1")


def test_critic_of_other_observations(tmp_path) -> None:
    """It is refused unless critic=new is written."""
    content = foreign.state(foreign.mlp(1, (7,), 40), "mlp")
    foreign.rsl_rl(tmp_path / "x.pt", critic_state_dict=content)
    refused(r"critic=new.*reads 40 numbers and the policy 17", "rsl_rl", tmp_path / "x.pt")
    assert read("rsl_rl", tmp_path / "x.pt", critic=False).critic is None
    foreign.rsl_rl(tmp_path / "x.pt")
    groups = ModelConfig(actor_obs=("a",), critic_obs=("a", "b"))
    spec = {"a": SPEC, "b": ArraySpec((3,), torch.float32)}
    with pytest.raises(ConfigError, match=r"write critic=new, or .* model.critic_obs gives"):
        read("rsl_rl", tmp_path / "x.pt").check_sizes(ActorCritic(spec, BOX, groups), "Go1Joystick")
    read("rsl_rl", tmp_path / "x.pt", critic=False).check_sizes(ActorCritic(spec, BOX, groups), "")
