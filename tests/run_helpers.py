"""Small training runs, and checks of processes, Ray and nested states."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from embodied_envs.base.random import env_seeds
from embodied_envs.types import VectorEnv
from embodied_ppo.cluster import run_plan
from embodied_ppo.commands import main
from embodied_ppo.core import compile
from embodied_ppo.core.types import Mean, Trajectory
from embodied_ppo.options import loader, validation
from embodied_ppo.options.batch_sizes import total_updates
from embodied_ppo.options.schema import Config
from embodied_ppo.policies import robot_policy
from embodied_ppo.policies.actor_critic import POLICY_GAIN, ActorCritic
from embodied_ppo.ppo.robot_actor import robot_ppo
from embodied_ppo.programs import robot, runs
from embodied_ppo.programs.run_spec import RunSpec
from embodied_ppo.programs.system import build_system
from embodied_ppo.rollout import environments
from embodied_ppo.rollout.simulation import Rollout
from embodied_ppo.training import checkpoint
from embodied_ppo.training.progress import Messages

BASE: dict[str, Any] = {
    "env": {"id": "HalfCheetah-v4", "num_envs": 4, "num_threads": 1},
    "model": {"hidden": [16]},
    "algorithm": {"horizon": 8, "global_batch_size": 16, "update_epoch": 3, "lr": 3e-3},
    "updates": 3,
}


def scale_policy(policy: ActorCritic, gain: float) -> ActorCritic:
    """Return the new policy with another gain of its head: its actions depend on observations."""
    with torch.no_grad():
        policy.policy_head.weight.mul_(gain / POLICY_GAIN)
    return policy


def tables(test_file: str) -> dict[str, Any]:
    """Return the tables in the YAML file beside a test module."""
    return yaml.safe_load(Path(test_file).with_suffix(".yaml").read_text(encoding="utf-8"))


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries for dotted paths: {"a.b": 1} -> {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def options(text: str) -> dict[str, Any]:
    """Return options that are written as on a command line, ``updates=4 model.hidden=[16]``."""
    words = (word.partition("=") for word in text.split())
    return {path: yaml.safe_load(value) for path, _, value in words}


def words(text: str) -> list[str]:
    """Return the words of a text, as of a command line."""
    return text.split()


def run_command(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """Run ``embodied-ppo COMMAND --json ..``, which must succeed; return its JSON output."""
    capsys.readouterr()
    command, *options = map(str, arguments)
    code = main.main([command, "--json", *options])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


def assert_refused(
    capsys: pytest.CaptureFixture[str], command: str | Iterable[object], message: str = ""
) -> str:
    """Run a command that is refused with one line and without other output; return the line.

    Args:
        capsys: The fixture of the test.
        command: The command and its arguments; a text is split at spaces.
        message: What the line must contain, parts separated by " .. ".
    """
    capsys.readouterr()
    code = main.main(command.split(" ") if isinstance(command, str) else [*map(str, command)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, err
    for part in message.split(" .. "):
        assert part in err, err
    return err.removesuffix("\n")


def tiny_config(options: Mapping[str, Any] | None = None) -> Config:
    """Return ``BASE`` with ``options`` (dotted paths), validated as on the command line.

    Every option must be read.
    """
    options = options or {}
    is_actor_critic = options.get("model.policy", "actor_critic") == "actor_critic"
    reads_hidden = is_actor_critic and options.get("model.network") is None
    base = BASE if reads_hidden else {**BASE, "model": {}}
    loaded = loader.read(Config, [("base", base), ("test", nested(options))])
    validation.check(loaded.config, explicit=loaded.deliberate({"test"}))
    return loaded.config


def train(run_dir: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Train with the options of ``tiny_config`` in ``run_dir``; return the run's summary."""
    return runs.train(tiny_config({**options, "run_dir": str(run_dir)}), quiet=True)


def metric_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def stored(run_dir: Path, update: int) -> checkpoint.Checkpoint:
    """Return the checkpoint of an update."""
    return checkpoint.open_checkpoint(run_dir / "checkpoints" / f"step_{update:06d}")


def tiny_training(c: Config, *, max_lag: int = 0) -> list[dict[str, float]]:
    """Train and return the metrics of every update, and the sum of all absolute weights.

    Args:
        c: Options of the run.
        max_lag: Updates between acting and learning, as in ``loop.train``.
    """
    rollout = tiny_rollout(c)
    env, policy = rollout.env, rollout.policy
    try:
        updates = total_updates(c)
        never = compile.CompileSchedule(None)
        spec = RunSpec(c, env.device, Path(), updates)
        learner = robot.make_learner(spec, policy, never, Messages(print))
        pending, rows = [], []
        for update in range(updates + max_lag):
            if update < updates:
                pending.append(rollout.collect(c.algorithm.horizon, update=update, version=0))
            if update >= max_lag:
                trajectory, metrics = pending.pop(0)
                metrics = metrics | learner.update(trajectory, update=update - max_lag)
                weights = sum(float(p.detach().double().abs().sum()) for p in policy.parameters())
                row = {k: v.value if isinstance(v, Mean) else float(v) for k, v in metrics.items()}
                rows.append(row | {"weights": weights})
        return rows
    finally:
        env.close()


