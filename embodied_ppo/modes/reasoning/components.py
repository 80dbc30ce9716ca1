"""Components of mode=reasoning from their options.

Prompts, models, graders, decode engine, learners, evaluation.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from embodied_ppo.algorithms.learner import Critic, Learner
from embodied_ppo.algorithms.separate_critic_learner import (
    LocalCritic,
    Reference,
    separate_critic_learner,
)
from embodied_ppo.config.schema import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    EvaluateConfig,
    EvaluationConfig,
)
from embodied_ppo.core import compile
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.errors import show
from embodied_ppo.core.host_memory import keep_freed_memory
from embodied_ppo.core.random import sampling_key
from embodied_ppo.core.types import ConfigError, Trajectory
from embodied_ppo.data import synthetic_tasks
from embodied_ppo.data.prompts import Prompt, files_of, load_prompts, load_tokenizer, task_prompts
from embodied_ppo.evaluation.prompts import PromptEvaluationResult, evaluate_prompts
from embodied_ppo.imitation.supervised_finetuning import warm_start
from embodied_ppo.models import causal_lm
from embodied_ppo.models.causal_lm import LanguageCritic, LanguagePolicy
from embodied_ppo.modes import base
from embodied_ppo.modes.base import ReportFiles, RunRequest
from embodied_ppo.rewards import graders, reward_model
from embodied_ppo.rewards.graders import Graders, WithFormat
from embodied_ppo.rewards.worker_pool import GraderPool
from embodied_ppo.rollout.generation.engine import Engine, Generator
from embodied_ppo.rollout.generation.sampling import Sampling
from embodied_ppo.rollout.generation.vllm import VllmEngine
from embodied_ppo.rollout.language import ReasoningRollout, Truncation
from embodied_ppo.training import checkpoint
from embodied_ppo.training.logging import numbers


# ------------------------------------------------------------------------------------------ prompts
def make_tokenizer(config: Config) -> Any:
    """Return the tokenizer of the synthetic task, or of a directory. Raises ConfigError."""
    if config.data.task is not None:
        return synthetic_tasks.tokenizer()
    return load_tokenizer(config.actor.tokenizer or config.actor.model.path or "")


def read_prompts(
    config: Config, tokenizer: Any, say: Callable[[str], None]
) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to train on, and the held-out ones.

    Args:
        say: Called with a line about the number of prompts, and about overlaps.

    Raises:
        ConfigError: A file is missing or has the wrong format.
    """
    d = config.data
    if d.task is not None:
        task = synthetic_tasks.TASKS[d.task]
        train, held_out = (task_prompts(task, part, tokenizer) for part in ("train", "held_out"))
        say(f"data: {len(train):,} prompts of task {d.task}, {len(held_out):,} held out")
        return train, held_out
    train = read_files(config, d.train, tokenizer, say, "data.train")
    held_out = read_files(config, d.eval, tokenizer, say, "data.eval")
    both = {p.text for p in train} & {p.text for p in held_out}
    if both:
        say(f"data: {len(both):,} of the {len(held_out):,} held-out prompts are in data.train, too")
    return train, held_out


def read_files(
    config: Config, files: Sequence[str], tokenizer: Any, say: Callable[[str], None], path: str
) -> list[Prompt]:
    """Return the prompts of data files up to algorithm.prompt_length.

    Args:
        path: Path of the option that names the files.

    Raises:
        ConfigError: A file is missing or has the wrong format.
    """
    d, limit = config.data, config.algorithm.prompt_length
    with _option(path, files):
        prompts, longer = load_prompts(
            list(files),
            tokenizer,
            prompt_length=limit,
            chat_template=d.chat_template,
            system=d.system,
            prompt_key=d.prompt_key,
            answer_key=d.answer_key,
            suffix=d.suffix,
        )
    more = (
        f"; {longer:,} longer than algorithm.prompt_length={limit} were left out" if longer else ""
    )
    say(f"data: {len(prompts):,} prompts of {path}={show(files)}{more}")
    return prompts


