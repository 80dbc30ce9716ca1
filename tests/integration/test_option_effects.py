"""Every option of every command has an effect: two values differ, or a value is refused.

``test_options`` compares trainings. This file adds the options without
an effect on training (memory, time, files, text, placement) and the options of the other commands,
and requires an entry for each option of the schema. ``docs/options_effects.md`` shows the table; to
update it:

    PYTHONPATH=tests python -m tests.integration.test_option_effects
"""

from __future__ import annotations

import ast
import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
from torch import nn

from embodied_ppo import run as build
from embodied_ppo.algorithms.actor_critic_learner import actor_critic_learner
from embodied_ppo.commands import main
from embodied_ppo.config import batch_sizes, loader, validation
from embodied_ppo.config.schema import (
    BenchmarkConfig,
    Config,
    DemosConfig,
    EvaluateConfig,
    ExportConfig,
)
from embodied_ppo.core.devices import matmul_precision
from embodied_ppo.core.errors import CheckpointError, ConfigError, EnvError, PlacementError
from embodied_ppo.evaluation import video as video_module
from embodied_ppo.imitation import expert_demos
from embodied_ppo.modes import base as modes
from embodied_ppo.modes.embodied import components as embodied
from embodied_ppo.modes.embodied.mode import EmbodiedMode
from embodied_ppo.modes.registry import mode
from embodied_ppo.rollout.simulation import Rollout
from embodied_ppo.training import run_directory
from tests.integration import language_option_cases, robot_option_cases

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options_effects.md"
REFUSALS = (CheckpointError, ConfigError, EnvError, PlacementError)
CPU = torch.device("cpu")
FOLDER = Path(os.environ.get("EMBODIED_PPO_CACHE", "/tmp")) / "option_effects"
"""Runs and reports; removed with the cache of the tests."""


@dataclass(frozen=True)
class Pair:
    """Two values of an option with different effects.

    Attributes:
        a: A value.
        b: Another value.
        effect: Description of the difference.
        observe: Function from the value to an observation; those of ``a`` and ``b`` must differ. A
            refusal is an observation, too.
        test: Another test that compares the values, instead of ``observe``.
    """

    a: Any
    b: Any
    effect: str
    observe: Callable[[Any], Any] | None = None
    test: str = ""


# ---------------------------------------------------------------------------------------- observers
def observed(observe: Callable[[Any], Any], value: Any) -> Any:
    """Return the observation of a value, or the text of its refusal."""
    try:
        return observe(value)
    except REFUSALS as error:
        return f"refused: {error}"


def command(name: str, arguments: list[str], option: str, value: Any) -> str:
    """Run a command; return the exit code and stderr."""
    text = io.StringIO()
    with redirect_stderr(text), redirect_stdout(io.StringIO()):
        code = main.main([name, *arguments, f"{option}={json.dumps(value)}"])
    return f"{code}: {text.getvalue()}"


TRAIN: dict[str, Any] = {
    "env.id": "toy_envs:Balance",
    "env.num_envs": 2,
    "env.max_episode_steps": 6,
    "algorithm.horizon": 4,
    "algorithm.global_batch_size": 8,
    "algorithm.update_epoch": 1,
    "evaluation.episodes": 2,
    "compile": "never",
    "device": "cpu",
    "updates": 3,
}
"""Options of a run of about half a second."""


@cache
def _run(options: str) -> Path:
    folder = FOLDER / f"run{abs(hash(options))}"
    changes = {"run_dir": str(folder), **json.loads(options)}
    build.train(run_helpers.tiny_config({**TRAIN, **changes}), quiet=True)
    return folder


def run(option: str, value: Any, needs: dict[str, Any] | None = None) -> Path:
    """Return the folder of a run; equal options share one."""
    return _run(json.dumps({**(needs or {}), option: value}, sort_keys=True))


def checkpoints(option: str, value: Any) -> list[str]:
    needs = {"save_every": 1} if option == "keep_last" else {}
    return sorted(path.name for path in (run(option, value, needs) / "checkpoints").glob("step_*"))


def rows(value: int) -> int:
    """Return the number of rows of metrics with an evaluation."""
    lines = (run("eval_every", value) / "metrics.jsonl").read_text().splitlines()
    return sum("eval/return" in line for line in lines)


@contextmanager
def without_rendering(arguments: list[Any]) -> Iterator[None]:
    """Record the arguments of ``record_video`` in ``arguments``; rendering of a video takes 4 s."""

    def record(*args: Any, episodes: int, steps: int, **more: Any) -> video_module.Video:
        arguments.append((episodes, steps, args[1].keywords["size"]))
        return video_module.Video(path=None, reason="not rendered")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(video_module, "record_video", record)
        yield


