"""Find the fastest placement of a run: measure a few updates in each candidate placement."""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from embodied_envs.base.compilation import highest_matmul_precision
from embodied_envs.base.errors import ConfigError, ProcessLost, TrainingError
from embodied_ppo.cluster import run_plan
from embodied_ppo.cluster.run_plan import hardware_of
from embodied_ppo.core.devices import select_device
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options import batch_sizes, placement, placement_memory, validation
from embodied_ppo.options.batch_sizes import total_updates
from embodied_ppo.options.schema import ClusterConfig, Config
from embodied_ppo.programs.compilation import compiled_since as first_compiled
from embodied_ppo.programs.run_spec import RunSpec
from embodied_ppo.programs.system import build_system
from embodied_ppo.training import loop
from embodied_ppo.training.logging import Log, Timer
from embodied_ppo.training.progress import Interrupts, Messages, Progress
from embodied_ppo.training.run_directory import absolute

MEASURE_S = 5.0
"""Seconds for which the updates of each placement are timed; at least two updates."""


# --------------------------------------------------------------------------------------- candidates
def placements(config: Config, devices: int, cores: int) -> dict[str, Config]:
    """Return name -> options of the run in each placement that is tried.

    One process comes first, then the presets. Placements whose simulators are apart from the policy
    are tried with one and two stages, which can overlap. Where there are more cores than devices,
    one more placement has a process of simulators for each core.

    Args:
        config: Options of the run.
        devices: Number of devices of all machines.
        cores: CPU cores of all machines.
    """
    named = {"local": replace(config, placement="local", cluster=ClusterConfig())}
    # Name -> option placement, and roles of each process -> their devices.
    groups: dict[str, tuple[str, Mapping[str, Any]]] = {
        name: (name, roles) for name, roles in placement.PRESETS.items()
    }
    simulates = config.mode == "embodied"
    if simulates and cores > devices:
        per_core = {"env": {"devices": "all", "processes": cores}, "rollout,actor": "all"}
        groups[f"{cores} processes of simulators"] = ("local", per_core)
    for name, (preset, roles) in groups.items():
        apart = simulates and any("env" in entry and "rollout" not in entry for entry in roles)
        for stages in (1, 2) if apart else (1,):
            cluster = replace(
                config.cluster,
                component_placement=dict(roles) if preset == "local" else {},
                stages=stages,
            )
            text = name if stages == 1 else f"{name}, {stages} stages"
            named[text] = replace(config, placement=preset, cluster=cluster)
    return named


@dataclass(frozen=True)
class Candidate:
    """A placement that is valid for the run and fits in memory.

    Attributes:
        name: Its name.
        config: Options of the run in this placement.
        plan: Its plan; None for a run in one process.
        memory: Bytes of the fullest device (on a CPU: of the machine).
        seconds: Measured seconds of an update.
    """

    name: str
    config: Config
    plan: placement.Plan | None
    memory: int
    seconds: float = math.inf

    def summary(self) -> dict[str, Any]:
        """Return the measurement as plain JSON."""
        return {
            "placement": self.name,
            "processes": sum(group.processes for group in self.plan.groups) if self.plan else 1,
            "memory_gb": self.memory / 1e9,
            "measured_s": self.seconds,
        }


def candidates(config: Config, device: torch.device) -> tuple[list[Candidate], dict[str, str]]:
    """Return the valid placements, and the reasons of the refused ones by name.

    Raises:
        ConfigError, EnvError: An option is refused by what it configures.
        PlacementError: No placement is valid.
    """
    hardware, lag = hardware_of(config, device), config.cluster.max_lag
    estimator = run_plan.memory_estimator(config)
    cores = (os.cpu_count() or 1) * config.cluster.num_nodes
    valid, refused = list[Candidate](), dict[str, str]()
    for name, placed in placements(config, hardware.total, cores).items():
        try:
            plan = run_plan.plan_run(placed, device)
            if plan is None and lag:
                raise PlacementError(
                    f"cluster.max_lag = {lag}: one process cannot run ahead of itself"
                )
            memory_plan = plan or run_plan.plan_on_one_device(config, device)
            needs = estimator.estimate_memory(memory_plan)
            placement_memory.check_memory(memory_plan, needs)
            most = max(load.total for load in placement_memory.loads(memory_plan, needs))
            valid.append(Candidate(name, placed, plan, most))
        except (ConfigError, PlacementError) as error:
            refused[name] = str(error)
    if not valid:
        name, reason = next(iter(refused.items()))
        raise PlacementError(f"tune: no placement is left; {name}: {reason}")
    return valid, refused


