"""What mode=reasoning is made of: prompts, language models, a decode engine, judges, examinations."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from embodied_ppo.algorithms.learner import Critic, Learner
from embodied_ppo.algorithms.separate_critic_learner import LocalCritic, Reference, separate_critic_learner
from embodied_ppo.config import loader
from embodied_ppo.config.schema import AlgorithmConfig, Config, CriticConfig, EvaluateConfig, EvaluationConfig
from embodied_ppo.core import compile
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.errors import show
from embodied_ppo.core.random import sampling_key
from embodied_ppo.core.types import Advance, CheckpointError, ConfigError, Trajectory
from embodied_ppo.data import synthetic_tasks
from embodied_ppo.data.prompts import Prompt, files_of, load_prompts, load_tokenizer, task_prompts
from embodied_ppo.evaluation import prompts as exam
from embodied_ppo.evaluation import report
from embodied_ppo.evaluation.prompts import ExamResult
from embodied_ppo.imitation.supervised_finetuning import warm_start
from embodied_ppo.models import causal_lm
from embodied_ppo.models.causal_lm import LanguageCritic, LanguagePolicy
from embodied_ppo.models.checkpoint_files import share
from embodied_ppo.modes.base import Assembly, Setup
from embodied_ppo.rewards import graders, reward_model
from embodied_ppo.rewards.graders import Graders, WithFormat
from embodied_ppo.rewards.worker_pool import GraderPool
from embodied_ppo.rollout.generation.engine import Engine, Generator
from embodied_ppo.rollout.generation.sampling import Sampling
from embodied_ppo.rollout.generation.vllm import VllmEngine
from embodied_ppo.rollout.language import ReasoningRollout, Truncation, reader
from embodied_ppo.training import checkpoint
from embodied_ppo.training.local_system import LocalSystem
from embodied_ppo.training.run_directory import versions
from embodied_ppo.training.system import Records


# ------------------------------------------------------------------------------------------------------------- prompts
def make_tokenizer(config: Config) -> Any:
    """The tokenizer of the task, or of a directory. Raises ConfigError."""
    if config.data.task is not None:
        return synthetic_tasks.tokenizer()
    return load_tokenizer(config.actor.tokenizer or config.actor.model.path or "")


def read_prompts(config: Config, tokenizer: Any, say: Callable[[str], None]) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to train on, and those held out; ``say`` hears how many, and what is wrong with them."""
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
    config: Config, files: Sequence[str], tokenizer: Any, say: Callable[[str], None], what: str
) -> list[Prompt]:
    """Prompts of data files, those that are too long left out. Raises ConfigError."""
    d, limit = config.data, config.algorithm.prompt_length
    try:
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
    except ConfigError as error:
        raise ConfigError(f"{what}={show(files)}: {error}") from error
    more = f"; {longer:,} longer than algorithm.prompt_length={limit} were left out" if longer else ""
    say(f"data: {len(prompts):,} prompts of {what}={show(files)}{more}")
    return prompts


def check_files(config: Config) -> None:
    """Whether tokenizer, data files and the actor's directory are there: what is in them each process reads later.

    Raises ConfigError.
    """
    make_tokenizer(config)
    if config.data.task is None:
        for what, files in (("data.train", config.data.train), ("data.eval", config.data.eval)):
            try:
                files_of(list(files))
            except ConfigError as error:
                raise ConfigError(f"{what}={show(files)}: {error}") from error
    if (path := config.actor.model.path) is not None and not Path(path).is_dir():
        raise ConfigError(f"actor.model.path={path}: there is no such directory; name the directory of a model")


# -------------------------------------------------------------------------------------------------------------- models
def make_policy(config: Config, tokenizer: Any, device: torch.device) -> LanguagePolicy:
    """The actor, its weights from a directory or from ``config.seed``. Raises ConfigError."""
    m = config.actor.model
    with torch.random.fork_rng():
        torch.manual_seed(sampling_key(config.seed, "weights"))
        model = causal_lm.load(m.path, m.architecture, what="actor.model", device=device)
    known, needed = model.get_input_embeddings().num_embeddings, max(tokenizer.get_vocab().values()) + 1
    if needed > known:
        raise ConfigError(f"actor.model: knows {known} tokens, the tokenizer has {needed}; they do not belong together")
    policy = LanguagePolicy(model, temperature=config.rollout.temperature, compute=getattr(torch, m.dtype))
    policy.decoder.module.recompute = m.gradient_checkpointing
    return policy