@contextmanager
def _option(path: str, files: Sequence[str]) -> Iterator[None]:
    """Name the option in a ConfigError that is raised within the block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}={show(files)}: {error}") from error


def check_files(config: Config) -> None:
    """Raise ConfigError where tokenizer, data files or the actor's directory are missing.

    Each worker process reads their contents later.
    """
    make_tokenizer(config)
    if config.data.task is None:
        for option, files in (("data.train", config.data.train), ("data.eval", config.data.eval)):
            with _option(option, files):
                files_of(list(files))
    if (path := config.actor.model.path) is not None and not Path(path).is_dir():
        raise ConfigError(
            f"actor.model.path={path}: there is no such directory; name the directory of a model"
        )


# ------------------------------------------------------------------------------------------- models
def make_policy(config: Config, tokenizer: Any, device: torch.device) -> LanguagePolicy:
    """Return the actor with weights of a directory or from ``config.seed``. Raises ConfigError."""
    m = config.actor.model
    with torch.random.fork_rng():
        torch.manual_seed(sampling_key(config.seed, "weights"))
        model = causal_lm.load(m.path, m.architecture, section="actor.model", device=device)
    vocabulary = model.get_input_embeddings().num_embeddings
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > vocabulary:
        raise ConfigError(
            f"actor.model: has {vocabulary} tokens, the tokenizer has {needed}; use the tokenizer"
            " of this model"
        )
    policy = LanguagePolicy(
        model, temperature=config.rollout.temperature, compute=getattr(torch, m.dtype)
    )
    policy.decoder.module.recompute = m.gradient_checkpointing
    return policy


def check_length(policy: LanguagePolicy, prompts: Sequence[Prompt], response_length: int) -> int:
    """Return the tokens of the longest prompt and response together.

    Raises:
        ConfigError: They exceed the model's number of positions.
    """
    longest = max(len(p.ids) for p in prompts)
    limit = getattr(policy.model.config, "max_position_embeddings", None)
    if limit is not None and longest + response_length > limit:
        raise ConfigError(
            f"algorithm.response_length = {response_length}: with the longest prompt of {longest}"
            f" tokens that is {longest + response_length}, the model's limit is {limit}; lower it,"
            " or take shorter prompts"
        )
    return longest + response_length


def make_critic(
    config: Config, policy: LanguagePolicy, device: torch.device
) -> LanguageCritic | None:
    """Return the critic, a copy of the actor unless critic.model is set; None: no values are used.

    Raises:
        ConfigError: critic.model cannot be loaded, or has fewer tokens than the actor.
    """
    m = config.critic.model
    if config.algorithm.adv_type != "gae":
        return None
    if m.path is None and not m.architecture:
        model = copy.deepcopy(policy.model)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(sampling_key(config.seed, "critic"))
            model = causal_lm.load(m.path, m.architecture, section="critic.model", device=device)
        vocabulary, needed = (
            x.get_input_embeddings().num_embeddings for x in (model, policy.model)
        )
        if vocabulary < needed:
            raise ConfigError(
                f"critic.model: has {vocabulary} tokens, the actor {needed}; take one of the same"
                " family"
            )
    critic = LanguageCritic(model, compute=getattr(torch, m.dtype))
    critic.decoder.recompute = m.gradient_checkpointing
    return critic


def critic_config(a: AlgorithmConfig, c: CriticConfig) -> AlgorithmConfig:
    """Return the algorithm's options, replaced by those that ``critic`` sets.

    loss_agg_func is token-mean unless ``critic`` sets it. The learning rate is not adapted to the
    KL divergence of the actor: adaptive becomes constant, adaptive_linear linear.
    """
    names = {f.name for f in fields(AlgorithmConfig)}
    overrides = {
        f.name: getattr(c, f.name)
        for f in fields(c)
        if f.name in names and getattr(c, f.name) is not None
    }
    overrides.setdefault("loss_agg_func", "token-mean")
    critic = replace(a, **overrides)
    schedule = {"adaptive": "constant", "adaptive_linear": "linear"}.get(critic.lr_schedule)
    return critic if schedule is None else replace(critic, lr_schedule=schedule)


def stop_ids(config: Config, policy: LanguagePolicy, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a response: those of tokenizer, model and options.

    Raises:
        ConfigError: There is none, or the model lacks one.
    """
    model = policy.model
    declared = [
        tokenizer.eos_token_id,
        model.config.eos_token_id,
        model.generation_config.eos_token_id,
    ]
    ids = set(config.rollout.stop_token_ids)
    for value in declared:
        ids.update(value if isinstance(value, (list, tuple)) else [value])
    tokens = tuple(sorted(ids - {None}))
    if not tokens and not config.rollout.stop:
        raise ConfigError(
            "rollout.stop_token_ids = []: neither tokenizer nor model name a token that ends a"
            " response; name one, or rollout.stop=[TEXT]"
        )
    limit = policy.model.get_input_embeddings().num_embeddings
    if tokens and tokens[-1] >= limit:
        raise ConfigError(
            f"rollout.stop_token_ids: {tokens[-1]} is none of the model's {limit} tokens"
        )
    return tokens


