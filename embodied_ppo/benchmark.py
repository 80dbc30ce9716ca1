"""Train our own methods on tabletop-bench, measure them, and write the table and the page.

The protocol is in ``embodied_envs.tabletop_bench``; this module trains with ``run.clone`` and
``run.train``. Each stage runs in its own process, ``python -m embodied_ppo.benchmark``. Stages on
the left must be finished before the methods on the right start::

    demos, clone_token              -> clone, ppo_token, grpo
    demos, clone_flow               -> ppo_flow
    demos, clone_gaussian           -> ppo_gaussian
    teacher, teacher_demos, clone_teacher -> ppo_from_teacher

Demonstrations of the scripted expert are recorded once; all other stages run once per seed. The
teacher of ``ppo_from_teacher`` is trained by PPO on the simulator's state. Its successful episodes
are recorded and cloned instead of the expert's demonstrations.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_ppo import api, run
from embodied_ppo.config.compose import CALL, override_lines, prepare
from embodied_ppo.config.schema import BenchmarkConfig, Config, DemosConfig
from embodied_ppo.core.errors import ConfigError, EnvError, TrainingError
from embodied_ppo.evaluation import benchmark_page, report, video
from embodied_ppo.imitation import expert_demos
from embodied_ppo.training import checkpoint, run_directory
from embodied_ppo.training.process_pool import ONE_THREAD, POLL_S, ProcessPool, last_line
from embodied_ppo.training.progress import Interrupts, Progress
from embodied_ppo.training.run_directory import replace_text

EXPERIMENT = "tabletop_bench"
VIDEO_EPISODES = 2


# ------------------------------------------------------------------------------------------ methods
@dataclass(frozen=True)
class Method:
    """A method of the table.

    Attributes:
        clone: Stage whose cloned policy is measured, or is the initial policy of PPO.
        options: Options of PPO in addition to those of EXPERIMENT and of the action head; None: the
            cloned policy is measured without PPO.
    """

    clone: str
    options: Mapping[str, Any] | None


HEADS: dict[str, dict[str, Any]] = {
    "clone_token": {},
    "clone_flow": {"model.policy": "flow", "model.flow_eta": 1.2, "algorithm.lr": 2e-4},
    "clone_gaussian": {
        "model.policy": "gaussian",
        "model.init_log_std": -1.0,
        "model.min_log_std": -3.0,
        "algorithm.logprob_type": "action_level",
    },
    "clone_teacher": {},
}
"""Cloning stage -> options of its action head, for cloning and PPO, that differ from EXPERIMENT."""
METHODS: dict[str, Method] = {
    "clone": Method("clone_token", None),
    "ppo_token": Method("clone_token", {}),
    "ppo_flow": Method("clone_flow", {}),
    "ppo_gaussian": Method("clone_gaussian", {}),
    "grpo": Method(
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
    "ppo_from_teacher": Method("clone_teacher", {}),
}
"""Methods in the order of the table."""
TEACHER: dict[str, Any] = {
    "env.num_envs": 128,
    "env.num_threads": 1,
    "model.hidden": [128, 128],
    "algorithm.horizon": 32,
    "algorithm.update_epoch": 5,
    "algorithm.global_batch_size": 1024,
    "algorithm.normalize_advantages": True,
    "algorithm.gamma": 0.98,
    "algorithm.lr": 5e-4,
    "evaluation.num_envs": 64,
    "evaluation.video_episodes": 0,
}
"""Options of the teacher that differ from those of experiment tabletop_privileged."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of all stages.

    Attributes:
        demonstrations: Number of demonstrations of the expert; also that of the teacher.
        teacher_steps: Environment steps without images that train the teacher.
        episodes: Episodes of each measurement.
        options: Options of cloning and of PPO that differ from EXPERIMENT.
        cloning: Options of cloning only.
        ppo: Options of PPO only.
    """

    demonstrations: int
    teacher_steps: int
    episodes: int
    options: Mapping[str, Any]
    cloning: Mapping[str, Any]
    ppo: Mapping[str, Any]


FULL = Sizes(
    demonstrations=2000, teacher_steps=600_000, episodes=256, options={}, cloning={}, ppo={}
)
TRIAL = Sizes(
    demonstrations=8,
    teacher_steps=4096,
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
        return (METHODS[stage].clone,)
    return {
        "demos": (),
        "teacher": (),
        "teacher_demos": ("teacher",),
        "clone_teacher": ("teacher_demos",),
    }.get(stage, ("demos",))


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
            name: Key of METHODS or HEADS, "demos", "teacher" or "teacher_demos".
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

    def state(self) -> dict[str, Any]:
        """Return "done" and "cpu_s", the CPU seconds so far, including interrupted processes."""
        try:
            stored = json.loads(self.marker.read_text())
            return {"done": bool(stored["done"]), "cpu_s": float(stored["cpu_s"])}
        except (OSError, ValueError, KeyError, TypeError):
            return {"done": False, "cpu_s": 0.0}

    def command(self) -> list[str]:
        """Return the command line of the process."""
        mode = "trial" if self.trial else "full"
        module = [sys.executable, "-m", "embodied_ppo.benchmark"]
        return [*module, str(self.out), self.name, str(self.seed), mode]

    def run(self) -> None:
        """Run the stage in this process; continue it if an earlier process was interrupted."""
        earlier_cpu_s, done = float(self.state()["cpu_s"]), False
        try:
            if self.name in ("demos", "teacher_demos"):
                self._record()
            elif self.name == "teacher":
                self._train(self._teacher_options())
            elif self.name in HEADS:
                self._clone()
            else:
                self._run_method(earlier_cpu_s)
            done = True
        finally:
            cpu_s = round(earlier_cpu_s + time.process_time(), 1)
            replace_text(self.marker, json.dumps({"done": done, "cpu_s": cpu_s}) + "\n")

    # ------------------------------------------------------------------------------------ training
    def _options(self, head: str) -> dict[str, Any]:
        """Return the options of cloning and PPO for a cloning stage of HEADS."""
        return {
            "experiment": EXPERIMENT,
            "seed": self.seed,
            **HEADS[head],
            **self.sizes.options,
        }

    def _teacher_options(self) -> dict[str, Any]:
        """Return the options of the teacher's training."""
        kwargs = _bench().task_kwargs(obs="goal")
        options = {f"env.kwargs.{name}": value for name, value in kwargs.items()}
        return {
            "experiment": "tabletop_privileged",
            "seed": self.seed,
            **TEACHER,
            **options,
            "env_steps": self.sizes.teacher_steps,
            "evaluation.episodes": min(64, self.sizes.episodes),
        }

    def _train(self, options: Mapping[str, Any]) -> None:
        """Train the run of this stage, or continue it."""
        if checkpoint.steps(self.dir / "checkpoints"):
            options = {"resume": str(self.dir)}
        options = {**options, "run_dir": str(self.dir)}
        run.train(_config("train", options), quiet=True)

    def _clone(self) -> None:
        """Clone the demonstrations of the expert or of the teacher."""
        if checkpoint.steps(self.dir / "checkpoints"):
            return  # only the evaluation is missing, and no other stage uses it
        demos = self.other(requirements(self.name)[0])
        options = {
            **self._options(self.name),
            **self.sizes.cloning,
            "cloning.episodes": self.sizes.demonstrations,
            "cloning.dataset": str(demos.dir),
            "run_dir": str(self.dir),
            "evaluation.episodes": min(64, self.sizes.episodes),
        }
        run.clone(_config("clone", options), quiet=True)

    def _record(self) -> None:
        """Record demonstrations of the expert or of the teacher."""
        env = _config("train", {"experiment": EXPERIMENT}).env
        # The teacher of a trial does not succeed, so a trial records the expert instead.
        is_teacher = self.name == "teacher_demos" and not self.trial
        act = api.load(self.other("teacher").dir).act if is_teacher else None
        config = DemosConfig(out=str(self.dir), episodes=self.sizes.demonstrations, env=env)
        config = replace(config, env=expert_demos.recording_env(config))
        with Progress(quiet=True) as bar, Interrupts() as interrupts:
            expert_demos.record(config, bar.say, atomic=interrupts.uninterrupted, policy=act)

    # --------------------------------------------------------------------------------- measurement
    def _run_method(self, earlier_cpu_s: float) -> None:
        """Train a method, measure it by the protocol, and write its result.

        ``earlier_cpu_s`` is the CPU time of interrupted processes of this stage.
        """
        method, clone = METHODS[self.name], self.other(METHODS[self.name].clone)
        policy_dir = clone.dir
        if method.options is not None:
            options = {
                **self._options(method.clone),
                **method.options,
                **self.sizes.ppo,
                "cloning.steps": 0,
                "initial_policy": str(clone.dir),
                "save_every": 10,
                "keep_last": 1,
            }
            self._train(options)
            policy_dir = self.dir
        bench, policy = _bench(), api.load(policy_dir)
        chunk = policy.config.env.action_chunk
        act = sentence_reader(policy)
        measured = bench.evaluate(act, action_chunk=chunk, episodes=self.sizes.episodes)
        rows = [row for row in report.rows(policy_dir) if row.get("eval/success") is not None]
        stages = [stage for stage in stages_of(self.name) if stage != self.name]
        cpu_s = earlier_cpu_s + time.process_time()
        cpu_s += sum(float(self.other(stage).state()["cpu_s"]) for stage in stages)
        content = bench.result(
            self.name,
            measured,
            seed=self.seed,
            env_steps=int(rows[-1]["env_steps"]) if rows else 0,
            cpu_s=round(cpu_s, 1),
            curve=[(int(row["env_steps"]), float(row["eval/success"])) for row in rows],
            notes={
                "demonstrations": 0 if "teacher" in stages else self.sizes.demonstrations,
                "teacher_steps": self.sizes.teacher_steps if "teacher" in stages else 0,
                "trial": self.trial,
                "run_dir": str(policy_dir.relative_to(self.out)),
            },
        )
        bench.write_result(self.result, content)


