"""Comparison of options: combinations that are refused, and options that are not read."""

from __future__ import annotations

from typing import Any

import pytest
from run_helpers import nested

from embodied_envs import tasks
from embodied_envs.base.errors import ConfigError, EnvError, show
from embodied_ppo.commands import main
from embodied_ppo.options import loader, term_names, validation
from embodied_ppo.options.schema import Config, EnvConfig
from tests.options.test_loader import CLONING, FLOW, LANGUAGE, PUBLISHED, TOKENS, refused

GROUPS = {"env.restart_each_rollout": True, "algorithm.group_size": 4}


PIPELINE = {"pipeline": True, "algorithm.off_policy_correction": "token"}
BATCH_NORM = {"algorithm.reward_norm": "batch"}
OBSERVED = {"model.actor_obs": ["a"], "model.critic_obs": ["a"]}
COLUMNS = {"algorithm.minibatch_unit": "column"}
PARTS = "algorithm.reward_groups"
TWO_PARTS = {"a": {"terms": ["x"]}, "b": {}}
TWO_TASKS = {"env.id": ["WalkerWalk-v1", "CheetahRun-v1"]}
CONFLICTS: list[tuple[dict[str, Any], str]] = [
    ({"algorithm.global_batch_size": 300}, "nearest: 256, 512; or .. nearest env.num_envs: 75"),
    ({"algorithm.global_batch_size": 4096}, "32 x 64 = 2048 .. nearest: 2048 .. num_envs: 128"),
    (
        {"algorithm.minibatch_unit": "column", "algorithm.global_batch_size": 100},
        "nearest: 64, 128",
    ),
    ({"algorithm.minibatch_unit": "column", "algorithm.global_batch_size": 96}, "num_envs: 63, 66"),
    ({"algorithm.micro_batch_size": 512}, "write algorithm.micro_batch_size=256"),
    ({"algorithm.minibatch_unit": "column", "algorithm.micro_batch_size": 40}, "nearest: 32, 64"),
    ({"pipeline": True, "placement": "fused"}, "write pipeline=false: placement = fused"),
    ({"pipeline": True}, "write algorithm.off_policy_correction=token"),
    ({**PIPELINE, "env.cameras": ["front"]}, "write pipeline=false: env.cameras = [front]"),
    ({"cluster.stages": 3}, "num_envs = 64 .. cluster.stages = 3; nearest: 63, 66"),
    ({**TWO_TASKS, "env.num_envs": 65}, "not a multiple of 2, the tasks .. nearest: 64, 66"),
    ({**TWO_TASKS, "env.task_weights": [2, 1]}, "env.num_envs = 64 .. nearest: 63, 66"),
    ({**TWO_TASKS, "cluster.stages": 64}, "cluster.stages = 64; nearest: 128"),
    ({"algorithm.popart": 0.1, "env.tasks": ["A"], "env.id": "B"}, "write env.tasks=[..,B]"),
    (
        {"algorithm.popart": 0.1, "cluster.shard": True, "placement": "fused"},
        "write cluster.shard=false",
    ),
    ({**TWO_TASKS, **GROUPS}, "write algorithm.group_size=1"),
    ({"algorithm.group_size": 5}, "algorithm.group_size = 5; nearest: 4, 8"),
    ({"algorithm.adv_type": "rloo"}, "adv_type = rloo .. write algorithm.group_size=4"),
    ({"algorithm.reward_norm": "group"}, "reward_norm = group .. algorithm.group_size = 1"),
    ({"algorithm.adv_type": "grpo", "algorithm.group_size": 4}, "env.restart_each_rollout=true"),
    ({"algorithm.loss_agg_func": "seq-mean-token-sum"}, "write algorithm.minibatch_unit=column"),
    ({"algorithm.loss_agg_func": "trajectory-mean"}, "write env.restart_each_rollout=true"),
    ({"algorithm.use_kl_loss": True, "algorithm.kl_loss_type": "k1"}, "kl_loss_type=k2, k3 or k1+"),
    ({"algorithm.loss_type": "actor"}, "write algorithm.loss_type=actor_critic"),
    ({"algorithm.clip_ratio_low": 1.0}, "clip_ratio_low = 1 must be < 1"),
    (
        {**BATCH_NORM, "algorithm.reward_shift": True, "algorithm.reward_scale": True},
        "reward_shift = true .. reward_scale = true .. leave both false",
    ),
    (
        {"algorithm.reward_norm": "running", "algorithm.reward_shift": True},
        "write algorithm.reward_norm=batch",
    ),
    (
        {"algorithm.logprob_type": "chunk_level", "algorithm.reward_type": "action_level"},
        "is finer than algorithm.logprob_type = chunk_level",
    ),
    ({"model.min_log_std": 3.0}, "model.min_log_std = 3 must be < model.max_log_std = 2"),
    ({"model.init_log_std": -6.0}, "model.init_log_std = -6 must be >= model.min_log_std = -5"),
    ({"model.actor_obs": ["a"]}, "critic_obs is null .. write model.critic_obs=[a,NAME]"),
    ({**OBSERVED, "model.critic_obs": []}, "model.critic_obs = []: names no observation"),
    ({**OBSERVED, "model.critic_obs": ["b"]}, "model.critic_obs lacks a, but"),
    ({**OBSERVED, "env.cameras": ["front"]}, "no network reads front; add it to model.actor_obs"),
    ({**TOKENS, "model.shared_backbone": False}, "model.policy=token has one trunk"),
    ({**TOKENS, "model.width": 4}, "model.width=8: model.width = 4 .. multiple of 8"),
    ({"env_steps": None}, "updates=100: updates = null and env_steps = null"),
    ({"algorithm.ratio_level": "sequence"}, "algorithm.minibatch_unit=column (or"),
    ({**COLUMNS, "algorithm.ratio_level": "sequence"}, "env.restart_each_rollout=true (or"),
    ({"algorithm.ratio_level": "chunk"}, "action_chunk = 1 .. logprob_type=token_level"),
    ({**LANGUAGE, "algorithm.ratio_level": "chunk"}, "write algorithm.ratio_level=sequence"),
    ({"algorithm.adv_type": "dr_grpo", **GROUPS}, "write algorithm.normalize_advantages=false"),
    ({"algorithm.group_filter": "success", **GROUPS}, "adv_type = gae compares no groups"),
    (
        {"algorithm.group_filter": "success", "algorithm.adv_type": "grpo", **GROUPS},
        "write updates=100: updates = null, and",
    ),
    (
        {
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.type": "adaptive",
            "algorithm.kl_ctrl.horizon": 10,
        },
        "horizon = 10 must be > 0.2 x env.num_envs = 12.8, .. algorithm.kl_ctrl.horizon=640",
    ),
    ({PARTS: {"a": {}, "b": {"terms": "rest"}}}, "remove terms: rest from .. or from a"),
    ({PARTS: {"a": {"terms": ["x"]}, "b": {"terms": ["y", "x"]}}}, "remove x from"),
    ({PARTS: {"a": {"terms": []}}}, "reward_groups.a.terms = []"),
    ({PARTS: {"a": {"weight": 0}}}, "write algorithm.reward_groups.a.weight=1"),
    ({"env.id": []}, "env.id = []: list one or more tasks"),
    ({"env.id": ["A", "A"]}, "env.id = [A, A]: .. each of them once"),
    ({"env.id": ["A", "B"], "env.tasks": []}, "env.tasks = []"),
    ({"algorithm.popart": 0.1, "algorithm.curiosity.weight": 1}, "curiosity.weight=0: .. popart"),
    ({"algorithm.rpo_alpha": 0.5, "algorithm.use_kl_loss": True}, "algorithm.use_kl_loss=false"),
    ({PARTS: {"a/b": {}}}, "use letters, digits"),
    ({PARTS: {"a": {"gama": 0.9}}}, "reward_groups.a.gama = 0.9 .. did you mean gamma?"),
    (
        {PARTS: {"a": {"gamma": 2}}},
        "reward_groups.a.gamma = 2 .. must be a finite number >= 0 and <= 1",
    ),
    ({PARTS: {"a": 3}}, "reward_groups.a = 3 .. is a section"),
    ({PARTS: TWO_PARTS, "algorithm.use_kl_in_reward": True}, "algorithm.use_kl_in_reward=false"),
    (
        {PARTS: TWO_PARTS, "env.action_chunk": 2, "algorithm.reward_type": "action_level"},
        "write algorithm.reward_type=chunk_level",
    ),
    ({**LANGUAGE, PARTS: TWO_PARTS}, "write algorithm.adv_type=grpo"),
    ({**LANGUAGE, "reward.terms": {"a/b": {"grader": "exact"}}}, "use letters, digits"),
    ({**LANGUAGE, "reward.terms": {"a": {}}}, "write reward.terms.a.grader=NAME or"),
    ({**LANGUAGE, "reward.terms": {"a": {"grader": "exact", "weight": 0}}}, "terms.a.weight=1"),
    (
        {**LANGUAGE, "reward.terms": {"a": {"grader": "exact", "weight": "x"}}},
        "reward.terms.a.weight = x .. must be a finite number",
    ),
    (
        {
            **LANGUAGE,
            "reward.terms": {"a": {"grader": "exact", "weight": 0}, "b": {"model": "DIR"}},
            "algorithm.adv_type": "grpo",
            "algorithm.group_size": 2,
            PARTS: {"g": {"terms": ["a"]}},
        },
        "remove a from algorithm.reward_groups.g",
    ),
    (
        {PARTS: {"curiosity": {}}, "algorithm.curiosity.weight": 1},
        "rename algorithm.reward_groups.curiosity",
    ),
    (
        {"algorithm.use_kl_in_reward": True, "algorithm.curiosity.weight": 1},
        "algorithm.use_kl_in_reward=false",
    ),
    (
        {PARTS: {"a": {"gae_lambda": 0.5}}, "algorithm.adv_type": "reinforce"},
        "remove algorithm.reward_groups.a.gae_lambda",
    ),
]


