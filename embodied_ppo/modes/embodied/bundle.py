"""Write the deployment bundle of an actor-critic policy.

policy.onnx   raw observations -> history -> normaliser -> network -> action mapping -> action of
              ``env.step``; a policy with memory has its state as inputs and outputs
policy.json   names, units, limits and order of inputs and outputs, control rate, origin
golden.npz    recorded observations and actions of episodes of the run's simulator
run_policy.py checks the bundle where it is deployed, and runs it (numpy and onnxruntime only)
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied_ppo.config import loader
from embodied_ppo.config.schema import RealismConfig
from embodied_ppo.core.errors import one_line
from embodied_ppo.core.history import SINGLE, ObservationHistory, named
from embodied_ppo.core.recurrent_state import EpisodeMemory, starts, with_memory
from embodied_ppo.core.types import (
    ArraySpec,
    Box,
    ConfigError,
    Discrete,
    Obs,
    TrainingError,
    VectorEnv,
)
from embodied_ppo.evaluation import episodes as evaluation
from embodied_ppo.models.actor_critic import ActorCritic
from embodied_ppo.models.backbone import channels_last
from embodied_ppo.modes.base import TrainedRun, report_write_errors, select_device
from embodied_ppo.modes.embodied import components, run_policy
from embodied_ppo.training.run_directory import versions

MEMORY_PREFIX, RECURRENT = "memory/", "recurrent"
"""Names of the inputs of policy.onnx that are its memory begin with the first; the second is the
state of the recurrent layer.
"""
PACKAGES = ("onnx", "onnxruntime")
"""Packages of the extra ``export``."""
OPSET, LEAST_ONNXRUNTIME = 17, "1.12"
"""Operator set of policy.onnx, and the first onnxruntime that reads it."""
EPISODES, STEPS = 4, 100
"""Environments that are recorded, and steps of each."""
TOLERANCE = 1e-6
"""Largest difference of an action in the replay, as a share of the range of its dimension."""
ROUNDING = 8
"""Factor of the difference measured at the export, where that is larger than ``TOLERANCE``."""


class Exported(nn.Module):
    """Actor, history, normaliser and action mapping as one function of tensors."""

    def __init__(
        self,
        policy: ActorCritic,
        specs: Mapping[str, ArraySpec],
        mapping: Callable[..., Tensor],
        history: ObservationHistory | None = None,
    ) -> None:
        """Store the parts.

        Args:
            policy: The policy without its critic, on the CPU.
            specs: Observations of the actor; one array has the name "obs".
            mapping: Maps the policy's continuous actions [.., A] to those of the simulator.
            history: Builds the policy's observations from those of several steps, if it has one.
        """
        super().__init__()
        self.policy, self.mapping, self.history = policy, mapping, history
        self.names = list(specs)
        self.memory: dict[str, Tensor] = {}
        """Name of each part of the memory -> its value at the start of an episode, [1, ..]."""
        cpu = torch.device("cpu")
        if history is not None:
            self.memory |= {MEMORY_PREFIX + n: x for n, x in history.empty(1, cpu).items()}
        if policy.memory_size:
            self.memory[MEMORY_PREFIX + RECURRENT] = torch.zeros(1, policy.memory_size)

    @property
    def outputs(self) -> list[str]:
        """Names of the results of ``forward``."""
        results = ["action", "logits"] if self.policy.kind == "categorical" else ["action"]
        return results + [run_policy.NEXT + name for name in self.memory]

    @torch.no_grad()
    def forward(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        """Return the results named ``outputs``.

        Actions are [B, A] ([B, C, A] for chunks), or choices [B] with logits [B, K].

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
        if self.policy.kind == "categorical":
            features, after_step = self.policy.features(inputs)
            logits = self.policy.policy_head(features)
            action = logits.argmax(-1)
            results = (action, logits)
        else:
            decision = self.policy.act(inputs)
            action, after_step = decision.action, decision.memory
            results = (self.map(action),)
        if self.history is not None:
            after |= self.history.push(previous, raw, action)
        if after_step is not None:
            after[RECURRENT] = after_step
        return *results, *(after[n.removeprefix(MEMORY_PREFIX)] for n in self.memory)

    def map(self, action: Tensor) -> Tensor:
        """Map continuous actions of the policy, [B, C·A], to those of the simulator."""
        chunk = self.policy.chunk
        return self.mapping(action if chunk == 1 else action.unflatten(-1, (chunk, -1)))