def check_length(policy: LanguagePolicy, prompts: Sequence[Prompt], response_length: int) -> int:
    """Tokens of the longest prompt and response together. Raises ConfigError where the model cannot hold them."""
    longest = max(len(p.ids) for p in prompts)
    limit = getattr(policy.model.config, "max_position_embeddings", None)
    if limit is not None and longest + response_length > limit:
        raise ConfigError(
            f"algorithm.response_length = {response_length}: with the longest prompt of {longest} tokens that is "
            f"{longest + response_length}, the model's limit is {limit}; lower it, or take shorter prompts"
        )
    return longest + response_length


def make_critic(config: Config, policy: LanguagePolicy, device: torch.device) -> LanguageCritic | None:
    """The critic, a copy of the actor unless it has a model of its own; None where no value is read."""
    m = config.critic.model
    if config.algorithm.adv_type != "gae":
        return None
    if m.path is None and not m.architecture:
        model = copy.deepcopy(policy.model)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(sampling_key(config.seed, "critic"))
            model = causal_lm.load(m.path, m.architecture, what="critic.model", device=device)
        known, needed = (x.get_input_embeddings().num_embeddings for x in (model, policy.model))
        if known < needed:
            raise ConfigError(f"critic.model: knows {known} tokens, the actor {needed}; take one of the same family")
    critic = LanguageCritic(model, compute=getattr(torch, m.dtype))
    critic.decoder.recompute = m.gradient_checkpointing
    return critic


def critic_config(a: AlgorithmConfig, c: CriticConfig) -> AlgorithmConfig:
    """The algorithm's options with the critic's own; its loss_agg_func is token-mean where critic says nothing."""
    names = {f.name for f in fields(AlgorithmConfig)}
    own = {f.name: getattr(c, f.name) for f in fields(c) if f.name in names and getattr(c, f.name) is not None}
    schedule = own.get("lr_schedule", a.lr_schedule)
    own = {"loss_agg_func": "token-mean", **own}
    return replace(a, **{**own, "lr_schedule": "constant" if schedule == "adaptive" else schedule})


def stop_ids(config: Config, policy: LanguagePolicy, tokenizer: Any) -> tuple[int, ...]:
    """Every token that tokenizer, model or options call an end. Raises ConfigError where there is none."""
    known = [tokenizer.eos_token_id, policy.model.config.eos_token_id, policy.model.generation_config.eos_token_id]
    flat = [x for one in known for x in (one if isinstance(one, (list, tuple)) else [one]) if x is not None]
    found = tuple(sorted({*flat, *config.rollout.stop_token_ids}))
    if not found and not config.rollout.stop:
        raise ConfigError(
            "rollout.stop_token_ids = []: neither tokenizer nor model name a token that ends a response; name one, or "
            "rollout.stop=[TEXT]"
        )
    limit = policy.model.get_input_embeddings().num_embeddings
    if found and found[-1] >= limit:
        raise ConfigError(f"rollout.stop_token_ids: {found[-1]} is none of the model's {limit} tokens")
    return found


