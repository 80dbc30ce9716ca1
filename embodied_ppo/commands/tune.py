"""`embodied-ppo tune`: predict every placement of a run from what its roles take here, try the best, write one down."""

from __future__ import annotations

import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

from embodied_ppo.config import loader, placement, validation
from embodied_ppo.config.batch_sizes import total_updates
from embodied_ppo.config.schema import ClusterConfig, Config
from embodied_ppo.core.types import ConfigError, PlacementError, ProcessLost, TrainingError
from embodied_ppo.modes.base import Assembly, Setup, device, hardware_of, matmul_precision
from embodied_ppo.modes.embodied import components as embodied
from embodied_ppo.modes.embodied import profile as embodied_profile
from embodied_ppo.modes.embodied import workers as embodied_workers
from embodied_ppo.modes.reasoning import components as reasoning
from embodied_ppo.modes.reasoning import cost_model as reasoning_cost_model
from embodied_ppo.modes.reasoning import profile as reasoning_profile
from embodied_ppo.modes.reasoning import workers as reasoning_workers
from embodied_ppo.placement import cost_model
from embodied_ppo.training import loop
from embodied_ppo.training.logging import Log, Timer
from embodied_ppo.training.progress import Interrupts, Progress
from embodied_ppo.training.run_directory import absolute

TRIED = 2
"""Placements, the best predicted, that are measured as they run."""
TRY_S = 10.0
"""Seconds that each is tried for, two updates at least."""


@dataclass(frozen=True)
class Offer:
    """A placement that the run may have.

    placed  None: in one process    needs   of ``plan.check_memory``
    memory  bytes on the device (on a CPU: the machine) that has most
    """

    choice: cost_model.Choice
    placed: placement.Plan | None
    needs: Mapping[str, placement.Need]
    memory: int

    @property
    def processes(self) -> int:
        return 1 if self.placed is None else sum(group.processes for group in self.placed.groups)


@dataclass(frozen=True)
class Found:
    """What tuning came to; the first of ``ranked`` is the best predicted.

    tried    name of a choice -> seconds of an update, measured    failed  -> why it could not be
    refused  choices that are not legal, and why                   asked   the run
    devices  of each machine
    """

    ranked: list[tuple[Offer, cost_model.Prediction]]
    tried: dict[str, float]
    failed: dict[str, str]
    refused: list[tuple[cost_model.Choice, str]]
    measured: cost_model.Machine

    asked: Config
    devices: int

    @property
    def best(self) -> Offer:
        name = min(self.tried, key=lambda name: self.tried[name])
        return next(offer for offer, _ in self.ranked if offer.choice.name == name)

    @property
    def config(self) -> Config:
        """Of the run where it is best, with the number of devices that it was found for."""
        config = chosen(self.asked, self.best.choice)
        if self.best.placed is None:
            return config
        return replace(config, cluster=replace(config.cluster, devices_per_node=self.devices))

    def told(self) -> dict[str, Any]:
        """As plain JSON."""
        rows = [
            {
                "placement": offer.choice.name,
                "processes": offer.processes,
                **vars(expected),
                "memory_gb": offer.memory / 1e9,
                "measured_s": self.tried.get(offer.choice.name),
            }
            for offer, expected in self.ranked
        ]
        refused = [{"placement": choice.name, "reason": reason} for choice, reason in self.refused]
        refused += [{"placement": name, "reason": reason} for name, reason in self.failed.items()]
        costs = asdict(self.measured)
        return {"placements": rows, "refused": refused, "best": self.best.choice.name, "measured": costs}


# --------------------------------------------------------------------------------------------------------------- modes
@dataclass(frozen=True)
class Mode:
    """What is asked of the parts of mode=embodied, or of mode=reasoning.

    planned, foresight          of a run in a placement, and what any will need
    choices                     of the devices, as many cores and the roles that a run lacks
    measured, predicted         costs of the roles; of an update in a placement
    alone, apart                the system in this process, or in a placement's
    """

    planned: Callable[[Config, torch.device], placement.Plan | None]
    foresight: Callable[[Config], embodied_workers.Foresees]
    choices: Callable[[placement.Hardware, int, Sequence[str]], list[cost_model.Choice]]
    measured: Callable[[Setup, int, Sequence[placement.Plan | None]], Any]
    predicted: Callable[[placement.Plan | None, Any, Mapping[str, placement.Need]], cost_model.Prediction]
    alone: Callable[[Setup, ExitStack], Assembly]
    apart: Callable[[Setup, placement.Plan], Assembly]