def check_packages() -> None:
    """Raise ConfigError where a package of the extra ``export`` is missing."""
    try:
        import onnx  # pyright: ignore[reportMissingImports]
        import onnxruntime  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"export needs {' and '.join(PACKAGES)} ({error}): pip install 'embodied-ppo[export]'"
        ) from error
    del onnx, onnxruntime


def write(run: TrainedRun, out: Path) -> dict[str, Any]:
    """Write the bundle of a checkpoint and replay it.

    Returns:
        The largest difference of the replayed actions, the number of recorded steps, the rate.

    Raises:
        CheckpointError, ConfigError, EnvError: Before anything is written.
        TrainingError: The bundle does not reproduce the recorded actions.
    """
    # The robot has delays and errors of its own; observations of the trace follow from its states.
    env_config = replace(components.evaluation_env(run.config), realism=RealismConfig())
    if env_config.simulator == "warp":  # its kernels compile for minutes on a CPU
        env_config = replace(env_config, simulator="auto")
    task = components.evaluated_task(run, env_config, allow=False)
    env = components.make_env(
        evaluation.evaluation_seeds(0, EPISODES),
        config=env_config,
        device=select_device("auto", 0),
        task=task,
        model=run.config.model,
    )
    try:
        model = components.trained_model(run, allow=False)
        policy = components.make_policy(replace(run.config, env=env_config, model=model), env)
        assert isinstance(policy, ActorCritic)
        run.load_weights(policy)
        policy.eval()
        history: ObservationHistory | None = getattr(env, "history", None)
        spec = env.obs_spec if history is None else history.raw_spec
        specs = spec if isinstance(spec, dict) else {SINGLE: spec}
        mapping: Callable[..., Tensor] = components.action_mapper(run.config.env, env)
        exported = Exported(policy.actor_only().cpu(), specs, mapping, history).eval()
        golden = _record(policy, env, exported)
        info = _describe(run, env, exported, specs, golden)
    finally:
        env.close()
    source = inspect.getsource(run_policy)
    with report_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        _write_onnx(exported, specs, out / "policy.onnx")
        arrays: dict[str, Any] = golden
        np.savez_compressed(out / "golden.npz", **arrays)
        (out / "run_policy.py").write_text(source, encoding="utf-8")
        _write_info(info, out)
        difference = _set_tolerances(info, golden, out)
        _write_info(info, out)
    try:
        run_policy.Policy(str(out))
    except run_policy.BundleError as error:
        raise TrainingError(f"out={out}: {error}; report this") from error
    return {
        "action_difference": difference,
        "recorded_steps": len(golden["episode"]),
        "rate_hz": info["control"]["rate_hz"],
    }