def video(option: str, value: Any) -> list[Any]:
    """Return episodes, steps and size of the video of a run or of ``embodied-ppo evaluate``."""
    arguments: list[Any] = []
    is_evaluate, _, name = option.rpartition(" ")
    needs: dict[str, Any] = {"video": True} if is_evaluate else {"evaluation.video_episodes": 1}
    needs.pop(name, None)
    with without_rendering(arguments):
        if is_evaluate:
            evaluated(name, value, needs)
        else:
            run(option, value, needs)
    return arguments


@cache
def language_run() -> Path:
    """Train a tiny language model and return the run directory."""
    folder = FOLDER / "language_run"
    build.train(language_option_cases.config({"run_dir": str(folder), "updates": 1}), quiet=True)
    return folder


@cache
def _evaluated(options: str) -> dict[str, Any]:
    changes = json.loads(options)
    out = FOLDER / f"report{abs(hash(options))}"
    if changes.pop("language", False):
        base = {"checkpoint": str(language_run()), "episodes": 8}
    else:
        checkpoint = str(run("save_every", 50))
        base = {"checkpoint": checkpoint, "episodes": 3, "num_envs": 3, "video": False}
    config = loader.read(EvaluateConfig, [("test", {**base, "out": str(out), **changes})]).config
    with env_sizes() as sizes:
        build.evaluate(config, explicit=(), quiet=True)
    report = [path.read_text() for path in Path(config.out or out).rglob("*.json")]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return {
        "report": sorted(report),
        "environments": max(sizes, default=0),
        "threads": threads,
        "out": str(config.out),
    }


@contextmanager
def env_sizes() -> Iterator[list[int]]:
    """Record the number of environments of each call of ``make_env``."""
    sizes, make = [], embodied.make_env

    def record(seeds: list[int], **options: Any) -> Any:
        sizes.append(len(seeds))
        return make(seeds, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embodied, "make_env", record)
        yield sizes


def evaluated(option: str, value: Any, needs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Evaluate a run; return the report, and numbers of environments and threads."""
    return _evaluated(json.dumps({**(needs or {}), option: value}, sort_keys=True))


def of_evaluate(key: str, option: str, needs: dict[str, Any] | None = None) -> Callable[[Any], Any]:
    """Return an observer of one result of ``evaluated``; reports without durations."""

    def observe(value: Any) -> Any:
        result = evaluated(option, value, needs)[key]
        if key != "report":
            return result
        ignored = ("out", "seconds", "wall")
        return [
            {k: v for k, v in json.loads(text).items() if not any(name in k for name in ignored)}
            for text in result
        ]

    return observe


def evaluation_observations(value: dict[str, Any], option: str) -> Any:
    """Return the observations after 3 steps of the evaluation environment."""
    base = {"env.id": "toy_envs:toy_envs/Point-v0", "env.num_threads": 0}
    if option == "evaluation.randomize":
        base = {"env.id": "toy_envs:Balance", "env.randomize": True}
        base |= {"env.ranges": {"mass": [0.1, 0.2]}}
    c = run_helpers.tiny_config({**base, option: value})
    env: Any = embodied.make_env([5, 6], config=embodied.evaluation_env(c), device=CPU)
    try:
        env.reset()
        action = torch.full((2, 2 if "Point" in c.env.id else 1), 0.5)
        return [env.step(action).obs for _ in range(3)][-1].tolist()
    finally:
        env.close()


def evaluation_envs(value: int) -> int:
    """Return the number of environments of a run's evaluation."""
    options = {"evaluation.num_envs": value, "evaluation.episodes": 4}
    c = run_helpers.tiny_config({**TRAIN, **options})
    with env_sizes() as sizes:
        env = embodied.make_env([0], config=c.env, device=CPU)
        policy = embodied.make_policy(c, env)
        make = partial(embodied.make_env, config=embodied.evaluation_env(c), device=CPU)
        embodied.measure(c.evaluation, policy, make)
        env.close()
    return max(sizes)


def threads_of_simulator(value: int) -> int:
    """Return the number of threads that a simulator of 4 environments starts."""
    before = len(os.listdir("/proc/self/task"))
    c = run_helpers.tiny_config({"env.num_threads": value})
    env = embodied.make_env([0, 1, 2, 3], config=c.env, device=CPU)
    try:
        env.reset()
        return len(os.listdir("/proc/self/task")) - before
    finally:
        env.close()


class Forwards:
    """Record rows and threads of the forward passes of a module."""

    def __init__(self, module: nn.Module, kind: str = "") -> None:
        self.rows: list[int] = []
        self.threads: set[int] = set()
        for part in module.modules():
            if type(part).__name__.endswith(kind) if kind else part is module:
                part.register_forward_pre_hook(self.record, with_kwargs=True)

    def record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.ndim]
        self.rows.append(tensors[0].shape[0] if tensors else 0)
        self.threads.add(threading.get_ident())


