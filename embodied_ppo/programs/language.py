"""Train a language model: construct prompts, models, graders, rollout and learners in order.

``build`` constructs the roles of one process. In a local run this process has all of them. On a
cluster the reward, the critic and the reference can be in other processes (``remote_models``), and
the driver calls the ``Worker`` of each of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from embodied_envs.base.errors import ConfigError
from embodied_envs.base.random import sampling_key
from embodied_ppo.cluster import remote_models
from embodied_ppo.cluster.channels import Exchange, Server
from embodied_ppo.cluster.remote_models import RemoteCritic, RemoteGraders, RemoteReference
from embodied_ppo.cluster.worker import Worker, WorkerSpec, broadcast_weights
from embodied_ppo.core import compile
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.types import Trajectory
from embodied_ppo.data import synthetic_tasks
from embodied_ppo.data.prompts import Sampler, demonstrations
from embodied_ppo.evaluation import language_evaluation
from embodied_ppo.evaluation.prompt_evaluation import PromptEvaluationResult
from embodied_ppo.evaluation.run_report import ReportFiles, ReportTarget
from embodied_ppo.imitation.supervised_finetuning import finetune, warm_start
from embodied_ppo.options.reward_groups import rollout_groups
from embodied_ppo.options.schema import AlgorithmConfig, Config
from embodied_ppo.policies.language_models import critic_config, critic_rank, make_critic
from embodied_ppo.ppo import agreement
from embodied_ppo.ppo.critic import LocalCritic
from embodied_ppo.ppo.language_actor import FrozenReference, language_ppo, log_prob_batch_size
from embodied_ppo.ppo.roles import Critic
from embodied_ppo.programs.compilation import schedule_at
from embodied_ppo.programs.run_spec import RunSpec
from embodied_ppo.rollout.generation.engine import Generator
from embodied_ppo.rollout.generation.sampling import Sampling
from embodied_ppo.rollout.language_inputs import Inputs, make_engine, read_inputs
from embodied_ppo.rollout.language_rollout import ReasoningRollout, Truncation, response_decoder
from embodied_ppo.rollout.recorded_responses import ResponseRecorder
from embodied_ppo.rollout.rewards.build import make_reward
from embodied_ppo.rollout.rewards.graders import Graders
from embodied_ppo.training import checkpoint
from embodied_ppo.training.progress import Messages
from embodied_ppo.training.run_directory import stored_config

# Learning rate and demonstrations of each supervised step before PPO.
WARM_START_LR, WARM_START_BATCH = 1e-3, 128


def build(
    spec: RunSpec,
    process: WorkerSpec,
    exchange: Exchange | None,
    messages: Messages,
    stack: ExitStack,
) -> tuple[Worker, Mapping[str, Any]]:
    """Construct the roles of one process.

    Args:
        spec: The run.
        process: Roles, ranks and connections of this process.
        exchange: Receives the requests of processes that lack a role that is here.
        messages: Lines for the log.
        stack: Closes what is opened here.

    Returns:
        The worker, and facts for the summary.

    Raises:
        ConfigError: An option is refused by what it configures.
    """
    config, a, roles = spec.config, spec.config.algorithm, process.roles

    # Tokenizer, prompts and actor. A sharded model need not fit on the device as a whole, so it is
    # built in host memory.
    supervised = config.warm_start.steps or config.cloning.steps
    on_host = process.learners.sharded and "rollout" not in roles and not supervised
    device = torch.device("cpu") if on_host else spec.device
    inputs = read_inputs(config, device, messages.add)
    policy = inputs.policy

    # Reward: graders and models.
    graders: Graders | None = None
    if "reward" in roles:
        graders = make_reward(inputs, spec.device, stack, messages.progress)
    # The first learner is warmed up and sends its weights to the others.
    if "actor" in roles:
        if not process.learners.rank:
            _initialize_actor(spec, inputs, messages)
        broadcast_weights(policy, process.learners)

    # Critic and reference, here or in other processes.
    critic, values = _critic(spec, process, inputs, device, messages)
    reference = _reference(spec, roles, inputs)
    # Reply to the requests of processes without these models.
    server = None
    if exchange is not None:
        services = remote_models.ModelService(
            device=spec.device,
            graders=graders,
            prompts=inputs.prompts,
            critic=values,
            reference=reference,
        )
        server = Server(services, exchange)

    # Decode engine, rollout and evaluation.
    rollout = learner = measure = None
    hooks: dict[str, Any] = {}
    if "rollout" in roles:
        engine = make_engine(inputs)
        # Responses are graded here, or in the process that has the graders.
        clients = process.clients.get("reward", ())
        scores = graders if graders is not None else RemoteGraders(clients[0], inputs.prompts)
        rollout = make_rollout(
            config, inputs, engine, scores, process.rollouts, notice=messages.notice
        )
        measure = partial(language_evaluation.measure, inputs, rollout)
        # The engine's results depend on the version of the weights, and its cache occupies memory
        # that other roles need while this one is offloaded.
        hooks |= {"on_weights_updated": engine.update_weights, "release_cache": engine.sleep}

    # Learner of the actor.
    if "actor" in roles:
        remote = None
        if clients := process.clients.get("reference", ()):
            pretrained = config.actor.model.lora_rank > 0  # its process has read the directory
            remote = RemoteReference(clients[0], spec.device, pretrained=pretrained)
        learner = language_ppo(
            policy,
            critic,
            a,
            recompute=a.recompute_log_probs,
            # Sequences of all ranks: rewards and advantages are computed for all of them.
            num_sequences=a.rollout_batch_size * a.group_size,
            ranks=process.learners,
            reference=remote,
            notice=messages.notice,
            **_learner_options(spec, a, messages),
        )
        hooks["initialize_models"] = learner.initialize
        learner.record = _recorder(spec, process, inputs)

    # A worker offloads the weights of its policy. In a process that neither acts nor learns, critic
    # and reference take this place.
    other_models: list[nn.Module] = [] if values is None else [values.module]
    other_models += [] if reference is None else [reference.policy]
    acts_or_learns = rollout is not None or learner is not None
    worker = Worker(
        process,
        policy=policy if acts_or_learns else nn.ModuleList(other_models),
        rollout=rollout,
        learner=learner,
        server=server,
        count=response_tokens,
        measure=measure,
        write_report=partial(_write_report, spec),
        **hooks,
        state_tensors=lambda: [
            x.state_tensors() for x in (learner or values, reference) if x is not None
        ],
    )
    return worker, {}


def _recorder(spec: RunSpec, process: WorkerSpec, inputs: Inputs) -> ResponseRecorder | None:
    """Return what writes the responses of updates to files, where rollout.dump is set."""
    config, ranks = spec.config, process.learners
    if config.rollout.dump is None:
        return None
    return ResponseRecorder(
        spec.run_dir,
        config.rollout.dump,
        inputs.train,
        response_decoder(inputs.decode, config.rollout.stop),
        tuple(config.reward.terms),
        part=ranks.rank if ranks.world > 1 else None,
    )


def _write_report(
    spec: RunSpec, result: PromptEvaluationResult, source: checkpoint.Checkpoint, out: Path
) -> ReportFiles:
    """Write the report of an evaluation."""
    config = spec.config
    target = ReportTarget(config, source, spec.run_dir, out, config.evaluation)
    return language_evaluation.write_report(target, result)


def _critic(
    spec: RunSpec, process: WorkerSpec, inputs: Inputs, device: torch.device, messages: Messages
) -> tuple[Critic | None, LocalCritic | None]:
    """Return the critic that the actor here calls, and the critic of this process."""
    config = spec.config
    if "critic" in process.roles:
        critic = make_critic(config, inputs.policy, device)
        assert critic is not None
        if _has_initial_critic(spec):
            assert spec.initial_policy is not None
            weights = spec.initial_policy.training()["learner"]["critic_weights"]
            name = f"initial_policy={config.initial_policy}, critic"
            checkpoint.load_weights(critic, weights, name)
        a = critic_config(config.algorithm, config.critic)
        # The actor in this process calls it, or the server for actors in other processes.
        options = _learner_options(spec, a, messages)
        values = LocalCritic(critic, a, ranks=process.critics, **options)
        return values, values
    clients = process.clients.get("critic", ())
    # Estimators such as grpo read no values.
    if not clients:
        return None, None
    # A critic without weights of its own starts from those of the actor. With adapters, its process
    # has read those of the directory.
    pretrained = config.critic.model.path is not None or _has_initial_critic(spec)
    pretrained = pretrained or config.actor.model.lora_rank > 0 or critic_rank(config) > 0
    return RemoteCritic(clients[0], device, pretrained=pretrained), None


def _has_initial_critic(spec: RunSpec) -> bool:
    """Return whether the critic starts from that of ``initial_policy``."""
    source = spec.initial_policy
    if source is None or spec.checkpoint is not None:
        return False
    # Before the first update a critic is a copy of the actor, if there is one.
    return source.update > 0 and stored_config(source).algorithm.adv_type == "gae"


def _reference(spec: RunSpec, roles: Sequence[str], inputs: Inputs) -> FrozenReference | None:
    """Return the reference of a process without an actor; None: it has none."""
    # Together with an actor, ``language_ppo`` copies the policy as its reference.
    if "reference" not in roles or "actor" in roles:
        return None
    a, policy = spec.config.algorithm, inputs.policy
    if "rollout" in roles:  # the weights of the policy will change
        policy = copy.deepcopy(policy)
    return FrozenReference(policy, tokens=a.micro_batch_tokens, columns=log_prob_batch_size(a))


def _learner_options(spec: RunSpec, a: AlgorithmConfig, messages: Messages) -> dict[str, Any]:
    """Return the arguments of both learners.

    Args:
        spec: The run.
        a: Options of the actor or of the critic.
        messages: Receives lines for the log.

    Raises:
        ConfigError: compile=always is set and this machine cannot compile.
    """
    # Language models run compiled on request only, and then from the first update on.
    since = None
    if spec.config.compile == "always":
        if reason := compile.unavailable_reason():
            raise ConfigError(f"compile=always: {reason}; or use compile=auto")
        since = 0
    return {
        "length": a.response_length,
        "columns": a.global_batch_size * a.group_size,
        "tokens": a.micro_batch_tokens,
        "updates": spec.updates,
        "seed": spec.config.seed,
        "compile_schedule": schedule_at(spec, messages, since),
        "tolerances": agreement.tolerances(spec.config),
    }


def _initialize_actor(spec: RunSpec, inputs: Inputs, messages: Messages) -> None:
    """Load ``initial_policy`` where a run starts, and train on demonstrations (or load the result
    from the cache).

    Raises:
        CheckpointError: The initial policy cannot be read, or is of another model.
    """
    config, w, policy = spec.config, spec.config.warm_start, inputs.policy
    if spec.checkpoint is None and (source := spec.initial_policy) is not None:
        checkpoint.load_weights(policy, source.policy(), f"initial_policy={config.initial_policy}")
        others = "critic" if _has_initial_critic(spec) else "no critic, which starts as a copy"
        messages.notice(f"initial_policy: weights of {source.path}, and {others}")
    if config.cloning.steps and spec.checkpoint is None:
        _clone(config, inputs, messages)
    if not w.steps or spec.checkpoint is not None:
        return
    assert config.data.task is not None
    task = synthetic_tasks.TASKS[config.data.task]
    # A stream of random numbers of its own, so that every process draws the same examples.
    seed = sampling_key(config.seed, "demonstrations") % 2**32
    pairs = synthetic_tasks.demonstrations(
        task, task.problems("train"), w.steps * WARM_START_BATCH, seed=seed
    )
    prompts, responses = (
        synthetic_tasks.encode(texts, inputs.tokenizer) for texts in zip(*pairs, strict=True)
    )
    # Each response ends with EOS, so that the model learns to stop.
    warm_start(
        policy,
        [(p, (*r, synthetic_tasks.EOS)) for p, r in zip(prompts, responses, strict=True)],
        steps=w.steps,
        batch_size=WARM_START_BATCH,
        lr=WARM_START_LR,
        folder=compile.cache_folder() / "warm_start",
        notice=messages.progress,
    )


def _clone(config: Config, inputs: Inputs, messages: Messages) -> None:
    """Train the actor on the responses of data.train. Raises ConfigError, TrainingError."""
    c, a = config.cloning, config.algorithm
    examples, weights = demonstrations(
        inputs.train, inputs.tokenizer, inputs.stops, response_length=a.response_length
    )
    longer = len(inputs.train) - len(examples)
    more = f"; {longer:,} longer than algorithm.response_length were left out" * (longer > 0)
    messages.progress(f"cloning: {c.steps} steps on {len(examples):,} responses{more}")
    order = c.batch_size, config.seed, bool(config.data.shuffle)
    sampler = Sampler(len(examples), *order, weights=weights)
    batches = ([examples[i] for i in sampler.next()] for _ in range(c.steps))
    losses = finetune(
        inputs.policy,
        batches,
        lr=c.lr,
        lr_warmup=c.steps // 10,
        label="cloning",
        tokens=a.micro_batch_tokens,
        rows=a.micro_batch_size,
    )
    passes = f"{sampler.epoch:.2g} passes"
    messages.add(f"cloning: loss {losses[0]:.4g} to {losses[-1]:.4g} in {passes}")


def make_rollout(
    config: Config,
    m: Inputs,
    engine: Generator,
    graders: Graders,
    ranks: Ranks,
    *,
    notice: Callable[[str], None] = lambda line: None,
) -> ReasoningRollout:
    """Return the collector of experience of one of the rollout processes ``ranks``.

    Raises ConfigError.
    """
    a = config.algorithm
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
        # Without a filter the first round of generation is the batch.
        filter_rounds=0 if a.group_filter is None else a.group_filter_rounds,
        oversampling=config.rollout.oversampling,
        shuffle=config.data.shuffle,
        truncation=Truncation(
            treatment=config.rollout.truncation,
            missing_eos=a.missing_eos_penalty,
            overlong_buffer=config.rollout.overlong_buffer,
        ),
        reward_groups=rollout_groups(a) if a.reward_groups else (),
        recorded_terms=tuple(config.reward.terms) if config.rollout.dump is not None else None,
        ranks=ranks,
        notice=notice,
    )


def response_tokens(t: Trajectory) -> int:
    """Return the number of generated tokens, including those outside the loss or the batch.

    Args:
        t: Experience; ``terminated`` [T, N] marks the last token of each response.
    """
    # Filtered responses were generated, too.
    if t.collected is not None:
        return int(t.collected.sum())
    # A response whose last token is in row t has t + 1 tokens.
    steps = torch.arange(1, len(t.terminated) + 1, device=t.terminated.device).unsqueeze(1)
    return int((t.terminated * steps).sum())