# --------------------------------------------------------------------------------------- recording
@torch.inference_mode()
def _record(policy: ActorCritic, env: VectorEnv, exported: Exported) -> dict[str, np.ndarray]:
    """Return observations and actions [rows, ..] of ``STEPS`` steps of each environment.

    Rows are sorted by environment and step. Actions are those of an evaluation, mapped to the
    simulator's; ``state/*`` are the positions and velocities of our own simulator.
    """
    obs, steps = env.reset(), []
    episode = torch.arange(env.num_envs)  # [N], a number of its own for each episode
    memory = EpisodeMemory(policy, env.num_envs, evaluation.policy_device(policy))
    for t in range(STEPS):
        inputs = policy.encode(memory.attach(obs))
        action, state = evaluation.act(
            policy, obs, memory, first=0, t=t, seed=0, deterministic=True, device=env.device
        )
        raw: Obs = getattr(env, "raw_obs", obs)
        row = {f"observation/{name}": x for name, x in named(raw).items()}
        row |= {f"state/{name}": x for name, x in components.joint_state(env).items()}
        row = {name: x.detach().cpu().clone() for name, x in row.items()}
        row["episode"] = episode.clone()
        if policy.kind == "categorical":
            row["action"] = action.cpu()
            features, _ = policy.features(inputs)
            row["logits"] = policy.policy_head(features).cpu()
        else:
            row["action"] = exported.map(action.cpu())
        step = env.step(action)
        row["mask"] = step.mask.cpu()  # a row that only resets takes no action
        steps.append(row)
        ended = (step.terminated | step.truncated).cpu()
        episode = torch.where(ended, episode + env.num_envs, episode)
        obs = step.obs
        memory.store(state, starts(step))
    arrays = {
        name: torch.stack([row[name] for row in steps], 1).flatten(0, 1).numpy()
        for name in steps[0]
    }
    mask = arrays.pop("mask")
    return {name: x[mask] for name, x in arrays.items()}


# ------------------------------------------------------------------------------------------- files
def _write_onnx(exported: Exported, specs: Mapping[str, ArraySpec], path: Path) -> None:
    """Write policy.onnx with a free batch dimension."""
    arrays = [torch.zeros(2, *spec.shape, dtype=spec.dtype) for spec in specs.values()]
    arrays += [x.repeat(2, *[1] * (x.ndim - 1)) for x in exported.memory.values()]
    names = [*specs, *exported.memory]
    try:
        with warnings.catch_warnings(), _no_output():
            warnings.simplefilter(
                "ignore"
            )  # of the TorchScript exporter, which needs no onnxscript
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


@contextmanager
def _no_output() -> Iterator[None]:
    """Discard what C++ code prints: torch prints the graph of a network that it cannot export."""
    sys.stdout.flush()
    with open(os.devnull, "w") as null:
        stdout = os.dup(1)
        os.dup2(null.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)


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
        if spec["dtype"] != "float32" or spec["role"] == "memory":
            continue
        expected = run_policy.rows(golden[spec["name"]])
        difference = np.abs(run_policy.rows(outputs[spec["name"]]) - expected).max(0)
        extent = np.maximum(np.ptp(expected, axis=0), 1.0)
        for i, (low, high) in enumerate(zip(spec["low"], spec["high"], strict=True)):
            if low is not None and high is not None:
                extent[i] = high - low
        spec["tolerance"] = np.maximum(TOLERANCE * extent, ROUNDING * difference).tolist()
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
    step_s: float | None = getattr(env, "step_s", None)
    mechanism = components.mechanism(env)
    names: list[tuple[str, str | None]] = mechanism.pop("observation_names", [])
    manifest, config = run.source.manifest, run.config
    return {
        "format": run_policy.FORMAT,
        "task": env.id,
        "inputs": _inputs(exported, specs, names) + _memory(exported, ""),
        "outputs": _outputs(env, exported.policy, mechanism) + _memory(exported, run_policy.NEXT),
        "control": {
            "step_s": step_s,
            "rate_hz": None if step_s is None else 1 / step_s,
            "action_chunk": exported.policy.chunk,
        },
        "action_mapping": config.env.action_mapping if isinstance(env.action_spec, Box) else "none",
        **mechanism,
        "realism": loader.dump(config.env)["realism"],
        "golden": {
            "seeds": evaluation.evaluation_seeds(0, EPISODES),
            "rows": len(golden["episode"]),
        },
        "run": {
            "name": config.name,
            "seed": config.seed,
            "config_hash": manifest["config_hash"],
            "task_hash": manifest.get("task_hash"),
        },
        "checkpoint": {
            "name": run.source.path.name,
            "update": run.source.update,
            "env_steps": manifest["env_steps"],
            "sha256": manifest["files"]["policy.pt"]["sha256"],
        },
        "requires": {"opset": OPSET, "onnxruntime": LEAST_ONNXRUNTIME},
        "versions": versions() | {name: version(name) for name in PACKAGES},
    }


