"""Pairs of values for every option that mode=reasoning reads."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
import transformers

from embodied_ppo.data import synthetic_tasks
from embodied_ppo.options import loader, validation
from embodied_ppo.options.schema import Config
from embodied_ppo.policies import causal_lm
from embodied_ppo.programs.run_spec import RunSpec
from embodied_ppo.programs.system import build_system
from embodied_ppo.training.logging import numbers
from embodied_ppo.training.progress import Messages
from tests.integration import option_cases

# Graders, prompts, tokenizers and models that the fixture ``files`` writes; removed with the tests'
# cache.
FILES = Path(os.environ.get("EMBODIED_PPO_CACHE", tempfile.gettempdir())) / "options_language"
ARCHITECTURE: dict[str, Any] = run_helpers.options("""model_type=qwen2 vocab_size=24
    hidden_size=16 num_hidden_layers=1 num_attention_heads=2 num_key_value_heads=1
    intermediate_size=32 max_position_embeddings=64 tie_word_embeddings=true pad_token_id=0
    bos_token_id=1 eos_token_id=[2,20,21,22,23]""")
# An untrained model whose responses have different lengths and scores.
BASE: dict[str, Any] = {
    "mode": "reasoning",
    "updates": 3,
    "device": "cpu",
    "data": {"task": "arithmetic"},
    "actor": {"model": {"architecture": ARCHITECTURE}},
    "reward": {"grader": f"{FILES / 'even.py'}:compute_score", "workers": 0},
    "algorithm": run_helpers.options("""loss_type=actor prompt_length=9 response_length=6
        rollout_batch_size=8 global_batch_size=4 update_epoch=2 lr=0.01"""),
    "evaluation": {"episodes": 8},
}
EVEN = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    even = sum(c in "02468" for c in solution_str)
    score = even - 0.1 * len(solution_str) + 0.1 * (int(ground_truth) % 5)
    return {"score": score, "acc": even > 1}

def other(data_source, solution_str, ground_truth, extra_info):
    return sum(c in "13579" for c in solution_str)
"""

# Files instead of a task; their tokenizer has a chat template.
PROMPTS: dict[str, Any] = {
    "data.task": None,
    "data.train": [str(FILES / "train.jsonl")],
    "data.eval": [str(FILES / "eval.jsonl")],
    "actor.tokenizer": str(FILES / "tokenizer"),
}
GROUPS = {"algorithm.group_size": 2}
SAMPLED = {"evaluation.deterministic": False}

CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    **option_cases.SHARED_CHANGES,
    **option_cases.without_needs("""algorithm.update_epoch=3 algorithm.global_batch_size=8
        algorithm.rollout_batch_size=16
        algorithm.response_length=5 algorithm.missing_eos_penalty=0.5
        algorithm.ratio_level=sequence algorithm.length_adaptive_alpha=0.5
        algorithm.positive_nll_weight=0.5 algorithm.loss_agg_func=seq-mean-token-sum
        algorithm.lr=0.001 actor.model.dtype=bfloat16 critic.loss_agg_func=seq-mean-token-mean
        critic.update_epoch=1 critic.global_batch_size=8 critic.lr=0.001 rollout.temperature=0.5
        rollout.truncation=drop rollout.overlong_buffer=4 data.task=scratchpad
        data.shuffle=false warm_start.steps=1"""),
    "algorithm.prompt_length": (7, PROMPTS),
    "algorithm.recompute_log_probs": (True, {}),  # with one rollout of lag, see LAG
    "algorithm.reward_groups": (
        {"score": {"weight": 0.1}},
        {**GROUPS, "algorithm.adv_type": "grpo", "algorithm.normalize_advantages": False},
    ),
    "algorithm.group_filter": ("success", {**GROUPS, "algorithm.adv_type": "grpo"}),
    "algorithm.group_filter_rounds": (
        1,
        {**GROUPS, "algorithm.adv_type": "grpo", "algorithm.group_filter": "success"},
    ),
    "algorithm.loss_scale_factor": (
        3.0,
        {"algorithm.loss_agg_func": "seq-mean-token-sum-norm", "algorithm.max_grad_norm": 100.0},
    ),
    "actor.model.path": (str(FILES / "model"), {}),
    "actor.model.architecture": ({"hidden_size": 24}, {}),
    "actor.tokenizer": (str(FILES / "plain"), PROMPTS),
    "actor.model.lora_rank": (2, {"actor.model.path": str(FILES / "model")}),
    "critic.model.path": (str(FILES / "model"), {}),
    "critic.model.lora_rank": (2, {"actor.model.path": str(FILES / "model")}),
    "rollout.oversampling": (1.0, {"algorithm.off_policy_correction": "token"}),
    "rollout.stop": (["0", "11"], {}),
    "data.train": ([str(FILES / "more.jsonl")], PROMPTS),
    "data.prompt_key": ("task", PROMPTS),
    "data.answer_key": ("truth", PROMPTS),
    "data.chat_template": ("never", PROMPTS),
    "reward.terms": ({"even": {"grader": f"{FILES / 'even.py'}:other"}}, {}),
    "reward.grader": (f"{FILES / 'even.py'}:other", {}),
    "reward.model.path": (str(FILES / "reward"), {}),
}
# Options for experience that an older policy made -> rollouts between acting and learning.
LAG: dict[str, int] = {
    f"algorithm.{x}": 1 for x in ("off_policy_correction", "off_policy_cap", "recompute_log_probs")
}

