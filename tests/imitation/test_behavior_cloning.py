"""Behaviour cloning: what a clone learns from demonstrations, and its cache."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_ppo.commands import main
from embodied_ppo.config.schema import CloningConfig, Config, EnvConfig, ModelConfig
from embodied_ppo.core.types import ArraySpec, Box, ConfigError
from embodied_ppo.data.lerobot_reader import Demonstrations
from embodied_ppo.imitation import behavior_cloning, expert_demos
from embodied_ppo.models.vla.action_tokens import TokenVLA
from embodied_ppo.models.vla.trunk import MASKED_WORD, sentence_table
from embodied_ppo.training import checkpoint
from tests.models.vla.test_trunk import SENTENCES, SPEC, A, C, make

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
    table, before = (
        policy.trunk.table,
        behavior_cloning._held_out_loss(policy, demos, torch.arange(240)),
    )
    lines: list[str] = []
    result = behavior_cloning.clone(policy, demos, STEPS, seed=0, notice=lines.append)
    assert (
        result.steps == 150
        and result.loss < 0.3
        and result.held_out_loss < 0.5 < before
        and result.cpu_s > 0
    )
    assert policy.trunk.table is table  # the simulator's sentences are restored
    policy.set_sentences(demos.instructions)
    obs = {
        "front": demos.images["front"].permute(0, 3, 1, 2),
        "state": demos.state,
        "instruction": demos.instruction,
    }
    action = policy.act(policy.encode(obs)).action.view(240, -1, A)[:, 0]
    assert ((action - demos.action).abs() < 0.15).float().mean() > 0.95
    assert lines[0].startswith("auxiliary loss: step 10 of 100, loss ") and lines[-1].startswith(
        "cloning: step 150 of 150"
    )
    moments = policy.trunk.encoder.moments
    assert moments is not None and torch.allclose(
        moments.mean.float(), demos.state.mean(0), atol=1e-4
    )


@pytest.mark.slow
def test_cloning_is_deterministic_and_depends_on_its_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    monkeypatch.setattr(
        behavior_cloning, "MASKED_WORDS", 0.0
    )  # words are masked only while the auxiliary loss is trained alone
    assert weights() != base and weights(foresight_steps=0) == cloning_only


def test_targets_of_the_auxiliary_loss() -> None:
    episode = torch.tensor([0, 0, 0, 2, 2, 7])
    assert behavior_cloning._frames_at(episode, (0.5, 1.0)).tolist() == [
        [1, 2],
        [1, 2],
        [1, 2],
        [3, 4],
        [3, 4],
        [5, 5],
    ]
    images = torch.randint(0, 256, (3, 8, 12, 3), dtype=torch.uint8)
    cells = behavior_cloning._cells(images)  # in row-major order
    assert cells.shape == (3, 6, 3)
    assert (cells[2, 4].float() - images[2, 4:8, 4:8].float().mean((0, 1))).abs().max() <= 0.5


def test_share_of_masked_words() -> None:
    words = torch.tensor([[5, 6, 7, 0, 0]]).expand(4000, 5)
    masked = behavior_cloning._mask_words(words, torch.Generator().manual_seed(0))
    assert torch.equal(masked[:, 3:], words[:, 3:])
    is_masked = masked[:, :3] == MASKED_WORD
    assert ((masked == words)[:, :3] | is_masked).all()
    assert ((is_masked.float().mean(0) - behavior_cloning.MASKED_WORDS).abs() < 0.03).all()


def test_cloning_initialises_the_words_of_the_demonstrations() -> None:
    policy = make()
    with torch.no_grad():
        policy.trunk.words.weight.zero_()
    demos = demonstrations()
    behavior_cloning.clone(policy, demos, replace(STEPS, steps=1), seed=0)
    lines = sentence_table(demos.instructions, 64).unique()
    silent = (policy.trunk.words.weight == 0).all(1)
    assert set(range(1, 64)) - set(lines.tolist()) == set(silent.nonzero().flatten().tolist()) - {0}


@pytest.mark.slow
def test_colour_changes_are_predicted() -> None:
    """The patch in the sentence disappears and another appears; the state has no information."""
    episodes, g = 400, torch.Generator().manual_seed(0)
    images = torch.zeros(2 * episodes, 16, 24, 3, dtype=torch.uint8)
    instruction = torch.randint(0, 2, (episodes,), generator=g).repeat_interleave(2)
    for episode in range(
        episodes
    ):  # two of six squares are red and blue; the one in the sentence becomes dark
        for patch, square in enumerate(torch.randperm(6, generator=g)[:2].tolist()):
            y, x = 8 * (square // 3), 8 * (square % 3)
            images[2 * episode, y : y + 4, x : x + 4, 2 * patch] = 255
            if instruction[2 * episode] != patch:
                images[2 * episode + 1, y : y + 4, x : x + 4, 2 * patch] = 255
    demos = Demonstrations(
        {"front": images},
        torch.zeros(2 * episodes, 5),
        torch.zeros(2 * episodes, A),
        torch.arange(episodes).repeat_interleave(2),
        instruction,
        ("take the red one", "take the blue one"),
        20,
    )
    policy = make(word_buckets=256)  # with 64, red and blue share a bucket
    policy.set_sentences(demos.instructions)
    frames = torch.arange(2 * episodes)
    config = replace(STEPS, batch_size=64)
    run = behavior_cloning._CloningRun(
        policy, demos, frames, config, 0, lambda text: None, lambda *a: None
    )
    begun = torch.arange(0, 2 * episodes, 2)
    train, test = begun[:350], begun[350:]
    run.train(train, 300, "auxiliary loss", 0)
    with torch.no_grad():
        grounding = policy.encode_context(behavior_cloning._inputs(policy, demos, test)).grounding
        assert grounding is not None and grounding.cells is not None and run.cell_head is not None
        off = (run.cell_head(grounding.cells) - run._change(test) / run.change_std).square().mean()
    assert off < 0.3 * (run._change(test) / run.change_std).square().mean(), (
        off
    )  # without the words half are correct


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": torch.zeros(240, 3)}, "its actions have 3 dimensions, the task's 2"),
        (
            {"images": {"wrist": torch.zeros(240, 16, 24, 3, dtype=torch.uint8)}},
            "holds no camera 'front', only wrist",
        ),
        ({"images": {}}, r"holds no camera 'front', only none; .*env.cameras=\[front\]"),
        (
            {"images": {"front": torch.zeros(240, 8, 8, 3, dtype=torch.uint8)}},
            "camera 'front' have 8 x 8 pixels, the task's have 16 x 24; set env.image_size",
        ),
        (
            {"state": torch.zeros(240, 4)},
            r"its observation.state has 4 numbers, the task has state \(5\); name",
        ),
    ],
)
def test_demonstrations_of_another_robot_are_refused(change: dict[str, Any], message: str) -> None:
    policy = make()
    with pytest.raises(ConfigError, match=f"cloning.dataset.*{message}"):
        behavior_cloning.clone(policy, replace(demonstrations(), **change), STEPS, seed=0)


def relabelled(**spec: ArraySpec) -> Any:
    """Return a policy with other observations and the weights of ``make()``, name for name."""
    config = ModelConfig(policy="token", bins=16, width=32, word_buckets=64)
    box = Box((-1.0,) * (C * A), (1.0,) * (C * A))
    policy = TokenVLA(
        {**spec, "instruction": SPEC["instruction"]}, box, config, chunk=C, sentences=SENTENCES
    )
    policy.load_state_dict(make().state_dict())
    return policy


@pytest.mark.parametrize(
    "spec",
    [
        {"proprio": SPEC["state"], "front": SPEC["front"]},
        {"joints": ArraySpec((3,)), "front": SPEC["front"], "gripper": ArraySpec((2,))},
        {"joints": ArraySpec((2, 2)), "gripper": ArraySpec((1,)), "front": SPEC["front"]},
        {"state": SPEC["state"], "front": ArraySpec((16, 24, 3), torch.uint8)},
    ],
    ids=["another name", "two vectors", "a matrix", "channels last"],
)
def test_names_and_layouts_of_observations_do_not_change_cloning(
    spec: dict[str, ArraySpec],
) -> None:
    policies, lines, config = (
        (make(), relabelled(**spec)),
        [],
        replace(STEPS, steps=3, foresight_steps=3),
    )
    result = [
        behavior_cloning.clone(p, demonstrations(), config, seed=0, notice=lines.append)
        for p in policies
    ]
    assert result[0].loss == result[1].loss and result[0].held_out_loss == result[1].held_out_loss
    a, b = (p.state_dict() for p in policies)
    assert all(torch.equal(a[k], b[k]) for k in a)
    read = "cloning: the dataset's observation.state is read as joints, then gripper"
    assert (read in lines) == ("joints" in spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"front": ArraySpec((24, 16, 3), torch.uint8), "state": SPEC["state"]},
            "have 16 x 24 pixels, the task's have 24 x 16",
        ),
        (
            {"front": ArraySpec((1, 16, 24), torch.uint8), "state": SPEC["state"]},
            "have 3 channels .*, the task's have 1",
        ),
        (
            {"front": SPEC["front"], "joints": ArraySpec((4,)), "gripper": ArraySpec((2,))},
            r"observation.state has 5 numbers, the task has joints \(4\) \+ gripper \(2\) = 6",
        ),
    ],
)
def test_mismatched_observations_are_refused_by_name(
    spec: dict[str, ArraySpec], message: str
) -> None:
    box = Box((-1.0,) * (C * A), (1.0,) * (C * A))
    policy = TokenVLA(spec, box, ModelConfig(policy="token", width=32), chunk=C, sentences=())
    with pytest.raises(ConfigError, match=f"cloning.dataset.*{message}"):
        behavior_cloning.check(policy, demonstrations())


def test_policy_with_images_only_needs_no_state() -> None:
    box = Box((-1.0,) * (C * A), (1.0,) * (C * A))
    policy = TokenVLA(
        {"front": SPEC["front"]}, box, ModelConfig(policy="token", width=32), chunk=C, sentences=()
    )
    steps: list[tuple[str, int, int]] = []
    result = behavior_cloning.clone(
        policy,
        demonstrations(),
        replace(STEPS, steps=2, foresight_steps=3),
        seed=0,
        advance=lambda *step: steps.append(step),
    )
    assert result.loss > 0
    assert steps == [
        *(("auxiliary loss", i, 3) for i in (1, 2, 3)),
        ("cloning", 1, 2),
        ("cloning", 2, 2),
    ]


@pytest.mark.slow
def test_command_records_and_clones_and_reuses_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("EMBODIED_PPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    words = [
        "train",
        "experiment=tabletop_token",
        "updates=1",
        "eval_every=0",
        "env.num_envs=4",
        "evaluation.episodes=4",
    ]
    words += [
        "algorithm.horizon=2",
        "algorithm.global_batch_size=8",
        "evaluation.num_envs=4",
        "model.width=16",
    ]
    words += [
        f"cloning.{x}" for x in ("steps=2", "foresight_steps=2", "episodes=6", "batch_size=4")
    ]
    words += ["evaluation.video_episodes=0"]
    assert main.main([*words, "run_dir=one"]) == 0
    first = capsys.readouterr().err
    assert "cloning: recording 6 demonstrations into" in first and "of held-out episodes" in first
    assert main.main([*words, "run_dir=two"]) == 0
    second = capsys.readouterr().err
    assert "recording" not in second and "cloning: taken from" in second
    assert sorted(path.suffix for path in (tmp_path / "cache" / "cloned").iterdir()) == [
        ".json",
        ".safetensors",
    ]
    a, b = (checkpoint.open_checkpoint(run).policy() for run in ("one", "two"))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    # one option changes the clone, the other does not
    assert main.main([*words, "run_dir=four", "model.heads=2"]) == 0
    assert "taken from" not in capsys.readouterr().err
    assert main.main([*words, "run_dir=five", "cloning.coef=0.1", "model.detach_value=false"]) == 0
    assert "cloning: taken from" in capsys.readouterr().err
    # a resumed run loads its own weights
    assert main.main([*words, "resume=one", "run_dir=three", "updates=2"]) == 0
    assert "cloning:" not in capsys.readouterr().err


def test_tasks_without_an_expert_need_a_dataset(tmp_path: Path) -> None:
    config = Config(
        env=EnvConfig(id="HalfCheetah-v5"),
        cloning=CloningConfig(steps=1),
        model=ModelConfig(policy="token"),
    )
    with pytest.raises(
        ConfigError, match=r"env\.id=HalfCheetah-v5 has no expert of its own; name a folder"
    ):
        expert_demos.demonstrations(config, print)
    config = replace(config, cloning=CloningConfig(steps=1, dataset=str(tmp_path / "none")))
    policy = make()
    assert isinstance(policy, TokenVLA)
    with pytest.raises(ConfigError, match="none: does not exist; record it"):
        expert_demos.clone(policy, config, print)
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"holds no meta/info\.json"):
        expert_demos.clone(policy, config, print)