@pytest.mark.parametrize(("flat", "line"), CONFLICTS)
def test_conflicting_options_are_refused(flat: dict[str, Any], line: str) -> None:
    message = refused(Config, flat)
    for part in line.split(" .. "):
        assert part in message


@pytest.mark.parametrize(
    "flat",
    [
        {
            "algorithm.minibatch_unit": "column",
            "algorithm.global_batch_size": 64,
            "algorithm.micro_batch_size": 32,
        },
        {"algorithm.micro_batch_size": 100},
        {"algorithm.adv_type": "grpo", **GROUPS},
        {"algorithm.policy_loss": "cispo", "algorithm.clip_ratio_low": 1.0},
        {"algorithm.group_filter": "success", "algorithm.adv_type": "rloo", "updates": 5, **GROUPS},
        {"algorithm.reward_norm": "group", **GROUPS},
        {"algorithm.loss_agg_func": "seq-mean-token-mean", "algorithm.minibatch_unit": "column"},
        {"algorithm.use_kl_loss": True, "algorithm.kl_loss_type": "k1+"},
        {"algorithm.entropy_target": -3.0},
        {"algorithm.reward_norm": "batch", "algorithm.reward_shift": True},
        {"algorithm.logprob_type": "token_level", "algorithm.reward_type": "action_level"},
        {"env_steps": None, "updates": 1},
        {"updates": 3, "env_steps": 5000},  # updates wins
        {"device": "cuda:3"},
    ],
)
def test_compatible_options_are_accepted(flat: dict[str, Any]) -> None:
    loader.load(Config, nested(flat))


