"""Every option of every command has an effect: two values differ, or a value is refused.

``test_options`` compares trainings. This file adds the options without
an effect on training (memory, time, files, text, placement) and the options of the other commands,
and requires an entry for each option of the schema.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
from torch import nn

import embodied_envs
from embodied_envs.base.errors import CheckpointError, ConfigError, EnvError
from embodied_ppo.cluster import run_plan
from embodied_ppo.core import devices
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.evaluation import checkpoint_evaluation, robot_evaluation
from embodied_ppo.evaluation import video as video_module
from embodied_ppo.imitation import expert_demos
from embodied_ppo.options import batch_sizes, loader
from embodied_ppo.options.batch_sizes import optimization_config
from embodied_ppo.options.compose import DEMOS_ENV
from embodied_ppo.options.schema import (
    Config,
    DemosConfig,
    DistillationConfig,
    EvaluateConfig,
    ExportConfig,
)
from embodied_ppo.policies import robot_policy
from embodied_ppo.ppo.robot_actor import robot_ppo
from embodied_ppo.programs import compilation, runs
from embodied_ppo.programs.run_spec import RunSpec
from embodied_ppo.programs.system import build_system
from embodied_ppo.rollout import environments
from embodied_ppo.rollout.simulation import Rollout
from embodied_ppo.training import run_directory
from embodied_ppo.training.progress import Messages
from tests.integration import language_option_cases, robot_option_cases
from tests.integration.test_options import files  # noqa: F401

REFUSALS = (CheckpointError, ConfigError, EnvError, PlacementError)
CPU = torch.device("cpu")
MORE_PROMPTS = language_option_cases.FILES / "more.jsonl"
# Runs and reports; removed with the cache of the tests.
FOLDER = Path(os.environ.get("EMBODIED_PPO_CACHE", "/tmp")) / "option_effects"


# ---------------------------------------------------------------------------------------- observers
def observed(observe: Callable[[str, Any], Any], option: str, value: Any) -> Any:
    """Return the observation of a value, or the text of its refusal."""
    try:
        return observe(option, value)
    except REFUSALS as error:
        return f"refused: {error}"


# Options of a run of about half a second.
TRAIN = run_helpers.options("""env.id=toy_envs:Balance env.num_envs=2 env.max_episode_steps=6
    algorithm.horizon=4 algorithm.global_batch_size=8 algorithm.update_epoch=1
    evaluation.episodes=2 compile=never device=cpu updates=3""")


@cache
def _run(options: str) -> Path:
    folder = FOLDER / f"run{abs(hash(options))}"
    run_helpers.train(folder, {**TRAIN, **json.loads(options)})
    return folder


def run(option: str, value: Any, needs: dict[str, Any] | None = None) -> Path:
    """Return the folder of a run; equal options share one."""
    return _run(json.dumps({**(needs or {}), option: value}, sort_keys=True))


def checkpoints(option: str, value: Any) -> list[str]:
    needs = {"save_every": 1} if option == "keep_last" else {}
    return sorted(path.name for path in (run(option, value, needs) / "checkpoints").glob("step_*"))


def rows(option: str, value: int) -> int:
    """Return the number of rows of metrics with an evaluation."""
    return sum("eval/return" in row for row in run_helpers.metric_rows(run(option, value)))


@contextmanager
def without_rendering(arguments: list[Any]) -> Iterator[None]:
    """Record the arguments of ``record_video`` in ``arguments``; rendering of a video takes 4 s."""

    def record(*args: Any, episodes: int, **more: Any) -> video_module.Video:
        arguments.append(episodes)
        return video_module.Video(path=None, reason="not rendered")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(video_module, "record_video", record)
        yield


def video(option: str, value: Any) -> list[Any]:
    """Return the episodes of the video of a run or of ``embodied-ppo evaluate``."""
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
    runs.train(language_option_cases.config({"run_dir": str(folder), "updates": 1}), quiet=True)
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
        checkpoint_evaluation.evaluate(config, explicit=(), quiet=True)
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
    """Record the number of environments of each simulator that is built."""
    sizes, make = [], embodied_envs.make

    def record(id: str, *, num_envs: int, **options: Any) -> Any:
        sizes.append(num_envs)
        return make(id, num_envs=num_envs, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embodied_envs, "make", record)
        yield sizes


def evaluated(option: str, value: Any, needs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Evaluate a run; return the report, and numbers of environments and threads."""
    return _evaluated(json.dumps({**(needs or {}), option: value}, sort_keys=True))