def joint_forwards(option: str, value: Any, needs: dict[str, Any], kind: str) -> Any:
    """Return the rows of each forward pass of one update of a robot policy."""
    c = run_helpers.tiny_config({**needs, option: value})
    env = embodied.make_env(list(range(c.env.num_envs)), config=c.env, device=CPU)
    try:
        policy = embodied.make_policy(c, env)
        trajectory, _ = Rollout(env, policy, seed=0).collect(
            c.algorithm.horizon, update=0, version=0
        )
        learner = actor_critic_learner(
            policy, c.algorithm, num_envs=env.num_envs, updates=2, seed=0
        )
        forwards = Forwards(policy if kind else policy.trunk, kind)
        learner.update(trajectory, update=0)
        return forwards.rows
    finally:
        env.close()


@cache
def _language(options: str) -> dict[str, Any]:
    c = language_option_cases.config(json.loads(options))
    with ExitStack() as stack:
        request = modes.RunRequest(
            c, CPU, FOLDER / "language", c.updates or 0, "", {}, print, print, []
        )
        system: Any = mode(c).build_local(request, stack).system
        stack.callback(system.close)
        children = set(Path("/proc/self/task").glob("*/children"))
        processes = sum(len(path.read_text().split()) for path in children)
        actor, acting = Forwards(system.module, "RMSNorm"), len(system.module.state_dict())
        critic = Forwards(system.learner.critic.module, "RMSNorm")
        trajectory, _ = system.collect(c.algorithm.response_length, update=0)
        rollout, actor.rows = actor.rows, []
        system.update(trajectory, update=0)
        own_thread = critic.threads != {threading.get_ident()}
        return {
            "rollout": max(rollout),
            "actor": actor.rows,
            "critic": critic.rows,
            "threads": own_thread,
            "processes": processes,
            "tensors": acting,
        }


def language(key: str, option: str, value: Any, needs: dict[str, Any] | None = None) -> Any:
    """Run one update of a language model; return rows of passes, threads or processes."""
    return _language(json.dumps({**(needs or {}), option: value}))[key]


CLUSTER = {"placement": "fused", "cluster.devices_per_node": 2, "env.num_envs": 4}


def planned(option: str, value: Any, needs: dict[str, Any] | None = None) -> Any:
    """Return devices, weight transport, stages and memory of a plan."""
    c = run_helpers.tiny_config({**CLUSTER, **(needs or {}), option: value})
    plan = mode(c).plan(c, CPU)
    if plan is None:
        return None
    return plan.rows(), plan.weights_path(0), plan.stages, mode(c).check_memory(c, plan)


def labels(value: dict[str, Any]) -> Any:
    """Return a plan with a placement by the label of a node."""
    roles = {"env,rollout,actor": {"node": "sim", "devices": 0}}
    needs = {"placement": "local", "cluster.component_placement": roles}
    return planned("cluster.node_groups", value, needs)


def threads(value: int) -> int:
    try:
        modes.select_device("cpu", value)
        return torch.get_num_threads()
    finally:
        torch.set_num_threads(1)


def precision(value: str) -> str:
    with matmul_precision(value):
        return torch.get_float32_matmul_precision()


def located(value: str | None) -> str:
    """Return the directory in which an existing run is resumed."""
    options = {"run_dir": str(run("save_every", 50)), "resume": value}
    return str(run_directory.locate(run_helpers.tiny_config({**TRAIN, **options}), print))


def recorded_env(option: str, value: Any) -> Any:
    """Return the first observation and the threads of the environment that demos records."""
    base = {"id": "Tabletop", "cameras": ["front"], "image_size": 16, "num_threads": 1}
    options = {"out": "x", "env": {**base, option: value}}
    config = loader.read(DemosConfig, [("test", options)]).config
    before = len(os.listdir("/proc/self/task"))
    env: Any = embodied.make_env([0, 1], config=expert_demos.recording_env(config), device=CPU)
    try:
        sums = {name: x.double().sum().item() for name, x in env.reset().items()}
        return sums, len(os.listdir("/proc/self/task")) - before
    finally:
        env.close()