def pad_id(tokenizer: Any, stops: Sequence[int]) -> int:
    """What fills rows up; it may be an end."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (*stops, 0)[0]


def decoder(tokenizer: Any, stops: Sequence[int]) -> Callable[[list[int]], str]:
    """Token ids to text, without the token that ended them; any other special token stays to be seen, and graded."""

    def decode(ids: list[int]) -> str:
        end = len(ids) - bool(ids and ids[-1] in stops)
        return tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    return decode


# -------------------------------------------------------------------------------------------------------------- judges
def make_graders(config: Config, prompts: Sequence[Prompt], stack: ExitStack) -> Graders:
    """The rules that judge responses; ``stack`` ends their processes. Raises ConfigError."""
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
                f"reward.grader = auto: data_source {unknown[0]!r} has no grader of its own; name one of "
                f"{', '.join(g for g in graders.GRADERS if g != 'auto')}, module:function or FILE.py:function"
            )
        spec = "exact" if unknown else "auto"
    workers = 0 if callable(spec) and r.workers is None else r.workers
    pool = GraderPool(spec, workers=workers, timeout_s=r.timeout_s)
    stack.callback(pool.close)
    return pool


def with_format(config: Config, judge: Graders) -> Graders:
    """Return the grader with the reward for the form of a response added, if reward.format is set."""
    r = config.reward
    if r.format is None:
        return judge
    return WithFormat(judge, re.compile(r.format, re.DOTALL), r.format_weight)


def make_reward(
    config: Config, rule: Graders, policy: LanguagePolicy | None, device: torch.device, notice: Callable[[str], None]
) -> Graders:
    """The judge of training: the rules, or a reward model by path, or one that begins as ``policy`` and learns from
    preferences (None: the rules again)."""
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
    told = reward_model.train(
        model,
        tokenizer,
        pairs,
        steps=m.steps,
        batch_size=m.batch_size,
        lr=m.lr,
        seed=sampling_key(config.seed, "reward model"),
    )
    notice(f"reward model: {100 * told['accuracy']:.1f} % of held-out preferences right, loss {told['loss']:.3f}")
    return reward_model.RewardModel(model, tokenizer, rule=rule)


# -------------------------------------------------------------------------------------------------------- examinations
def exam_sampling(e: EvaluationConfig | EvaluateConfig, config: Config, stops: tuple[int, ...]) -> Sampling:
    """How an examination's responses are chosen."""
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
    config: Config, result: ExamResult, *, source: checkpoint.Checkpoint, run_dir: Path, out: Path
) -> dict[str, str | None]:
    """report.json and report.html of an examination; returns their paths."""
    shown = {"eval/return", "eval/length", "eval/truncated"}
    extra = {tag.removeprefix("eval/"): float(x) for tag, x in result.metrics().items() if tag not in shown}  # pyright: ignore[reportArgumentType]
    written = report.write(
        out,
        result.results(),
        checkpoint=source.path.name,
        update=source.update,
        steps=int(source.manifest["tokens"]),
        unit="tokens",
        config=loader.relevant(config) | {"run_dir": None},
        config_hash=str(source.manifest["config_hash"]),
        versions=versions(),
        curves=report.rows(run_dir),
        samples=result.samples(),
        extra=extra,
    )
    return {"report": str(written.html), "report_json": str(written.json)}


# ------------------------------------------------------------------------------------------------------------ assembly
def demonstrate(s: Setup, policy: LanguagePolicy, tokenizer: Any) -> None:
    """The supervised steps before PPO, from the cache where they have been made; a resumed run needs them only where
    its reward model begins as the actor did."""
    w, config = s.config.warm_start, s.config
    if not w.steps or not (s.fresh_start or config.reward.model.pairs):
        return
    assert config.data.task is not None
    task = synthetic_tasks.TASKS[config.data.task]
    seed = sampling_key(config.seed, "demonstrations") % 2**32
    pairs = synthetic_tasks.demonstrations(
        task, task.problems("train"), w.steps * w.batch_size, seed=seed, forget=w.forget
    )
    prompts, responses = (synthetic_tasks.encode(texts, tokenizer) for texts in zip(*pairs, strict=True))
    examples = [(p, (*r, synthetic_tasks.EOS)) for p, r in zip(prompts, responses, strict=True)]
    warm_start(
        policy,
        examples,
        steps=w.steps,
        batch_size=w.batch_size,
        lr=w.lr,
        key={},
        folder=compile.cache_folder() / "warm_start",
        notice=s.progress,
    )


@dataclass(frozen=True)
class Material:
    """What every process of a run reads.

    train, held_out  prompts           stops    token ids that end a response
    longest          prompt and response together, tokens
    """

    config: Config
    tokenizer: Any
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    policy: LanguagePolicy
    stops: tuple[int, ...]
    longest: int

    @property
    def text(self) -> Callable[[list[int]], str]:
        """Token ids to text."""
        return decoder(self.tokenizer, self.stops)

    @property
    def fill(self) -> int:
        """What fills rows up."""
        return pad_id(self.tokenizer, self.stops)

    @property
    def prompts(self) -> list[Prompt]:
        """All, in the order that processes number them in."""
        return [*self.train, *self.held_out]


def read(s: Setup) -> Material:
    """Tokenizer, prompts and the actor's model, not yet taught. Raises ConfigError."""
    config, a, e = s.config, s.config.algorithm, s.config.evaluation
    tokenizer = make_tokenizer(config)
    train, held_out = read_prompts(config, tokenizer, s.early.append)
    policy = make_policy(config, tokenizer, s.device)
    stops = stop_ids(config, policy, tokenizer)
    longest = check_length(policy, [*train, *held_out], max(a.response_length, e.response_length or 0))
    return Material(config, tokenizer, train, held_out, policy, stops, longest)


def make_judge(s: Setup, m: Material, rule: Graders) -> Graders:
    """What scores responses; where it begins as the actor, the actor has been taught. Raises ConfigError."""
    return with_format(s.config, make_reward(s.config, rule, m.policy, s.device, s.progress))