def _memory(exported: Exported, prefix: str) -> list[dict[str, Any]]:
    """Return the entries of the memory, zeros at the start of an episode."""
    return [
        {
            "name": prefix + name,
            "role": "memory",
            "dtype": str(x.dtype).removeprefix("torch."),
            "shape": list(x.shape[1:]),
            "names": None,
            "unit": None,
            "tolerance": None,
        }
        for name, x in exported.memory.items()
    ]


def _inputs(
    exported: Exported,
    specs: Mapping[str, ArraySpec],
    described: Sequence[tuple[str, str | None]],
) -> list[dict[str, Any]]:
    """Return the entries of the observations, with mean and standard deviation of each dimension.

    ``described`` has name and unit of each number of "state" (or of the only observation).

    The normaliser's statistics are of all vectors, joined in the order of ``encoder.vectors``. Of
    an observation with a history, those of its newest value are returned.
    """
    policy, history = exported.policy, exported.history
    moments, entries, first = policy.encoder.moments, {}, 0
    for name, read in policy.encoder.vectors.items():
        if name not in specs:  # the previous actions
            first += math.prod(read.shape)
            continue
        size = math.prod(specs[name].shape)
        if history is not None and name in history.names:
            first += (history.steps - 1) * size
        entry = {"mean": None, "std": None, "clip": None}
        if moments is not None and float(moments.count) > 0:
            part = slice(first, first + size)
            std = (moments.var[part] + moments.eps).sqrt() + moments.std_eps
            entry = {
                "mean": moments.mean[part].tolist(),
                "std": std.tolist(),
                "clip": policy.encoder.clip,
            }
        entries[name], first = entry, first + size
    inputs = []
    for name, spec in specs.items():
        is_image = name in policy.encoder.images
        size = math.prod(spec.shape)
        names, unit = [f"{name}[{i}]" for i in range(size)], None
        if name in ("state", SINGLE) and len(described) == size:
            names, unit = [x for x, _ in described], [x for _, x in described]
        layout = ("HWC" if channels_last(spec) else "CHW") if is_image else None
        inputs.append(
            {
                "name": name,
                "role": "observation",
                "dtype": str(spec.dtype).removeprefix("torch."),
                "shape": list(spec.shape),
                "names": None if is_image else names,
                "unit": "0 to 255" if is_image else unit,
                "layout": layout,
                **entries.get(name, {"mean": None, "std": None, "clip": None}),
            }
        )
    return inputs


def _outputs(
    env: VectorEnv, policy: ActorCritic, mechanism: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the entries of the action and, for choices, of the logits."""
    if isinstance(env.action_spec, Discrete):
        choices = env.action_spec.n
        action = {"dtype": "int64", "shape": [], "names": None, "low": [0], "high": [choices - 1]}
        logits = {"dtype": "float32", "shape": [choices], "low": [None] * choices}
        logits |= {"names": [f"logit of {i}" for i in range(choices)], "high": [None] * choices}
        return [
            {"name": "action", "role": "action", "unit": "choice", "tolerance": None, **action},
            {"name": "logits", "role": "logits", "unit": None, "tolerance": None, **logits},
        ]
    chunk, size = policy.chunk, env.action_spec.size // policy.chunk
    names = [actuator["name"] for actuator in mechanism.get("actuators", ())]
    if len(names) != size:
        names = [f"action[{i}]" for i in range(size)]
    if chunk > 1:
        names = [f"{name}@{c}" for c in range(chunk) for name in names]
    return [
        {
            "name": "action",
            "role": "action",
            "dtype": "float32",
            "shape": [size] if chunk == 1 else [chunk, size],
            "names": names,
            "unit": "of env.step",
            "low": [x if math.isfinite(x) else None for x in env.action_spec.low],
            "high": [x if math.isfinite(x) else None for x in env.action_spec.high],
            "tolerance": None,
        }
    ]
