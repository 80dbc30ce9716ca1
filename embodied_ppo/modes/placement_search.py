"""Find the fastest placement of a run: predict the speed of all, measure the best ones."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from embodied_ppo.config import placement, validation
from embodied_ppo.config.batch_sizes import total_updates
from embodied_ppo.config.schema import ClusterConfig, Config
from embodied_ppo.core.devices import matmul_precision
from embodied_ppo.core.types import ConfigError, PlacementError, ProcessLost, TrainingError
from embodied_ppo.modes.base import RunRequest, hardware_of, select_device
from embodied_ppo.modes.registry import mode
from embodied_ppo.modes.workers import build_workers
from embodied_ppo.placement import cost_model
from embodied_ppo.training import loop
from embodied_ppo.training.logging import Log, Timer
from embodied_ppo.training.progress import Interrupts, Progress
from embodied_ppo.training.run_directory import absolute

MAX_MEASURED = 2
"""Number of placements, those with the best predictions, that are run and measured."""
MEASURE_S = 10.0
"""Seconds for which each placement runs; at least two updates."""


@dataclass(frozen=True)
class Candidate:
    """A placement that is valid for the run and fits in memory.

    Attributes:
        choice: Its options.
        plan: Its plan; None for a run in one process.
        needs: Memory of one process of each group.
        memory: Bytes of the fullest device (on a CPU: of the machine).
    """

    choice: cost_model.Choice
    plan: placement.Plan | None
    needs: Mapping[str, placement.Need]
    memory: int

    @property
    def processes(self) -> int:
        return 1 if self.plan is None else sum(group.processes for group in self.plan.groups)


@dataclass(frozen=True)
class TuningResult:
    """Predictions and measurements of the placements of a run.

    Attributes:
        ranked: Valid placements with their predictions, the fastest predicted first.
        measured_s: Name of a choice -> measured seconds of an update.
        failed: Name of a choice -> the reason why it could not be measured.
        refused: Choices that are not valid, with the reasons.
        costs: Costs of the roles on this machine.
        original: Options of the run as given.
        devices: Devices of each machine.
    """

    ranked: list[tuple[Candidate, cost_model.Prediction]]
    measured_s: dict[str, float]
    failed: dict[str, str]
    refused: list[tuple[cost_model.Choice, str]]
    costs: cost_model.Machine
    original: Config
    devices: int

    @property
    def best(self) -> Candidate:
        """Return the placement with the fewest measured seconds."""
        name = min(self.measured_s, key=lambda name: self.measured_s[name])
        return next(candidate for candidate, _ in self.ranked if candidate.choice.name == name)

    @property
    def config(self) -> Config:
        """Return the options of the run in the best placement, with the number of devices."""
        config = with_placement(self.original, self.best.choice)
        if self.best.plan is None:
            return config
        return replace(config, cluster=replace(config.cluster, devices_per_node=self.devices))

    def summary(self) -> dict[str, Any]:
        """Return the result as plain JSON."""
        rows = [
            {
                "placement": candidate.choice.name,
                "processes": candidate.processes,
                **vars(prediction),
                "memory_gb": candidate.memory / 1e9,
                "measured_s": self.measured_s.get(candidate.choice.name),
            }
            for candidate, prediction in self.ranked
        ]
        refused = [{"placement": choice.name, "reason": reason} for choice, reason in self.refused]
        refused += [{"placement": name, "reason": reason} for name, reason in self.failed.items()]
        return {
            "placements": rows,
            "refused": refused,
            "best": self.best.choice.name,
            "measured": asdict(self.costs),
        }


# --------------------------------------------------------------------------------------- candidates
def with_placement(config: Config, choice: cost_model.Choice) -> Config:
    """Return the options of the run in another placement."""
    if choice == cost_model.Choice():
        return replace(config, placement=choice.placement, cluster=ClusterConfig())
    options = {"component_placement": dict(choice.component_placement), "stages": choice.stages}
    return replace(config, placement=choice.placement, cluster=replace(config.cluster, **options))


def candidates(
    config: Config, device: torch.device
) -> tuple[list[Candidate], list[tuple[cost_model.Choice, str]]]:
    """Return the valid placements and the refused ones with the reasons.

    Of several equivalent placements only the first one is returned.

    Raises:
        ConfigError, EnvError: An option is refused by what it configures.
        PlacementError: No placement is valid.
    """
    hardware, lag = hardware_of(config, device), config.cluster.max_lag
    implementation = mode(config)
    estimator = implementation.memory_estimator(config)
    cores = (os.cpu_count() or 1) * config.cluster.num_nodes
    valid, refused = dict[Any, Candidate](), list[tuple[cost_model.Choice, str]]()
    for choice in implementation.choices(config, hardware, cores):
        try:
            plan = implementation.plan(with_placement(config, choice), device)
            if plan is None and lag:
                raise PlacementError(
                    f"cluster.max_lag = {lag}: one process cannot run ahead of itself"
                )
            key = None if plan is None else cost_model.meaning(plan)
            if key not in valid:
                memory_plan = plan or implementation.plan_on_one_device(config, device)
                needs = estimator.needs(memory_plan)
                placement.check_memory(memory_plan, needs)
                most = max(load.total for load in placement.loads(memory_plan, needs))
                valid[key] = Candidate(choice, plan, needs, most)
        except (ConfigError, PlacementError) as error:
            refused.append((choice, str(error)))
    if not valid:
        raise PlacementError(f"tune: no placement is left; {refused[0][0].name}: {refused[0][1]}")
    return list(valid.values()), refused


def check_devices(config: Config, device: torch.device, notice: Callable[[str], None]) -> None:
    """Wait until a Ray cluster has all devices free, as a run does. Raises PlacementError."""
    from embodied_ppo.placement.ray_system import Reservation  # importing Ray takes a second

    Reservation(
        placement.plan("fused", hardware_of(config, device)), config.cluster, notice
    ).close()


# ------------------------------------------------------------------------------------------- search
def search(config: Config, *, explicit: Any = (), quiet: bool = False) -> TuningResult:
    """Profile the roles, predict all placements, and measure the best ones.

    Args:
        explicit: Options that the user set, for messages about options without effect.
        quiet: Whether progress is not shown.

    Raises:
        ConfigError, EnvError, PlacementError: Before a placement is measured.
        TrainingError: No placement runs.
    """
    validation.check_tuning(config, explicit)
    config = absolute(config)
    notices = set[str]()
    with (
        Interrupts(),
        Progress(quiet) as bar,
        matmul_precision(config.matmul_precision),
        ExitStack() as stack,
    ):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="embodied-ppo-tune-")))

        def notice(line: str) -> None:
            if line not in notices:
                notices.add(line)
                bar.say(line)

        device = select_device(config.device, config.threads, notice=notice)
        valid, refused = candidates(config, device)
        if any(candidate.plan is not None for candidate in valid):
            check_devices(config, device, notice)
        implementation, updates = mode(config), total_updates(config)
        # The duration of an update does not depend on how well a reward model or a robot's clone is
        # trained. It does on a language model's warm start, which determines when responses end.
        quick = replace(
            config, reward=replace(config.reward, model=replace(config.reward.model, steps=1))
        )
        request = RunRequest(
            config=quick,
            device=device,
            run_dir=folder,
            updates=updates,
            config_text="",
            info={},
            notice=notice,
            progress=notice,
            early_log_lines=[],
            fresh_start=implementation.profiles_trained_policy,
            advance=bar.advance,
        )
        plans = [candidate.plan for candidate in valid]
        costs = implementation.cost_model(request, updates // 2, plans)
        bar.say(f"measured: {costs.summary()}")
        if not costs.compiled:
            request = replace(request, config=replace(quick, compile="never"))
        ranked = [
            (candidate, costs.predict(candidate.plan, candidate.needs)) for candidate in valid
        ]
        # Predictions are exact to two digits; of equal ones the fewest processes come first.
        ranked.sort(key=lambda pair: (float(f"{pair[1].whole_s:.2g}"), pair[0].processes))
        measured_s, failed = _measure_best(request, ranked, updates // 2, bar.say)
    devices = hardware_of(config, device).per_node[0]
    return TuningResult(ranked, measured_s, failed, refused, costs, config, devices)


def _measure_best(
    request: RunRequest,
    ranked: list[tuple[Candidate, cost_model.Prediction]],
    first: int,
    say: Callable[[str], None],
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the seconds of an update in the best placements, and the failures.

    Raises TrainingError if all fail.
    """
    measured_s, failed = dict[str, float](), dict[str, str]()
    while (following := _next_candidate(ranked, measured_s, failed)) is not None:
        candidate, prediction = following
        name = candidate.choice.name
        say(f"trying {name}, {prediction.whole_s:.3g} s per update predicted")
        run_dir = request.run_dir / str(len(measured_s) + len(failed))
        try:
            config = with_placement(request.config, candidate.choice)
            attempt = replace(request, config=config, run_dir=run_dir)
            measured_s[name] = _update_seconds(attempt, candidate.plan, first)
        except ProcessLost as error:  # for example: the memory of simulators is not estimated
            failed[name] = str(error)
            say(f"{name} failed: {error}")
        else:
            say(f"{name}: {measured_s[name]:.3g} s per update")
    if not measured_s:
        name, reason = next(iter(failed.items()))
        raise TrainingError(f"tune: {len(failed)} placements failed; {name}: {reason}")
    return measured_s, failed


