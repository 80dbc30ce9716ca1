"""π0.5: ``evaluate`` recomputes ``act``, agreement with a reference in float64, prompts, files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_helpers import perturb
from safetensors.torch import load_file
from tiny_pi0_checkpoint import tiny_model, write_checkpoint
from torch import Tensor
from vla_policy_checks import check_evaluate_reproduces_act, flow_policy, random_observations

from embodied_envs.base.errors import ConfigError
from embodied_envs.types import ArraySpec, ObsSpec
from embodied_ppo.options import openpi_configs
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies.vla import pi0_files, published
from embodied_ppo.policies.vla.pi0 import KEYS, PI0
from embodied_ppo.policies.vla.pi05 import PI05
from embodied_ppo.policies.vla.trunk import WORDS

C, A, B, H, N = 3, 2, 4, 6, 8
SPEC: ObsSpec = {
    "state": ArraySpec((3,)),
    "front": ArraySpec((3, 16, 16), torch.uint8),
    "instruction": ArraySpec((), torch.int64),
}
SENTENCES = ("push the red block", "lift_it", "go to the cup")
LOW, HIGH = torch.tensor([-2.0, -1.0, 0.0]), torch.tensor([2.0, 3.0, 0.5])
STATISTICS = {
    "observation.state.q01": LOW,
    "observation.state.q99": HIGH,
    "action.q01": torch.tensor([-0.5, 0.0]),
    "action.q99": torch.tensor([0.5, 2.0]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pi05") / "tiny"
    return write_checkpoint(path, kind="pi05", statistics=STATISTICS)


def make(folder: Path, policy_class: type[PI0] = PI05, **options: Any) -> Any:
    return flow_policy(policy_class, folder, SPEC, SENTENCES, chunk=C, size=A, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trunk", "chain"),
    [({"freeze_trunk": True}, {}), ({}, {"flow_chain": "sum", "flow_noise": "learned"})],
    ids=str,
)
def test_evaluate_reproduces_act(folder: Path, chain: Any, trunk: Any) -> None:
    policy = make(folder, **chain, **trunk)
    inputs = policy.encode(random_observations(SPEC, B, 0))
    assert (KEYS in inputs) == ("freeze_trunk" in trunk)
    d = policy.act(inputs, noise=policy.noise(B, torch.Generator().manual_seed(1)))
    check_evaluate_reproduces_act(policy, inputs, d, shape=(B, C, A), sizes=(B, 1))


def test_gradients_reach_the_adaptive_norms(folder: Path) -> None:
    policy = make(folder)
    inputs = policy.encode(random_observations(SPEC, B, 0))
    d = policy.act(inputs, noise=policy.noise(B, torch.Generator().manual_seed(1)))
    policy.evaluate(inputs, d.action, d.replay).log_prob.sum().backward()
    for name, p in policy.named_parameters():
        if "dense" in name or "time_mlp" in name:
            assert p.grad is not None and p.grad.abs().max() > 0, name


def test_prompt_is_that_of_openpi(folder: Path) -> None:
    """The ids without padding are those of the whole text, digitised by numpy."""
    policy = make(folder)
    obs = random_observations(SPEC, B, 0)
    obs["state"] = torch.tensor(
        [[-2.0, -1.0, 0.0], [2.0, 3.0, 0.5], [-9.0, 99.0, 0.25], [0.013, 1.0, 0.2501]]
    )
    ids = policy.encode(obs)[WORDS]
    state = ((obs["state"] - LOW) / (HIGH - LOW) * 2 - 1).numpy()
    bins = np.digitize(state, np.linspace(-1, 1, 257)[:-1]) - 1
    assert bins.min() == -1 and bins.max() == 255
    tokenizer = policy.trunk.tokenize.tokenizer
    for i in range(B):
        sentence = SENTENCES[int(obs["instruction"][i])].replace("_", " ")
        text = f"Task: {sentence}, State: {' '.join(map(str, bins[i]))};\nAction: "
        expected = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]
        assert ids[i][ids[i] >= 0].tolist() == expected


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_openpi_directory_names_its_training(kind: str, tmp_path) -> None:
    """Horizon and folder of the statistics identify a configuration, else an option names it."""
    sizes = {"chunk_size": 50 if kind == "pi0" else 10}
    quantiles = {"q01": [-1.0] * 8, "q99": [1.0] * 8, "mean": [0.0] * 8, "std": [1.0] * 8}
    statistics = {"state": quantiles, "actions": quantiles}
    policy_class = published.FLOW_FAMILIES[kind]
    folder = tmp_path / "openpi"
    write_checkpoint(folder, kind=kind, asset="libero", statistics=statistics, **sizes)
    obs = random_observations(SPEC, B, 0)
    if kind == "pi05":
        policy = make(folder)
        assert policy.trunk.relative is None and not policy.state_in_prefix
        ids = policy.encode(obs)[WORDS]
        tokenizer = policy.trunk.tokenize.tokenizer
        text = [SENTENCES[int(i)].replace("_", " ") + "\n" for i in obs["instruction"]]
        assert [tokenizer.decode(row[row >= 0]) for row in ids] == [f"<bos>{x}" for x in text]
        inputs = policy.encode(obs)
        d = policy.act(inputs, noise=policy.noise(B, torch.Generator().manual_seed(1)))
        check_evaluate_reproduces_act(policy, inputs, d, shape=(B, C, A), sizes=(B, 1))
        other = policy.encode(obs | {"state": obs["state"] + 1})
        assert torch.equal(policy.act(inputs).action, policy.act(other).action)
        policy = make(folder, discrete_state_input=True)
        assert policy.state_in_prefix and policy.encode(obs)[WORDS].shape[1] > ids.shape[1]
    else:  # pi0_libero adds the state to six dimensions, of which the task has two
        with pytest.raises(ConfigError, match=r"delta_actions=\[0, 1, 2, 3, 4, 5\]"):
            make(folder, policy_class)
        policy = make(folder, policy_class, delta_actions=(0,))
        assert policy.trunk.relative.tolist() == [True, False]
        with pytest.raises(ConfigError, match="discrete_state_input=true"):
            make(folder, policy_class, delta_actions=(), discrete_state_input=True)
    notice = policy.size_notice or ""
    assert ("2 cameras (here 1)" in notice) == (kind == "pi05")  # else by option: not known
    assert "8 numbers of a state (here 3), 8 numbers of an action (here 2)" in notice
    (folder / "assets" / "libero").rename(folder / "assets" / "droid")
    for options, message in (
        ({}, r"config_name=NAME.*none that is known fits"),
        ({"config_name": "pi05_libro"}, "did you mean pi05_libero|known are"),
        ({"config_name": "pi0_aloha" if kind == "pi0" else "pi05_aloha"}, "adapt_to_pi"),
        ({"config_name": "pi05_libero" if kind == "pi0" else "pi0_libero"}, f"holds {kind}"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(folder, policy_class, **options)
        for name in options.values():  # no model is loaded
            with pytest.raises(ConfigError, match=message):
                openpi_configs.check(name, str(folder))
    with pytest.raises(ConfigError, match="remove model"):
        openpi_configs.check("pi05_libero", str(write_checkpoint(tmp_path / "own", kind=kind)))


@pytest.mark.parametrize(
    ("cameras", "known"),
    [
        (("agentview", "robot0_eye_in_hand"), True),
        (("robot0_eye_in_hand", "agentview"), False),
        (("rgb_gripper", "rgb_static"), False),
        (("front", "side"), True),  # no name contains wrist or gripper
    ],
)
def test_cameras_in_another_order_are_reported(cameras: tuple[str, ...], known: bool) -> None:
    trained = pi0_files.Published(None, lambda _: (), cameras=pi0_files.OPENPI_CAMERAS[:2])
    notice = pi0_files.size_notice(trained, ModelConfig(), cameras, (3, 2))
    assert (notice is None) == known and (known or cameras[0] in str(notice))


def reference_velocity(model: Any, prefix: Any, x: Tensor, tau: Tensor) -> Tensor:
    """Compute the expert in float64, with loops over heads."""
    expert, embed = model.model.dit, model.embed_action_time
    config = expert.config
    width, d = config.hidden_size, config.head_dim
    period = 4e-3 * (4.0 / 4e-3) ** torch.linspace(0, 1, width // 2, dtype=torch.float64)
    angle = 2 * math.pi * tau[:, None] / period
    time = torch.cat((angle.sin(), angle.cos()), 1)
    time = torch.nn.functional.silu(embed.time_mlp_in(time))
    condition = torch.nn.functional.silu(embed.time_mlp_out(time))

    def norm(layer: Any, h: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift, gate = layer.dense(condition)[:, None].chunk(3, -1)
        h = h / (h.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
        return h * (1 + scale) + shift, gate

    h = embed.action_in_proj(x)
    for i, layer in enumerate(expert.layers):
        a = layer.self_attn
        n, gate = norm(layer.input_layernorm, h)
        place = prefix.valid.sum(1, keepdim=True) + torch.arange(x.shape[1])
        freq = 10_000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        angle = (place[..., None] * freq).repeat(1, 1, 2)

        def rotated(y: Tensor, angle: Tensor = angle) -> Tensor:
            half = torch.cat((-y[..., d // 2 :], y[..., : d // 2]), -1)
            return y * angle.cos() + half * angle.sin()

        key = torch.cat((prefix.keys[i][:, 0].double(), rotated(a.k_proj(n))), 1)
        value = torch.cat((prefix.values[i][:, 0].double(), a.v_proj(n)), 1)
        heads = []
        for q in a.q_proj(n).split(d, -1):
            scores = rotated(q) @ key.mT / math.sqrt(d)
            visible = torch.cat((prefix.valid, torch.ones(x.shape[:2], dtype=torch.bool)), 1)
            scores = scores.masked_fill(~visible[:, None], -math.inf)
            heads.append(scores.softmax(-1) @ value)
        h = h + gate * a.o_proj(torch.cat(heads, -1))
        n, gate = norm(layer.post_attention_layernorm, h)
        m = layer.mlp
        inner = torch.nn.functional.gelu(m.gate_proj(n), approximate="tanh") * m.up_proj(n)
        h = h + gate * m.down_proj(inner)
    h, _ = norm(expert.norm, h)
    return model.action_out_proj(h)


def test_velocity_agrees_with_the_reference(folder: Path) -> None:
    policy, model = make(folder), tiny_model(kind="pi05").double()
    context = policy.encode_context(policy.encode(random_observations(SPEC, B, 0)))
    assert not context.valid.all()
    x, tau = torch.randn(B, H, N), torch.rand(B)
    with torch.no_grad():
        v, _ = policy.field(context)(x, tau)
        expected = reference_velocity(model, context, x.double(), tau.double())
    assert expected.abs().max() > 0.1
    assert (v - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pi0", "pi05"])
@pytest.mark.parametrize("trunk", [{}, {"lora_rank": 4}], ids=str)
def test_export_and_read_again(trunk: Any, kind: str, tmp_path) -> None:
    """The written directory has the files and keys of its source and gives the same actions."""
    statistics = STATISTICS if kind == "pi05" else None
    source = write_checkpoint(tmp_path / "source", kind=kind, statistics=statistics)
    policy_class = published.FLOW_FAMILIES[kind]
    policy = make(source, policy_class, **trunk)
    perturb(policy, 0.1)
    obs = random_observations(SPEC, B, 0)
    for _ in range(2):
        policy.observe(obs, torch.ones(B, dtype=torch.bool))
    action = policy.act(policy.encode(obs)).action
    policy.export(source, tmp_path / "out")
    again = make(tmp_path / "out", policy_class)
    again.trunk.encoder.load_state_dict(policy.trunk.encoder.state_dict())
    difference = (again.act(again.encode(obs)).action - action).abs().max()
    assert difference < 1e-5 if trunk.get("lora_rank") else difference == 0
    assert action.std() > 0.1
    assert sorted(f.name for f in source.iterdir()) == sorted(
        f.name for f in (tmp_path / "out").iterdir()
    )
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    changed = {name for name, x in before.items() if not torch.equal(x, after[name])}
    vision = {name for name in before if "vision_tower" in name}
    assert "model.action_out_proj.weight" in changed
    assert (vision <= changed) if not trunk else not (vision & changed)


def test_units_are_those_of_the_quantiles(folder: Path) -> None:
    policy = make(folder)
    x = torch.tensor([[[-1.0, -1.0], [1.0, 1.0], [0.0, 0.5]]])
    expected = torch.tensor([[[-0.5, 0.0], [0.5, 2.0], [0.0, 1.5]]])
    context = policy.encode_context(policy.encode(random_observations(SPEC, 1, 0)))
    assert (policy.denormalize_actions(x, context) - expected).abs().max() < 1e-6
    assert (policy.normalize_actions(expected, context) - x).abs().max() < 1e-6
    same = torch.ones(1, dtype=torch.float64)  # a constant is -1, as for lerobot and openpi
    for high in (same, same + pi0_files.OPENPI_MARGIN):
        constant = pi0_files.Statistics.from_quantiles(same, high)
        assert float(constant.normalize(torch.ones(1))) == -1


def test_refusals(tmp_path) -> None:
    other = write_checkpoint(tmp_path / "tiny", kind="pi05")
    config = json.loads((other / "config.json").read_text())
    config["normalization_mapping"] = {"STATE": "MIN_MAX"}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"normalization_mapping\.STATE=MIN_MAX"):
        make(other)
    config["normalization_mapping"] = {}
    (other / "config.json").write_text(json.dumps(config | {"adapt_to_pi_aloha": True}))
    with pytest.raises(ConfigError, match="adapt_to_pi_aloha=true"):
        make(other)
    (other / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["5;"] = 280
    tokenizer["model"]["merges"] = [["5", ";"]]
    tokenizer["pre_tokenizer"]["use_regex"] = False
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="state"):
        make(other)