# ------------------------------------------------------------------------------------------- search
def search(
    config: Config, *, explicit: Any = (), quiet: bool = False
) -> tuple[list[Candidate], dict[str, str]]:
    """Run a few updates in each candidate placement and measure their durations.

    Args:
        config: Options of the run.
        explicit: Options that the user set, for messages about options without effect.
        quiet: Whether progress is not shown.

    Returns:
        The measured placements, the fastest first, and for each other placement (by name) the
        reason why it is not valid or was not measured.

    Raises:
        ConfigError, EnvError, PlacementError: Before a placement is measured.
        TrainingError: No placement runs.
    """
    validation.check_tuning(config, explicit)
    config = absolute(config)
    notices = set[str]()
    with Interrupts(), Progress(quiet) as bar, highest_matmul_precision(), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="embodied-ppo-tune-")))

        def notice(line: str) -> None:
            if line not in notices:
                notices.add(line)
                bar.say(line)

        device = select_device(config.device, config.threads, notice=notice)
        # The placement that is written names the number of devices.
        hardware = hardware_of(config, device)
        cluster = replace(config.cluster, devices_per_node=hardware.per_node[0])
        # The duration of an update depends on a language model's warm start, which determines when
        # responses end, but not on the cloning of a robot's policy.
        config = replace(config, cluster=cluster, cloning=replace(config.cloning, steps=0))
        # Updates from the middle of the run on are measured, with compiled code only if the run
        # uses it by then.
        updates = total_updates(config)
        local = replace(config, placement="local", cluster=ClusterConfig())
        compiled_since = first_compiled(local)
        if config.compile == "auto" and (compiled_since is None or compiled_since > updates // 2):
            config = replace(config, compile="never")
        valid, refused = candidates(config, device)
        if any(candidate.plan is not None for candidate in valid):
            from embodied_ppo.cluster.ray_reservation import Reservation  # importing Ray: a second

            # Wait until a Ray cluster has all devices free, as a run does.
            Reservation(placement.plan("fused", hardware), notice).close()
        spec = RunSpec(config, device, folder, updates)
        measured, failed = _measure(spec, valid, bar)
    return measured, failed | refused


def _measure(
    spec: RunSpec, valid: Sequence[Candidate], bar: Progress
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the measured placements, the fastest first, and the failures with their reasons.

    Raises TrainingError if all fail.
    """
    measured, failed = list[Candidate](), dict[str, str]()
    for i, candidate in enumerate(valid):
        name = candidate.name
        bar.say(f"trying {name} ({i + 1} of {len(valid)})")
        attempt = replace(spec, config=candidate.config, run_dir=spec.run_dir / str(i))
        try:
            seconds = _update_seconds(attempt, candidate.plan, spec.updates // 2)
        except ProcessLost as error:  # for example: the memory of simulators is not estimated
            failed[name] = str(error)
            bar.say(f"{name} failed: {error}")
        else:
            measured.append(replace(candidate, seconds=seconds))
            bar.say(f"{name}: {seconds:.3g} s per update")
    if not measured:
        name, reason = next(iter(failed.items()))
        raise TrainingError(f"tune: {len(failed)} placements failed; {name}: {reason}")
    return sorted(measured, key=lambda candidate: candidate.seconds), failed


class _EnoughUpdates(Exception):
    """Ends a run whose updates have been timed."""


def _update_seconds(spec: RunSpec, plan: placement.Plan | None, first_update: int) -> float:
    """Return the median seconds of the updates from ``first_update`` on, without the warm-up."""
    config, lag = spec.config, spec.config.cluster.max_lag
    warm_up = 1 + lag
    with ExitStack() as stack:
        system = build_system(replace(spec, plan=plan), Messages(lambda line: None), stack).system
        stack.callback(system.close)
        log = Log(
            spec.run_dir,
            total_updates=spec.updates,
            completed_updates=first_update,
            unit=system.unit,
            quiet=True,
        )
        stack.callback(log.close)
        timer, sums = Timer(), list[float]()  # seconds since the start, at the end of each update

        def stop_if_enough() -> bool:
            sums.append(timer.total(loop.TRAINING_PHASES)[0])
            if len(sums) > warm_up + 2 and sums[-1] - sums[warm_up] > MEASURE_S:
                raise _EnoughUpdates
            return False

        schedule = loop.Schedule(
            updates=sys.maxsize, horizon=batch_sizes.horizon(config), max_lag=lag
        )
        with suppress(_EnoughUpdates):
            loop.train(
                system,
                log,
                schedule,
                completed_updates=first_update,
                should_stop=stop_if_enough,
                timer=timer,
            )
    return statistics.median(after - before for before, after in pairwise(sums[warm_up:]))