# ------------------------------------------------------------------------------------------ graders
def make_graders(config: Config, prompts: Sequence[Prompt], stack: ExitStack) -> Graders:
    """Return the graders of reward.grader; ``stack`` ends their processes. Raises ConfigError."""
    r = config.reward
    spec: Any = r.grader
    if r.path is not None:
        spec = f"{r.path}:{r.name}"
    elif r.grader == "auto" and config.data.task is not None:
        spec = synthetic_tasks.TaskGrader(config.data.task)
    elif r.grader == "auto":
        unknown = sorted({p.data_source for p in prompts} - set(graders.DEFAULTS))
        if unknown and r.model.path is None:
            raise ConfigError(
                f"reward.grader = auto: data_source {unknown[0]!r} has no grader of its own; name"
                f" one of {', '.join(g for g in graders.GRADERS if g != 'auto')}, module:function"
                " or FILE.py:function"
            )
        spec = "exact" if unknown else "auto"
    workers = 0 if callable(spec) and r.workers is None else r.workers
    pool = GraderPool(spec, workers=workers, timeout_s=r.timeout_s)
    stack.callback(pool.close)
    return pool


def make_reward(
    config: Config,
    rule: Graders,
    policy: LanguagePolicy | None,
    device: torch.device,
    notice: Callable[[str], None],
) -> Graders:
    """Return the graders or the reward model of responses, with the reward for their format.

    Args:
        rule: The graders; they also decide whether an answer is right.
        policy: Initialises a reward model that is trained here; None: use ``rule`` instead.
        notice: Called with a line about the training of a reward model.

    Raises:
        ConfigError: The directory holds no reward model.
    """
    scores, r = _scores(config, rule, policy, device, notice), config.reward
    if r.format is None:
        return scores
    return WithFormat(scores, re.compile(r.format, re.DOTALL), r.format_weight)


def _scores(
    config: Config,
    rule: Graders,
    policy: LanguagePolicy | None,
    device: torch.device,
    notice: Callable[[str], None],
) -> Graders:
    """Return the graders or the reward model of responses; see ``make_reward``."""
    m = config.reward.model
    if m.path is not None:
        model, tokenizer = reward_model.load(m.path, device=device)
        return reward_model.RewardModel(model, tokenizer, rule=rule)
    if m.pairs and policy is None:
        notice("reward: the run's own reward model is not kept; scores are the rule's")
    if not m.pairs or policy is None:
        return rule
    assert config.data.task is not None
    task, tokenizer = synthetic_tasks.TASKS[config.data.task], synthetic_tasks.tokenizer()
    model = reward_model.new(policy.model.config.to_diff_dict(), device=device)
    model.base_model.load_state_dict(policy.model.base_model.state_dict())
    pairs = synthetic_tasks.preferences(
        task, task.problems("train"), m.pairs, seed=sampling_key(config.seed, "preferences") % 2**32
    )
    notice(f"reward model: learns from {m.pairs:,} preferences of task {task.name}")
    metrics = reward_model.train(
        model,
        tokenizer,
        pairs,
        steps=m.steps,
        batch_size=m.batch_size,
        lr=m.lr,
        seed=sampling_key(config.seed, "reward model"),
    )
    accuracy, loss = 100 * metrics["accuracy"], metrics["loss"]
    notice(f"reward model: {accuracy:.1f} % of held-out preferences right, loss {loss:.3f}")
    return reward_model.RewardModel(model, tokenizer, rule=rule)


# --------------------------------------------------------------------- prompt evaluation and report
def evaluation_sampling(
    e: EvaluationConfig | EvaluateConfig, config: Config, stops: tuple[int, ...]
) -> Sampling:
    """Return how the responses of an evaluation are sampled."""
    return Sampling(
        max_tokens=e.response_length or config.algorithm.response_length,
        temperature=0.0 if e.deterministic else e.temperature,
        top_k=e.top_k,
        top_p=e.top_p,
        min_p=e.min_p,
        repetition_penalty=e.repetition_penalty,
        stop_ids=stops,
        stop=config.rollout.stop,
    )