def of_evaluate(
    key: str = "report", needs: dict[str, Any] | None = None
) -> Callable[[str, Any], Any]:
    """Return an observer of one result of ``evaluated``; reports without durations."""

    def observe(option: str, value: Any) -> Any:
        result = evaluated(option.removeprefix("evaluate "), value, needs)[key]
        if key != "report":
            return result
        ignored = ("out", "seconds", "wall")
        return [
            {k: v for k, v in json.loads(text).items() if not any(name in k for name in ignored)}
            for text in result
        ]

    return observe


def evaluation_observations(option: str, value: Any) -> Any:
    """Return the observations after 3 steps of the evaluation environment."""
    base = {"env.id": "toy_envs:toy_envs/Point-v0", "env.num_threads": 0}
    if option == "evaluation.randomize":
        base = {"env.id": "toy_envs:Balance", "env.randomize": True}
        base |= {"env.ranges": {"mass": [0.1, 0.2]}}
    c = run_helpers.tiny_config({**base, option: value})
    env: Any = environments.make_env([5, 6], config=environments.evaluation_env(c), device=CPU)
    try:
        env.reset()
        action = torch.full((2, 2 if "Point" in c.env.id else 1), 0.5)
        return [env.step(action).obs for _ in range(3)][-1].tolist()
    finally:
        env.close()


def simulators_of_run(option: str, value: str) -> int:
    """Return the number of simulators that a run with two evaluations builds."""
    options = {option: value, "run_dir": str(FOLDER / f"evaluation_{value}")}
    with env_sizes() as sizes:
        runs.train(run_helpers.tiny_config({**TRAIN, **options}), quiet=True)
    return len(sizes)


def evaluation_envs(option: str, value: int) -> int:
    """Return the number of environments of a run's evaluation."""
    options = {option: value, "evaluation.episodes": 4}
    c = run_helpers.tiny_config({**TRAIN, **options})
    with env_sizes() as sizes:
        env = environments.make_env([0], config=c.env, device=CPU)
        policy = robot_policy.make_policy(c, env)
        make = partial(environments.make_env, config=environments.evaluation_env(c), device=CPU)
        robot_evaluation.measure(c.evaluation, policy, make)
        env.close()
    return max(sizes)


def threads_of_simulator(option: str, value: int) -> int:
    """Return the number of threads that a simulator of 4 environments starts."""
    before = len(os.listdir("/proc/self/task"))
    c = run_helpers.tiny_config({option: value})
    env = environments.make_env([0, 1, 2, 3], config=c.env, device=CPU)
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


def joint_forwards(option: str, value: Any) -> Any:
    """Return the rows of each forward pass of one update of a robot policy."""
    is_vla = option.startswith("model.")
    c = run_helpers.tiny_config({**(robot_option_cases.OPENVLA if is_vla else {}), option: value})
    env = environments.make_env(list(range(c.env.num_envs)), config=c.env, device=CPU)
    try:
        policy = robot_policy.make_policy(c, env)
        rollout = Rollout(env, policy, seed=0)
        trajectory, _ = rollout.collect(c.algorithm.horizon, update=0, version=0)
        learner = robot_ppo(policy, c.algorithm, num_envs=env.num_envs, updates=2, seed=0)
        forwards = Forwards(policy, "RMSNorm") if is_vla else Forwards(policy.trunk)
        learner.update(trajectory, update=0)
        return forwards.rows
    finally:
        env.close()