def make_rollout(
    s: Setup, m: Material, engine: Generator, judge: Graders, rank: int = 0, world: int = 1
) -> ReasoningRollout:
    """Of the options. Raises ConfigError."""
    config, a = s.config, s.config.algorithm
    return ReasoningRollout(
        m.train,
        engine,
        judge,
        m.text,
        batch=a.rollout_batch_size,
        sampling=Sampling(
            max_tokens=a.response_length,
            temperature=config.rollout.temperature,
            stop_ids=m.stops,
            stop=config.rollout.stop,
        ),
        pad_id=m.fill,
        seed=config.seed,
        group_size=a.group_size,
        shuffle=config.data.shuffle,
        truncation=Truncation(
            how=config.rollout.truncation,
            missing_eos=a.missing_eos_penalty,
            overlong_buffer=config.rollout.overlong_buffer,
            overlong_penalty=config.rollout.overlong_penalty,
        ),
        rank=rank,
        world=world,
        notice=s.notice,
    )


def measuring(m: Material, rollout: ReasoningRollout) -> Callable[[], ExamResult]:
    """What examines the policy that ``rollout`` acts with."""
    e = m.config.evaluation
    return functools.partial(
        exam.examine,
        m.held_out[: e.episodes],
        rollout.generator,
        rollout.graders,
        rollout.text,
        exam_sampling(e, m.config, m.stops),
        n=e.n,
        seed=e.seed,
    )


def _same(s: Setup, a: AlgorithmConfig, since: int | None) -> dict[str, Any]:
    """What actor and critic learn with alike; ``a``: whose options."""
    return {
        "length": a.response_length,
        "columns": a.global_batch_size * a.group_size,
        "tokens": a.micro_batch_tokens,
        "updates": s.updates,
        "seed": s.config.seed,
        "compile_schedule": compile.CompileSchedule(since, required=True, notice=s.notice),
        "dump_dir": s.run_dir,
        "notice": s.notice,
    }


def make_values(s: Setup, critic: LanguageCritic, since: int | None = None, ranks: Ranks | None = None) -> LocalCritic:
    """What teaches a critic. ``since``: update from which minibatches are compiled. ``ranks``: who else learns."""
    own = critic_config(s.config.algorithm, s.config.critic)
    return LocalCritic(critic, own, concurrent=s.config.critic.concurrent, ranks=ranks, **_same(s, own, since))


def make_learner(
    s: Setup,
    policy: LanguagePolicy,
    critic: Critic | None,
    since: int | None = None,
    ranks: Ranks | None = None,
    reference: Reference | None = None,
) -> Learner:
    """What teaches the actor; as for ``make_values``. Raises ConfigError."""
    a = s.config.algorithm
    return separate_critic_learner(
        policy,
        critic,
        a,
        recompute=a.recompute_log_probs,
        num_sequences=a.rollout_batch_size * a.group_size,
        ranks=ranks,
        reference=reference,
        **_same(s, a, since),
    )


def records(s: Setup) -> Records:
    """What is written about a run."""
    return Records("tokens", "eval/accuracy", s.run_dir / "checkpoints", s.config.keep_last, s.text, s.info)


def writer(s: Setup) -> Callable[[ExamResult, checkpoint.Checkpoint, Path], dict[str, str | None]]:
    """What writes the report of an examination."""
    return lambda result, source, out: write_report(s.config, result, source=source, run_dir=s.run_dir, out=out)


def title(config: Config, size: int | None = None) -> str:
    """What is trained, for the log's first line; ``size``: parameters."""
    name = config.data.task or Path(config.actor.model.path or "a new model").name
    return name if size is None else f"{name}, {size / 1e6:.1f} M parameters"


def assemble(s: Setup, stack: ExitStack) -> Assembly:
    """A system of mode=reasoning in this process; ``stack`` closes what it opens. Raises ConfigError."""
    config = s.config
    m = read(s)
    rule = make_graders(config, m.prompts, stack)
    demonstrate(s, m.policy, m.tokenizer)
    judge = make_judge(s, m, rule)
    critic = make_critic(config, m.policy, s.device)
    engine = make_engine(m)
    rollout = make_rollout(s, m, engine, judge)
    since = compile_from(config)
    values = None if critic is None else make_values(s, critic, since)
    system = LocalSystem(
        records(s),
        policy=m.policy,
        rollout=rollout,
        learner=make_learner(s, m.policy, values, since),
        count=response_tokens,
        measure=measuring(m, rollout),
        publish=engine.update_weights,
    )
    size = sum(p.numel() for p in m.policy.parameters())
    name, horizon = title(config, size), config.algorithm.response_length
    return Assembly(system, name, horizon, writer(s), ExamResult.samples, success="eval/accuracy")