# -------------------------------------------------------------------------------------------- table
SHOWN = "experiment=tabletop_token"
DEMOS_UNREAD = {
    "simulator": "warp",
    "num_envs": 8,
    "max_episode_steps": 5,
    "action_mapping": "clip",
    "success_key": "x",
    "action_chunk": 2,
    "ranges": {"mass": [0.5, 1]},
    "realism.obs_keys": ["state"],
    "realism.action_delay": 1,
    "realism.obs_delay": 1,
    "realism.obs_noise": 0.1,
    "realism.obs_bias": 0.1,
    "realism.obs_dropout": 0.1,
    "realism.action_rate_limit": 0.1,
    "realism.push_velocity": 0.1,
    "realism.push_interval_s": [1.0, 2.0],
    "restart_each_rollout": True,
    "restart_every": 3,
    "stagger": False,
    "obs_keys": ["x"],
    "step_timeout_s": 5.0,
}
CAPTIONS = "imitation/test_captions.py::test_cloning_depends_on_captions_and_their_coefficient"
CLONING = (
    "imitation/test_behavior_cloning.py::test_cloning_is_deterministic_and_depends_on_its_options"
)
DISTILLATION = "imitation/test_distillation.py::test_options_of_distillation_change_the_student"
TRACKERS = "training/test_trackers.py::test_training_does_not_depend_on_its_trackers"
ROBUSTNESS = "evaluation/test_robustness.py::test_evaluate_writes_card_picture_and_table"
GRADIENTS = "forward passes of a layer in one update: computed again in the backward pass"