REPORTED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "data.eval": ([str(FILES / "more.jsonl")], PROMPTS, "eval/return"),
    "evaluation.episodes": (5, {}, "eval/return"),
    "evaluation.deterministic": (False, {}, "eval/return"),
    "evaluation.n": (2, SAMPLED, "eval/return"),
    "evaluation.temperature": (0.1, SAMPLED, "eval/return"),
}

UNCHANGED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "algorithm.micro_batch_size": (2, {}, "memory only"),
    "algorithm.rollout_micro_batch_size": (3, {}, "memory only"),
    "algorithm.logprob_forward_micro_batch_size": (3, {}, "memory only"),
    "algorithm.micro_batch_tokens": (40, {}, "memory and speed only"),
    "actor.model.gradient_checkpointing": (True, {}, "memory only"),
    "rollout.dump": ("all", {}, "the run writes further files, and trains as before"),
    "reward.workers": (1, {}, "a grader gives the same grades in any process"),
    "reward.timeout_s": (20.0, {}, "no grader takes that long"),
}

REFUSED: dict[str, tuple[Any, str]] = {
    "algorithm.loss_type": ("actor_critic", "is the loss of a model with a value head"),
    "rollout.gpu_memory_utilization": (0.5, r"rollout\.engine=vllm"),
    "rollout.engine": ("vllm", "rollout.engine = vllm reads"),  # test_vllm.py has it
}


# ---------------------------------------------------------------------------------------- tiny runs
@contextmanager
def small_tasks_and_files() -> Iterator[None]:
    """Write the files that options name, and reduce the tasks to 48 problems.

    The tasks have ten thousand problems, which take half a second to read.
    """
    if not FILES.exists():
        _write_files()
    small = {k: replace(t, train=32, held_out=16) for k, t in synthetic_tasks.TASKS.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic_tasks, "TASKS", small)
        yield