FILES = {
    **LANGUAGE,
    "data.task": None,
    "data.train": ["a"],
    "data.eval": ["b"],
    "actor.tokenizer": "x",
}
NO_VALUE = {**LANGUAGE, "algorithm.adv_type": "grpo", "algorithm.group_size": 2}
UNREAD: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    # option -> (a value, options under which it is not read, options under which it is read)
    "algorithm.desired_kl": (0.02, {}, {"algorithm.lr_schedule": "adaptive"}),
    "algorithm.reward_shift": (True, {}, BATCH_NORM),
    "algorithm.kl_loss_coef": (0.1, {}, {"algorithm.use_kl_loss": True}),
    "algorithm.kl_ctrl.horizon": (
        500,
        {},
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"},
    ),
    "algorithm.gae_lambda": (0.9, {"algorithm.adv_type": "reinforce_plus_plus"}, {}),
    "algorithm.critic_warmup_variance": (
        0.5,
        {"algorithm.gae_lambda_value": 1.0},
        {"algorithm.critic_warmup": 9, "algorithm.gae_lambda_value": 1.0},
    ),
    "algorithm.clip_ratio_c": (3.0, {"algorithm.policy_loss": "cispo"}, {}),
    "algorithm.entropy_bonus": (0.1, FLOW, TOKENS),
    "algorithm.value_clip": (0.3, NO_VALUE, LANGUAGE),
    "algorithm.rpo_alpha": (0.5, {"model.distribution": "beta"}, {}),
    "model.min_log_std": (-2.0, {"model.distribution": "beta"}, {}),
    "model.state_dependent_std": (True, {"model.distribution": "beta"}, {}),
    "algorithm.prompt_length": (77, LANGUAGE, FILES),
    "critic.lr": (0.1, NO_VALUE, LANGUAGE),
    "cloning.episodes": (3, {}, CLONING),
    "distillation.loss": ("nll", {}, {"teacher": "runs/x"}),
    "eval_every": (2, {"evaluation.episodes": 0}, {}),
    "evaluation.num_envs": (4, {"evaluation.env": "training"}, {}),
    "evaluation.temperature": (0.5, LANGUAGE, {**LANGUAGE, "evaluation.deterministic": False}),
    "env.obs_keys": (["a"], OBSERVED, {}),
    "initial_policy": ("runs/x", {"resume": "runs/x"}, {}),
    "allow_changed_task": (True, {}, {"resume": "runs/first"}),
    "model.hidden": ([8], TOKENS, {}),
    "model.bins": (8, {}, TOKENS),
    "model.lora_rank": (4, TOKENS, PUBLISHED),
    "model.flow_steps": (3, TOKENS, FLOW),
    "model.recurrent_size": (8, {}, {"model.recurrent": "gru", **COLUMNS}),
}


