"""Distillation: losses, schedule, who acts, and whole runs from a teacher to PPO."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
import yaml

import embodied_ppo
from embodied_envs.base.errors import ConfigError
from embodied_envs.types import ArraySpec, Box, Discrete
from embodied_ppo.imitation import teacher as distillation
from embodied_ppo.imitation.distillation import (
    GuidedPolicy,
    Selection,
    distillation_loss,
    executed_bounds,
    resolve_loss,
)
from embodied_ppo.options import loader
from embodied_ppo.options.schema import Config, DistillationConfig, ModelConfig
from embodied_ppo.policies import actor_critic
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.programs import runs
from embodied_ppo.training import trained_run
from tests.integration.test_resume import assert_same, contents, rows

TASK: dict[str, Any] = run_helpers.nested(
    run_helpers.options("""env.id=toy_envs:Grouped env.num_envs=8 env.num_threads=1 compile=never
    env.max_episode_steps=16 algorithm.horizon=8 algorithm.global_batch_size=64
    algorithm.update_epoch=1 evaluation.episodes=2 evaluation.video_episodes=0""")
)
ALL_GROUPS = {"actor_obs": ["state", "privileged"], "critic_obs": ["state", "privileged"]}
TEACHER = {"model": {"hidden": [16], **ALL_GROUPS}, "updates": 1}
STUDENT = {
    "model": run_helpers.options("""hidden=[32] shared_backbone=false actor_obs=[state]
        critic_obs=[state,privileged]"""),
    "distillation": {"teacher_share_updates": 2, "lr": 1e-2},
    "updates": 4,
    "save_every": 2,
}


def config(*layers: dict[str, Any]) -> Config:
    return loader.read(Config, [(str(i), layer) for i, layer in enumerate(layers)]).config


# ------------------------------------------------------------------------------------------- losses
def test_losses_of_gaussians_equal_hand_computed_values() -> None:
    mean, log_std = torch.tensor([[1.0, -1.0]]), torch.tensor([0.0, math.log(2)])
    action = torch.tensor([[0.0, 1.0]])
    # mse: ((1 - 0)^2 + (-1 - 1)^2) / 2
    mse = distillation_loss("mse", "gaussian", mean, log_std, action)
    assert mse.tolist() == pytest.approx([2.5])
    # nll: 1/2 + log sqrt(2 pi) + (2 / 2)^2 / 2 + log 2 + log sqrt(2 pi)
    nll = distillation_loss("nll", "gaussian", mean, log_std, action)
    assert nll.tolist() == pytest.approx([1.0 + math.log(2) + math.log(2 * math.pi)])
    # kl of N(0, 1), N(1, 1): 0 + (1 + 1) / 2 - 1/2 = 1/2; log 2 + (1 + 4) / 8 - 1/2
    kl = distillation_loss("kl", "gaussian", mean, log_std, torch.tensor([[0.0, 1.0, 0.0, 0.0]]))
    assert kl.tolist() == pytest.approx([0.5 + math.log(2) + 0.125])
    same = torch.cat([mean, log_std.expand(1, 2)], dim=1)
    assert distillation_loss("kl", "gaussian", mean, log_std, same).tolist() == [0.0]


def test_losses_of_squashed_gaussians_are_those_of_the_executed_action() -> None:
    mean, log_std = torch.tensor([[0.5]]), torch.tensor([0.0])
    kind, action = "squashed_gaussian", torch.tensor([[0.5]]).tanh()
    assert distillation_loss("mse", kind, mean, log_std, action).tolist() == [0.0]
    # -log N(0.5; 0.5, 1) + log(1 - tanh(0.5)^2)
    expected = 0.5 * math.log(2 * math.pi) + math.log(1 - math.tanh(0.5) ** 2)
    nll = distillation_loss("nll", kind, mean, log_std, action)
    assert nll.tolist() == pytest.approx([expected], abs=1e-5)
    saturated = distillation_loss("nll", kind, mean, log_std, torch.tensor([[1.0]]))
    assert bool(saturated.isfinite().all())


def test_losses_of_beta_distributions_are_those_of_the_executed_action() -> None:
    alpha, beta = torch.tensor([[3.0]]), torch.tensor([[1.0]])  # mean 2 * 3/4 - 1
    action = torch.tensor([[0.0]])
    assert distillation_loss("mse", "beta", alpha, beta, action).tolist() == [0.25]
    # density 3 x^2 at x = 1/2, divided by 2
    nll = distillation_loss("nll", "beta", alpha, beta, action)
    assert nll.tolist() == pytest.approx([-math.log(0.375)])
    # of a uniform teacher: -E log(3 x^2) = 2 - log 3
    kl = distillation_loss("kl", "beta", alpha, beta, torch.ones(1, 2))
    assert kl.tolist() == pytest.approx([2 - math.log(3)])
    spec = ArraySpec((3,))
    teacher = _policy(spec, distribution="beta")
    assert resolve_loss(DistillationConfig(loss="kl"), teacher, teacher) == "kl"
    inputs, target = teacher.encode(torch.randn(4, 3)), _policy(spec, distribution="beta")
    parameters = torch.cat(target.distribution(target.encode(torch.randn(4, 3))), dim=-1)
    loss = distillation_loss("kl", "beta", *teacher.distribution(inputs), parameters)
    assert loss.shape == (4,) and (loss > 0).all()


def test_losses_of_choices_equal_hand_computed_values() -> None:
    logits, unused = torch.tensor([[0.0, math.log(3)]]), torch.zeros(1)  # 1/4, 3/4
    nll = distillation_loss("nll", "categorical", logits, unused, torch.tensor([0]))
    assert nll.tolist() == pytest.approx([math.log(4)])
    # teacher 1/2, 1/2: log(2) / 2 + log(2/3) / 2
    kl = distillation_loss("kl", "categorical", logits, unused, torch.zeros(1, 2))
    assert kl.tolist() == pytest.approx([0.5 * math.log(4 / 3)])


def _policy(spec: Any, action: Any = None, **options: Any) -> ActorCritic:
    action = action or Box((-1.0, -1.0), (1.0, 1.0))
    policy = ActorCritic(spec, action, ModelConfig(hidden=(8,), **options))
    return run_helpers.scale_policy(policy, 1.0)


def test_loss_is_resolved_or_refused_by_the_distributions() -> None:
    spec = ArraySpec((3,))
    gaussian, squashed = _policy(spec), _policy(spec, distribution="squashed_gaussian")
    discrete = _policy(spec, Discrete(3))
    for student, auto in ((gaussian, "mse"), (squashed, "mse"), (discrete, "kl")):
        assert resolve_loss(DistillationConfig(), student, student) == auto
    assert resolve_loss(DistillationConfig(loss="nll"), gaussian, squashed) == "nll"
    with pytest.raises(ConfigError, match=r"are discrete; write distillation\.loss=kl"):
        resolve_loss(DistillationConfig(loss="mse"), discrete, discrete)
    with pytest.raises(ConfigError, match="is gaussian, the student's squashed_gaussian"):
        resolve_loss(DistillationConfig(loss="kl"), squashed, gaussian)


# ----------------------------------------------------------------------------------------- who acts


def test_observations_and_bounds_are_selected() -> None:
    obs = {"state": torch.zeros(2, 3), "front": torch.ones(2, 1)}
    assert list(Selection({"front": ArraySpec((1,))})(obs)) == ["front"]
    assert Selection(ArraySpec((1,)))(obs["front"]) is obs["front"]
    box = Box((-2.0,), (3.0,))
    infinite = [-math.inf, math.inf]
    for mapping, spec, expected in (
        ("none", box, infinite),
        ("clip", Discrete(2), infinite),
        ("clip", box, [-2.0, 3.0]),
        ("rescale", box, [-1.0, 1.0]),
        ("rescale", Box((0.0,), (math.inf,)), [0.0, math.inf]),
    ):
        assert [x.item() for x in executed_bounds(mapping, spec)] == expected


@pytest.mark.parametrize("loss", ["mse", "kl"])
def test_guided_policy_acts_as_teacher_or_student_and_labels(loss: Any) -> None:
    torch.manual_seed(0)
    spec = {"state": ArraySpec((3,)), "extra": ArraySpec((2,))}
    student, teacher = _policy({"state": spec["state"]}), _policy(spec)
    with torch.no_grad():
        teacher.policy_head.bias.add_(torch.tensor([3.0, 0.0]))  # beyond the bounds
    c = DistillationConfig(loss=loss, sample_actions=loss == "kl")
    policy = GuidedPolicy(
        student,
        teacher,
        c,
        read_student=Selection({"state": spec["state"]}),
        read_teacher=Selection(spec),
        bounds=(-torch.ones(2), torch.ones(2)),
    )
    policy.set_update(c.teacher_share_updates // 2)
    obs = {"state": torch.randn(4000, 3), "extra": torch.randn(4000, 2)}
    noise = policy.noise(4000, torch.Generator().manual_seed(0))
    inputs = policy.encode(obs)
    decision = policy.act(inputs, noise=noise)
    label = teacher.act(teacher.encode(obs)).action
    clamped = label.clamp(-1, 1)
    assert label[:, 0].max() > 1
    own_noise = noise[:, :-1] if c.sample_actions else None
    own = student.act(student.encode({"state": obs["state"]}), noise=own_noise).action
    is_guided = (decision.action == clamped).all(1)
    assert is_guided.float().mean().item() == pytest.approx(0.5, abs=0.05)
    torch.testing.assert_close(decision.action[~is_guided], own[~is_guided])
    target = decision.replay["target"]
    torch.testing.assert_close(target[:, :2], clamped if loss == "mse" else label)
    mode = student.act(student.encode({"state": obs["state"]})).action.clamp(-1, 1)
    torch.testing.assert_close(decision.replay["error"], (mode - clamped).abs().mean(1))
    assert not any(p.requires_grad for p in teacher.parameters())
    policy.set_update(c.teacher_share_updates)
    torch.testing.assert_close(policy.act(inputs, noise=noise).action, own)


# --------------------------------------------------------------------------------------- whole runs
@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """A run whose actor reads a privileged observation."""
    run_dir = tmp_path_factory.mktemp("teacher") / "run"
    with pytest.MonkeyPatch.context() as patch:
        # A policy that depends on the observations from the beginning.
        patch.setattr(actor_critic, "POLICY_GAIN", 1.0)
        runs.train(config(TASK, TEACHER, {"run_dir": str(run_dir)}), quiet=True)
    return run_dir


@pytest.fixture(scope="module")
def student(teacher: Path, tmp_path_factory) -> Path:
    """A run of 24 updates that distils ``teacher``; it keeps the checkpoint of update 22."""
    run_dir = tmp_path_factory.mktemp("student") / "run"
    options = {"run_dir": str(run_dir), "teacher": str(teacher), "updates": 24, "keep_last": 100}
    runs.distill(config(TASK, STUDENT, options), quiet=True)
    return run_dir


@pytest.mark.slow
def test_student_approaches_the_teacher(student: Path) -> None:
    trained = run_helpers.metric_rows(student)[1:]
    first, last = trained[0]["distill/action_error"], trained[-1]["distill/action_error"]
    assert 0 < last < 0.85 * first  # the teacher reads a number that is drawn in every step
    assert 0 < trained[-1]["distill/loss"] < trained[0]["distill/loss"]
    assert [r["distill/teacher_share"] for r in trained[:3]] == [1.0, 0.5, 0.0]
    assert "policy/clip_fraction" not in trained[-1] and trained[-1]["policy/lr"] == 1e-2
    assert trained[-1]["rollout/return"] > 0 and trained[-1]["policy/grad_norm"] > 0


def test_run_is_an_ordinary_run(student: Path, tmp_path, capsys) -> None:
    summary = json.loads((student / "summary.json").read_text())
    assert summary["updates"] == 24 and Path(summary["report"]).is_file()
    arguments = [f"checkpoint={student}", "episodes=3", "video=false", f"out={tmp_path}"]
    assert run_helpers.run_command(capsys, "evaluate", *arguments)["eval/length"] > 0
    policy = embodied_ppo.load(student)
    assert policy.act({"state": torch.zeros(4)}).shape == (1,)
    stored = yaml.safe_load((student / "config.yaml").read_text())
    assert stored["algorithm"]["global_batch_size"] == 64  # PPO's, for `train`
    assert stored["teacher"].endswith("checkpoints/step_000001")


def test_resumed_distillation_equals_an_uninterrupted_one(student: Path, tmp_path, capsys) -> None:
    source = student / "checkpoints" / "step_000022"
    arguments = [f"resume={source}", f"run_dir={tmp_path / 'run'}"]
    run_helpers.run_command(capsys, "distill", *arguments)
    assert_same(contents(student, 24), contents(tmp_path / "run", 24))
    assert rows(student)[-2:] == rows(tmp_path / "run")
    message = "continue with embodied-ppo distill resume="
    run_helpers.assert_refused(capsys, ["train", *arguments], message)


def test_ppo_starts_from_the_student_with_a_critic_warm_up(student: Path, tmp_path) -> None:
    options = {
        "run_dir": str(tmp_path / "run"),
        "initial_policy": str(student),
        "algorithm": {"critic_warmup": 1, "lr": 1e-3},
        "updates": 2,
        "save_every": 1,
    }
    runs.train(config(TASK, STUDENT, {"distillation": {}}, options), quiet=True)
    other = options | {"run_dir": str(tmp_path / "other"), "model": {"obs_clip": 1.0}}
    with pytest.raises(ConfigError, match=r"write model\.obs_clip=10"):
        runs.train(config(TASK, STUDENT, {"distillation": {}}, other), quiet=True)
    before, _ = contents(student, 24)
    warm, training = contents(tmp_path / "run", 1)
    after, _ = contents(tmp_path / "run", 2)
    actor = [name for name in before if name.startswith(("trunk", "policy_head"))]
    critic = [name for name in before if name.startswith("value")]
    assert actor and critic
    assert all(torch.equal(before[name], warm[name]) for name in actor)
    assert not any(torch.equal(before[name], warm[name]) for name in critic)
    assert not any(torch.equal(warm[name], after[name]) for name in actor)
    count = "encoder.moments.count"
    assert float(warm[count]) == float(before[count]) + 64  # the normaliser goes on
    steps = [x["step"] for x in training["learner"]["optimizer"]["state"].values()]
    assert len(steps) == len(critic) and set(map(float, steps)) == {1.0}  # a new optimiser


# ------------------------------------------------------------------------------ other kinds of task


MEMORIES: dict[str, dict[str, Any]] = {
    "history": {"model": {"history": 3}},
    "gru": {"model": {"recurrent": "gru", "recurrent_size": 8}},
}


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
def test_student_with_memory_learns_and_resumes_bit_for_bit(
    memory: str, teacher: Path, tmp_path
) -> None:
    options = {**MEMORIES[memory], "teacher": str(teacher), "updates": 6}
    full = config(TASK, STUDENT, options, {"run_dir": str(tmp_path / "full"), "save_every": 3})
    runs.distill(full, quiet=True)
    metrics = rows(tmp_path / "full")
    assert metrics[-1]["distill/loss"] < metrics[1]["distill/loss"]
    source = tmp_path / "full" / "checkpoints" / "step_000003"
    runs.distill(replace(full, run_dir=str(tmp_path / "part"), resume=str(source)), quiet=True)
    assert_same(contents(tmp_path / "full", 6), contents(tmp_path / "part", 6))
    policy = embodied_ppo.load(tmp_path / "full")
    assert policy.has_memory and policy.act({"state": torch.zeros(2, 4)}).shape == (2, 1)
    again = {"initial_policy": str(tmp_path / "full"), "updates": 1}
    unit = {"algorithm": {"minibatch_unit": "column"}}
    c = config(TASK, STUDENT, MEMORIES[memory], unit, again, {"run_dir": str(tmp_path / "ppo")})
    runs.train(replace(c, distillation=DistillationConfig()), quiet=True)
    assert len(rows(tmp_path / "ppo")) == 2


# ----------------------------------------------------------------------------------------- refusals
@pytest.fixture
def refusal(teacher: Path, tmp_path, capsys, monkeypatch) -> Callable[..., str]:
    """Return a function that runs a command on ``STUDENT`` and returns the line of its refusal."""
    monkeypatch.chdir(tmp_path)
    merged = loader.dump(config(TASK, STUDENT))
    experiment = {
        key: {k: merged[key][k] for k in TASK.get(key, {}) | STUDENT.get(key, {})}
        for key in ("env", "algorithm", "evaluation", "model", "distillation")
    }
    Path("experiment").mkdir()
    text = "# @package _global_\n" + yaml.safe_dump({**experiment, "updates": 1})
    Path("experiment/mine.yaml").write_text(text)

    def refuse(*options: str, command: str = "distill") -> str:
        arguments = ["experiment=mine", f"teacher={teacher}", "run_dir=run", *options]
        line = run_helpers.assert_refused(capsys, [command, "--config-dir", ".", *arguments])
        assert not Path("run").exists()
        return line

    return refuse


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("teacher=null", "teacher = null"),
        ("teacher=nowhere", "teacher=nowhere"),
        ("model.actor_obs=[state,privileged]", "model.actor_obs: remove privileged"),
        ("env.id=toy_envs:Balance", "toy_envs:Grouped"),
        ("algorithm.lr=0.1", "distillation.lr"),
        ("distillation.loss=huber", "distillation.loss = huber"),
        ("placement=fused", "placement"),
    ],
)
def test_bad_input_is_refused_with_one_line(
    refusal: Callable[..., str], option: str, message: str
) -> None:
    # The second of two values of an option on the command line is the one that counts.
    assert message in refusal(*option.split(" "))


def test_teachers_that_do_not_fit_are_refused(teacher: Path) -> None:
    run = trained_run.open_run(str(teacher))
    trained = run.config
    own, model = config(TASK, STUDENT), trained.model
    for change, message in (
        ({"mode": "reasoning"}, "language model"),
        ({"model": replace(model, history=2)}, "model.history=2"),
        ({"model": replace(model, actor_obs=None, critic_obs=None)}, "reads all observations"),
        ({"env": replace(trained.env, tasks=("A", "B"))}, r"write env\.tasks=\[A"),
    ):
        chosen = replace(run, config=replace(trained, **change))
        with pytest.raises(ConfigError, match=message):
            distillation.check_teacher(chosen, own)
    with pytest.raises(ConfigError, match=r"write model\.actor_obs="):
        distillation.check_teacher(run, replace(own, model=replace(own.model, actor_obs=None)))