def _next_candidate(
    ranked: list[tuple[Candidate, cost_model.Prediction]],
    measured_s: Mapping[str, float],
    failed: Mapping[str, str],
) -> tuple[Candidate, cost_model.Prediction] | None:
    """Return the placement to measure next; None if enough are measured.

    These are the ``MAX_MEASURED`` best predictions, and always the placement in one process: other
    work on the machine during profiling can make the prediction for one process too slow.
    """
    if len(failed) > MAX_MEASURED:
        return None
    untried = [pair for pair in ranked if pair[0].choice.name not in {*measured_s, *failed}]
    if len(measured_s) >= MAX_MEASURED:
        untried = [pair for pair in untried if pair[0].plan is None]
    return next(iter(untried), None)


class _EnoughUpdates(Exception):
    """Ends a run whose updates have been timed."""


def _update_seconds(request: RunRequest, plan: placement.Plan | None, first: int) -> float:
    """Return the median seconds of an update from update ``first`` on, without the warm-up."""
    config, lag = request.config, request.config.cluster.max_lag
    warm_up = 1 + lag
    with ExitStack() as stack:
        implementation = mode(config)
        if plan is None:
            system = implementation.build_local(request, stack).system
        else:
            system = build_workers(implementation, request, plan).system
        stack.callback(system.close)
        log = Log(
            request.run_dir,
            total_updates=request.updates,
            completed_updates=first,
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
            updates=sys.maxsize, horizon=implementation.horizon(config), max_lag=lag
        )
        with suppress(_EnoughUpdates):
            loop.train(
                system,
                log,
                schedule,
                completed_updates=first,
                should_stop=stop_if_enough,
                timer=timer,
            )
    return statistics.median(after - before for before, after in pairwise(sums[warm_up:]))