@cache
def _language(options: str) -> dict[str, Any]:
    c = language_option_cases.config(json.loads(options))
    with ExitStack() as stack:
        spec = RunSpec(c, CPU, FOLDER / "language", c.updates or 0)
        system: Any = build_system(spec, Messages(print), stack).system
        stack.callback(system.close)
        children = set(Path("/proc/self/task").glob("*/children"))
        processes = sum(len(path.read_text().split()) for path in children)
        actor, acting = Forwards(system.module, "RMSNorm"), len(system.module.state_dict())
        critic = Forwards(system.learner.critic.module, "RMSNorm")
        trajectory, _ = system.collect(c.algorithm.response_length, update=0)
        rollout, actor.rows = actor.rows, []
        system.update(trajectory, update=0)
        rows = {"rollout": max(rollout), "actor": actor.rows, "critic": critic.rows}
        return rows | {"processes": processes, "tensors": acting}


def of_language(key: str, **needs: Any) -> Callable[[str, Any], Any]:
    """Return an observer of one update of a language model: rows of passes, or processes."""
    return lambda option, value: _language(json.dumps({**needs, option: value}))[key]


CLUSTER = {"placement": "fused", "cluster.devices_per_node": 2, "env.num_envs": 4}


def planned(option: str, value: Any, needs: dict[str, Any] | None = None) -> Any:
    """Return devices, weight transport, stages and memory of a plan."""
    c = run_helpers.tiny_config({**CLUSTER, **(needs or {}), option: value})
    plan = run_plan.plan_run(c, CPU)
    if plan is None:
        return None
    run_plan.check_memory(c, plan)
    memory = run_plan.memory_estimator(c).estimate_memory(plan)
    return plan.rows(), plan.weights_path(0), plan.stages, memory


def of_plan(**needs: Any) -> Callable[[str, Any], Any]:
    """Return an observer of a plan with other options."""
    return lambda option, value: planned(option, value, needs)


def threads(option: str, value: int) -> int:
    try:
        devices.select_device("cpu", value)
        return torch.get_num_threads()
    finally:
        torch.set_num_threads(1)


def located(option: str, value: str | None) -> tuple[str, ...]:
    """Return the parent and the name of the directory of a run, and what it resumes."""
    existing = {"run_dir": str(run("save_every", 50))} if option == "resume" else {}
    c = run_helpers.tiny_config({**TRAIN, **existing, option: value})
    folder, resume = run_directory.locate(c, print)
    return *folder.parts[:2], str(resume)


def described(option: str, value: str) -> str:
    """Return the file of options of a run, without its directory."""
    return (run(option, value) / "config.yaml").read_text().partition("run_dir")[0]


def updates(option: str, value: int) -> int:
    return batch_sizes.total_updates(run_helpers.tiny_config({"updates": None, option: value}))


def compiles_from(option: str, value: str) -> Any:
    return compilation.compile_from(run_helpers.tiny_config({option: value}), CPU, print)


def schedule_of_student(option: str, value: Any) -> str:
    c = Config(teacher="RUN", distillation=DistillationConfig(lr_schedule=value))
    return optimization_config(c).algorithm.lr_schedule


def recorded_env(option: str, value: Any) -> Any:
    """Return the first observation and the threads of the environment that demos records."""
    base = {"id": "Tabletop", "cameras": ["front"], "image_size": 16, "num_threads": 1}
    options = {"out": "x", "env": {**base, option.removeprefix("demos env."): value}}
    config = loader.read(DemosConfig, [("test", options)]).config
    before = len(os.listdir("/proc/self/task"))
    env: Any = environments.make_env([0, 1], config=expert_demos.recording_env(config), device=CPU)
    try:
        sums = {name: x.double().sum().item() for name, x in env.reset().items()}
        return sums, len(os.listdir("/proc/self/task")) - before
    finally:
        env.close()


