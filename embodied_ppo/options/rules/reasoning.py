"""Rules of mode=reasoning: prompts and responses, a language model and its critic."""

from __future__ import annotations

import math
import re

from embodied_envs.base.errors import ConfigError
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options.rules import base
from embodied_ppo.options.rules.base import refuse, refuse_any
from embodied_ppo.options.schema import CloningConfig, Config


def check(config: Config) -> None:
    """Refuse options that exclude each other or lack what they need.

    Raises ConfigError, PlacementError.
    """
    a, d, e, r = config.algorithm, config.data, config.evaluation, config.rollout
    model, stages, vllm = config.actor.model, config.cluster.stages, config.rollout.engine == "vllm"
    refuse(
        stages > 1,
        f"write cluster.stages=1: mode=reasoning has no simulators for cluster.stages = {stages}",
        PlacementError,
    )
    from_files, new_model = d.task is None, model.path is None
    no_eval = from_files and not d.eval
    rank = max(model.lora_rank, config.critic.model.lora_rank or 0)
    lacks_rest = a.reward_groups and all(g.terms != "rest" for g in a.reward_groups.values())
    refusals: dict[str, object] = {
        f"write algorithm.loss_type=actor: {a.loss_type} is the loss of a model with a value"
        " head": a.loss_type != "actor",
        "write updates=100: updates = null sets no length of the training": config.updates is None,
        "write data.train=[FILE.jsonl] or data.task=arithmetic: data.train = [] has no"
        " prompts": from_files and not d.train,
        "write data.eval=[FILE.jsonl] with held-out prompts: data.eval = []": no_eval,
        "write actor.model.path=DIRECTORY as transformers writes it, or actor.model.architecture"
        " (experiment=arithmetic has one): actor.model.path ="
        " null": new_model and not model.architecture,
        "write actor.tokenizer=DIRECTORY: a new model for files of prompts needs one, not"
        " null": from_files and new_model and config.actor.tokenizer is None,
        "write algorithm.ratio_level=sequence (a response) or token: only robots have a"
        " chunk": a.ratio_level == "chunk",
        "write algorithm.loss_agg_func=seq-mean-token-mean: trajectory-mean is for"
        " robots": a.loss_agg_func == "trajectory-mean",
        f"lower rollout.overlong_buffer = {r.overlong_buffer} below algorithm.response_length ="
        f" {a.response_length}": r.overlong_buffer >= a.response_length,
        "write terms: rest in one group of algorithm.reward_groups: no term of the others has the"
        " penalties rollout.overlong_buffer and algorithm.missing_eos_penalty": lacks_rest
        and (r.overlong_buffer or a.missing_eos_penalty),
        f"write evaluation.deterministic=false: else all evaluation.n = {e.n} responses are"
        " equal": e.n > 1 and e.deterministic,
        "remove algorithm.micro_batch_tokens and algorithm.micro_batch_size, or write"
        " compile=never: minibatches of compile = always have one"
        " shape": config.compile == "always" and (a.micro_batch_tokens or a.micro_batch_size),
        f"write compile=never: adapters (lora_rank = {rank}) are not compiled": config.compile
        == "always"
        and rank,
        f"write warm_start.steps=0: {config.warm_start.steps} steps are for a new model"
        " (actor.model.path=null) and"
        " rollout.engine=builtin": (vllm or not new_model) and config.warm_start.steps,
        f"write cloning.lr=1e-5: the default {CloningConfig().lr:g} is for new models of"
        " robots": config.cloning.steps and config.cloning.lr == CloningConfig().lr,
        f"write rollout.engine=builtin: vllm reads the weights from before {config.cloning.steps}"
        " cloning.steps": vllm and config.cloning.steps,
        f"write warm_start.steps=0: initial_policy = {config.initial_policy} is trained"
        " already": config.initial_policy is not None and config.warm_start.steps,
        "write algorithm.off_policy_correction=token: with rollout.oversampling ="
        f" {r.oversampling:g} responses have tokens of several policies": r.oversampling
        and a.off_policy_correction is None,
        f"write rollout.oversampling=0: {r.oversampling:g} needs rollout.engine=builtin and"
        " algorithm.group_filter=null": r.oversampling and (vllm or a.group_filter is not None),
        "write rollout.engine=builtin: numbers of vllm may differ between two runs, which"
        " deterministic = true excludes": vllm and config.deterministic,
        "write actor.model.path=DIRECTORY, which rollout.engine = vllm reads, or"
        " engine=builtin": vllm and new_model,
    }
    refuse_any(refusals)
    _check_sizes(config)
    _check_reward_terms(config)


def _check_reward_terms(config: Config) -> None:
    """Check the entries of reward.terms. Raises ConfigError."""
    terms = config.reward.terms
    for name, term in terms.items():
        path = f"reward.terms.{name}"
        refuse(
            not re.fullmatch(r"(?!(score|(missing_eos|overlong)_penalty)$)[\w.-]+", name),
            f"{path}: the name is part of a metric's name; use letters, digits, _, - and ., and not"
            " score, missing_eos_penalty or overlong_penalty, which are other metrics",
        )
        refuse(
            (term.grader is None) == (term.model is None),
            f"write {path}.grader=NAME or {path}.model=DIRECTORY: one of them is the term",
        )
    refuse(
        terms and not any(term.weight for term in terms.values()),
        f"write reward.terms.{next(iter(terms), '')}.weight=1: the weight of every term is 0, so"
        " that there is no reward",
    )
    for name, group in config.algorithm.reward_groups.items():
        for x in () if group.terms == "rest" else group.terms:
            refuse(
                x in terms and not terms[x].weight,
                f"remove {x} from algorithm.reward_groups.{name}, or write reward.terms.{x}.weight"
                "=1: a term of weight 0 is no part of the reward",
            )


def _check_sizes(config: Config) -> None:
    """Check that minibatches divide the rollout. Raises ConfigError."""
    a = config.algorithm
    total, responses = a.rollout_batch_size, a.rollout_batch_size * a.group_size
    refuse(
        responses * a.response_length > base.LARGEST_ROLLOUT,
        f"algorithm.rollout_batch_size x group_size x response_length = {total} x {a.group_size} x"
        f" {a.response_length} tokens must be <= {base.LARGEST_ROLLOUT:,}; lower one of them",
    )
    batches = {
        "algorithm.global_batch_size": a.global_batch_size,
        "critic.global_batch_size": config.critic.global_batch_size or a.global_batch_size,
    }
    unit = math.lcm(*batches.values())
    for path, batch in batches.items():
        if total % batch:
            raise ConfigError(
                f"algorithm.rollout_batch_size = {total} is not a multiple of {path} = {batch}"
                f" (prompts); nearest: {base.nearest_values(base.divisors(total), batch)}; or"
                f" nearest algorithm.rollout_batch_size: {base.nearest_multiples(unit, total)}"
            )
    largest = a.global_batch_size * a.group_size
    refuse(
        a.micro_batch_size is not None and a.micro_batch_size > largest,
        f"algorithm.micro_batch_size = {a.micro_batch_size} (responses) must be <="
        f" algorithm.global_batch_size x group_size = {largest}; leave it null",
    )
    base.check_controller(config, responses, "algorithm.rollout_batch_size x group_size")
