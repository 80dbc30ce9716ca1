"""`embodied-ppo fit`: a recipe for other devices; optimiser steps stay what they are, in smaller parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from embodied_ppo import run as build
from embodied_ppo.config import batch_sizes, loader, placement, readers, validation
from embodied_ppo.config.schema import ClusterConfig, Config
from embodied_ppo.core.types import ConfigError, PlacementError
from embodied_ppo.modes.base import device, hardware_of
from embodied_ppo.modes.reasoning.workers import Foresight as LanguageForesight


@dataclass(frozen=True)
class Change:
    """An option that had to change, and why."""

    option: str
    old: Any
    new: Any
    why: str


@dataclass(frozen=True)
class Fitted:
    """The recipe, what a run of it consists of, what changed, the memory of a process of each group, what one should
    know."""

    config: Config
    run: Sequence[str]
    changes: tuple[Change, ...]
    memory: Sequence[tuple[str, ...]]
    notes: tuple[str, ...]


def fit(config: Config, devices: int) -> Fitted:
    """``config`` on so many devices of one machine.

    Raises ConfigError, EnvError; PlacementError with the sum where even the smallest micro-batch does not fit.
    """
    if config.resume is not None:
        raise ConfigError(f"resume = {config.resume}: fit writes a recipe; leave it out here, give it to train")
    # a recipe for a GPU may be written where there is none
    where = torch.device("cuda") if config.device.startswith("cuda") else device(config.device, config.threads)
    one = replace(config.cluster, num_nodes=1, devices_per_node=devices, node_groups={})
    limit = hardware_of(replace(config, cluster=one), where).memory
    if limit is None:
        raise ConfigError(f"device = {config.device}: there is none here to measure; write cluster.device_memory_gb=24")
    fitted, placed, why = _placed(config, devices, where)
    placed = replace(placed, hardware=replace(placed.hardware, memory=limit))
    fitted, needs, cut = _cut(fitted, placed)
    learns, processes = placed.processes("actor"), f"{placed.hardware.total} of {devices} devices"
    notes = [f"uses {processes}"] if placed.hardware.total < devices else []
    if batch_sizes.batches(config).actor.minibatches > 1 and learns != _learners(config, where):
        notes.append(
            f"{learns} learning now: which samples share a minibatch is drawn anew (each process draws its share from "
            "its own environments or prompts); how many, how often and with what step size stays"
        )
    if fitted.algorithm != config.algorithm and config.mode == "embodied" and config.compile != "never":
        notes.append("compiled code is not used where micro-batches cut minibatches")
    before, after = loader.flat(loader.dump(config)), loader.flat(loader.dump(fitted))
    changes = [
        Change(path, before.get(path), after.get(path), why if path.startswith(("placement", "cluster")) else cut)
        for path in dict.fromkeys((*before, *after))
        if before.get(path) != after.get(path) and path != "cluster.device_memory_gb"  # said to fit, not to train
    ]
    return Fitted(fitted, batch_sizes.lines(fitted), tuple(changes), placement.memory_rows(placed, needs), tuple(notes))


def _learners(config: Config, where: torch.device) -> int:
    """Processes that learn as the recipe stands; 0 where this machine cannot tell."""
    try:
        return build.placed(config, where).processes("actor")
    except PlacementError:
        return 0


def _placed(config: Config, devices: int, where: torch.device) -> tuple[Config, placement.Plan, str]:
    """As the recipe says if that can be on so many devices, else fused on as many as divide the work, or local; and
    why. Raises ConfigError."""
    c = config.cluster
    alone = replace(config, placement="local", cluster=ClusterConfig())
    if config.placement == "local" and not c.component_placement:
        return alone, build.placed(alone, where), "for placements of several processes"
    wanted = replace(config, cluster=replace(c, num_nodes=1, devices_per_node=devices))
    try:
        return wanted, build.placed(wanted, where), f"--devices {devices}"
    except PlacementError as error:
        why = f"--devices {devices}: {error}"
    most = config.env.num_envs if config.mode == "embodied" else config.algorithm.rollout_batch_size  # one for each
    for count in range(min(devices, most), 1, -1):
        cluster = replace(c, num_nodes=1, devices_per_node=count, node_groups={}, component_placement={}, max_lag=0)
        cluster = replace(cluster, weights="auto" if c.max_lag else c.weights)
        fused = replace(config, placement="fused", cluster=cluster)
        try:
            return fused, build.placed(fused, where), why
        except PlacementError:  # fewer may divide evenly; one does
            continue
    return alone, build.placed(alone, where), why


def _cut(config: Config, placed: placement.Plan) -> tuple[Config, dict[str, dict[str, int]], str]:
    """With the fewest passes to an optimiser step that the memory allows; what is needed, and why. Raises
    PlacementError."""
    a, learns, b = config.algorithm, placed.processes("actor"), batch_sizes.batches(config)
    foresight = build.mode(config).Foresight(config)
    robot = config.mode == "embodied"
    unit = a.horizon if robot and a.minibatch_unit == "column" else 1
    largest = max(p.size for p in (b.actor, b.critic) if p is not None)
    most = largest * (1 if robot else a.group_size) // learns // unit
    asked = a.micro_batch_size if not isinstance(foresight, LanguageForesight) else foresight.at_once
    now = min(most, (asked or most * unit) // unit)

    def needs(size: int) -> dict[str, dict[str, int]]:
        return foresight.needs(placed, size * unit)

    try:
        placement.check_memory(placed, needs(now))
        return config, needs(now), ""
    except PlacementError as error:
        why = str(error).rpartition("; one process of ")[0]
    placement.check_memory(placed, needs(1), least=True)
    few, many = -(-most // now), most  # passes: too few, enough
    while many - few > 1:
        middle = (few + many) // 2
        try:
            placement.check_memory(placed, needs(-(-most // middle)))
            many = middle
        except PlacementError:
            few = middle
    size = -(-most // many)
    if isinstance(foresight, LanguageForesight) and a.micro_batch_tokens is not None:
        a = replace(a, micro_batch_tokens=size * foresight.longest)
    else:
        a = replace(a, micro_batch_size=size * unit)
    compiled = "auto" if config.compile == "always" else config.compile  # compiled minibatches have one shape
    cut = f"{why}; now {many} passes to an optimiser step, and their gradients are added"
    return replace(config, algorithm=a, compile=compiled), needs(size), cut


# ---------------------------------------------------------------------------------------------------------------- file
def settings(config: Config) -> dict[str, Any]:
    """Every option that is not as in config.py, and the name; what is not read is left out."""
    left_out = {path for path, _ in readers.unread(config, config.mode)}
    default, said = loader.flat(loader.dump(Config())), dict[str, Any]()
    values = loader.dump(config)
    for path in loader.describe(Config):
        *parents, leaf = path.split(".")
        value: Any = values
        for part in (*parents, leaf):
            value = value[part]
        other = readers.mode_of(path) not in (None, config.mode) or path in left_out
        if path != "name" and (other or value == default.get(path, {})):
            continue
        node = said
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    return said


def text(fitted: Fitted, command: str) -> str:
    """An experiment's YAML that says everything: it needs no other file; ``command``: what was asked."""
    said = settings(fitted.config)
    told = [f"{x.option}: {x.old} -> {x.new}" for x in fitted.changes] or ["nothing had to change"]
    head = "".join(f"# {' '.join(line.split())}\n" for line in (command, *told))
    written = f"# @package _global_\n{head}{yaml.safe_dump(said, sort_keys=False)}"
    again = loader.read(Config, [("fit", yaml.safe_load(written))])
    validation.check(again.config, explicit=again.deliberate())
    assert settings(again.config) == said
    return written


def destination(out: str) -> tuple[Path, str, str]:
    """The file, its folder of configs and the experiment's name. Raises ConfigError."""
    file = Path(out)
    if file.suffix != ".yaml" or file.parent.name != "experiment":
        raise ConfigError(
            f"--out {out}: experiments are in a folder of that name; write --out my_configs/experiment/{file.stem}.yaml"
        )
    if not re.fullmatch(r"[\w .-]+", file.stem, re.ASCII):
        raise ConfigError(
            f"--out {out}: no experiment can be called {file.stem!r}; letters, digits and _ . - can be used"
        )
    if file.exists():
        raise ConfigError(f"--out {out}: is there already; name another file")
    return file, str(file.parent.parent), file.stem


def write(file: Path, content: str) -> None:
    """Raises ConfigError."""
    temporary = file.with_suffix(".new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(content)
        temporary.replace(file)
    except OSError as error:
        raise ConfigError(f"--out {file}: cannot be written ({error.strerror}); name another file") from error
