"""Train our own methods on tabletop-bench, measure them, and write the table and the page.

The protocol is in ``embodied_envs.tabletop_bench``; this module trains with ``runs.clone`` and
``runs.train``. Each stage runs in its own process,
``python -m embodied_ppo.tools.benchmark_table``. Stages on the left must be finished before the
methods on the right start::

    demos, clone_token              -> clone, ppo_token, grpo
    demos, clone_flow               -> ppo_flow
    demos, clone_gaussian           -> ppo_gaussian

Demonstrations of the scripted expert are recorded once; all other stages run once per seed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_envs import tabletop_bench as bench
from embodied_envs.base.errors import ConfigError, EnvError, TrainingError, show, show_path
from embodied_ppo import api
from embodied_ppo.core import guarded_files
from embodied_ppo.evaluation import benchmark_page, report
from embodied_ppo.imitation import expert_demos
from embodied_ppo.options.compose import CALL, override_lines, prepare
from embodied_ppo.options.schema import BenchmarkConfig, Config, DemosConfig
from embodied_ppo.programs import runs
from embodied_ppo.tools.process_pool import ONE_THREAD, POLL_S, ProcessPool, last_line
from embodied_ppo.training import checkpoint, run_directory
from embodied_ppo.training.progress import Interrupts, Progress
from embodied_ppo.training.run_directory import replace_text

EXPERIMENT = "tabletop_bench"


# ------------------------------------------------------------------------------------------ methods
HEADS: dict[str, dict[str, Any]] = {
    "clone_token": {},
    "clone_flow": {"model.policy": "flow", "model.flow_eta": 1.2, "algorithm.lr": 2e-4},
    "clone_gaussian": {
        "model.policy": "gaussian",
        "model.init_log_std": -1.0,
        "model.min_log_std": -3.0,
        "algorithm.logprob_type": "action_level",
    },
}
"""Cloning stage -> options of its action head, for cloning and PPO, that differ from EXPERIMENT."""
METHODS: dict[str, tuple[str, Mapping[str, Any] | None]] = {
    "clone": ("clone_token", None),
    "ppo_token": ("clone_token", {}),
    "ppo_flow": ("clone_flow", {}),
    "ppo_gaussian": ("clone_gaussian", {}),
    "grpo": (
        "clone_token",
        {
            "env.restart_each_rollout": True,
            "env.kwargs.reward": "success",
            "algorithm.adv_type": "grpo",
            "algorithm.group_size": 8,
            "algorithm.normalize_advantages": False,
            "algorithm.horizon": 25,
            "algorithm.global_batch_size": 400,
            "algorithm.critic_warmup": 0,
        },
    ),
}
"""Methods in the order of the table -> (cloning stage whose policy is measured, or is the initial
policy of PPO; options of PPO in addition to those of EXPERIMENT and of the action head, None: no
PPO)."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of all stages.

    Attributes:
        demonstrations: Number of demonstrations of the expert.
        episodes: Episodes of each measurement.
        options: Options of cloning and of PPO that differ from EXPERIMENT.
        cloning: Options of cloning only.
        ppo: Options of PPO only.
    """

    demonstrations: int
    episodes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    cloning: Mapping[str, Any] = field(default_factory=dict)
    ppo: Mapping[str, Any] = field(default_factory=dict)


FULL = Sizes(demonstrations=2000, episodes=256)
TRIAL = Sizes(
    demonstrations=8,
    episodes=2,
    options={
        "env.num_envs": 16,
        "evaluation.episodes": 2,
        "model.width": 16,
    },
    cloning={"cloning.foresight_steps": 2, "cloning.steps": 2},
    ppo={"env_steps": 2048, "eval_every": 0},
)


def requirements(stage: str) -> tuple[str, ...]:
    """Return the stages that must be finished before ``stage`` starts."""
    if stage in METHODS:
        return (METHODS[stage][0],)
    return () if stage == "demos" else ("demos",)


def stages_of(method: str) -> list[str]:
    """Return all stages of a method, each after those that it requires."""
    stages = [method]
    for stage in stages:
        stages += requirements(stage)
    return stages[::-1]


# ------------------------------------------------------------------------------------------- stages
class Stage:
    """One stage of one seed: its files and its computation."""

    def __init__(self, out: Path, name: str, seed: int, *, trial: bool) -> None:
        """Set the paths of the stage; no file is read or written.

        Args:
            out: Directory of the benchmark.
            name: Key of METHODS or HEADS, or "demos".
            seed: Seed of the training.
            trial: Whether the sizes are TRIAL instead of FULL.
        """
        self.out, self.name, self.seed, self.trial = out, name, seed, trial
        self.sizes = TRIAL if trial else FULL
        parent = out if name == "demos" else out / f"seed-{seed}"
        self.dir = parent / name
        self.marker, self.log = parent / f"{name}.json", parent / f"{name}.log"

    def other(self, name: str) -> Stage:
        """Return another stage of the same seed."""
        return Stage(self.out, name, self.seed, trial=self.trial)

    @property
    def result(self) -> Path:
        """Result file of a method."""
        return self.out / "results" / f"{self.name}-{self.seed}.json"

    @property
    def cpu_s(self) -> float | None:
        """CPU seconds of the stage; None until it is finished."""
        try:
            return float(guarded_files.read_object(self.marker, {"cpu_s": float})["cpu_s"])
        except (OSError, ValueError):
            return None

    def command(self) -> list[str]:
        """Return the command line of the process."""
        mode = "trial" if self.trial else "full"
        module = [sys.executable, "-m", "embodied_ppo.tools.benchmark_table"]
        return [*module, str(self.out), self.name, str(self.seed), mode]

    def run(self) -> None:
        """Run the stage in this process; continue it if an earlier process was interrupted."""
        if self.name == "demos":
            self._record()
        elif self.name in HEADS:
            self._clone()
        else:
            self._run_method()
        replace_text(self.marker, json.dumps({"cpu_s": round(time.process_time(), 1)}) + "\n")

    # ------------------------------------------------------------------------------------ training
    def _options(self, head: str) -> dict[str, Any]:
        """Return the options of cloning and PPO for a cloning stage of HEADS."""
        return {
            "experiment": EXPERIMENT,
            "seed": self.seed,
            **HEADS[head],
            **self.sizes.options,
        }

    def _train(self, options: Mapping[str, Any]) -> None:
        """Train the run of this stage, or continue it."""
        if checkpoint.steps(self.dir / "checkpoints"):
            options = {"resume": str(self.dir)}
        options = {**options, "run_dir": str(self.dir)}
        runs.train(_config("train", options), quiet=True)

    def _clone(self) -> None:
        """Clone the demonstrations of the expert."""
        if checkpoint.steps(self.dir / "checkpoints"):
            return  # only the evaluation is missing, and no other stage uses it
        options = {
            **self._options(self.name),
            **self.sizes.cloning,
            "cloning.episodes": self.sizes.demonstrations,
            "cloning.dataset": str(self.other("demos").dir),
            "run_dir": str(self.dir),
            "evaluation.episodes": min(64, self.sizes.episodes),
        }
        runs.clone(_config("clone", options), quiet=True)

    def _record(self) -> None:
        """Record demonstrations of the expert."""
        env = _config("train", {"experiment": EXPERIMENT}).env
        config = DemosConfig(out=str(self.dir), episodes=self.sizes.demonstrations, env=env)
        expert_demos.record_demos(config, quiet=True)

    # --------------------------------------------------------------------------------- measurement
    def _run_method(self) -> None:
        """Train a method, measure it by the protocol, and write its result."""
        head, ppo_options = METHODS[self.name]
        clone = self.other(head)
        policy_dir = clone.dir
        if ppo_options is not None:
            options = {
                **self._options(head),
                **ppo_options,
                **self.sizes.ppo,
                "cloning.steps": 0,
                "initial_policy": str(clone.dir),
                "save_every": 10,
                "keep_last": 1,
            }
            self._train(options)
            policy_dir = self.dir
        policy = api.load(policy_dir)
        chunk = policy.config.env.action_chunk
        act = sentence_reader(policy)
        measured = bench.evaluate(act, action_chunk=chunk, episodes=self.sizes.episodes)
        rows = [row for row in report.rows(policy_dir) if row.get("eval/success") is not None]
        stages = [stage for stage in stages_of(self.name) if stage != self.name]
        cpu_s = time.process_time() + sum(self.other(stage).cpu_s or 0.0 for stage in stages)
        content = bench.result(
            self.name,
            measured,
            seed=self.seed,
            env_steps=int(rows[-1]["env_steps"]) if rows else 0,
            cpu_s=round(cpu_s, 1),
            curve=[(int(row["env_steps"]), float(row["eval/success"])) for row in rows],
            notes={
                "demonstrations": self.sizes.demonstrations,
                "trial": self.trial,
                "run_dir": str(policy_dir.relative_to(self.out)),
            },
        )
        bench.write_result(self.result, content)


def _config(command: str, options: Mapping[str, Any]) -> Config:
    """Return the complete configuration of a command with these options."""
    args = argparse.Namespace(command=command, config_name=None, config_dir=None)
    return prepare(args, override_lines(command, options), label=CALL).config


def sentence_reader(policy: Any) -> Callable[[Mapping[str, Any]], Tensor]:
    """Return a function with the interface ``BenchPolicy`` that calls a trained VLA policy."""
    indices: dict[str, int] = {}

    def act(obs: Mapping[str, Any]) -> Tensor:
        count = len(indices)
        for sentence in obs["instruction"]:
            indices.setdefault(sentence, len(indices))
        if len(indices) > count:
            policy.network.set_sentences(tuple(indices))
        index = torch.tensor([indices[sentence] for sentence in obs["instruction"]])
        return policy.act({"front": obs["image"], "state": obs["state"], "instruction": index})

    return act


# --------------------------------------------------------------------------------------- all stages
def benchmark(config: BenchmarkConfig, *, quiet: bool = False) -> dict[str, Any]:
    """Train and measure the methods, and write the table and the page.

    Finished stages are kept, and interrupted ones are continued.

    Args:
        config: Checked options.
        quiet: Whether progress is hidden.

    Returns:
        Paths "page" and "results", and the entries of ``benchmark_page.summarize``.

    Raises:
        ConfigError, EnvError: The folder or a result file cannot be used; nothing has been trained.
        TrainingError: A stage failed.
        KeyboardInterrupt: The benchmark was interrupted; the same command continues it.
    """
    out = Path(config.out).absolute()
    episodes = (TRIAL if config.trial else FULL).episodes
    others = {path: bench.read_result(path, episodes=episodes) for path in config.results}
    known = {(m, seed): f"methods={m}" for m in config.methods for seed in range(config.seeds)}
    for path, content in others.items():
        key = (content["method"], content["seed"])
        if key in known:
            raise ConfigError(
                f"results={path}: has method {key[0]!r} with seed {key[1]}, as {known[key]} has;"
                " leave one out, or change its field method"
            )
        known[key] = path
    seeds = range(config.seeds)
    wanted = [Stage(out, m, seed, trial=config.trial) for seed in seeds for m in config.methods]
    with run_directory.locked(out, "out"):
        _check_folder(out, config.trial)
        _run_all(_in_order(wanted), config.jobs, Progress(quiet))
        results = [bench.read_result(stage.result, episodes=episodes) for stage in wanted]
        results += others.values()
        summary = benchmark_page.summarize(results, bench)
        page = out / "index.html"
        replace_text(page, benchmark_page.render(results, summary, bench, config.trial))
    return {"page": str(page), "results": str(out / "results"), **summary}


def _check_folder(out: Path, trial: bool) -> None:
    """Write benchmark.json, which identifies the benchmark of a folder, or check the existing one.

    Raises:
        ConfigError: The folder holds another benchmark or cannot be used.
    """
    identity = {"benchmark": bench.NAME, "protocol": bench.PROTOCOL, "trial": trial}
    file = out / "benchmark.json"
    others = {*os.listdir(out)} - {run_directory.LOCK}
    if not file.exists() and others:
        raise ConfigError(
            f"name a new or empty folder: out={show_path(out)} contains {show(min(others))} and is"
            " not a benchmark's"
        )
    if not file.exists():
        replace_text(file, json.dumps(identity) + "\n")
    with guarded_files.refusing_damage(file, "name another folder"):
        stored = guarded_files.read_object(file)
    if stored != identity:
        raise ConfigError(
            f"out={out}: holds a benchmark with {json.dumps(stored)}, not {json.dumps(identity)};"
            " name another folder"
        )


def _in_order(methods: Sequence[Stage]) -> list[Stage]:
    """Return the unfinished stages of methods, each after those that it requires."""
    stages: dict[Path, Stage] = {}
    lost: set[Path] = set()
    for method in methods:
        for name in stages_of(method.name):
            stage = method.other(name)
            stages.setdefault(stage.marker, stage)
        if not method.result.exists():
            lost.add(method.marker)
    return [s for s in stages.values() if s.marker in lost or s.cpu_s is None]


def _run_all(stages: Sequence[Stage], jobs: int, progress: Progress) -> None:
    """Run stages in processes, at most ``jobs`` at the same time."""
    waiting, running = list(stages), dict[str, Stage]()
    with Interrupts(), ProcessPool(jobs) as pool:
        while waiting or running:
            for key, code in pool.ended().items():
                stage = running.pop(key)
                name, cpu_s = f"{stage.name}, seed {stage.seed}", stage.cpu_s
                if code != 0 or cpu_s is None:
                    cause = last_line(stage.log, code)
                    raise TrainingError(f"{name} failed ({cause}); see {stage.log}")
                progress.say(f"{name}: {cpu_s:.0f} CPU s; {len(waiting)} stages to start")
            unfinished = {str(s.marker) for s in waiting} | set(running)
            ready = [
                s
                for s in waiting
                if not any(str(s.other(r).marker) in unfinished for r in requirements(s.name))
            ]
            for stage in ready[: pool.free]:
                waiting.remove(stage)
                running[str(stage.marker)] = stage
                pool.start(str(stage.marker), stage.command(), stage.log, environment=ONE_THREAD)
            time.sleep(POLL_S)


def main(argv: Sequence[str]) -> None:
    """Run one stage; ``argv`` is OUT STAGE SEED trial|full."""
    out, name, seed, mode = argv
    torch.set_num_threads(1)
    try:
        Stage(Path(out), name, int(seed), trial=mode == "trial").run()
    except (ConfigError, EnvError, TrainingError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