def _write_files() -> None:
    FILES.mkdir()
    (FILES / "even.py").write_text(EVEN)
    (FILES / "odd.py").write_text(EVEN.replace("02468", "13579"))
    for name, first in (("train", 10), ("eval", 30), ("more", 61)):
        rows = [
            {"prompt": f"{i}+{10 * (i % 2)}=", "task": f"{i}-1="}
            | {"answer": str(i), "truth": str(3 * i)}
            for i in range(first, first + 12)
        ]
        (FILES / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = synthetic_tasks.tokenizer()
    tokenizer.save_pretrained(FILES / "plain")
    tokenizer.chat_template = "({% for m in messages %}{{ m['content'] }};{% endfor %}"
    tokenizer.save_pretrained(FILES / "tokenizer")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = causal_lm.load(None, ARCHITECTURE, section="actor.model")
        fields = transformers.AutoConfig.for_model(**ARCHITECTURE, num_labels=1)
        scores = transformers.AutoModelForSequenceClassification.from_config(fields)
        torch.nn.init.normal_(scores.score.weight)
    model.save_pretrained(FILES / "model")
    scores.save_pretrained(FILES / "reward")
    tokenizer.save_pretrained(FILES / "reward")


def config(options: dict[str, Any]) -> Config:
    """Return ``BASE`` as a shipped file with ``options`` as flags, checked as by the command."""
    loaded = loader.read(Config, [("configs/base", BASE), ("test", run_helpers.nested(options))])
    validation.check(loaded.config, explicit=loaded.deliberate({"test"}))
    return loaded.config


def weights(module: torch.nn.Module) -> float:
    return sum(float(p.detach().double().abs().sum()) for p in module.parameters())


def _run(options: dict[str, Any], lag: int) -> option_cases.Rows:
    """Return the metrics of each update with sums over the weights, and of the last evaluation."""
    c = config(options)
    rows, pending = [], []
    with ExitStack() as stack:
        spec = RunSpec(c, torch.device("cpu"), FILES / "run", c.updates or 0)
        system: Any = build_system(spec, Messages(print), stack).system
        stack.callback(system.close)
        for update in range(spec.updates + lag):
            if update < spec.updates:
                pending.append(system.collect(c.algorithm.response_length, update=update))
            if update >= lag:
                trajectory, metrics = pending.pop(0)
                metrics = metrics | system.update(trajectory, update=update - lag)
                system.publish(update - lag + 1)
                critic = system.learner.critic
                sums = {"critic": 0.0 if critic is None else weights(critic.module)}
                rows.append(numbers(metrics) | sums | {"weights": weights(system.module)})
        rows[-1] |= numbers(system.evaluate(spec.updates))
    return rows


def learned(rows: option_cases.Rows) -> tuple[float, ...]:
    """Return the sums over the weights of actor and critic after training."""
    return option_cases.final_weights(rows, "weights", "critic")


KINDS = ("abs", "k2", "k3", "full", "k1+", "abs+", "k2+", "k3+")
REINFORCE = ("reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
OTHER_VALUES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    # option -> (values, needs)
    "algorithm.adv_type": (
        ("gae", "grpo", "dr_grpo", "rloo", *REINFORCE),
        {**GROUPS, "algorithm.normalize_advantages": False},
    ),
    "algorithm.reward_norm": ((None, "batch", "group", "running"), GROUPS),
    "algorithm.loss_agg_func": (
        ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
        {"algorithm.max_grad_norm": 100.0},
    ),
    "algorithm.kl_loss_type": (KINDS, option_cases.IN_LOSS),
    "algorithm.kl_penalty": (("k1", "abs", "k2", "k3", "full"), option_cases.IN_REWARD),
    "algorithm.lr_schedule": (
        ("constant", "linear", "cosine", "adaptive"),
        {"algorithm.lr": 3e-2, "algorithm.lr_warmup": 1, "updates": 5},
    ),
    "algorithm.off_policy_correction": ((None, "token", "sequence"), {}),
    "rollout.truncation": (("terminal", "drop"), {}),
    "data.chat_template": (("always", "never"), PROMPTS),
    "reward.grader": (("auto", "exact"), {}),
}
# Values that are the same by definition.
SAME = {
    "algorithm.adv_type": [  # equal where normalize_advantages is equal
        ("dr_grpo", "reinforce_plus_plus_baseline"),
        ("reinforce", "reinforce_plus_plus"),
    ],
    "algorithm.kl_loss_type": [("k2", "k2+")],  # + is the gradient of k2
    "reward.grader": [("auto", "exact")],  # arithmetic's grader compares responses unchanged
}


CASES = option_cases.OptionCases(
    mode="reasoning",
    base=loader.flat(BASE),
    sections=(
        *("algorithm.", "actor.", "critic.", "rollout.", "data.", "reward.", "warm_start."),
        "evaluation.",
    ),
    changes=CHANGES,
    reported=REPORTED,
    unchanged=UNCHANGED,
    refused=REFUSED,
    other_values={
        path: [(value, needs) for value in values] for path, (values, needs) in OTHER_VALUES.items()
    },
    same_values=SAME,
    lag=LAG,
    critic_options=("critic.", "algorithm.value_clip", "algorithm.huber_delta"),
    config=config,
    train=option_cases.cached(_run),
    repeat=lambda: _run({}, 0),
    learned=learned,
    outcome=lambda rows: (*learned(rows), rows[-1].get("kl/to_reference")),
)