PAIRS: dict[str, Pair] = {
    # Option -> two values and their difference. Other commands than train: "COMMAND option".
    "mode": Pair(
        "embodied",
        "reasoning",
        "refused with options of the other mode",
        lambda v: run_helpers.tiny_config({"mode": v}).mode,
    ),
    "placement": Pair(
        "local",
        "fused",
        "devices of the plan",
        lambda v: EmbodiedMode().plan(run_helpers.tiny_config({"placement": v}), CPU) is None,
    ),
    "name": Pair(
        "one",
        "two",
        "run directory",
        lambda v: run_directory.locate(run_helpers.tiny_config({"name": v}), print)[0].parts[:2],
    ),
    "description": Pair(
        "one",
        "two",
        "config.yaml of the run",
        lambda v: loader.plain_yaml((run("description", v) / "config.yaml").read_text())[
            "description"
        ],
    ),
    "run_dir": Pair(
        "a",
        "b",
        "run directory",
        lambda v: run_directory.locate(run_helpers.tiny_config({"run_dir": v}), print)[0],
    ),
    "seed": Pair(0, 1, "weights", lambda v: robot_option_cases.train({"seed": v})[-1]["weights"]),
    "updates": Pair(
        2, 3, "updates of the run", lambda v: len(robot_option_cases.train({"updates": v}))
    ),
    "env_steps": Pair(
        64,
        128,
        "updates of the run",
        lambda v: batch_sizes.total_updates(
            run_helpers.tiny_config({"updates": None, "env_steps": v})
        ),
    ),
    "resume": Pair(None, "auto", "an existing run is refused or continued", located),
    "save_every": Pair(1, 2, "checkpoints of the run", partial(checkpoints, "save_every")),
    "keep_last": Pair(1, 2, "checkpoints that are kept", partial(checkpoints, "keep_last")),
    "eval_every": Pair(0, 1, "evaluations of the run", rows),
    "device": Pair(
        "cpu",
        "cuda:99",
        "refused where it does not exist",
        lambda v: str(modes.select_device(v, 1)),
    ),
    "threads": Pair(1, 2, "threads of torch", threads),
    "compile": Pair(
        "always",
        "never",
        "first compiled update",
        lambda v: embodied.compile_from(run_helpers.tiny_config({"compile": v}), CPU, print),
    ),
    "pipeline": Pair(
        False,
        True,
        "thread that collects",
        test="training/test_pipelined_system.py::test_learner_and_rollout_run_in_different_threads",
    ),
    "learner_threads": Pair(
        1,
        2,
        "threads that compute the gradient of a minibatch",
        test="core/test_compile.py::test_gradients_of_two_threads_equal_those_of_one",
    ),
    "matmul_precision": Pair(
        "highest", "medium", "precision of float32 products while training", precision
    ),
    "trackers": Pair([], ["wandb"], "tools that receive the metrics", test=TRACKERS),
    "tracker_project": Pair(None, "robots", "project in the tool", test=TRACKERS),
    "tracker_run_name": Pair(None, "one", "name of the run in the tool", test=TRACKERS),
    "allow_changed_task": Pair(
        False,
        True,
        "refused where the files of the task differ",
        test="envs/test_task_files.py::test_changed_task_is_reported",
    ),
    "env.step_timeout_s": Pair(
        0.05,
        None,
        "a call of the simulator that takes longer ends the run",
        test="commands/test_supervisor.py::test_calls_beyond_their_limit_are_overdue",
    ),
    "env.num_threads": Pair(1, 3, "threads that the simulator starts", threads_of_simulator),
    "model.gradient_checkpointing": Pair(
        False,
        True,
        GRADIENTS,
        lambda v: joint_forwards(
            "model.gradient_checkpointing", v, robot_option_cases.VLM, "RMSNorm"
        ),
    ),
    "algorithm.micro_batch_size": Pair(
        4,
        8,
        "rows of forward passes",
        lambda v: joint_forwards("algorithm.micro_batch_size", v, {}, ""),
    ),
    "algorithm.micro_batch_tokens": Pair(
        None,
        40,
        "rows of forward passes",
        partial(language, "actor", "algorithm.micro_batch_tokens"),
    ),
    "algorithm.rollout_micro_batch_size": Pair(
        None,
        3,
        "rows of forward passes while acting",
        partial(language, "rollout", "algorithm.rollout_micro_batch_size"),
    ),
    "algorithm.logprob_forward_micro_batch_size": Pair(
        None,
        3,
        "rows of forward passes that compute log-probabilities again",
        partial(
            language,
            "actor",
            "algorithm.logprob_forward_micro_batch_size",
            needs={"algorithm.recompute_log_probs": True},
        ),
    ),
    "evaluation.num_envs": Pair(1, 2, "environments of an evaluation", evaluation_envs),
    "evaluation.env_kwargs": Pair(
        {},
        {"far": 3.0},
        "observations of an evaluation",
        partial(evaluation_observations, option="evaluation.env_kwargs"),
    ),
    "evaluation.randomize": Pair(
        False,
        True,
        "observations of an evaluation",
        partial(evaluation_observations, option="evaluation.randomize"),
    ),
    "evaluation.video_episodes": Pair(
        1, 2, "steps or episodes of the video", partial(video, "evaluation.video_episodes")
    ),
    "evaluation.video_steps": Pair(
        2, 4, "steps or episodes of the video", partial(video, "evaluation.video_steps")
    ),
    "evaluation.video_size": Pair(
        32, 48, "pixels of the video", partial(video, "evaluation.video_size")
    ),
    "actor.model.gradient_checkpointing": Pair(
        False, True, GRADIENTS, partial(language, "actor", "actor.model.gradient_checkpointing")
    ),
    "critic.model.gradient_checkpointing": Pair(
        False, True, GRADIENTS, partial(language, "critic", "critic.model.gradient_checkpointing")
    ),
    "critic.concurrent": Pair(
        False,
        True,
        "the critic learns in a thread of its own",
        partial(language, "threads", "critic.concurrent"),
    ),
    "rollout.gpu_memory_utilization": Pair(
        0.4,
        0.6,
        "memory that vLLM allocates",
        test="rollout/generation/test_engine.py::test_options_and_prefix_cache_of_vllm",
    ),
    "rollout.slots": Pair(
        3, 256, "rows of forward passes", partial(language, "rollout", "rollout.slots")
    ),
    "reward.workers": Pair(
        0, 1, "processes that grade", partial(language, "processes", "reward.workers")
    ),
    "cloning.steps": Pair(
        0,
        2,
        "a run clones before it learns",
        test="imitation/test_behavior_cloning.py::"
        + "test_command_records_and_clones_and_reuses_both",
    ),
    "cloning.dataset": Pair(
        None,
        "DIR",
        "refused where a task has no expert",
        test="imitation/test_behavior_cloning.py::test_tasks_without_an_expert_need_a_dataset",
    ),
    "cloning.episodes": Pair(
        6,
        2000,
        "demonstrations recorded",
        test="imitation/test_behavior_cloning.py::test_command_records_and_clones_and_reuses_both",
    ),
    "cloning.foresight_steps": Pair(0, 5, "weights of the clone", test=CLONING),
    "cloning.captions": Pair(0, 3, "weights of the clone", test=CAPTIONS),
    "cloning.caption_coef": Pair(1.0, 0.0, "weights of the clone", test=CAPTIONS),
    "cloning.batch_size": Pair(8, 64, "weights of the clone", test=CLONING),
    "cloning.lr": Pair(1e-3, 4e-3, "weights of the clone", test=CLONING),
    "cloning.coef": Pair(
        0.0,
        0.1,
        "metric policy/cloning_loss",
        test="imitation/test_auxiliary_cloning.py::"
        "test_command_trains_and_resumes_with_the_auxiliary_loss",
    ),
    "teacher": Pair(
        None,
        "DIR",
        "refused by distill without one, and by train with one",
        test="imitation/test_distillation.py::"
        "test_train_does_not_read_a_teacher_or_options_of_distillation",
    ),
    "initial_policy": Pair(
        None,
        "DIR",
        "initial weights",
        test="imitation/test_distillation.py::"
        "test_ppo_starts_from_the_student_with_a_critic_warm_up",
    ),
    "distillation.loss": Pair("mse", "nll", "weights of the student", test=DISTILLATION),
    "distillation.teacher_share": Pair(1.0, 0.1, "weights of the student", test=DISTILLATION),
    "distillation.teacher_share_updates": Pair(2, 0, "weights of the student", test=DISTILLATION),
    "distillation.sample_actions": Pair(False, True, "weights of the student", test=DISTILLATION),
    "distillation.update_epoch": Pair(4, 1, "weights of the student", test=DISTILLATION),
    "distillation.global_batch_size": Pair(32, 64, "weights of the student", test=DISTILLATION),
    "distillation.lr": Pair(3e-3, 1e-4, "weights of the student", test=DISTILLATION),
    "distillation.lr_schedule": Pair(
        "constant", "linear", "weights of the student", test=DISTILLATION
    ),
    "cluster.num_nodes": Pair(
        1, 2, "refused without a Ray cluster", partial(planned, "cluster.num_nodes")
    ),
    "cluster.devices_per_node": Pair(
        1, 2, "devices of the plan", partial(planned, "cluster.devices_per_node")
    ),
    "cluster.device_memory_gb": Pair(
        1e-5, 64.0, "refused where the run needs more", partial(planned, "cluster.device_memory_gb")
    ),
    "cluster.node_groups": Pair({}, {"sim": 0}, "refused where a label has no machine", labels),
    "cluster.component_placement": Pair(
        {"env,rollout,actor": 0},
        {"env,rollout,actor": "0-1"},
        "devices of the plan",
        partial(planned, "cluster.component_placement", needs={"placement": "local"}),
    ),
    "cluster.stages": Pair(
        1,
        2,
        "parts of the environments",
        partial(planned, "cluster.stages", needs={"placement": "hybrid"}),
    ),
    "cluster.max_lag": Pair(
        0,
        1,
        "path of the weights",
        partial(planned, "cluster.max_lag", needs={"placement": "disaggregated"}),
    ),
    "cluster.weights": Pair(
        "broadcast",
        "store",
        "path of the weights",
        partial(planned, "cluster.weights", needs={"placement": "disaggregated"}),
    ),
    "cluster.shard": Pair(False, True, "memory of the plan", partial(planned, "cluster.shard")),
    "cluster.check_weights": Pair(
        False,
        True,
        "different weights end the run",
        test="placement/test_weight_sync.py::test_publish_gives_every_process_the_learners_tensors",
    ),
    "cluster.address": Pair(
        None,
        "127.0.0.1:1",
        "refused where Ray cannot be reached",
        test="integration/test_placements.py::test_unreachable_ray_cluster_is_named",
    ),
    "cluster.start_timeout_s": Pair(
        2.0,
        300.0,
        "the wait for devices ends",
        test="integration/test_placements.py::test_waiting_for_occupied_devices_ends_after_start_timeout",
    ),
    "cluster.step_timeout_s": Pair(
        0.2,
        1800.0,
        "the wait for a process ends",
        test="placement/test_channels.py::test_lost_or_silent_peer_is_named",
    ),
    "cluster.max_restarts": Pair(
        0,
        1,
        "the run is rebuilt after a loss",
        test="drills/test_placement_failures.py::test_restarted_run_equals_an_undisturbed_one",
    ),
    "evaluate checkpoint": Pair(
        "",
        "DIR",
        "refused when empty",
        lambda v: validation.check(EvaluateConfig(checkpoint=v)) or "",
    ),
    "evaluate robustness": Pair(False, True, "robustness.json", test=ROBUSTNESS),
    "evaluate robustness_factors": Pair([], ["mass"], "factors of the card", test=ROBUSTNESS),
    "evaluate robustness_values": Pair({}, {"mass": [1, 2]}, "values of a factor", test=ROBUSTNESS),
    "evaluate robustness_episodes": Pair(None, 2, "episodes at each value", test=ROBUSTNESS),
    "evaluate episodes": Pair(2, 3, "report", of_evaluate("report", "episodes")),
    "evaluate num_envs": Pair(1, 3, "environments", of_evaluate("environments", "num_envs")),
    "evaluate seed": Pair(0, 1, "report", of_evaluate("report", "seed")),
    "evaluate deterministic": Pair(True, False, "report", of_evaluate("report", "deterministic")),
    "evaluate video": Pair(False, True, "the video", lambda v: video("evaluate video", v)),
    "evaluate video_episodes": Pair(
        1, 2, "steps or episodes of the video", lambda v: video("evaluate video_episodes", v)
    ),
    "evaluate video_steps": Pair(
        2, 4, "steps or episodes of the video", lambda v: video("evaluate video_steps", v)
    ),
    "evaluate video_size": Pair(
        32, 48, "pixels of the video", lambda v: video("evaluate video_size", v)
    ),
    "evaluate out": Pair(
        str(FOLDER / "a"), str(FOLDER / "b"), "folder of the report", of_evaluate("out", "out")
    ),
    "evaluate device": Pair(
        "cpu", "cuda:99", "refused where it does not exist", of_evaluate("report", "device")
    ),
    "evaluate threads": Pair(1, 2, "threads of torch", of_evaluate("threads", "threads")),
    "evaluate allow_changed_task": Pair(
        False,
        True,
        "refused where the files of the task differ",
        test="envs/test_task_files.py::test_changed_task_is_reported",
    ),
    "evaluate env": Pair(
        {"max_episode_steps": 3}, {"max_episode_steps": 4}, "report", of_evaluate("report", "env")
    ),
    "evaluate data": Pair(
        [],
        [str(language_option_cases.FILES / "more.jsonl")],
        "report",
        of_evaluate("report", "data", {"language": True}),
    ),
    **{
        f"evaluate {name}": Pair(
            a,
            b,
            "report",
            of_evaluate(
                "report", name, {"language": True, **({"deterministic": False} if sampled else {})}
            ),
        )
        for name, a, b, sampled in (
            ("n", 1, 2, True),
            ("response_length", 3, 6, False),
            ("temperature", 0.1, 1.0, True),
            ("top_k", 0, 2, True),
            ("top_p", 0.2, 1.0, True),
            ("min_p", 0.0, 0.8, True),
            ("repetition_penalty", 1.0, 5.0, False),
        )
    },
    "demos out": Pair(
        "",
        "DIR",
        "refused when empty",
        lambda v: str(
            expert_demos.recording_env(
                loader.read(
                    DemosConfig,
                    [("test", {"out": v, "env": {"id": "Tabletop", "cameras": ["front"]}})],
                ).config
            )
        ),
    ),
    "demos episodes": Pair(
        5,
        7,
        "demonstrations recorded",
        test="commands/test_demos.py::test_demonstrations_are_recorded_and_continued",
    ),
    "demos seed": Pair(
        0,
        1,
        "recorded states",
        test="commands/test_demos.py::test_recordings_depend_on_seed_and_noise",
    ),
    "demos noise": Pair(
        0.05,
        0.3,
        "recorded states",
        test="commands/test_demos.py::test_recordings_depend_on_seed_and_noise",
    ),
    "demos captions": Pair(
        False,
        True,
        "columns of the recording",
        test="commands/test_demos.py::test_captions_are_recorded_and_cloned",
    ),
    "demos env.id": Pair(
        "Tabletop", "Hopper-v4", "refused without an expert", partial(recorded_env, "id")
    ),
    "demos env.kwargs": Pair(
        {"families": ["reach"]},
        {"families": ["push"]},
        "first observations",
        partial(recorded_env, "kwargs"),
    ),
    "demos env.cameras": Pair(
        ["front"], [], "refused without a camera", partial(recorded_env, "cameras")
    ),
    "demos env.image_size": Pair(16, 24, "observations", partial(recorded_env, "image_size")),
    "demos env.randomize": Pair(
        False, True, "first observations", partial(recorded_env, "randomize")
    ),
    "demos env.num_threads": Pair(
        1, 3, "threads that the simulator starts", partial(recorded_env, "num_threads")
    ),
    **{
        f"demos env.{name}": Pair(
            "null",
            value,
            "refused, as demos does not read it",
            lambda v, name=name: (
                "" if v == "null" else command("demos", ["out=x", SHOWN], f"env.{name}", v)
            ),
        )
        for name, value in DEMOS_UNREAD.items()
    },
    **{
        f"benchmark {name}": Pair(a, b, effect, test=f"test_benchmark.py::{test}")
        for name, a, b, effect, test in (
            ("out", "", "DIR", "folder of all files", "test_trial_writes_table_and_page"),
            ("methods", ["clone"], ["clone", "grpo"], "rows", "test_trial_writes_table_and_page"),
            ("results", [], ["FILE"], "rows of the table", "test_trial_writes_table_and_page"),
            ("trial", False, True, "sizes", "test_trial_writes_table_and_page"),
            ("seeds", 1, 2, "stages", "test_stages_run_in_order"),
            ("jobs", 1, 2, "processes at the same time", "test_stages_run_in_order"),
        )
    },
    "export checkpoint": Pair(
        "", "DIR", "refused when empty", lambda v: validation.check(ExportConfig(v, "x")) or ""
    ),
    "export out": Pair(
        "", "DIR", "refused when empty", lambda v: validation.check(ExportConfig("x", v)) or ""
    ),
    "export lora": Pair(
        "merged",
        "adapter",
        "written files",
        test="models/vla/test_pretrained.py::test_train_evaluate_and_export",
    ),
}