def tiny_env(c: Config) -> VectorEnv:
    """Return the simulators of a run in one process."""
    seeds = env_seeds(c.seed, 0, c.env.num_envs, c.algorithm.group_size)
    options = environments.training_env(c)
    return environments.make_env(seeds, config=options, device=torch.device("cpu"), model=c.model)


def tiny_rollout(c: Config) -> Rollout:
    """Return the rollout of a run in one process, without compiled code."""
    env = tiny_env(c)
    policy = robot_policy.make_policy(c, env)
    return robot.make_rollout(c, env, policy, compile.CompileSchedule(None))


def train_mean_rewards(c: Config, env: VectorEnv, *, stagger: bool = False) -> list[float]:
    """Train a policy in ``env`` and return the mean reward of each update's rollout."""
    policy = robot_policy.make_policy(c, env)
    rollout = Rollout(env, policy, seed=1, stagger=stagger)
    updates = total_updates(c)
    learner = robot_ppo(policy, c.algorithm, num_envs=env.num_envs, updates=updates, seed=1)
    rewards = []
    for update in range(updates):
        trajectory, _ = rollout.collect(c.algorithm.horizon, update=update, version=update)
        rewards.append(trajectory.reward[trajectory.mask].mean().item())
        learner.update(trajectory, update=update)
    return rewards


def build_cluster_system(c: Config, run_dir: Path, stack: ExitStack) -> Any:
    """Return the ClusterSystem of ``c``; ``stack`` closes it."""
    plan = run_plan.plan_run(c, torch.device("cpu"))
    assert plan is not None
    spec = RunSpec(c, torch.device("cpu"), run_dir, 4, plan=plan)
    system: Any = build_system(spec, Messages(print), stack).system
    stack.callback(system.close)
    return system


def trajectory(reward: Tensor, **fields: Any) -> Trajectory:
    """Return a trajectory of version 0; fields that are not given: no ends, no masks, zeros."""
    zero, flag = torch.zeros_like(reward), torch.zeros_like(reward, dtype=torch.bool)
    version = torch.zeros(reward.shape[:2], dtype=torch.int64)
    fields = {"replay": {}, "value": zero, "next_value": zero, "mask": ~flag} | fields
    fields = {"terminated": flag, "truncated": flag, "version": version} | fields
    return Trajectory(reward=reward, **fields)


def free_ray_cpus(expected: float = 8.0) -> float:
    """Wait up to 20 s until Ray has ``expected`` free CPUs; return how many it has.

    Ray reclaims the CPUs of an ended process with a delay.
    """
    import ray  # takes a second to load

    deadline = time.monotonic() + 20
    while (free := ray.available_resources().get("CPU", 0.0)) != expected:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return free


def processes_ended(*pids: int) -> bool:
    """Return whether these processes end within 10 s.

    A zombie counts as ended; it has an empty command line.
    """

    def runs(pid: int) -> bool:
        try:
            return bool(Path("/proc", str(pid), "cmdline").read_bytes())
        except (FileNotFoundError, ProcessLookupError):
            return False

    deadline = time.monotonic() + 10
    while (running := any(map(runs, pids))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not running


def assert_states_close(actual: Any, expected: Any, path: str = "") -> None:
    """Assert that two nested states are equal, tensors to 1e-5."""
    assert type(actual) is type(expected), path
    if isinstance(expected, dict):
        assert list(actual) == list(expected), path
        for name, value in expected.items():
            assert_states_close(actual[name], value, f"{path}/{name}")
    elif isinstance(expected, Tensor):
        assert type(actual) is Tensor and actual.dtype == expected.dtype, path
        torch.testing.assert_close(
            actual, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{path}: {text}"
        )
    elif isinstance(expected, list):
        assert_states_close(dict(enumerate(actual)), dict(enumerate(expected)), path)
    else:
        assert actual == expected, path


def run_process(*command: object, **options: Any) -> str:
    """Run a command, which must succeed within 5 minutes; return what it prints to stdout.

    Args:
        command: The program and its arguments.
        options: Of ``subprocess.run``, such as cwd and env.
    """
    options = {"capture_output": True, "text": True, "timeout": 300} | options
    done = subprocess.run([*map(str, command)], **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@torch.no_grad()
def perturb(module: torch.nn.Module, scale: float, *, frozen: bool = False) -> None:
    """Add noise to the trained parameters, new ones of which are zero, or to all parameters."""
    for p in module.parameters():
        if p.requires_grad or frozen:
            p.add_(scale * torch.randn_like(p))


def trace_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``torch.compile`` trace functions without generating code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def page_commands(folder: Path, root: Path) -> dict[str, str]:
    """Write ``embodied-ppo`` and ``python`` of the checkout ``root`` into ``folder``/bin.

    Returns:
        The environment in which blocks of a page of the documentation find them.
    """
    for name, arguments in {"embodied-ppo": "-m embodied_ppo.commands.main", "python": ""}.items():
        file = folder / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        file.chmod(0o755)
    path = os.pathsep.join([str(root), str(root / "envs")])
    return os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": path}