def _bench() -> Any:
    """Return the module of the protocol."""
    return importlib.import_module("embodied_envs").benchmark_protocol()


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
    out, progress = Path(config.out).absolute(), Progress(quiet)
    episodes = (TRIAL if config.trial else FULL).episodes
    bench = _bench()
    others = {path: bench.read_result(path, episodes=episodes) for path in config.results}
    _check_distinct(config, others)
    with run_directory.locked(out, "out"):
        _check_folder(out, config.trial)
        return _train_and_show(config, out, list(others.values()), progress)


def _check_distinct(config: BenchmarkConfig, others: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError if two results have the same method and seed."""
    known = {(m, seed): f"methods={m}" for m in config.methods for seed in range(config.seeds)}
    if len(others) < len(config.results):
        raise ConfigError(f"results={list(config.results)}: names a file twice; name it once")
    for path, content in others.items():
        key = (content["method"], content["seed"])
        if key in known:
            raise ConfigError(
                f"results={path}: has method {key[0]!r} with seed {key[1]}, as {known[key]} has;"
                " leave one out, or change its field method"
            )
        known[key] = path


def _train_and_show(
    config: BenchmarkConfig, out: Path, others: Sequence[Mapping[str, Any]], progress: Progress
) -> dict[str, Any]:
    """Train and measure, and write the table and the page, see ``benchmark``."""
    episodes = (TRIAL if config.trial else FULL).episodes
    bench, seeds = _bench(), range(config.seeds)
    wanted = [Stage(out, m, seed, trial=config.trial) for seed in seeds for m in config.methods]
    _run_all(_in_order(wanted), config.jobs, progress)
    results = [bench.read_result(stage.result, episodes=episodes) for stage in wanted]
    own_results = [dict(content) for content in results]
    results += others
    families = bench.FAMILIES[:1] if config.trial else bench.FAMILIES
    videos = _videos(out, own_results, families, progress) if own_results else {}
    summary = benchmark_page.summarize(results, bench)
    page = out / "index.html"
    replace_text(page, benchmark_page.render(results, summary, bench, videos, config.trial))
    return {"page": str(page), "results": str(out / "results"), **summary}


def _check_folder(out: Path, trial: bool) -> None:
    """Write benchmark.json, which identifies the benchmark of a folder, or check the existing one.

    Raises:
        ConfigError: The folder holds another benchmark or cannot be used.
    """
    identity = {"benchmark": _bench().NAME, "protocol": _bench().PROTOCOL, "trial": trial}
    file = out / "benchmark.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        stored = json.loads(file.read_text()) if file.exists() else None
        if stored is None:
            replace_text(file, json.dumps(identity) + "\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "benchmark.json is damaged"
        raise ConfigError(f"out={out}: cannot be used ({reason}); name another folder") from error
    if stored is not None and stored != identity:
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
    return [s for s in stages.values() if s.marker in lost or not s.state()["done"]]


def _run_all(stages: Sequence[Stage], jobs: int, progress: Progress) -> None:
    """Run stages in processes, at most ``jobs`` at the same time."""
    waiting, running = list(stages), dict[str, Stage]()
    with Interrupts(), ProcessPool(jobs) as pool:
        while waiting or running:
            for key, code in pool.ended().items():
                stage = running.pop(key)
                _check_finished(stage, code)
                cpu_s = stage.state()["cpu_s"]
                name = f"{stage.name}, seed {stage.seed}"
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


def _check_finished(stage: Stage, code: int) -> None:
    """Raise TrainingError if the process of a stage failed."""
    if code == 0 and stage.state()["done"]:
        return
    cause = last_line(stage.log, code)
    raise TrainingError(f"{stage.name}, seed {stage.seed} failed ({cause}); see {stage.log}")


def _videos(
    out: Path, results: Sequence[Mapping[str, Any]], families: Sequence[str], progress: Progress
) -> dict[str, benchmark_page.FamilyVideo]:
    """Return family -> video of the first measured episodes of the best method."""
    bench = _bench()
    scores = {r["method"]: bench.rates(r)["score"] for r in results if r["seed"] == 0}
    best = max(scores, key=lambda name: scores[name])
    content = next(r for r in results if r["method"] == best and r["seed"] == 0)
    policy = api.load(out / content["notes"]["run_dir"])
    chunk, videos = policy.config.env.action_chunk, {}
    for family in families:
        path, name = out / "videos" / f"{best}-{family}.mp4", f"train/{family}"
        seeds = bench.seeds(name, VIDEO_EPISODES)
        sentences_file = path.with_suffix(".json")
        if not (path.exists() and sentences_file.exists()):
            progress.say(f"video of {family}")
            recorded = video.record_video(
                policy.network,
                bench.video_env(name, chunk),
                path=path,
                seed=bench.evaluation_seed(name),
                episodes=VIDEO_EPISODES,
                budget_s=4.0,
                notice=progress.say,
            )
            if recorded.path is None:
                continue
            replace_text(sentences_file, json.dumps(bench.sentences(name, seeds)) + "\n")
        videos[family] = benchmark_page.FamilyVideo(
            best, path, json.loads(sentences_file.read_text())
        )
    return videos


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
