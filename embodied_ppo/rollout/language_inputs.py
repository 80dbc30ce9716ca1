"""Tokenizer, prompts and decode engine of a language model's run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from embodied_envs.base.errors import ConfigError, show
from embodied_envs.base.host_memory import keep_freed_memory
from embodied_envs.types import Say
from embodied_ppo.data import synthetic_tasks
from embodied_ppo.data.prompt_rows import files_of
from embodied_ppo.data.prompts import Prompt, load_prompts, load_tokenizer, task_prompts
from embodied_ppo.options.schema import Config
from embodied_ppo.policies.causal_lm import LanguagePolicy
from embodied_ppo.policies.language_models import make_policy
from embodied_ppo.rollout.generation.engine import Engine, Generator
from embodied_ppo.rollout.generation.vllm import VllmEngine
from embodied_ppo.rollout.rewards import graders


def make_tokenizer(config: Config) -> Any:
    """Return the tokenizer of the synthetic task, or of a directory. Raises ConfigError."""
    if config.data.task is not None:
        return synthetic_tasks.tokenizer()
    return load_tokenizer(config.actor.tokenizer or config.actor.model.path or "")


def read_prompts(config: Config, tokenizer: Any, say: Say) -> tuple[list[Prompt], list[Prompt]]:
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
    # Prompts in both files make the evaluation optimistic. This is reported, and not refused.
    in_both = {p.text for p in train} & {p.text for p in held_out}
    if in_both:
        shared, total = len(in_both), len(held_out)
        say(f"data: {shared:,} of the {total:,} held-out prompts are in data.train, too")
    return train, held_out


def read_files(
    config: Config, files: Sequence[str] | Mapping[str, float], tokenizer: Any, say: Say, path: str
) -> list[Prompt]:
    """Return the prompts of data files up to algorithm.prompt_length.

    Args:
        files: Files, or their weights by name.
        path: Path of the option that names the files.

    Raises:
        ConfigError: A file is missing or has the wrong format.
    """
    limit, r = config.algorithm.prompt_length, config.reward
    # Only built-in graders without a reward model need the correct answers.
    built_in = any(term.grader in graders.GRADERS for _, term in r.all_terms)
    options = {"prompt_length": limit, "needs_answer": r.model.path is None and built_in}
    with _option(path, files):
        prompts, longer = load_prompts(files, tokenizer, config.data, **options)
    # Longer prompts are left out instead of cut, because a cut prompt is another question.
    more = f"; {longer:,} longer than algorithm.prompt_length={limit} were left out" * (longer > 0)
    # Prompts without an answer are accepted only where the reward does not need one.
    if unanswered := sum(not p.ground_truth for p in prompts):
        more += f"; {unanswered:,} have no answer"
    if isinstance(files, Mapping):
        shares = dict.fromkeys((p.data_source for p in prompts), 0.0)
        total = sum(p.weight for p in prompts)
        for p in prompts:
            shares[p.data_source] += p.weight / total
        more += f"; drawn: {', '.join(f'{name} {x:.1%}' for name, x in shares.items())}"
    say(f"data: {len(prompts):,} prompts of {path}={show(files)}{more}")
    return prompts


@contextmanager
def _option(path: str, files: Sequence[str] | Mapping[str, float]) -> Iterator[None]:
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
    # Check the existence only, so that a wrong path is refused before worker processes start.
    if config.data.task is None:
        for option, files in (("data.train", config.data.train), ("data.eval", config.data.eval)):
            with _option(option, files):
                files_of(list(files))
    if (path := config.actor.model.path) is not None and not Path(path).is_dir():
        raise ConfigError(
            f"actor.model.path={path}: there is no such directory; name the directory of a model"
        )


def check_length(policy: LanguagePolicy, prompts: Sequence[Prompt], response_length: int) -> int:
    """Return the tokens of the longest prompt and response together.

    Raises:
        ConfigError: They exceed the model's number of positions.
    """
    longest = max(len(p.ids) for p in prompts)
    limit = getattr(policy.model.config, "max_position_embeddings", None)
    rope = getattr(policy.model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond it the frequencies of all rows change with the longest one of a batch.
        limit = rope["original_max_position_embeddings"]
    # The model has no embedding for positions beyond its limit, or was never trained with them.
    if limit is not None and longest + response_length > limit:
        raise ConfigError(
            f"lower response_length = {response_length}, or take shorter prompts: with the longest"
            f" prompt of {longest} tokens that is {longest + response_length}, the model's limit is"
            f" {limit}"
        )
    return longest + response_length


def stop_ids(config: Config, policy: LanguagePolicy, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a response: those of tokenizer and model.

    Raises:
        ConfigError: There is none and no text either, or the model lacks one.
    """
    model = policy.model
    # Published models declare end tokens in different places; chat models often have a second one.
    declared = [x.eos_token_id for x in (tokenizer, model.config, model.generation_config)]
    ids = set[Any]()
    # Each place has one id, a list of ids, or None.
    for value in declared:
        ids.update(value if isinstance(value, (list, tuple)) else [value])
    tokens = tuple(sorted(ids - {None}))
    if not tokens and not config.rollout.stop:
        raise ConfigError(
            "write rollout.stop=[TEXT], or eos_token_id to generation_config.json in"
            " actor.model.path: neither tokenizer nor model name a token that ends a response"
        )
    # The ids are sorted, so the last one is the largest.
    limit = policy.model.get_input_embeddings().num_embeddings
    if tokens and tokens[-1] >= limit:
        fact = f"actor.model: eos_token_id {tokens[-1]} is none of the model's {limit} tokens"
        raise ConfigError(f"{fact}; correct it in the files of the model or of the tokenizer")
    return tokens


