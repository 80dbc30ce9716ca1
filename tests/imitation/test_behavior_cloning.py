"""Behaviour cloning: what a clone learns from demonstrations, and its cache."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from embodied_envs.base.errors import ConfigError
from embodied_envs.types import ArraySpec, Box
from embodied_ppo.commands import main
from embodied_ppo.data.lerobot_reader import Demonstrations, open_folder, read
from embodied_ppo.data.lerobot_writer import Writer
from embodied_ppo.imitation import behavior_cloning, expert_demos
from embodied_ppo.options.schema import CloningConfig, Config, ModelConfig
from embodied_ppo.policies.vla.action_tokens import TokenVLA
from embodied_ppo.training import checkpoint
from tests.policies.vla.test_trunk import SENTENCES, SPEC, A, C, make

STEPS = CloningConfig(steps=150, batch_size=16, lr=3e-3, foresight_steps=100)


def demonstrations(episodes: int = 40, length: int = 6) -> Demonstrations:
    """A bright patch is left or right; the sentence selects whether to move to it or away from it.

    The final state follows from both.
    """
    g = torch.Generator().manual_seed(0)
    frames = episodes * length
    right = torch.randint(0, 2, (episodes,), generator=g)
    away = torch.randint(0, 2, (episodes,), generator=g)
    way = ((2 * right - 1) * (1 - 2 * away)).float().repeat_interleave(length)
    images = torch.zeros(frames, 16, 24, 3, dtype=torch.uint8)
    for i in range(frames):
        images[i, 4:8, (16 if right[i // length] else 4) :][:, :4] = 255
    t = torch.arange(length).repeat(episodes).float()
    state = torch.zeros(frames, 5)
    state[:, 0] = way * t / length
    action = torch.stack((0.8 * way, torch.zeros(frames)), dim=1)
    episode = torch.arange(episodes).repeat_interleave(length)
    return Demonstrations(
        {"front": images}, state, action, episode, away[episode], SENTENCES[:2], 20
    )


@pytest.mark.slow
def test_clone_imitates_the_demonstrations_and_reports_losses() -> None:
    policy, demos = make(), demonstrations()
    table = policy.trunk.table
    before = behavior_cloning._held_out_loss(policy, demos, torch.arange(240))
    lines: list[str] = []
    result = behavior_cloning.clone(policy, demos, STEPS, seed=0, notice=lines.append)
    assert result["cloning_loss"] < 0.3 and result["held_out_loss"] < 0.5 < before
    assert policy.trunk.table is table  # the simulator's sentences are restored
    policy.set_sentences(demos.instructions)
    obs = {
        "front": demos.images["front"].permute(0, 3, 1, 2),
        "state": demos.state,
        "instruction": demos.instruction,
    }
    action = policy.act(policy.encode(obs)).action.view(240, -1, A)[:, 0]
    assert ((action - demos.action).abs() < 0.15).float().mean() > 0.95
    assert lines[0].startswith("auxiliary loss: step 10 of 100, loss ")
    assert lines[-2].startswith("cloning: step 150 of 150")
    moments = policy.trunk.encoder.moments
    assert moments is not None
    assert torch.allclose(moments.mean.float(), demos.state.mean(0), atol=1e-4)


@pytest.mark.slow
def test_cloning_is_deterministic_and_depends_on_its_options(monkeypatch) -> None:
    def weights(seed: int = 0, **options: Any) -> float:
        policy = make()
        torch.rand(next(counted))  # other code draws random numbers before
        config = replace(STEPS, **{"steps": 5, "foresight_steps": 5, **options})
        behavior_cloning.clone(policy, demonstrations(), config, seed=seed)
        return sum(float(p.detach().double().abs().sum()) for p in policy.parameters())

    counted = itertools.count()
    base = weights()
    assert weights() == base
    cloning_only = weights(foresight_steps=0)
    assert len({base, cloning_only, weights(seed=1), weights(batch_size=8), weights(lr=1e-3)}) == 5
    # words are masked only while the auxiliary loss is trained alone
    monkeypatch.setattr(behavior_cloning, "MASKED_WORDS", 0.0)
    assert weights() != base and weights(foresight_steps=0) == cloning_only


def test_targets_of_the_auxiliary_loss() -> None:
    episode = torch.tensor([0, 0, 0, 2, 2, 7])
    frames = [[1, 2]] * 3 + [[3, 4]] * 2 + [[5, 5]]
    assert behavior_cloning._frames_at(episode, (0.5, 1.0)).tolist() == frames
    images = torch.randint(0, 256, (3, 8, 12, 3), dtype=torch.uint8)
    cells = behavior_cloning._cells(images)  # in row-major order
    assert cells.shape == (3, 6, 3)
    assert (cells[2, 4].float() - images[2, 4:8, 4:8].float().mean((0, 1))).abs().max() <= 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": torch.zeros(240, 3)}, "action.*3.*2"),
        ({"images": {}}, r"front.*none.*\(16, 24, 3\).*env\.cameras"),
        ({"state": torch.zeros(240, 4)}, "state.*4.*5"),
        ({"action": torch.full((240, 2), 25.0)}, r"100\.0% .* episode 0 action \[0\] = 25"),
        ({"action": torch.eye(240)[:, :2] * 1e9}, r"0\.8% .* action \[0\] = 1e\+09"),
    ],
)
def test_demonstrations_of_another_robot_are_refused(change: dict[str, Any], message: str) -> None:
    policy = make()
    with pytest.raises(ConfigError, match=f"cloning.dataset.*{message}"):
        behavior_cloning.clone(policy, replace(demonstrations(), **change), STEPS, seed=0)


@pytest.mark.slow
def test_clone_learns_from_images_on_disk(tmp_path) -> None:
    """A buffer of 30 of 240 frames teaches as much as all frames in memory."""
    demos = demonstrations()
    with Writer(
        tmp_path, fps=20, state=list("abcde"), action=["x", "y"], cameras={"front": (16, 24)}
    ) as writer:
        for i in range(40):
            frames = demos.episode == i
            text = demos.instructions[int(demos.instruction[frames][0])]
            state, action = demos.state[frames].numpy(), demos.action[frames].numpy()
            images = {"front": demos.images["front"][frames].numpy()}
            writer.add(images, state, action, text)
    config, losses = replace(STEPS, steps=15, foresight_steps=15, shuffle_buffer=30), []
    for seed in (0, 0, 1):
        policy = make()
        losses.append(behavior_cloning.clone(policy, open_folder(tmp_path), config, seed=seed))
    assert losses[0] == losses[1] != losses[2]
    in_memory = behavior_cloning.clone(
        make(), read(tmp_path), replace(config, shuffle_buffer=None), seed=0
    )
    assert losses[0] == pytest.approx(in_memory, abs=0.3)


def relabelled(**spec: ArraySpec) -> Any:
    """Return a policy with other observations and the weights of ``make()``, name for name."""
    config = ModelConfig(policy="token", bins=16, width=32)
    box = Box((-1.0,) * (C * A), (1.0,) * (C * A))
    policy = TokenVLA(
        {**spec, "instruction": SPEC["instruction"]}, box, config, chunk=C, sentences=SENTENCES
    )
    policy.load_state_dict(make().state_dict())
    return policy


@pytest.mark.parametrize(
    "spec",
    [
        {"joints": ArraySpec((2, 2)), "gripper": ArraySpec((1,)), "front": SPEC["front"]},
        {"state": SPEC["state"], "front": ArraySpec((16, 24, 3), torch.uint8)},
    ],
    ids=["a matrix and a vector", "channels last"],
)
def test_names_and_layouts_of_observations_do_not_change_cloning(
    spec: dict[str, ArraySpec],
) -> None:
    policies, lines = (make(), relabelled(**spec)), []
    config = replace(STEPS, steps=3, foresight_steps=3)
    result = [
        behavior_cloning.clone(p, demonstrations(), config, seed=0, notice=lines.append)
        for p in policies
    ]
    assert result[0] == result[1]
    a, b = (p.state_dict() for p in policies)
    assert all(torch.equal(a[k], b[k]) for k in a)
    read = "cloning: the dataset's observation.state is read as joints, then gripper"
    assert (read in lines) == ("joints" in spec)


def test_changed_data_are_cloned_again(tmp_path) -> None:
    name = lambda: expert_demos._clone_name(make(), Config(), tmp_path, None)
    names = []
    for data in (b"1", b"22"):
        (tmp_path / "episode_000000.parquet").write_bytes(data)
        names += [name(), name()]
    assert names[0] == names[1] != names[2] == names[3]


@pytest.mark.slow
def test_command_records_and_clones_and_reuses_both(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("EMBODIED_PPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    words = ["train", "experiment=tabletop_token", "updates=1", "eval_every=0", "env.num_envs=4"]
    words += ["algorithm.horizon=2", "algorithm.global_batch_size=8", "model.width=16"]
    words += [f"evaluation.{x}" for x in ("episodes=4", "num_envs=4", "video_episodes=0")]
    words += [
        f"cloning.{x}" for x in ("steps=2", "foresight_steps=2", "episodes=6", "batch_size=4")
    ]
    assert main.main([*words, "run_dir=one"]) == 0
    first = capsys.readouterr().err
    assert "cloning: recording 6 demonstrations into" in first and "of held-out episodes" in first
    assert main.main([*words, "run_dir=two"]) == 0
    second = capsys.readouterr().err
    assert "recording" not in second and "cloning: taken from" in second
    (cached,) = (tmp_path / "cache" / "cloned").iterdir()
    assert cached.suffix == ".safetensors"
    a, b = (checkpoint.open_checkpoint(run).policy() for run in ("one", "two"))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    # one option changes the clone, the other does not
    assert main.main([*words, "run_dir=four", "model.depth=1"]) == 0
    assert "taken from" not in capsys.readouterr().err
    assert main.main([*words, "run_dir=five", "model.detach_value=false"]) == 0
    assert "cloning: taken from" in capsys.readouterr().err
    # a resumed run loads its own weights
    assert main.main([*words, "resume=one", "run_dir=three", "updates=2"]) == 0
    assert "cloning:" not in capsys.readouterr().err