# ------------------------------------------------------------------------------------------- tables
# Two values of an option, and the function of option and value whose results differ.
Effect = tuple[Any, Any, Callable[[str, Any], Any]]
RECOMPUTED = {"algorithm.recompute_log_probs": True}
ROLES = "env,rollout,actor"
AT_LABEL = {"cluster.component_placement": {ROLES: {"node": "sim", "devices": 0}}}
OF_LANGUAGE = {"language": True}
SAMPLED = {"language": True, "deterministic": False}
EFFECTS: dict[str, Effect] = {
    "mode": ("embodied", "reasoning", lambda o, v: run_helpers.tiny_config({o: v}).mode),
    "placement": ("local", "fused", planned),
    "name": ("one", "two", located),
    "description": ("one", "two", described),
    "run_dir": ("a", "b", located),
    "seed": (0, 1, lambda o, v: robot_option_cases.train({o: v})[-1]["weights"]),
    "updates": (2, 3, lambda o, v: len(robot_option_cases.train({o: v}))),
    "env_steps": (64, 128, updates),
    "resume": (None, "auto", located),
    "save_every": (1, 2, checkpoints),
    "keep_last": (1, 2, checkpoints),
    "eval_every": (0, 1, rows),
    "device": ("cpu", "cuda:99", lambda _, v: str(devices.select_device(v, 1))),
    "threads": (1, 2, threads),
    "compile": ("always", "never", compiles_from),
    "env.num_threads": (1, 3, threads_of_simulator),
    "model.gradient_checkpointing": (False, True, joint_forwards),
    "algorithm.micro_batch_size": (4, 8, joint_forwards),
    "algorithm.micro_batch_tokens": (None, 40, of_language("actor")),
    "algorithm.rollout_micro_batch_size": (None, 3, of_language("rollout")),
    "algorithm.logprob_forward_micro_batch_size": (None, 3, of_language("actor", **RECOMPUTED)),
    "evaluation.env": ("own", "training", simulators_of_run),
    "evaluation.num_envs": (1, 2, evaluation_envs),
    "evaluation.env_kwargs": ({}, {"far": 3.0}, evaluation_observations),
    "evaluation.randomize": (False, True, evaluation_observations),
    "evaluation.video_episodes": (1, 2, video),
    "actor.model.gradient_checkpointing": (False, True, of_language("actor")),
    "reward.workers": (0, 1, of_language("processes")),
    "distillation.lr_schedule": ("constant", "linear", schedule_of_student),
    "cluster.num_nodes": (1, 2, planned),
    "cluster.devices_per_node": (1, 2, planned),
    "cluster.device_memory_gb": (1e-5, 64.0, planned),
    "cluster.node_groups": ({}, {"sim": 0}, of_plan(placement="local", **AT_LABEL)),
    "cluster.component_placement": ({ROLES: 0}, {ROLES: "0-1"}, of_plan(placement="local")),
    "cluster.stages": (1, 2, of_plan(placement="hybrid")),
    "cluster.max_lag": (0, 1, of_plan(placement="disaggregated")),
    "cluster.shard": (False, True, planned),
    "evaluate episodes": (2, 3, of_evaluate()),
    "evaluate num_envs": (1, 3, of_evaluate("environments")),
    "evaluate seed": (0, 1, of_evaluate()),
    "evaluate deterministic": (True, False, of_evaluate()),
    "evaluate video": (False, True, video),
    "evaluate video_episodes": (1, 2, video),
    "evaluate out": (str(FOLDER / "a"), str(FOLDER / "b"), of_evaluate("out")),
    "evaluate device": ("cpu", "cuda:99", of_evaluate()),
    "evaluate threads": (1, 2, of_evaluate("threads")),
    "evaluate env": ({"max_episode_steps": 3}, {"max_episode_steps": 4}, of_evaluate()),
    "evaluate data": ([], [str(MORE_PROMPTS)], of_evaluate(needs=OF_LANGUAGE)),
    "evaluate response_length": (3, 6, of_evaluate(needs=OF_LANGUAGE)),
    "evaluate n": (1, 2, of_evaluate(needs=SAMPLED)),
    "evaluate temperature": (0.1, 1.0, of_evaluate(needs=SAMPLED)),
    "evaluate top_k": (0, 2, of_evaluate(needs=SAMPLED)),
    "evaluate top_p": (0.2, 1.0, of_evaluate(needs=SAMPLED)),
    "demos env.id": ("Tabletop", "Hopper-v4", recorded_env),
    "demos env.kwargs": ({"families": ["reach"]}, {"families": ["push"]}, recorded_env),
    "demos env.cameras": (["front"], [], recorded_env),
    "demos env.image_size": (16, 24, recorded_env),
    "demos env.randomize": (False, True, recorded_env),
    "demos env.num_threads": (1, 3, recorded_env),
}
CLONING = ("steps", "dataset", "episodes", "foresight_steps", "batch_size", "lr", "shuffle_buffer")
# Test that compares two values -> the options.
ELSEWHERE = {
    "core/test_devices.py": ["deterministic"],
    "training/test_pipelined_system.py": ["pipeline"],
    "training/test_trackers.py": ["trackers"],
    "envs/test_task_files.py": ["allow_changed_task", "evaluate allow_changed_task"],
    "envs/base/test_images.py": ["env.image_layout"],
    "commands/test_supervisor.py": ["env.step_timeout_s"],
    "extras/test_vllm.py": ["rollout.gpu_memory_utilization"],
    "rollout/rewards/test_worker_pool.py": ["reward.timeout_s"],
    "tools/test_generations_page.py": ["rollout.dump"],
    "imitation/test_behavior_cloning.py": [f"cloning.{x}" for x in CLONING],
    "data/test_lerobot_reader.py": ["cloning.exclude_episodes"],
    "imitation/test_distillation.py": [
        *("teacher", "initial_policy", "distillation.loss", "distillation.sample_actions"),
        *("distillation.teacher_share_updates", "distillation.lr"),
    ],
    "cluster/test_channels.py": ["cluster.step_timeout_s"],
    "drills/test_placement_failures.py": ["cluster.max_restarts"],
    "evaluation/test_paired.py": ["evaluate paired"],
    "evaluation/test_robustness.py": [
        *("evaluate robustness", "evaluate robustness_factors"),
        *("evaluate robustness_values", "evaluate robustness_episodes"),
    ],
    "commands/test_demos.py": [
        *(f"demos {x}" for x in ("out", "episodes", "seed", "noise")),
        "cloning.fps_mismatch",
    ],
    "commands/test_main.py": ["evaluate checkpoint", "export checkpoint", "export out"],
    "policies/vla/test_pretrained.py": ["export lora"],
    "programs/test_language.py": ["evaluate model", "evaluate grader"],
}
DEMOS_UNREAD = [
    f"demos {path}"
    for path in loader.describe(DemosConfig)
    if path.startswith("env.") and path.removeprefix("env.") not in DEMOS_ENV
]