def write_report(
    config: Config,
    result: PromptEvaluationResult,
    *,
    source: checkpoint.Checkpoint,
    run_dir: Path,
    out: Path,
    options: EvaluationConfig | EvaluateConfig,
) -> ReportFiles:
    """Write report.json and report.html of a prompt evaluation; return their paths."""
    shown = {"eval/return", "eval/length", "eval/truncated"}
    extra = {
        tag.removeprefix("eval/"): x
        for tag, x in numbers(result.metrics()).items()
        if tag not in shown
    }
    return base.write_report(
        config,
        result.results(),
        source=source,
        run_dir=run_dir,
        out=out,
        options=options,
        unit="tokens",
        samples=result.samples(),
        extra=extra,
    )


# ------------------------------------------------------------------------ inputs, rollout, learners
def warm_start_actor(request: RunRequest, policy: LanguagePolicy, tokenizer: Any) -> None:
    """Train the actor on demonstrations before PPO, or load the result from the cache.

    A resumed run does so only where its reward model is initialised from this actor.
    """
    w, config = request.config.warm_start, request.config
    if not w.steps or not (request.fresh_start or config.reward.model.pairs):
        return
    assert config.data.task is not None
    task = synthetic_tasks.TASKS[config.data.task]
    seed = sampling_key(config.seed, "demonstrations") % 2**32
    pairs = synthetic_tasks.demonstrations(
        task, task.problems("train"), w.steps * w.batch_size, seed=seed, forget=w.forget
    )
    prompts, responses = (
        synthetic_tasks.encode(texts, tokenizer) for texts in zip(*pairs, strict=True)
    )
    examples = [(p, (*r, synthetic_tasks.EOS)) for p, r in zip(prompts, responses, strict=True)]
    warm_start(
        policy,
        examples,
        steps=w.steps,
        batch_size=w.batch_size,
        lr=w.lr,
        key={},
        folder=compile.cache_folder() / "warm_start",
        notice=request.progress,
    )


@dataclass(frozen=True)
class Inputs:
    """Tokenizer, prompts and actor, which every process of a run reads.

    Attributes:
        train: Prompts to train on.
        held_out: Prompts to evaluate on.
        policy: The actor, with weights from before the warm start.
        stops: Token ids that end a response.
        longest: Tokens of the longest prompt and response together.
    """

    config: Config
    tokenizer: Any
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    policy: LanguagePolicy
    stops: tuple[int, ...]
    longest: int

    @property
    def padding(self) -> int:
        """Return the token that pads rows; it may be a stop token."""
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else (*self.stops, 0)[0]

    @property
    def prompts(self) -> list[Prompt]:
        """Return all prompts, in the order of their numbers in messages between processes."""
        return [*self.train, *self.held_out]

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens without the stop token; other special tokens are kept."""
        end = len(ids) - bool(ids and ids[-1] in self.stops)
        return self.tokenizer.decode(
            ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def read_inputs(request: RunRequest) -> Inputs:
    """Read tokenizer, prompts and the actor's model, before its warm start. Raises ConfigError."""
    config, a, e = request.config, request.config.algorithm, request.config.evaluation
    if request.device.type == "cpu":
        keep_freed_memory()
    tokenizer = make_tokenizer(config)
    train, held_out = read_prompts(config, tokenizer, request.early_log_lines.append)
    policy = make_policy(config, tokenizer, request.device)
    stops = stop_ids(config, policy, tokenizer)
    longest = check_length(
        policy, [*train, *held_out], max(a.response_length, e.response_length or 0)
    )
    return Inputs(config, tokenizer, train, held_out, policy, stops, longest)


def make_rollout(
    request: RunRequest,
    m: Inputs,
    engine: Generator,
    graders: Graders,
    rank: int = 0,
    world: int = 1,
) -> ReasoningRollout:
    """Return the collector of experience of rollout process ``rank`` of ``world``.

    Raises ConfigError.
    """
    config, a = request.config, request.config.algorithm
    return ReasoningRollout(
        m.train,
        engine,
        graders,
        m.decode,
        batch=a.rollout_batch_size,
        sampling=Sampling(
            max_tokens=a.response_length,
            temperature=config.rollout.temperature,
            stop_ids=m.stops,
            stop=config.rollout.stop,
        ),
        pad_id=m.padding,
        seed=config.seed,
        group_size=a.group_size,
        filter_rounds=0 if a.group_filter is None else a.group_filter_rounds,
        shuffle=config.data.shuffle,
        truncation=Truncation(
            treatment=config.rollout.truncation,
            missing_eos=a.missing_eos_penalty,
            overlong_buffer=config.rollout.overlong_buffer,
            overlong_penalty=config.rollout.overlong_penalty,
        ),
        rank=rank,
        world=world,
        notice=request.notice,
    )