# -------------------------------------------------------------------------------------------- tests
CLASSES = {
    "": Config,
    "evaluate ": EvaluateConfig,
    "demos ": DemosConfig,
    "export ": ExportConfig,
    "benchmark ": BenchmarkConfig,
}
TRAININGS = (robot_option_cases.CASES, language_option_cases.CASES)


@pytest.fixture(scope="module", autouse=True)
def files() -> Iterator[None]:
    """Write the models, prompts and graders that options name."""
    robot_option_cases.write_models()
    with language_option_cases.small_tasks_and_files():
        yield


def trainings() -> set[str]:
    """Return the options for which ``test_options`` compares trainings or expects a refusal."""
    return {p for c in TRAININGS for table in (c.changes, c.reported, c.refused) for p in table}


def test_every_option_has_an_effect() -> None:
    options = {
        f"{command}{path}" for command, cls in CLASSES.items() for path in loader.describe(cls)
    }
    assert set(PAIRS) | trainings() == options, "a new option needs two values whose runs differ"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"language": True, "deterministic": False}])
def test_reports_are_reproducible(options: dict[str, Any]) -> None:
    """Check that equal options of evaluate give equal reports."""
    observe = of_evaluate("report", "seed", options)
    first = observe(0)
    _evaluated.cache_clear()
    assert observe(0) == first and len(first) == 1 and len(first[0]) > 5


