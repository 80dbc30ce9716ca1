"""Policies over action tokens on tiny directories of the published layout, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
from run_helpers import perturb, run_command
from safetensors.torch import load_file, save_file
from tiny_openvla_checkpoint import SIDE, write_checkpoint
from torch import Tensor
from vla_policy_checks import check_evaluate_reproduces_act, random_observations

from embodied_envs.base import tree
from embodied_envs.base.errors import CheckpointError, ConfigError
from embodied_envs.types import ArraySpec, Box
from embodied_ppo.commands import main
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies import lora
from embodied_ppo.policies.vla.pretrained import CheckpointVLA
from embodied_ppo.training import checkpoint

C, A, B, K = 2, 2, 5, 16
IMAGE = ArraySpec((3, SIDE, SIDE), torch.uint8)
SPEC = {"state": ArraySpec((5,)), "front": IMAGE, "instruction": ArraySpec((), torch.int64)}
SENTENCES = ("push the red block", "lift it", "reach the blue block, please")
DECODE = ("parallel", "autoregressive")
ADAPTED = {"lora_rank": 4}


@pytest.fixture(scope="session")
def published(tmp_path_factory) -> Path:
    """Return a directory in the published layout."""
    return write_checkpoint(tmp_path_factory.mktemp("published") / "openvla")


def policy_of(
    folder: Path, *, perturbed: bool = True, spec: Any = SPEC, **options: Any
) -> CheckpointVLA:
    options = {"unnorm_key": "bridge_orig", "bins": K} | options
    config = ModelConfig(policy="token", checkpoint=str(folder), **options)
    torch.manual_seed(0)
    box = Box((-1.0,) * (C * A), (1.0,) * (C * A))
    policy = CheckpointVLA(spec, box, config, chunk=C, sentences=SENTENCES)
    if perturbed:
        perturb(policy, 0.1)
    return policy


def observations(rows: int = B, seed: int = 0) -> dict[str, Tensor]:
    return random_observations(SPEC, rows, seed)


def sample(policy: CheckpointVLA, inputs: dict[str, Tensor], seed: int = 1) -> Any:
    return policy.act(inputs, noise=policy.noise(B, torch.Generator().manual_seed(seed)))


# ----------------------------------------------------------------------------- act and evaluate
@pytest.mark.parametrize("decode", DECODE)
def test_evaluate_reproduces_act_for_any_micro_batch(published: Path, decode: str) -> None:
    """Compare decoding with a cache and teacher forcing, for prompts of several lengths."""
    policy = policy_of(published, decode=decode, temperature=1.5)
    inputs = policy.encode(observations())
    for d in (sample(policy, inputs), policy.act(inputs)):
        check_evaluate_reproduces_act(policy, inputs, d, shape=(B, C, A), sizes=(B, 2, 1))
    assert d.value.abs().max() > 0


@pytest.mark.parametrize(("frozen", "decode"), [(True, DECODE[0]), (False, DECODE[1])])
def test_evaluate_reproduces_act_with_adapters_and_frozen_towers(
    published: Path, frozen: bool, decode: str
) -> None:
    policy = policy_of(published, freeze_trunk=frozen, decode=decode, **ADAPTED)
    policy.FROZEN_ROWS = 2
    inputs = policy.encode(observations())
    assert "/visual" in inputs and "/images" not in inputs
    d = sample(policy, inputs)
    for i in range(B):
        cut = slice(i, i + 1)
        out = policy.evaluate(tree.index(inputs, cut), d.action[cut], tree.index(d.replay, cut))
        assert (out.log_prob - d.log_prob[cut]).abs().max() < 1e-5


def test_features_of_untrained_towers_serve_all_epochs(published: Path, monkeypatch) -> None:
    """Adapters leave the towers as they are: images are encoded once, and nothing changes."""
    policy = policy_of(published, **ADAPTED)
    kept = policy.encode(observations())
    monkeypatch.setattr(policy, "FEATURE_SHARE", 0.0)
    images = policy.encode(observations())
    assert "/images" in images and "/images" not in kept
    monkeypatch.setattr(policy, "FEATURE_SHARE", 0.25)
    monkeypatch.setattr(policy, "FROZEN_ROWS", 2)
    cut = policy.encode(observations())
    assert cut.keys() == kept.keys()
    for name, x in cut.items():
        torch.testing.assert_close(x, kept[name])
    d = sample(policy, images)
    gradients, outputs = [], []
    for inputs in (kept, images):
        policy.zero_grad()
        outputs.append(policy.evaluate(inputs, d.action, d.replay))
        (outputs[-1].log_prob.sum() + outputs[-1].value.sum()).backward()
        gradients.append([p.grad for p in policy.parameters() if p.requires_grad])
    assert torch.equal(outputs[0].log_prob, outputs[1].log_prob)
    assert torch.equal(outputs[0].value, outputs[1].value)
    for g, h in zip(*gradients, strict=True):
        assert g is not None and h is not None and torch.equal(g, h)
    monkeypatch.setattr(policy.body, "encode_images", None)  # it is not called again
    policy.evaluate(kept, d.action, d.replay)


# ------------------------------------------------------------------------------------- training
@pytest.mark.parametrize(
    "options", [{}, {"freeze_trunk": True}, ADAPTED, ADAPTED | {"dtype": "bfloat16"}], ids=str
)
def test_parameter_groups_are_disjoint_and_complete(
    published: Path, options: dict[str, Any]
) -> None:
    policy = policy_of(published, **options)
    groups = policy.parameter_groups()
    ids = [id(p) for group in groups.values() for p in group]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(p) for p in policy.parameters() if p.requires_grad}
    assert all(p.dtype == torch.float32 for group in groups.values() for p in group)
    frozen = [p for p in policy.parameters() if not p.requires_grad and p.is_floating_point()]
    assert all(p.dtype == getattr(torch, options.get("dtype", "float32")) for p in frozen)
    names = {
        name
        for name, p in policy.named_parameters()
        if p.requires_grad and not name.startswith("value_head")
    }
    if "lora_rank" in options:
        assert all("lora_" in name or name in ("body.head", "body.query") for name in names)
        # layers x (A, B) x linear layers
        assert len([name for name in names if "lora_" in name]) == 2 * 2 * 7
    vision = {id(p) for p in policy.body.vision_parameters()}
    assert bool(vision & set(ids)) == (not options)
    inputs = policy.encode(observations())
    d = sample(policy, inputs)
    out = policy.evaluate(inputs, d.action, d.replay)
    (out.log_prob.sum() + out.value.sum()).backward()
    without_gradient = {name for name in names if policy.get_parameter(name).grad is None}
    # SigLIP's pooling, which PaliGemma does not read
    assert all(".vision_tower." in name for name in without_gradient)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, ADAPTED], ids=str)
def test_recomputed_layers_give_equal_gradients_and_store_less(
    published: Path, options: dict[str, Any]
) -> None:
    grads, stored = [], []
    for recompute in (False, True):
        policy = policy_of(published, gradient_checkpointing=recompute, **options)
        inputs = policy.encode(observations())
        d = sample(policy, inputs)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, s=saved: s.append(x.numel()) or x, lambda x: x
        ):
            out = policy.evaluate(inputs, d.action, d.replay)
        stored.append(sum(saved))
        out.log_prob.sum().backward()
        grads.append({n: p.grad for n, p in policy.named_parameters() if p.grad is not None})
        assert not any(m.training for m in policy.modules() if isinstance(m, torch.nn.Dropout))
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad)
    assert stored[1] < 0.7 * stored[0]


# ----------------------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("options", [{}, ADAPTED], ids=str)
def test_checkpoint_holds_trained_parameters(
    published: Path, options: dict[str, Any], tmp_path
) -> None:
    policy = policy_of(published, **options)
    other = policy_of(published, perturbed=False, **options)
    state = policy.state_dict()
    names = {name for name, p in policy.named_parameters() if p.requires_grad}
    if options:
        assert set(state) == names | {lora.BASE}
    else:
        assert set(state) >= names and lora.BASE not in state
    torch.save(state, tmp_path / "policy.pt")
    checkpoint.load_weights(
        other, torch.load(tmp_path / "policy.pt", weights_only=True), "policy.pt"
    )
    inputs = policy.encode(observations())
    assert torch.equal(sample(policy, inputs).log_prob, sample(other, inputs).log_prob)


def test_adapters_of_other_base_weights_are_refused(tmp_path) -> None:
    folder = write_checkpoint(tmp_path / "openvla")
    policy = policy_of(folder, **ADAPTED)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"note": "another"}))
    other = policy_of(folder, **ADAPTED)
    with pytest.raises(CheckpointError, match=r"model\.checkpoint=\S+openvla"):
        checkpoint.load_weights(other, policy.state_dict(), "policy.pt")
    with pytest.raises(CheckpointError, match=r"lora_A.*this model needs \(2, 16\)"):
        checkpoint.load_weights(policy_of(folder, lora_rank=2), policy.state_dict(), "policy.pt")
    with pytest.raises(CheckpointError, match=r"has no tensor '\S+lora_A.default.weight'"):
        checkpoint.load_weights(other, policy_of(folder).state_dict(), "policy.pt")


@pytest.mark.parametrize(
    ("decode", "options"), [(DECODE[0], ADAPTED), (DECODE[1], {"freeze_trunk": True})], ids=str
)
def test_openvla_is_written_in_its_own_layout(
    published: Path, decode: str, options: dict[str, Any], tmp_path
) -> None:
    """OpenVLA (autoregressive) and OFT (parallel): the same keys, shapes and log-probabilities."""
    policy = policy_of(published, decode=decode, **options)
    inputs = policy.encode(observations())
    d = sample(policy, inputs)
    expected = policy.evaluate(inputs, d.action, d.replay).log_prob
    policy.export(published, tmp_path / "openvla")
    again = policy_of(tmp_path / "openvla", decode=decode, perturbed=False)
    out = again.evaluate(again.encode(observations()), d.action, d.replay).log_prob
    assert (out - expected).abs().max() < 1e-4 if options == ADAPTED else torch.equal(out, expected)
    before, after = (load_file(f / "model.safetensors") for f in (published, tmp_path / "openvla"))
    assert {n: x.shape for n, x in before.items()} == {n: x.shape for n, x in after.items()}
    configs = [
        json.loads((f / "config.json").read_text()) for f in (published, tmp_path / "openvla")
    ]
    assert configs[0] == configs[1]
    changed = {name for name, x in before.items() if not torch.equal(x, after[name])}
    vision = {name for name in before if name.startswith(("vision", "projector"))}
    assert changed and not (vision & changed if options else set())


# ---------------------------------------------------------------------------- images, prompts, bins
def test_openvla_actions_are_unnormalised(published: Path) -> None:
    """Bin 0 of 16 edges has the centre x = -1 + 1/15.

    q01 = -2 and q99 = 2 give 2 x; q01 = 0 and q99 = 1 give (x + 1) / 2.
    """
    policy = policy_of(published)
    action = policy.actions_of(torch.zeros(1, C, A, dtype=torch.int64))
    x = -1 + 1 / 15
    torch.testing.assert_close(action, torch.tensor([2 * x, (x + 1) / 2]).expand(1, C, A))
    bins = torch.randint(0, K - 1, (B, C, A), generator=torch.Generator())
    assert torch.equal(policy.bins_of(policy.actions_of(bins)), bins)
    other = policy_of(published, unnorm_key="tabletop")
    assert not torch.equal(other.actions_of(bins), policy.actions_of(bins))


# ------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (None, r"config\.json"),
        ({"type": "pi0"}, r"pi0.*model\.policy=flow"),
        ({"model_type": "llama"}, r"llama.*model\.policy=token"),
    ],
)
def test_unsupported_directories_are_refused(
    raw: dict[str, Any] | None, named: str, tmp_path
) -> None:
    if raw is not None:
        (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=named):
        policy_of(tmp_path)


def test_missing_weights_are_refused(tmp_path) -> None:
    folder = write_checkpoint(tmp_path / "openvla")
    weights = load_file(folder / "model.safetensors")
    missing = next(name for name in weights if "q_proj" in name)
    del weights[missing]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.checkpoint=\S+: .*q_proj\.weight"):
        policy_of(folder)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"unnorm_key": "bridge"}, r"model\.unnorm_key=bridge.*bridge_orig"),
        ({"bins": 256}, r"model\.bins=256.*16"),
        ({"spec": {"state": ArraySpec((5,))}}, r"env\.cameras"),
    ],
)
def test_options_that_do_not_fit_the_checkpoint_are_refused(
    published: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        policy_of(published, **options)


# ------------------------------------------------------------------------------------- commands
TINY = run_helpers.words(f"""experiment=tabletop_token model.bins={K} cloning.steps=0
    env.num_envs=4 env.max_episode_steps=8 env_steps=null updates=2 algorithm.horizon=4
    algorithm.global_batch_size=8 algorithm.micro_batch_size=4 eval_every=2 save_every=1
    evaluation.episodes=2 evaluation.num_envs=2 evaluation.video_episodes=0 device=cpu""")


def add_tabletop_statistics(folder: Path) -> Path:
    """Write statistics of a dataset with four dimensions, as a fine-tuned model has them."""
    stats = {"four": {"action": {"q01": [-1.0] * 4, "q99": [1.0] * 4}}}
    (folder / "dataset_statistics.json").write_text(json.dumps(stats))
    return folder


@pytest.mark.slow
def test_train_evaluate_and_export(published: Path, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    options = run_helpers.words("""model.lora_rank=2 run_dir=run algorithm.use_kl_loss=true
        model.unnorm_key=four model.decode=autoregressive""")
    options += [f"model.checkpoint={published}"]
    add_tabletop_statistics(published)
    summary = run_command(capsys, "train", *TINY, *options)
    assert summary["updates"] == 2 and summary["env_steps"] == 2 * 4 * 4 * 4
    size = (Path(summary["checkpoint"]) / "policy.pt").stat().st_size
    assert size < 300_000  # adapters and heads
    evaluation = run_command(
        capsys, "evaluate", "checkpoint=run", "episodes=2", "num_envs=2", "video=false"
    )
    assert evaluation["eval/return"] == pytest.approx(summary["final_return"])
    written = run_command(capsys, "export", "checkpoint=run", "out=exported")
    assert written["logit_difference"] < 1e-4
    adapter = ("export", "checkpoint=run", "lora=adapter", "out=adapter")
    assert run_command(capsys, *adapter)["logit_difference"] == 0
    written = load_file("adapter/adapter_model.safetensors")
    assert len(written) == 2 * 2 * 7  # A and B of two layers
    layer = "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert written[layer].shape == (2, 16)
    assert not Path("adapter/model.safetensors").exists()
    Path("new").touch()
    assert {file.stat().st_mode for file in Path("exported").iterdir()} == {
        Path("new").stat().st_mode
    }, "permissions follow the umask"
    again = run_command(
        capsys,
        "train",
        *TINY,
        *options[1:],
        "model.checkpoint=exported",
        "run_dir=second",
        "updates=1",
    )
    assert again["updates"] == 1
    # The adapter is read as the merged model is: same actions, same training, same export.
    run_command(capsys, "train", *TINY, *options[1:], "model.checkpoint=adapter", "run_dir=third")
    run_command(capsys, "train", *TINY, *options[1:], "model.checkpoint=exported", "run_dir=four")
    returns = [
        run_command(capsys, "evaluate", f"checkpoint={x}", "video=false", "episodes=2")[
            "eval/return"
        ]
        for x in ("third", "four")
    ]
    assert returns[0] == pytest.approx(returns[1])
    assert run_command(capsys, "export", "checkpoint=third", "out=b")["logit_difference"] < 1e-4
    run_command(capsys, "plan", *TINY, *options[1:], "model.checkpoint=adapter")
    assert not (Path("b") / "adapter_config.json").exists()
    assert main.main(["export", "checkpoint=third", "lora=adapter", "out=c"]) == 2


def test_gripper_uses_the_sign_of_the_simulator(tmp_path) -> None:
    """0 is closed and 1 open in OpenVLA's datasets; 1 closes and -1 opens in LIBERO."""
    folder = write_checkpoint(tmp_path / "openvla")
    stats = {"action": {"q01": [-1.0, 0.0], "q99": [1.0, 1.0], "mask": [True, False]}}
    (folder / "dataset_statistics.json").write_text(json.dumps({"gripper": stats}))
    config = ModelConfig(policy="token", checkpoint=str(folder), bins=K, unnorm_key="gripper")
    box = Box((-1.0,) * 4, (1.0,) * 4)
    policy = CheckpointVLA(SPEC, box, config, chunk=C, sentences=SENTENCES, closes=1.0)
    bins = torch.arange(K).view(K, 1, 1).expand(K, C, A)
    assert policy.actions is not None
    raw, action = policy.actions.unscaled(policy.actions.values(bins)), policy.actions_of(bins)
    assert torch.equal(action[..., 0], raw[..., 0])
    assert torch.equal(action[..., 1], torch.where(raw[..., 1] > 0.5, -1.0, 1.0))
    bins = policy.bins_of(torch.tensor([[[0.0, 1.0], [0.0, -1.0]]]))  # closed is 0, open is 1
    assert torch.equal(policy.actions_of(bins)[..., 1], torch.tensor([[1.0, -1.0]]))
