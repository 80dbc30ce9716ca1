"""Write the deployment bundle of an actor-critic policy.

policy.onnx   raw observations -> history -> normaliser -> network -> action mapping -> action of
              ``env.step``; a policy with memory has its state as inputs and outputs
policy.json   names, units, limits and order of inputs and outputs, control rate, origin
golden.npz    recorded observations and actions of episodes of the run's simulator
run_policy.py checks the bundle where it is deployed, and runs it (numpy and onnxruntime only)

Where a robot loop can run the policy (``robot_section``), also:

robot_loop.py, mujoco_robot.py  run the policy on a robot, and in MuJoCo alone
observation.py                  the observation as a function in numpy, or a stub
my_robot.py                     a stub of the robot; robot_unitree.py, robot_ros2.py: examples
scene/scene.xml                 the model of the training
"""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied_envs.adapters.realistic_env import STATE
from embodied_envs.base import tree
from embodied_envs.base.action_mask import check_action_mask
from embodied_envs.base.errors import ConfigError, TrainingError, one_line
from embodied_envs.base.observation_names import SINGLE
from embodied_envs.task_files import TaskFiles
from embodied_envs.types import ArraySpec, Obs, VectorEnv, choices_of, starts
from embodied_ppo.core.devices import select_device
from embodied_ppo.core.history import ObservationHistory, named
from embodied_ppo.core.recurrent_state import EpisodeMemory, with_memory
from embodied_ppo.evaluation import episodes as evaluation
from embodied_ppo.evaluation import robot_evaluation
from embodied_ppo.options import loader
from embodied_ppo.options.schema import EnvConfig, RealismConfig
from embodied_ppo.policies import robot_policy
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.rollout import environments
from embodied_ppo.rollout.history_env import HistoryEnv
from embodied_ppo.tools.deploy import robot_section, run_policy
from embodied_ppo.training.run_directory import report_write_errors, versions
from embodied_ppo.training.trained_run import TrainedRun

# Prefix of the inputs of policy.onnx that are memory, and its recurrent layer's state.
MEMORY_PREFIX, RECURRENT = "memory/", "recurrent"
PACKAGES = ("onnx", "onnxruntime")  # packages of the extra ``export``
# Operator set of policy.onnx, and the first onnxruntime that reads it.
OPSET, LEAST_ONNXRUNTIME = 17, "1.12"
EPISODES, STEPS = 4, 100  # environments that are recorded, and steps of each
TRACKING_S = 10.0  # longest episode in the evaluation of the tracking error
# Largest difference of an action in the replay, as a share of the range of its dimension.
TOLERANCE = 1e-6
# Factor of the difference measured at the export, where that is larger than ``TOLERANCE``.
ROUNDING = 8