MODES = {
    "embodied": Mode(
        embodied_workers.planned,
        embodied_workers.Foresight,
        lambda hardware, cores, without: cost_model.choices(hardware, cores),
        embodied_profile.measured,
        cost_model.predicted,
        embodied.assemble,
        embodied_workers.assemble,
    ),
    "reasoning": Mode(
        reasoning_workers.planned,
        reasoning_workers.Foresight,
        lambda hardware, cores, without: reasoning_cost_model.choices(hardware, without),
        reasoning_profile.measured,
        reasoning_cost_model.predicted,
        reasoning.assemble,
        reasoning_workers.assemble,
    ),
}


# -------------------------------------------------------------------------------------------------------------- offers
def chosen(config: Config, choice: cost_model.Choice) -> Config:
    """The run in that placement."""
    if choice == cost_model.Choice():
        return replace(config, placement=choice.placement, cluster=ClusterConfig())
    asked = {"component_placement": dict(choice.component_placement), "stages": choice.stages}
    return replace(config, placement=choice.placement, cluster=replace(config.cluster, **asked))


def offered(config: Config, where: torch.device) -> tuple[list[Offer], list[tuple[cost_model.Choice, str]]]:
    """What may be chosen from, each meaning once; and what is refused, with the reason.

    Raises ConfigError, EnvError; PlacementError where nothing is left.
    """
    hardware, lag = hardware_of(config, where), config.cluster.max_lag
    mode, without = MODES[config.mode], validation.unused_roles(config)
    foresight = mode.foresight(config)
    roles = ",".join(role for role in placement.ROLES[config.mode] if role not in without)
    cores = (os.cpu_count() or 1) * config.cluster.num_nodes
    found, refused = dict[Any, Offer](), list[tuple[cost_model.Choice, str]]()
    for choice in mode.choices(hardware, cores, without):
        try:
            placed = mode.planned(chosen(config, choice), where)
            if placed is None and lag:
                raise PlacementError(f"cluster.max_lag = {lag}: one process cannot run ahead of itself")
            key = None if placed is None else cost_model.meaning(placed)
            if key not in found:
                alone = replace(hardware, per_node=(1,))
                whole = placed or placement.plan({roles: 0}, alone, mode=config.mode, without=without)
                needs = foresight.needs(whole)
                placement.check_memory(whole, needs)
                most = max(load.total for load in placement.loads(whole, needs))
                found[key] = Offer(choice, placed, needs, most)
        except (ConfigError, PlacementError) as error:
            refused.append((choice, str(error)))
    if not found:
        raise PlacementError(f"tune: no placement is left; {refused[0][0].name}: {refused[0][1]}")
    return list(found.values()), refused


def check_devices(config: Config, where: torch.device, notice: Callable[[str], None]) -> None:
    """Whether a Ray cluster has all devices free now; waits for them as a run would. Raises PlacementError."""
    from embodied_ppo.placement.ray_system import Reservation  # Ray takes a second to load

    Reservation(placement.plan("fused", hardware_of(config, where)), config.cluster, notice).close()