def compile_from(config: Config) -> int | None:
    """Update from which minibatches are compiled; None: never. Raises ConfigError where that is asked for in vain."""
    if config.compile != "always":
        return None
    if why := compile.obstacle():
        raise ConfigError(f"compile=always: {why}; or use compile=auto")
    return 0


def slots(config: Config) -> int:
    """Responses decoded together, at most."""
    limit = config.algorithm.rollout_micro_batch_size
    return config.rollout.slots if limit is None else min(config.rollout.slots, limit)


def make_engine(m: Material) -> Generator:
    """Return the engine that generates responses."""
    r, path = m.config.rollout, m.config.actor.model.path
    if r.engine == "builtin":
        return Engine(m.policy, slots=slots(m.config), pad_id=m.fill, decode=m.text)
    assert path is not None
    return VllmEngine(m.policy, path, pad_id=m.fill, slots=slots(m.config), width=m.longest, texts=bool(r.stop))


def response_tokens(t: Trajectory) -> int:
    """Tokens that were generated, those left out of the loss included."""
    steps = torch.arange(1, len(t.terminated) + 1, device=t.terminated.device).unsqueeze(1)
    return int((t.terminated * steps).sum())


# ----------------------------------------------------------------------------------------------- evaluate and export
def _restore(trained: Config, source: checkpoint.Checkpoint, device: torch.device) -> tuple[LanguagePolicy, Any]:
    """The policy of a checkpoint and its tokenizer."""
    tokenizer = make_tokenizer(trained)
    policy = make_policy(trained, tokenizer, device)
    checkpoint.load_weights(policy, source.policy(), source.path / checkpoint.POLICY)
    return policy, tokenizer


def evaluate(
    config: EvaluateConfig,
    trained: Config,
    source: checkpoint.Checkpoint,
    *,
    run_dir: Path,
    device: torch.device,
    say: Callable[[str], None],
) -> Callable[[Path, Advance], tuple[ExamResult, dict[str, str | None]]]:
    """What examines a checkpoint and writes the report into a folder, telling of every response; ``say``: to the user.

    Raises CheckpointError, ConfigError.
    """
    policy, tokenizer = _restore(trained, source, device)
    if config.data:
        prompts = read_files(trained, config.data, tokenizer, lambda text: None, "data")
    else:
        prompts = read_prompts(trained, tokenizer, lambda text: None)[1]
    stops = stop_ids(trained, policy, tokenizer)
    sampling = exam_sampling(config, trained, stops)
    check_length(policy, prompts[: config.episodes], sampling.max_tokens)
    text, fill = decoder(tokenizer, stops), pad_id(tokenizer, stops)

    def measure(out: Path, advance: Advance) -> tuple[ExamResult, dict[str, str | None]]:
        with ExitStack() as stack:
            rule = make_graders(trained, prompts, stack)
            judge = with_format(trained, make_reward(trained, rule, None, device, say))
            tell = functools.partial(advance, "responses")
            engine = Engine(policy, slots=slots(trained), pad_id=fill, decode=text, tell=tell)
            chosen = prompts[: config.episodes]
            result = exam.examine(
                chosen, engine, judge, reader(text, sampling.stop), sampling, n=config.n, seed=config.seed
            )
        return result, write_report(trained, result, source=source, run_dir=run_dir, out=out)

    return measure


def export(trained: Config, source: checkpoint.Checkpoint, out: Path) -> dict[str, Any]:
    """Weights, configuration and tokenizer as transformers writes them, read back and compared.

    Raises CheckpointError, ConfigError.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out={out}: is not an empty directory; name a new one")
    policy, tokenizer = _restore(trained, source, torch.device("cpu"))
    try:
        policy.model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        share(out)
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be written ({error.strerror}); name another directory") from error
    again = causal_lm.load(str(out), {}, what="out")
    ids = torch.arange(8).unsqueeze(0) % policy.model.get_input_embeddings().num_embeddings
    with torch.no_grad():
        difference = float((again(input_ids=ids).logits - policy.model(input_ids=ids).logits).abs().max())
    if difference:
        raise CheckpointError(f"out={out}: read back, logits differ by {difference:g}; report this")
    size = sum(file.stat().st_size for file in out.iterdir())
    return {"checkpoint": str(source.path), "out": str(out), "mb": round(size / 1e6, 1), "logit_difference": difference}