class Exported(nn.Module):
    """Actor, history, normaliser and action mapping as one function of tensors."""

    def __init__(
        self,
        policy: ActorCritic,
        specs: Mapping[str, ArraySpec],
        converter: Any,
        history: ObservationHistory | None = None,
    ) -> None:
        """Store the parts.

        Args:
            policy: The policy without its critic, on the CPU.
            specs: Observations of the actor; one array has the name "obs".
            converter: ``ActionConverter`` of the policy's actions to those of the simulator.
            history: Builds the policy's observations from those of several steps, if it has one.
        """
        super().__init__()
        self.policy, self.converter, self.history = policy, converter, history
        self.has_choices = policy.actions > policy.numbers
        self.names = list(specs)
        # Outputs that have the name of an observation get another one.
        unique = lambda name: f"output/{name}" if name in specs else name
        self.logits = unique("logits")
        # Name of each array of the simulator's action -> output.
        self.actions = {n: unique(f"action/{n}" if n else "action") for n in converter.arrays}
        # Name of each part of the memory -> its value at the start of an episode, [1, ..].
        self.memory: dict[str, Tensor] = {}
        cpu = torch.device("cpu")
        if history is not None:
            self.memory |= {MEMORY_PREFIX + n: x for n, x in history.empty(1, cpu).items()}
        if policy.memory_size:
            self.memory[MEMORY_PREFIX + RECURRENT] = torch.zeros(1, policy.memory_size)

    @property
    def outputs(self) -> list[str]:
        """Names of the results of ``forward``."""
        results = [*self.actions.values(), *([self.logits] if self.has_choices else [])]
        return results + [run_policy.NEXT + name for name in self.memory]

    @torch.no_grad()
    def forward(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        """Return the results named ``outputs``.

        Actions are [B, ..] ([B, C, ..] for chunks), those of ``env.step``; where some are choices,
        logits are [B, K], before the mask of choices.

        Args:
            arrays: Raw observations [B, ..] in the order of ``names``, then the memory [B, ..].
        """
        values = dict(zip([*self.names, *self.memory], arrays, strict=True))
        raw = {name: values[name] for name in self.names}
        obs: Obs = raw[SINGLE] if self.names == [SINGLE] else raw
        previous, after = dict[str, Tensor](), dict[str, Tensor]()
        if self.history is not None:
            previous = {n.removeprefix(MEMORY_PREFIX): values[n] for n in self.memory}
            previous.pop(RECURRENT, None)
            obs = self.history.stack(previous, raw)
        if self.policy.memory_size:
            state = values[MEMORY_PREFIX + RECURRENT]
            obs = with_memory(obs, state, torch.zeros_like(state[:, 0], dtype=torch.bool))
        inputs = self.policy.encode(obs)
        if self.has_choices:
            features, after_step = self.policy.features(inputs)
            action, logits = self.policy.choose(features, inputs)
            results = (*self.map(action).values(), logits)
        else:
            decision = self.policy.act(inputs)
            action, after_step = decision.action, decision.memory
            results = tuple(self.map(action).values())
        if self.history is not None:
            after |= self.history.push(previous, raw, action)
        if after_step is not None:
            after[RECURRENT] = after_step
        return *results, *(after[n.removeprefix(MEMORY_PREFIX)] for n in self.memory)

    def map(self, action: Tensor) -> dict[str, Tensor]:
        """Return outputs by name: actions of the policy, [B, C·A] or [B], as the simulator's."""
        chunk = self.policy.chunk
        arrays = self.converter.split(action if chunk == 1 else action.unflatten(-1, (chunk, -1)))
        return {self.actions[name]: x for name, x in arrays.items()}


def check_packages() -> None:
    """Raise ConfigError where a package of the extra ``export`` is missing."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        names = " and ".join(missing)
        raise ConfigError(f"export needs {names}: pip install 'embodied-ppo[export]'")


def write(run: TrainedRun, out: Path) -> dict[str, Any]:
    """Write the bundle of a checkpoint and replay it.

    Returns:
        The largest difference of the replayed actions, the number of recorded steps, the rate.

    Raises:
        CheckpointError, ConfigError, EnvError: Before anything is written.
        TrainingError: The bundle does not reproduce the recorded actions.
    """
    # The robot has delays and errors of its own; observations of the trace follow from its states.
    env_config = environments.evaluation_env(run.config)
    realism = env_config.realism
    env_config = replace(env_config, realism=RealismConfig())
    if env_config.simulator == "warp":  # its kernels compile for minutes on a CPU
        env_config = replace(env_config, simulator="auto")
    task = robot_evaluation.evaluated_task(run, env_config, allow=False)
    episodes = EPISODES
    if environments.builds_once(run.config):  # the environments of a robot may be one
        episodes = min(episodes, run.config.env.num_envs)
    with closing(_make_env(run, env_config, task, episodes)) as env:
        model = run.model(allow=False)
        policy = robot_policy.make_policy(replace(run.config, env=env_config, model=model), env)
        assert isinstance(policy, ActorCritic)
        run.load_weights(policy)
        policy.eval()
        history = env.history if isinstance(env, HistoryEnv) else None
        spec = env.obs_spec if history is None else history.raw_spec
        specs = spec if isinstance(spec, dict) else {SINGLE: spec}
        converter = environments.action_converter(run.config.env, env)
        exported = Exported(policy.actor_only().cpu(), specs, converter, history).eval()
        _hold(env, {})
        golden = _record(policy, env, exported, STEPS)
        info = _describe(run, env, exported, specs, golden)
        nominal = robot_section.nominal_realism(realism, env.physics_steps or 1, STATE)
        info["robot"] = robot = robot_section.describe(info, nominal)
        with report_write_errors(out):
            out.mkdir(parents=True, exist_ok=True)
            _write_onnx(exported, specs, out / "policy.onnx")
            arrays: dict[str, Any] = golden
            np.savez_compressed(out / "golden.npz", **arrays)
            shutil.copyfile(run_policy.__file__, out / "run_policy.py")
            _write_info(info, out)
            difference = _set_tolerances(info, golden, out)
            if robot is not None:
                robot_section.write_files(info, env.simulator, out, run.say)
    if robot is not None:
        commands = robot_section.tracking_commands(info)
        config = replace(env_config, realism=nominal, randomize=False, ranges={})
        with closing(_make_env(run, config, task, len(commands))) as env:
            simulator: Any = env.simulator
            _hold(env, {"command": torch.tensor(commands)} if robot["command_names"] else {})
            step_s = info["control"]["step_s"]
            length = min(round(TRACKING_S / step_s), env.max_episode_steps or STEPS)
            rows = _record(policy, env, exported, length)
            exact = None if env_config.randomize else golden
            robot_section.measure(info, simulator.physics.model, commands, rows, exact, out)
    with report_write_errors(out):
        _write_info(info, out)
    try:
        run_policy.Policy(str(out))
    except run_policy.BundleError as error:
        raise TrainingError(f"out={out}: {error}; report this") from error
    rate_hz, steps = info["control"]["rate_hz"], len(golden["episode"])
    return {"action_difference": difference, "recorded_steps": steps, "rate_hz": rate_hz}


def _make_env(
    run: TrainedRun, config: EnvConfig, task: TaskFiles | None, episodes: int
) -> VectorEnv:
    """Return environments with the seeds of an evaluation."""
    seeds, device = evaluation.evaluation_seeds(0, episodes), select_device("auto", 0)
    model = run.config.model
    return environments.make_env(seeds, config=config, device=device, task=task, model=model)


def _hold(env: VectorEnv, values: dict[str, Tensor]) -> None:
    """Hold variables of our own tasks, and noise at 0: one observation for each state."""
    simulator: Any = env.simulator
    if "noise" in getattr(simulator, "s", {}):
        values = values | {"noise": torch.zeros_like(simulator.s["noise"])}
    if values:
        simulator.hold_variables(values)


# --------------------------------------------------------------------------------------- recording
@torch.inference_mode()
def _record(
    policy: ActorCritic, env: VectorEnv, exported: Exported, length: int
) -> dict[str, np.ndarray]:
    """Return observations and actions [rows, ..] of ``length`` steps of each environment.

    Rows are sorted by environment and step. Actions are those of an evaluation, mapped to the
    simulator's; ``state/*`` are the positions and velocities of our own simulator.
    """
    obs, steps = env.reset(), []
    check_action_mask(env.id, env.action_spec, obs)
    episode = torch.arange(env.num_envs)  # [N], a number of its own for each episode
    memory = EpisodeMemory(policy, env.num_envs, evaluation.policy_device(policy))
    for t in range(length):
        inputs = policy.encode(memory.attach(obs))
        action, state = evaluation.act(
            policy, obs, memory, first_episode=0, t=t, seed=0, deterministic=True
        )
        raw = env.raw_obs if isinstance(env, HistoryEnv) else obs
        row = {f"observation/{name}": x for name, x in named(raw).items()}
        row |= {f"state/{name}": x for name, x in env.joint_state().items()}
        row = {name: x.detach().cpu().clone() for name, x in row.items()}
        row["episode"] = episode.clone()
        row |= exported.map(action.cpu())
        if exported.has_choices:
            row[exported.logits] = policy.choose(policy.features(inputs)[0], inputs)[1].cpu()
        step = env.step(action.to(env.device))
        check_action_mask(env.id, env.action_spec, step.obs, step)
        row["mask"] = step.mask.cpu()  # a row that only resets takes no action
        steps.append(row)
        ended = (step.terminated | step.truncated).cpu()
        episode = torch.where(ended, episode + env.num_envs, episode)
        obs = step.obs
        memory.store(state, starts(step))
    stacked = {name: torch.stack([row[name] for row in steps], 1) for name in steps[0]}
    arrays = {name: x.flatten(0, 1).numpy() for name, x in stacked.items()}
    mask = arrays.pop("mask")
    return {name: x[mask] for name, x in arrays.items()}


# ------------------------------------------------------------------------------------------- files
def _write_onnx(exported: Exported, specs: Mapping[str, ArraySpec], path: Path) -> None:
    """Write policy.onnx with a free batch dimension."""
    arrays = [torch.zeros(2, *spec.shape, dtype=spec.dtype) for spec in specs.values()]
    arrays += [x.repeat(2, *[1] * (x.ndim - 1)) for x in exported.memory.values()]
    names = [*specs, *exported.memory]
    try:
        with warnings.catch_warnings(action="ignore"):
            # Those of the TorchScript exporter, which needs no onnxscript.
            torch.onnx.export(
                exported,
                tuple(arrays),
                str(path),
                dynamo=False,
                opset_version=OPSET,
                input_names=names,
                output_names=exported.outputs,
                dynamic_axes={name: {0: "batch"} for name in [*names, *exported.outputs]},
            )
    except torch.onnx.OnnxExporterError as error:
        raise ConfigError(
            f"export: an operation of the network has no counterpart in ONNX ({one_line(error)});"
            " replace it in the file of model.network and train again"
        ) from error


def _write_info(info: Mapping[str, Any], out: Path) -> None:
    """Write policy.json."""
    text = json.dumps(info, indent=1, allow_nan=False) + "\n"
    # One line for each list of numbers.
    text = re.sub(r"\[[^][{}\"]*\]", lambda match: " ".join(match[0].split()), text)
    (out / "policy.json").write_text(text, encoding="utf-8")


def _set_tolerances(info: dict[str, Any], golden: Mapping[str, np.ndarray], out: Path) -> float:
    """Set the tolerance of each dimension; return the largest difference of the replay.

    It is ``TOLERANCE`` times the range of the dimension: high - low, or that of the recorded values
    where there are no limits, at least 1. Other processors and versions of onnxruntime round
    differently, so it is at least ``ROUNDING`` times the difference between torch and onnxruntime
    at the export.
    """
    policy = run_policy.Policy(str(out), check=False)
    arrays = {name: golden[f"observation/{name}"] for name in policy.inputs}
    largest = 0.0
    outputs = policy.outputs_of_trace(arrays)
    for spec in info["outputs"]:
        if spec["unit"] == "choice" or spec["role"] == "memory":
            continue
        expected = run_policy.rows(golden[spec["name"]])
        if not spec["dtype"].startswith("float"):  # rounding may turn a small difference into 1
            spec["tolerance"] = [1.0] * expected.shape[1]
            continue
        difference = np.abs(run_policy.rows(outputs[spec["name"]]) - expected).max(0)
        extent = np.maximum(np.ptp(expected, axis=0), 1.0)
        for i, (low, high) in enumerate(zip(spec["low"], spec["high"], strict=True)):
            if low is not None and high is not None:
                extent[i] = high - low
        relative = max(TOLERANCE, float(np.finfo(spec["dtype"]).eps))
        spec["tolerance"] = np.maximum(relative * extent, ROUNDING * difference).tolist()
        largest = max(largest, float(difference.max()))
    return largest


def _describe(
    run: TrainedRun,
    env: VectorEnv,
    exported: Exported,
    specs: Mapping[str, ArraySpec],
    golden: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """Return the content of policy.json, without tolerances."""
    step_s = env.step_s
    mechanism = env.simulator.mechanism()
    names: list[tuple[str, str | None]] = mechanism.pop("observation_names", [])
    manifest, config = run.source.manifest, run.config
    structure = exported.converter.structure
    origin = {"name": config.name, "seed": config.seed, "config_hash": manifest["config_hash"]}
    source = {"name": run.source.path.name, "update": run.source.update}
    source |= {"env_steps": manifest["env_steps"]}
    rate_hz = None if step_s is None else 1 / step_s
    seeds = evaluation.evaluation_seeds(0, env.num_envs)
    return {
        "format": run_policy.FORMAT,
        "task": env.id,
        "inputs": _inputs(exported, specs, names, env) + _memory(exported, ""),
        "outputs": _outputs(exported, mechanism) + _memory(exported, run_policy.NEXT),
        "action_structure": tree.map(lambda name: exported.actions[name], structure),
        "control": {"step_s": step_s, "rate_hz": rate_hz, "action_chunk": exported.policy.chunk},
        "action_mapping": config.env.action_mapping if exported.policy.numbers else "none",
        **mechanism,
        "realism": loader.dump(config.env)["realism"],
        "golden": {"seeds": seeds, "rows": len(golden["episode"])},
        "run": {**origin, "task_hash": manifest.get("task_hash")},
        "checkpoint": {**source, "sha256": manifest["files"]["policy.pt"]["sha256"]},
        "requires": {"opset": OPSET, "onnxruntime": LEAST_ONNXRUNTIME},
        "versions": versions() | {name: version(name) for name in PACKAGES},
    }


def _entry(
    name: str,
    role: str,
    dtype: Any,
    shape: Sequence[int],
    names: Sequence[str] | None = None,
    unit: Any = None,
    **further: Any,
) -> dict[str, Any]:
    """Return an entry of the inputs or outputs in policy.json."""
    entry = {"name": name, "role": role, "dtype": str(dtype).removeprefix("torch.")}
    return entry | {"shape": list(shape), "names": names, "unit": unit, **further}


def _memory(exported: Exported, prefix: str) -> list[dict[str, Any]]:
    """Return the entries of the memory, zeros at the start of an episode."""
    return [
        _entry(prefix + name, "memory", x.dtype, x.shape[1:], tolerance=None)
        for name, x in exported.memory.items()
    ]


def _inputs(
    exported: Exported,
    specs: Mapping[str, ArraySpec],
    described: Sequence[tuple[str, str | None]],
    env: VectorEnv,
) -> list[dict[str, Any]]:
    """Return the entries of the observations.

    ``described`` has name and unit of each number of "state" (or of the only observation).
    """
    inputs, spaces = [], environments.observation_spaces(env)
    for name, spec in specs.items():
        space: Any = spaces.get("" if name == SINGLE and "" in spaces else name)
        raw = {}
        start = getattr(space, "start", None)
        if start is not None and space.shape == ():  # a choice, whose input is one-hot
            raw = {"raw_shape": [], "start": int(start)}
        elif spec.dtype == torch.bool:
            raw = {"choices": list(choices_of(env.action_spec))}
        elif space is not None and space.shape == ():
            raw = {"raw_shape": []}
        is_image = name in exported.policy.encoder.images
        size = math.prod(spec.shape)
        names, unit = [f"{name}[{i}]" for i in range(size)], None
        if name in ("state", SINGLE) and len(described) == size:
            names, unit = [x for x, _ in described], [x for _, x in described]
        layout = spec.layout.order if is_image and spec.layout is not None else None
        names = None if is_image else names
        unit = "0 to 255" if spec.dtype == torch.uint8 else unit
        more = {"layout": layout, **raw}
        inputs.append(_entry(name, "observation", spec.dtype, spec.shape, names, unit, **more))
    return inputs


def _outputs(exported: Exported, mechanism: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of the arrays of the action and, for choices, of the logits."""
    chunk, outputs, logits = exported.policy.chunk, list[dict[str, Any]](), list[str]()
    actuators = [actuator["name"] for actuator in mechanism.get("actuators", ())]
    for name, array in exported.converter.arrays.items():
        output, size = exported.actions[name], len(array.low)
        names = [f"{output}[{i}]" for i in range(size)] if array.shape else [output]
        if not name and len(actuators) == size and array.shape:
            names = actuators
        for column, n, first in zip(names, array.choices, array.low, strict=False):
            of = "" if output == column == "action" else f"{column} = "
            logits += [f"logit of {of}{int(first) + i}" for i in range(n)]
        bounds = {
            key: [x if math.isfinite(x) else None for x in values] * chunk
            for key, values in (("low", array.low), ("high", array.high))
        }
        if chunk > 1:
            names = [f"{column}@{c}" for c in range(chunk) for column in names]
        names = names if array.shape or not array.choices else None
        unit = "choice" if array.choices else "of env.step"
        shape = [*([chunk] if chunk > 1 else []), *array.shape]
        more = {**bounds, "tolerance": None}
        outputs.append(_entry(output, "action", array.dtype, shape, names, unit, **more))
    if logits:
        more = {key: [None] * len(logits) for key in ("low", "high")} | {"tolerance": None}
        outputs.append(_entry(exported.logits, "logits", "float32", [len(logits)], logits, **more))
    return outputs