# -------------------------------------------------------------------------------------------------------------- search
def search(config: Config, *, explicit: Any = (), quiet: bool = False) -> Found:
    """Measure, predict, try the best.

    Raises ConfigError, EnvError, PlacementError before anything is tried; TrainingError if a run fails.
    """
    validation.check_tuning(config, explicit)
    where, config = device(config.device, config.threads), absolute(config)
    told = set[str]()
    with Interrupts(), Progress(quiet) as bar, matmul_precision(config.matmul_precision), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="embodied-ppo-tune-")))

        def notice(line: str) -> None:
            if line not in told:
                told.add(line)
                bar.say(line)

        offers, refused = offered(config, where)
        if any(offer.placed is not None for offer in offers):
            check_devices(config, where, notice)
        mode, updates = MODES[config.mode], total_updates(config)
        # Neither a robot's clone nor a learned reward model takes another time than one that knows nothing; a language
        # model that has not been taught when to end does.
        quick = replace(config, reward=replace(config.reward, model=replace(config.reward.model, steps=1)))
        fresh = config.mode == "reasoning"
        setup = Setup(quick, where, folder, updates, "", {}, notice, notice, [], fresh_start=fresh, advance=bar.advance)
        m = mode.measured(setup, updates // 2, [offer.placed for offer in offers])
        bar.say(f"measured: {m.told()}")
        if not m.compiled:
            setup = replace(setup, config=replace(quick, compile="never"))
        ranked = [(offer, mode.predicted(offer.placed, m, offer.needs)) for offer in offers]
        ranked.sort(key=lambda pair: (float(f"{pair[1].whole_s:.2g}"), pair[0].processes))  # no finer than it is true
        tried, failed = _try(setup, ranked, updates // 2, bar.say)
    return Found(ranked, tried, failed, refused, m, config, hardware_of(config, where).per_node[0])


def _try(
    setup: Setup, ranked: list[tuple[Offer, cost_model.Prediction]], first: int, say: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of an update of the best that run, and what failed. Raises TrainingError where nothing runs."""
    tried, failed = dict[str, float](), dict[str, str]()
    while (following := _next(ranked, tried, failed)) is not None:
        offer, expected = following
        name = offer.choice.name
        say(f"trying {name}, {expected.whole_s:.3g} s an update predicted")
        run_dir = setup.run_dir / str(len(tried) + len(failed))
        try:
            config = chosen(setup.config, offer.choice)
            tried[name] = _tried(replace(setup, config=config, run_dir=run_dir), offer.placed, first)
        except ProcessLost as error:  # memory of simulators, which nobody foresees
            failed[name] = str(error)
            say(f"{name} failed: {error}")
        else:
            say(f"{name}: {tried[name]:.3g} s an update")
    if not tried:
        name, why = next(iter(failed.items()))
        raise TrainingError(f"tune: {len(failed)} placements failed; {name}: {why}")
    return tried, failed


def _next(
    ranked: list[tuple[Offer, cost_model.Prediction]], tried: Mapping[str, float], failed: Mapping[str, str]
) -> tuple[Offer, cost_model.Prediction] | None:
    """What to try next: TRIED of them, and one process, which a moment of other work may have made look slow."""
    left = [pair for pair in ranked if pair[0].choice.name not in {*tried, *failed}]
    if len(failed) > TRIED:
        return None
    if len(tried) >= TRIED:
        left = [pair for pair in left if pair[0].placed is None]
    return next(iter(left), None)


class _Enough(Exception):
    """Updates have been timed."""


def _tried(setup: Setup, placed: placement.Plan | None, first: int) -> float:
    """Seconds of an update as it runs, from update ``first`` on: a median; those that warm up do not count."""
    lag = setup.config.cluster.max_lag
    warm = 1 + lag
    with ExitStack() as stack:
        mode = MODES[setup.config.mode]
        made = mode.alone(setup, stack) if placed is None else mode.apart(setup, placed)
        stack.callback(made.system.close)
        log = Log(setup.run_dir, total_updates=setup.updates, first_update=first, unit=made.system.unit, quiet=True)
        stack.callback(log.close)
        timer, sums = Timer(), list[float]()

        def enough() -> bool:
            sums.append(timer.total(loop.TRAINING)[0])
            if len(sums) > warm + 2 and sums[-1] - sums[warm] > TRY_S:
                raise _Enough
            return False

        schedule = loop.Schedule(updates=sys.maxsize, horizon=made.horizon, max_lag=lag)
        with suppress(_Enough):
            loop.train(made.system, log, schedule, first_update=first, should_stop=enough, timer=timer)
    return statistics.median(after - before for before, after in pairwise(sums[warm:]))


# --------------------------------------------------------------------------------------------------------------- file
def destination(home: Path, name: str) -> Path:
    """Where the placement of a run is written: group placement of the configs in ``home``. Raises ConfigError."""
    file = home / "placement" / f"tuned_{re.sub(r'[^A-Za-z0-9_-]', '-', name)}.yaml"
    there = next(folder for folder in file.absolute().parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"{file}: cannot be written ({there}); name another --config-dir")
    return file


def write(file: Path, found: Found, command: str) -> None:
    """The options that say where the roles of the best run, whatever other files say; ``command``: what was asked."""
    default, now, before = (loader.dump(c) for c in (ClusterConfig(), found.config.cluster, found.asked.cluster))
    said = ("component_placement", "stages", "num_nodes", "devices_per_node") if found.best.placed is not None else ()
    cluster = {n: value for n, value in now.items() if n in said or value != default[n] or before[n] != default[n]}
    settings = {"placement": found.config.placement} | ({"cluster": cluster} if cluster else {})
    seconds = min(found.tried.values())
    told = f"# {command} ({date.today()}): {found.best.choice.name}, {seconds:.3g} s an update"
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".new")
    temporary.write_text(f"# @package _global_\n{told}\n{yaml.safe_dump(settings, sort_keys=False)}")
    temporary.replace(file)