@pytest.mark.parametrize("path", UNREAD)
def test_option_that_is_not_read_is_refused(path: str) -> None:
    value, unread, read = UNREAD[path]
    line = refused(Config, {**unread, path: value})
    for part in (path, show(value), f"remove {path}"):
        assert part in line
    loader.load(Config, nested({**read, path: value}))


def test_check_refuses_unread_defaults_only_if_explicit() -> None:
    validation.check(Config())
    with pytest.raises(ConfigError, match=r"desired_kl = 0\.01"):
        validation.check(Config(), explicit={"algorithm.desired_kl"})
    validation.check(Config(), explicit={"algorithm.reward_shift"})  # false switches the option off


MINE = """
from embodied_envs.robots.rough_terrain import RoughTerrain
from embodied_envs.tasks.go1 import Go1Joystick as Base

class Mine(RoughTerrain, Base):
    def fast(self, before, s, action, *, limit=1.0):
        return s["qvel"].square().sum(1)

class Other(Mine):
    assigned = Mine.fast

class Computed(Mine):
    if True:
        def hidden(self, before, s, action): ...
"""


@pytest.mark.parametrize(
    "id", ["Go1Rough", "PandaPickCube", "named_terms:Mine", "named_terms:Other"]
)
def test_names_of_terms_in_the_source_are_those_of_the_task(id: str, tmp_path, monkeypatch) -> None:
    (tmp_path / "named_terms.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    task_class = tasks.find(id)
    assert task_class is not None
    task = tasks.make(id, task_class, {})
    terms = {name: {"weight": 1.0} for name in task.available_terms()}
    term_names.check(EnvConfig(id=id, rewards=terms, commands=dict(task.commands)))
    for wrong in ({"rewards": {"none": {}}}, {"commands": {"none": (0, 1)}}):
        with pytest.raises(EnvError, match=r"\.none is unknown"):
            term_names.check(EnvConfig(id=id, **wrong))
    # Names that the source does not show are accepted here.
    term_names.check(EnvConfig(id="named_terms:Computed", rewards={"hidden": {"weight": 1.0}}))


@pytest.mark.parametrize("place", [".", "checkpoints/step_000002"])
def test_evaluate_refuses_names_that_the_runs_copy_of_the_task_lacks(
    place: str, tmp_path, monkeypatch, capsys
) -> None:
    """The file on the path has changed since the training."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "changed_terms.py").write_text(MINE.replace("fast", "slow"))
    copy, run = tmp_path / "run/task/1f/files/changed_terms.py", tmp_path / "run" / place
    copy.parent.mkdir(parents=True)
    run.mkdir(parents=True, exist_ok=True)
    copy.write_text(MINE)
    (run / "config.yaml").write_text("env: {id: 'changed_terms:Mine'}")
    evaluate = ["evaluate", f"checkpoint={run}"]
    for option, name in (
        ("env.rewards.slow.weight=1", "fast"),
        ("env.commands.x=[0,1]", "lin_vel_x"),
    ):
        assert main.main([*evaluate, option]) == 2
        error = capsys.readouterr().err
        assert option.split("=")[0].removesuffix(".weight") in error and name in error
    for option in (
        "env.rewards.fast.weight=1",
        "env.rewards.slow.weight=1 allow_changed_task=true",
    ):
        assert main.main([*evaluate, *option.split()]) == 2
        assert "unknown" not in capsys.readouterr().err, "the folder holds no checkpoint"


def test_shipped_options_may_remain_unread() -> None:
    def deliberate(label: str, flat: dict[str, Any]) -> frozenset[str]:
        return loader.read(Config, [(label, nested(flat)), ("flag", nested(NO_VALUE))]).deliberate(
            {"flag"}
        )

    file = {"critic.lr": 0.1, "env.id": "Hopper-v4"}
    assert "critic.lr" in deliberate("my.yaml", file)
    assert "critic.lr" not in deliberate("configs/experiment/x.yaml", file)
    assert "critic.lr" not in deliberate(f"{loader.STORED}, run/config.yaml", file)
    assert "env.id" in deliberate("configs/experiment/x.yaml", file)  # the other mode's
