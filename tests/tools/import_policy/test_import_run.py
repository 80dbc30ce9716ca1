"""`import-policy` writes a run: it is measured, trained further, compared and exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from run_helpers import assert_refused, run_command

import embodied_ppo as ep
from embodied_ppo.commands import main
from embodied_ppo.policies.actor_critic import ActorCritic
from tests.tools.import_policy import foreign_checkpoints as foreign

TASK = ("experiment=halfcheetah", "env.max_episode_steps=20")
SMALL = ("env.num_envs=8", "algorithm.global_batch_size=64", "updates=1", "compile=never")
SMALL += ("evaluation.episodes=2", "evaluation.video_episodes=0")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Return the run of a policy in the layout of Stable-Baselines3 with VecNormalize."""
    folder = tmp_path_factory.mktemp("imported")
    torch.manual_seed(5)
    actor = foreign.sb3(folder / "model.zip", gamma=0.9)
    torch.save(actor, folder / "actor.pt")
    foreign.vec_normalize(folder / "vec.pkl")
    files = [str(folder / "model.zip"), f"normalizer={folder / 'vec.pkl'}"]
    arguments = [*files, f"run_dir={folder / 'run'}", *TASK, *SMALL, "--quiet"]
    assert main.main(["import-policy", "sb3", *arguments]) == 0
    return folder / "run"


def test_run_acts_as_the_library(run: Path) -> None:
    """Actions follow VecNormalize, the network, and clipping to the bounds [-1, 1]."""
    policy = ep.load(run)
    obs = np.random.default_rng(0).normal(0, 3, (32, foreign.OBS)).astype(np.float32)
    normal = np.clip((obs - foreign.MEAN) / np.sqrt(foreign.VAR + 1e-8), -2, 2)
    actor = torch.load(run.parent / "actor.pt", weights_only=False)
    expected = actor(torch.from_numpy(normal).float()).clamp(-1, 1).detach().numpy()
    assert np.abs(policy.act(obs) - expected).max() < 1e-5
    assert policy.config.env.action_mapping == "clip" and policy.update == 0


def test_origin_and_notes_are_recorded(run: Path) -> None:
    origin = json.loads((run / "import.json").read_text())
    assert origin["library"] == "sb3" and origin["options"]["model.obs_clip"] == 2.0
    assert any("gamma=0.9, and algorithm.gamma = 0.99" in note for note in origin["notes"])
    assert any("optimiser is not imported" in note for note in origin["notes"])
    training = torch.load(run / "checkpoints/latest/training.pt", weights_only=True)
    assert float(training["learner"]["returns"]["moments.var"]) == pytest.approx(9)


@pytest.mark.slow
def test_commands_accept_the_run(run: Path, tmp_path, capsys) -> None:
    """Evaluate it, train on in its directory and in another one, compare both, export it."""
    before = run_command(capsys, "evaluate", f"checkpoint={run}", "episodes=4", "video=false")
    longer = tmp_path / "longer"
    summary = run_command(capsys, "train", f"resume={run}", f"run_dir={longer}", "updates=2")
    assert summary["updates"] == 2 and summary["env_steps"] == 2 * 8 * 32
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, symlinks=True)
    summary = run_command(capsys, "train", f"resume={copy}")
    assert summary["updates"] == 1 and np.isfinite(summary["final_return"])
    content = run_command(capsys, "compare", run, longer, "episodes=4", f"out={tmp_path / 'out'}")
    assert content["methods"][0]["mean"] == pytest.approx(before["eval/return"])
    bundle = run_command(capsys, "export", f"checkpoint={run}", f"out={tmp_path / 'bundle'}")
    assert bundle["action_difference"] < 1e-5


@pytest.mark.parametrize(
    ("beta", "options", "message", "missing"),
    [
        # A file of a Gaussian whose network returns the deviation has the same layout.
        (True, [], "model.distribution=beta", "model.distribution=beta"),
        (
            False,
            ["algorithm.reward_groups={run: {terms: [reward_run]}, cost: {}}"],
            "write critic=new: the options of the run give a state 2",
            "critic=new",
        ),
    ],
)
def test_missing_option_is_named(beta, options, message, missing, tmp_path, capsys) -> None:
    foreign.rsl_rl(tmp_path / "x.pt", beta=beta)
    arguments = [str(tmp_path / "x.pt"), f"run_dir={tmp_path / 'run'}", *TASK, *SMALL, "--quiet"]
    arguments += options
    assert_refused(capsys, ["import-policy", "rsl_rl", *arguments], message)
    assert main.main(["import-policy", "rsl_rl", *arguments, missing]) == 0
    config = ep.load(tmp_path / "run").config
    assert (config.model.distribution == "beta") == beta
    assert list(config.algorithm.reward_groups) == ([] if beta else ["run", "cost"])


@pytest.mark.slow
def test_options_that_contradict_the_file_are_refused(run: Path, tmp_path, capsys) -> None:
    files = [str(run.parent / "model.zip"), f"normalizer={run.parent / 'vec.pkl'}"]
    for option, message in (
        ("model.hidden=[64]", "remove model.hidden = [64]: .* has [8, 5]"),
        ("model.normalize_obs=false", "remove model.normalize_obs = false: .* has true"),
        ("placement=fused", "write placement=local, .* import-policy runs in one process"),
        (
            "env.id=Hopper-v4",
            "env.id = Hopper-v4 has an observation of 11 numbers (obs), and the policy",
        ),
        ("mode=reasoning", "import-policy reads policies of robots"),
        ("initial_policy=x", "remove initial_policy = x: import-policy writes a new run"),
    ):
        line = [*files, f"run_dir={tmp_path / 'new'}", *TASK, *SMALL, option]
        if option.startswith("mode"):
            line = [*files, option]
        capsys.readouterr()
        assert main.main(["import-policy", "sb3", *line]) == 2, option
        error = capsys.readouterr().err
        for part in message.split(" .* "):
            assert part in error, error
        assert error.count("\n") == 1 and not (tmp_path / "new").exists()


def test_number_that_is_added_to_the_deviation() -> None:
    """(x - mean) / (sqrt(var + eps) + std_eps): (3 - 1) / (sqrt(3 + 1) + 2) = 0.5."""
    from embodied_ppo.core.running_stats import RunningMoments

    moments = RunningMoments((1,), eps=1.0, std_eps=2.0)
    moments.merge(torch.ones(1), torch.full((1,), 3.0), 10)
    assert moments.normalize(torch.full((1, 1), 3.0)).item() == pytest.approx(0.5)


def test_initial_deviation_of_softplus() -> None:
    """std = softplus(bias) + exp(min_log_std) is exp(init_log_std) at the start."""
    from embodied_envs.types import ArraySpec, Box
    from embodied_ppo.options.schema import ModelConfig

    config = ModelConfig(state_dependent_std="softplus", init_log_std=-1.0)
    policy = ActorCritic(ArraySpec((3,), torch.float32), Box((-1.0,), (1.0,)), config)
    _, log_std = policy.distribution(policy.encode(torch.zeros(1, 3)))
    assert log_std.item() == pytest.approx(-1.0, abs=1e-5)
