"""What both modes are put together with: the request for a system, and the system with what only its mode knows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from embodied_ppo.config import loader, placement
from embodied_ppo.config.schema import Config
from embodied_ppo.core.types import Advance, ConfigError, PlacementError
from embodied_ppo.training import checkpoint
from embodied_ppo.training.system import RunSystem


@dataclass(frozen=True)
class Setup:
    """What a mode is asked to put together.

    config   resolved          device  where policy and learner run
    run_dir  of the run         updates how many the whole run has
    text     config.yaml        info    versions, hash .. for every checkpoint
    notice   hears what a user should know once            early  lines for the log that is not there yet
    progress says at once what takes long
    fresh_start  False where a checkpoint's weights will replace those made here
    advance  hears how much of what takes long is done: what, how many, of how many
    task     files of the user's task (``embodied_envs.task_files.TaskFiles``); None: it is an installed package's
    """

    config: Config
    device: torch.device
    run_dir: Path
    updates: int
    text: str
    info: Mapping[str, Any]
    notice: Callable[[str], None]
    progress: Callable[[str], None]
    early: list[str]
    fresh_start: bool = True
    advance: Advance = lambda what, done, total: None
    task: Any = None


@dataclass(frozen=True)
class Assembly:
    """A system that is ready to run.

    title    what is trained, for the log's first line
    horizon  steps of one rollout
    write    an evaluation's result, its checkpoint, a folder -> paths of the report's files
    samples  of a result, rows of a table for TensorBoard; empty where there is nothing to read
    success  tag of the share of successes
    facts    of what came before training, for the summary
    """

    system: RunSystem
    title: str
    horizon: int
    write: Callable[[Any, checkpoint.Checkpoint, Path], dict[str, str | None]]
    samples: Callable[[Any], list[dict[str, Any]]] = lambda result: []
    success: str = "eval/success"
    facts: Mapping[str, Any] = field(default_factory=dict)


def device(name: str, threads: int) -> torch.device:
    """The device an option names; sets torch's threads. Raises ConfigError where it is not there."""
    if threads:
        torch.set_num_threads(threads)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = torch.device(name)
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        raise ConfigError(f"device={name}: this machine shows torch {count} CUDA devices; use device=cpu or auto")
    return found


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Of float32 products, within it: an option's word."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def hardware_of(config: Config, device: torch.device) -> placement.Hardware:
    """The devices that a placement deals out. Raises PlacementError."""
    c, kind = config.cluster, device.type
    here = torch.cuda.device_count() if kind == "cuda" else os.cpu_count() or 1
    if kind == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory if here else None
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if c.device_memory_gb:
        memory = int(c.device_memory_gb * 1e9)
    if (count := (c.devices_per_node or here) * c.num_nodes) > placement.MOST_DEVICES:
        said = f"cluster.num_nodes x cluster.devices_per_node = {count} devices"
        raise PlacementError(f"{said}, more than {placement.MOST_DEVICES}; write what there is")
    nodes = tuple(range(c.num_nodes))
    labels = {
        name: placement.ranges(value, nodes, f"cluster.node_groups = {{{name}: {value}}}", "node")
        for name, value in c.node_groups.items()
    }
    return placement.Hardware((c.devices_per_node or here,) * c.num_nodes, kind, labels, memory)


def config_hash(config: Config) -> str:
    """12 hex digits over every option that can change a result."""
    plain = loader.relevant(config)
    for path in ("name", "description", "run_dir", "resume", "keep_last", "allow_changed_task"):
        plain.pop(path)
    return digest(plain)[:12]


def digest(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()