@dataclass(frozen=True)
class Inputs:
    """Tokenizer, prompts and actor, which every process of a run reads.

    Attributes:
        train: Prompts to train on.
        held_out: Prompts to evaluate on.
        policy: The actor, with weights from before the warm start.
        stops: Token ids that end a response.
        longest: Tokens of the longest prompt and response together.
        response_length: Largest number of tokens of a response.
    """

    config: Config
    tokenizer: Any
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    policy: LanguagePolicy
    stops: tuple[int, ...]
    longest: int
    response_length: int

    @property
    def padding(self) -> int:
        """Return the token that pads rows; it may be a stop token."""
        # Padded positions are masked, so any valid id is correct.
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else (*self.stops, 0)[0]

    @property
    def prompts(self) -> list[Prompt]:
        """Return all prompts, in the order of their numbers in messages between processes."""
        return [*self.train, *self.held_out]

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens without the stop token; other special tokens are kept."""
        # The stop token ends a response and is no part of its text.
        end = len(ids) - bool(ids and ids[-1] in self.stops)
        return self.tokenizer.decode(
            ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def read_inputs(config: Config, device: torch.device, say: Say) -> Inputs:
    """Read tokenizer, prompts and the actor's model, before its warm start.

    Args:
        config: Options of the run.
        device: Device of the actor.
        say: Called with lines about the data.

    Raises:
        ConfigError: A file or a model is missing or does not fit.
    """
    response_length = config.algorithm.response_length
    # Reusing freed memory avoids the page faults of repeated large allocations.
    if device.type == "cpu":
        keep_freed_memory()
    # The tokenizer comes first: it encodes the prompts, and a new model has its vocabulary.
    tokenizer = make_tokenizer(config)
    train, held_out = read_prompts(config, tokenizer, say)
    policy = make_policy(config, tokenizer, device)
    stops = stop_ids(config, policy, tokenizer)
    # Held-out prompts count as well, so that no run fails at its first evaluation.
    longest = check_length(policy, [*train, *held_out], response_length)
    return Inputs(config, tokenizer, train, held_out, policy, stops, longest, response_length)


# Number of responses that are decoded together; algorithm.rollout_micro_batch_size changes it.
DECODED_TOGETHER = 256


def slots(config: Config) -> int:
    """Return the largest number of responses that are decoded together."""
    limit = config.algorithm.rollout_micro_batch_size
    return DECODED_TOGETHER if limit is None else limit


def make_engine(m: Inputs) -> Generator:
    """Return the engine that generates responses."""
    r, path = m.config.rollout, m.config.actor.model.path
    if r.engine == "builtin":
        return Engine(m.policy, slots=slots(m.config), pad_id=m.padding, decode=m.decode)
    # vLLM reads the model from its directory and holds weights of its own.
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