@pytest.mark.slow
@pytest.mark.parametrize("option", PAIRS)
def test_two_values_differ(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = PAIRS[option]
    if pair.observe is None:
        file, _, name = pair.test.partition("::")
        text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
        functions = [x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef)]
        (function,) = (x for x in functions if x.name == name)
        leaf = option.rpartition(".")[2].rpartition(" ")[2]
        source = ast.get_source_segment(text, function) or ""
        assert leaf in source, f"{pair.test} does not mention {leaf}"
        return
    monkeypatch.chdir(tmp_path)
    assert observed(pair.observe, pair.a) != observed(pair.observe, pair.b)


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "run: PYTHONPATH=tests python -m tests.integration.test_option_effects"
    )


# --------------------------------------------------------------------------------------------- page
def text_of(value: Any) -> str:
    """Format a value as JSON, without paths of this machine."""
    # The checkout first: it may be below the folder of temporary files.
    text = json.dumps(value).replace(f"{PAGE.parents[1]}/", "").replace("|", "\\|")
    return f"`{text.replace(str(FOLDER.parent), 'DIR')}`"


def page() -> str:
    """Return the tables as Markdown."""
    lines = [
        "# What each option changes",
        "",
        (
            "Every option has two values whose runs differ, or a value that is refused. The tests"
            " compare them: "
            "[tests/integration/test_option_effects.py](../tests/integration/test_option_effects.py)"
            " and [tests/integration/test_options.py](../tests/integration/test_options.py)."
            " This page is written from their tables by `PYTHONPATH=tests python -m"
            " tests.integration.test_option_effects`; a new option without an entry fails the"
            " tests."
        ),
    ]

    def table(title: str, head: str, rows: list[list[str]]) -> None:
        count = head.count("|") + 1
        lines.extend(["", f"## {title}", "", f"| {head} |", "|" + "---|" * count])
        lines.extend(f"| {' | '.join(row)} |" for row in rows)

    for title, cases in (
        ("Training of robot policies", robot_option_cases.CASES),
        ("Training of language models", language_option_cases.CASES),
    ):
        rows = []
        tables = ((cases.changes, "weights"), (cases.reported, ""), (cases.refused, ""))
        for entries, difference in tables:
            for path, entry in entries.items():
                default = loader.describe(Config)[path].default
                value, needs = entry[0], entry[1] if isinstance(entry[1], dict) else {}
                effect = difference or (f"metric `{entry[2]}`" if len(entry) > 2 else "refused")
                a = needs.get(path, cases.base.get(path, default))
                others = {k: v for k, v in needs.items() if k != path}
                rows.append(
                    [
                        f"`{path}`",
                        text_of(a),
                        text_of(value),
                        effect,
                        text_of(others) if others else "",
                    ]
                )
        table(title, "option | value | other value | what differs | with", rows)
    rows = [
        [
            f"`{option}`",
            text_of(pair.a),
            text_of(pair.b),
            pair.effect,
            f"`tests/{pair.test.partition('::')[0]}`" if pair.test else "",
        ]
        for option, pair in PAIRS.items()
    ]
    table(
        "Memory, time, files, placement and other commands",
        "option | value | other value | what differs | test elsewhere",
        rows,
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit(print(PAGE))