# -------------------------------------------------------------------------------------------- tests
CLASSES = {"": Config, "evaluate ": EvaluateConfig, "demos ": DemosConfig, "export ": ExportConfig}
TRAININGS = (robot_option_cases.CASES, language_option_cases.CASES)


def test_every_option_has_an_effect() -> None:
    options = {f"{c}{path}" for c, cls in CLASSES.items() for path in loader.describe(cls)}
    # ``test_options`` compares trainings with these, or expects a refusal.
    trained = {p for c in TRAININGS for table in (c.changes, c.reported, c.refused) for p in table}
    others = {option for paths in ELSEWHERE.values() for option in paths}
    assert {*EFFECTS, *others, *DEMOS_UNREAD} | trained == options, "a new option needs two values"
    for file, paths in ELSEWHERE.items():
        text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
        for leaf in (re.split("[. ]", option)[-1] for option in paths):
            assert re.search(rf"\b{leaf}\b", text), f"{file} does not mention {leaf}"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"language": True, "deterministic": False}])
def test_reports_are_reproducible(options: dict[str, Any]) -> None:
    """Check that equal options of evaluate give equal reports."""
    observe = of_evaluate(needs=options)
    first = observe("seed", 0)
    _evaluated.cache_clear()
    assert observe("seed", 0) == first and len(first) == 1 and len(first[0]) > 5


@pytest.mark.slow
@pytest.mark.parametrize("option", EFFECTS)
def test_two_values_differ(option: str, tmp_path, monkeypatch) -> None:
    a, b, observe = EFFECTS[option]
    monkeypatch.chdir(tmp_path)
    assert observed(observe, option, a) != observed(observe, option, b)


@pytest.mark.parametrize("option", DEMOS_UNREAD)
def test_demos_refuses_what_it_does_not_read(option: str, capsys) -> None:
    command = f"demos out=x {option.removeprefix('demos ')}=1"
    run_helpers.assert_refused(capsys, command, "demos ignores")