def measure(m: Inputs, rollout: ReasoningRollout) -> PromptEvaluationResult:
    """Evaluate the policy of ``rollout`` on held-out prompts."""
    e = m.config.evaluation
    return evaluate_prompts(
        m.held_out[: e.episodes],
        rollout.generator,
        rollout.graders,
        rollout.text,
        evaluation_sampling(e, m.config, m.stops),
        n=e.n,
        seed=e.seed,
    )


def _common_options(request: RunRequest, a: AlgorithmConfig, since: int | None) -> dict[str, Any]:
    """Return the arguments of both learners; ``a``: options of the actor or of the critic."""
    return {
        "length": a.response_length,
        "columns": a.global_batch_size * a.group_size,
        "tokens": a.micro_batch_tokens,
        "updates": request.updates,
        "seed": request.config.seed,
        "compile_schedule": base.compile_schedule(request, since),
        "dump_dir": request.run_dir,
    }


def make_critic_learner(
    request: RunRequest,
    critic: LanguageCritic,
    since: int | None = None,
    ranks: Ranks | None = None,
) -> LocalCritic:
    """Return the learner of a critic.

    Args:
        since: Update from which minibatches are compiled; None: never.
        ranks: Processes that learn together; None: this one alone.
    """
    config = request.config
    a = critic_config(config.algorithm, config.critic)
    return LocalCritic(
        critic,
        a,
        concurrent=config.critic.concurrent,
        ranks=ranks,
        **_common_options(request, a, since),
    )


def make_learner(
    request: RunRequest,
    policy: LanguagePolicy,
    critic: Critic | None,
    since: int | None = None,
    ranks: Ranks | None = None,
    reference: Reference | None = None,
) -> Learner:
    """Return the learner of the actor.

    Args:
        critic: Returns values; None for estimators without a critic.
        since: Update from which minibatches are compiled; None: never.
        ranks: Processes that learn together; None: this one alone.
        reference: Returns the log-probabilities of the reference model; None: a copy of ``policy``.

    Raises:
        ConfigError: The options and the model do not go together.
    """
    a = request.config.algorithm
    return separate_critic_learner(
        policy,
        critic,
        a,
        recompute=a.recompute_log_probs,
        num_sequences=a.rollout_batch_size * a.group_size,
        ranks=ranks,
        reference=reference,
        notice=request.notice,
        **_common_options(request, a, since),
    )


def compile_from(config: Config) -> int | None:
    """Return the update from which minibatches are compiled; None: never.

    Raises:
        ConfigError: compile=always is set and this machine cannot compile.
    """
    if config.compile != "always":
        return None
    if reason := compile.unavailable_reason():
        raise ConfigError(f"compile=always: {reason}; or use compile=auto")
    return 0


def slots(config: Config) -> int:
    """Return the largest number of responses that are decoded together."""
    limit = config.algorithm.rollout_micro_batch_size
    return config.rollout.slots if limit is None else min(config.rollout.slots, limit)


def make_engine(m: Inputs) -> Generator:
    """Return the engine that generates responses."""
    r, path = m.config.rollout, m.config.actor.model.path
    if r.engine == "builtin":
        return Engine(m.policy, slots=slots(m.config), pad_id=m.padding, decode=m.decode)
    assert path is not None
    return VllmEngine(
        m.policy,
        path,
        pad_id=m.padding,
        slots=slots(m.config),
        width=m.longest,
        texts=bool(r.stop),
        gpu_memory_utilization=r.gpu_memory_utilization,
    )


def response_tokens(t: Trajectory) -> int:
    """Return the number of generated tokens, including those outside the loss or the batch.

    Args:
        t: Experience; ``terminated`` [T, N] marks the last token of each response.
    """
    if t.collected is not None:
        return int(t.collected.sum())
    steps = torch.arange(1, len(t.terminated) + 1, device=t.terminated.device).unsqueeze(1)
    return int((t.terminated * steps).sum())
