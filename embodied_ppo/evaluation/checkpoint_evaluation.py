"""Measure a checkpoint and write its report: `embodied-ppo evaluate`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from embodied_envs.base.errors import ConfigError, show_path
from embodied_ppo.core.devices import select_device
from embodied_ppo.evaluation import language_evaluation, paired, report, robot_evaluation
from embodied_ppo.evaluation.episodes import EvaluationResult, evaluation_seeds, lend
from embodied_ppo.evaluation.prompt_evaluation import evaluate_prompts
from embodied_ppo.evaluation.robustness import plan as plan_sweep
from embodied_ppo.evaluation.run_report import ReportTarget
from embodied_ppo.options import loader, validation
from embodied_ppo.options.schema import Config, EvaluateConfig, RewardModelConfig
from embodied_ppo.policies import robot_policy
from embodied_ppo.rollout import environments, language_inputs
from embodied_ppo.rollout.generation.engine import Engine
from embodied_ppo.rollout.language_rollout import response_decoder
from embodied_ppo.rollout.rewards import build as rewards_build
from embodied_ppo.rollout.rewards.graders import check_exists
from embodied_ppo.training import checkpoint, generations
from embodied_ppo.training.logging import numbers
from embodied_ppo.training.progress import Progress, counter
from embodied_ppo.training.run_directory import digest, report_write_errors
from embodied_ppo.training.trained_run import MODEL, TrainedRun, open_evaluated


def evaluate(config: EvaluateConfig, *, explicit: Any = (), quiet: bool = False) -> dict[str, Any]:
    """Evaluate a checkpoint, or a language model; write the report, return metrics and paths.

    Raises:
        CheckpointError, ConfigError, EnvError: Before anything is written.
    """
    if (model := config.model) is not None:
        if not Path(model, MODEL).is_file():
            hint = f"name a directory with the {MODEL} and the weights of a model"
            raise ConfigError(f"{hint}: model={show_path(model)} has none")
        config = replace(config, checkpoint=model, model=None)
    progress = Progress(quiet)
    run = open_evaluated(config.checkpoint, say=progress.say)
    validation.check_evaluation(config, run.config.mode, explicit)
    deterministic = run.config.deterministic
    device = select_device(
        config.device, config.threads, deterministic=deterministic, notice=progress.say
    )
    measure = _evaluate_language if run.config.mode == "reasoning" else _evaluate_robot
    results = measure(run, config, device, report_dir(config, run.source, run.run_dir), progress)
    return {"checkpoint": str(run.source.path), "episodes": config.episodes, **results}


def report_dir(config: EvaluateConfig, source: checkpoint.Checkpoint, run_dir: Path) -> Path:
    """Return the directory of an evaluation's report.

    Its name has a digest of the options that change the result, so that reports do not overwrite
    each other.
    """
    if config.out:
        return Path(config.out)
    default = loader.dump(EvaluateConfig())
    free = ("checkpoint", "episodes", "seed", "num_envs", "out", "device", "threads")
    changed = {
        option: value
        for option, value in loader.dump(config).items()
        if value != default[option] and option not in free and "video" not in option
    }
    suffix = f"-{digest(changed)[:6]}" if changed else ""
    return run_dir / "reports" / f"step_{source.update:06d}-{config.episodes}x{config.seed}{suffix}"


def options_of_report(content: Mapping[str, Any], source: Path, **options: Any) -> EvaluateConfig:
    """Return the options with which the evaluation of a report is repeated, without a video.

    Args:
        content: Its report.json.
        source: The checkpoint.
        options: Values of options that the report may lack.

    Raises:
        KeyError, TypeError, ValueError: The report is damaged.
    """
    names = loader.dump(EvaluateConfig())
    options |= {name: x for name, x in dict(content["evaluation"]).items() if name in names}
    options |= {"seed": content["seed"], "video": False, "checkpoint": str(source)}
    return loader.load(EvaluateConfig, options, source="the report's options")


@contextmanager
def _measuring(out: Path, progress: Progress) -> Iterator[None]:
    """Create the folder of the report, and show the progress of the block."""
    with report_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    with progress:
        yield


def evaluated_config(run: TrainedRun, options: EvaluateConfig) -> Config:
    """Return the options of a robot's run with the environment that an evaluation measures.

    Raises:
        ConfigError: A changed option of the environment is refused.
    """
    base = environments.evaluation_env(run.config)
    env_config = environments.changed_env(base, environments.merged(base, options.env), "env")
    # Another task is shown to the policy in the observations of those that it has learned.
    trained = run.config.env
    if env_config.id != trained.id and env_config.tasks is None and trained.ids != (trained.id,):
        env_config = replace(env_config, tasks=trained.ids)
    config = replace(run.config, env=env_config)
    validation.check_changed_env(config, options.env)
    return config


def _evaluate_robot(
    run: TrainedRun, options: EvaluateConfig, device: torch.device, out: Path, progress: Progress
) -> dict[str, Any]:
    """Evaluate the checkpoint of a robot policy; see ``evaluate``."""
    evaluation_seeds(options.seed, options.episodes)  # raises before anything is built
    config = evaluated_config(run, options)
    env_config, allow = config.env, options.allow_changed_task
    options = replace(options, num_envs=environments.evaluated_envs(env_config, options.num_envs))
    builds_once = environments.builds_once(run.config)
    rebuild = not builds_once
    factory = robot_evaluation.env_factory(run, config, device, allow=allow, rebuild=rebuild)
    task, lender = factory.keywords["task"], None
    only_one = run.config.evaluation.env == "training"
    several = options.robustness or options.paired
    if only_one and several:
        message = "remove robustness and paired: evaluation.env=training builds one simulator"
        raise ConfigError(message)
    if builds_once and not several:
        n = config.env.num_envs  # as in the training, where it may have been fixed
        lender = factory(evaluation_seeds(options.seed, n))
        factory, options = functools.partial(lend, lender), replace(options, num_envs=n)
    policy, env = robot_evaluation.restore(run, config, factory, allow=allow)
    sweep = card = None
    if options.robustness:
        trained = environments.training_env(run.config)
        sweep = plan_sweep(options, trained, factory, env)
        for line in sweep.lines:
            run.say(line)
    perturbed = paired.plan(options, factory, env)
    if not options.deterministic:
        robot_policy.sampling_temperature(policy, options.temperature)  # raises without one

    def evaluate_changed(
        trained: bool, factory: Any, episodes: int, on_episode: Callable[[Any], None]
    ) -> EvaluationResult:
        acting = policy
        if not trained:
            acting, _ = robot_evaluation.restore(run, config, factory, allow=allow, trained=False)
        changed = replace(options, episodes=episodes)
        return robot_evaluation.measure(changed, acting, factory, on_episode)

    with _measuring(out, progress):
        on_episode = counter(progress.advance, "episodes", options.episodes)
        try:
            result = robot_evaluation.measure(options, policy, factory, on_episode)
        finally:
            if lender is not None:
                lender.close()
        if sweep is not None:
            card = sweep.measure(result, evaluate_changed, progress.advance)
        differences = paired.measure(perturbed, result, evaluate_changed, progress.advance)
        with report_write_errors(out):
            files = robot_evaluation.write_report(
                ReportTarget(config, run.source, run.run_dir, out, options),
                result,
                policy=policy,
                task=task,
                video_episodes=options.video_episodes if options.video and not only_one else 0,
                robustness=card,
                paired=differences,
            )
    results = {**numbers(result.metrics()), "ci95": result.intervals(), **files}
    if card is not None:
        results |= {"robustness_score": card["score"], "robustness": card}
    return results if differences is None else results | {"paired": differences}


def _evaluate_language(
    run: TrainedRun, options: EvaluateConfig, device: torch.device, out: Path, progress: Progress
) -> dict[str, Any]:
    """Evaluate the checkpoint of a language model; see ``evaluate``."""

    def silent(line: str) -> None:
        """Print nothing: the training has printed these lines."""

    config = run.config
    if options.grader is not None:
        check_exists(options.grader, "grader")
        own = {"grader": options.grader, "terms": {}, "model": RewardModelConfig()}
        config = replace(config, reward=replace(config.reward, **own))
    if not options.data and config.data.task is None and not config.data.eval:
        hint = "write data=[FILE.jsonl] or .parquet with prompts and answers"
        raise ConfigError(f"{hint}: {show_path(run.source.path)} is a model without data")
    # Refuse wrong files before a large model is loaded.
    tokenizer = language_inputs.make_tokenizer(config)
    if options.data:
        prompts = language_inputs.read_files(config, options.data, tokenizer, silent, "data")
    else:
        prompts = language_inputs.read_prompts(config, tokenizer, silent)[1]
    policy = language_evaluation.restore(run, tokenizer, device)
    stops = language_inputs.stop_ids(config, policy, tokenizer)
    sampling = language_evaluation.evaluation_sampling(options, config, stops)
    selected, length = prompts[: options.episodes], sampling.max_tokens
    longest = language_inputs.check_length(policy, selected, length)
    m = language_inputs.Inputs(
        config, tokenizer, [], selected, policy, sampling.stop_ids, longest, length
    )
    with ExitStack() as stack:
        reward = rewards_build.make_reward(m, device, stack, run.say)
        stack.enter_context(_measuring(out, progress))
        engine = Engine(
            policy,
            slots=language_inputs.slots(config),
            pad_id=m.padding,
            decode=m.decode,
            progress=functools.partial(progress.advance, "responses"),
        )
        text = response_decoder(m.decode, sampling.stop)
        result = evaluate_prompts(
            selected, engine, reward, text, sampling, n=options.n, seed=options.seed
        )
        grades = [answer.grade for answer in result.answers]
        if failed := sum(grade.failed for grade in grades):
            run.say(
                f"reward: {failed} of {len(grades)} responses could not be graded:"
                f" {reward.last_failure}"
            )
        target = ReportTarget(config, run.source, run.run_dir, out, options)
        with report_write_errors(out):
            files = language_evaluation.write_report(target, result)
            if (dump := config.rollout.dump) is not None:
                generations.write(out / f"{generations.FOLDER}.jsonl", result.lines(dump))
    success = report.read(Path(str(files["report_json"])))["overall"]["success"]
    return {**numbers(result.metrics()), "ci95": {"eval/accuracy": success["ci95"]}, **files}
