"""Learner of a language model: an actor, a separate critic, and a frozen reference.

Critic and reference may be in other processes (``placement.remote_models``): the learner calls them
through the protocols ``Critic`` and ``Reference``. T response tokens, N sequences, L tokens of a
row, D size of a hidden state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from embodied_ppo.algorithms import kl
from embodied_ppo.algorithms.learner import NO_STATS, Critic, Learner
from embodied_ppo.algorithms.optimizer import (
    MinibatchOptimizer,
    OptimizationStats,
    TokenBudgetCutter,
    cut_columns,
)
from embodied_ppo.algorithms.ppo_loss import ActorLoss, CriticLoss
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.core import compile, devices
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.types import Batch, ConfigError, Evaluation, Trajectory
from embodied_ppo.models.causal_lm import LanguageCritic, LanguagePolicy

Rows: TypeAlias = "Mapping[str, Tensor]"
"""Observations of a trajectory.

"row": int64 [L, N], prompt and response without a gap. "place": int64 [T, N], the position in its
row of the token before each response token.
"""


# ---------------------------------------------------------------------------------------- reference
class Reference(Protocol):
    """The policy before training, in this process or another one."""

    def initialize(self, actor: LanguagePolicy) -> None:
        """Initialise from ``actor``, once and before any other call."""
        ...

    def view(self, obs: Rows, mask: Tensor, action: Tensor, *, hidden: bool) -> dict[str, Tensor]:
        """Return what ``evaluate_tokens`` returns."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def state_tensors(self) -> Any:
        """Return the tensors, in nested containers, that are in this process between updates."""
        ...


POLICY_METHODS, CRITIC_METHODS = ("hidden", "view_where"), ("value",)
"""Methods that read weights: of actor and reference, and of the critic."""


def value_batch_size(c: AlgorithmConfig) -> int | None:
    """Return the limit of sequences in a forward pass of the critic; None: no limit."""
    return c.rollout_micro_batch_size or c.micro_batch_size


def log_prob_batch_size(c: AlgorithmConfig) -> int | None:
    """Return the limit of sequences in a forward pass for log-probabilities; None: no limit."""
    return c.logprob_forward_micro_batch_size or c.micro_batch_size


def full_kl(c: AlgorithmConfig) -> bool:
    """Return whether loss or reward uses the exact KL of the distributions to the reference."""
    return (c.use_kl_loss and c.kl_loss_type == "full") or (
        c.use_kl_in_reward and c.kl_penalty == "full"
    )


def column_parts(
    obs: Rows, mask: Tensor, tokens: int | None, columns: int | None, ranks: Ranks
) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """Yield columns in parts of similar length: (index [b], ids [b, l], place [b, r], r).

    See ``cut_columns``.

    Sharded models need the same number of passes on every rank. Ranks with fewer parts first yield
    a part of one token; its result is overwritten by that of the part that holds the token.
    """
    cuts = list(cut_columns(mask, obs["place"], tokens, columns))
    first = mask.new_zeros(1, dtype=torch.int64)
    for _ in range(ranks.max_passes(len(cuts)) - len(cuts)):
        yield first, obs["row"][:1, first].T, first.unsqueeze(0), 1
    for part, width, rows in cuts:
        place = torch.where(mask, obs["place"], 0)[:rows, part]
        yield part, obs["row"][:width, part].T, place.T, rows


@torch.no_grad()
def evaluate_tokens(
    policy: LanguagePolicy,
    obs: Rows,
    mask: Tensor,
    action: Tensor,
    *,
    tokens: int | None,
    columns: int | None,
    ranks: Ranks,
    hidden: bool = False,
) -> dict[str, Tensor]:
    """Return "log_prob" [T, N] of the taken tokens and, if ``hidden``, "hidden" [T, N, D].

    Masked entries are arbitrary.
    """
    zero = torch.zeros(mask.shape, device=mask.device)
    out = {"log_prob": zero}
    if hidden:
        out["hidden"] = zero.new_zeros(*zero.shape, policy.decoder.module.hidden_size)
    for part, ids, place, rows in column_parts(obs, mask, tokens, columns, ranks):
        states = policy.hidden(ids, place)
        out["log_prob"][:rows, part] = policy.view_where(
            mask[:rows, part], states, action[:rows, part], entropy=False
        ).log_prob
        if hidden:
            out["hidden"][:rows, part] = states.transpose(0, 1).to(zero.dtype)
    return out


class FrozenReference:
    """A reference in this process."""

    def __init__(
        self,
        policy: LanguagePolicy,
        *,
        tokens: int | None,
        columns: int | None,
        ranks: Ranks | None = None,
    ) -> None:
        """Freeze ``policy``; ``tokens`` and ``columns`` are the limits of a forward pass."""
        self.policy, self.ranks = policy.requires_grad_(False), ranks or Ranks()
        self.ranks.shard(policy, POLICY_METHODS)
        self.limits: dict[str, Any] = {"tokens": tokens, "columns": columns, "ranks": self.ranks}

    def initialize(self, actor: LanguagePolicy) -> None:
        """Do nothing: the reference is a copy of the policy."""

    def view(self, obs: Rows, mask: Tensor, action: Tensor, *, hidden: bool) -> dict[str, Tensor]:
        view = evaluate_tokens(self.policy, obs, mask, action, hidden=hidden, **self.limits)
        self.ranks.reshard(self.policy)
        return view

    def state(self) -> dict[str, Any]:
        return self.policy.state_dict()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state_dict(self.ranks.shard_state(self.policy, state))

    def state_tensors(self) -> Any:
        return list(self.policy.state_dict().values())


# ------------------------------------------------------------------------------------------- critic
def _prepare_thread(threads: int, device: torch.device) -> None:
    """Set the number of threads and the CUDA device, which torch keeps for each thread."""
    torch.set_num_threads(threads)
    devices.activate(device)


class LocalCritic:
    """A critic in this process and its optimiser; see ``learner.Critic``."""

    def __init__(
        self,
        critic: LanguageCritic,
        config: AlgorithmConfig,
        *,
        length: int,
        columns: int,
        tokens: int | None = None,
        concurrent: bool = False,
        ranks: Ranks | None = None,
        **options: Any,
    ) -> None:
        """Create the critic's optimiser.

        Args:
            critic: The model.
            config: Options of its optimiser and epochs.
            length: response_length (T).
            columns: Sequences of an optimiser step.
            tokens: Limit of tokens in a forward pass.
            concurrent: Whether it learns in its own thread.
            ranks: As for ``MinibatchOptimizer``.
            options: Further arguments of ``MinibatchOptimizer``.
        """
        config = replace(config, minibatch_unit="column", target_kl_stop=None)
        (ranks or Ranks()).shard(critic, CRITIC_METHODS)
        self.module, self.config, self.tokens = critic, config, tokens
        self.optimizer = MinibatchOptimizer(
            CriticLoss(critic, config, length=length),
            {"actor": [], "critic": list(critic.parameters())},
            config,
            TokenBudgetCutter(columns, tokens, config.micro_batch_size),
            buffers=[name for name, _ in critic.named_buffers()],
            ranks=ranks,
            **options,
        )
        self.pool: ThreadPoolExecutor | None = None
        if concurrent:
            settings = torch.get_num_threads(), next(critic.parameters()).device
            self.pool = ThreadPoolExecutor(
                1, "critic", initializer=_prepare_thread, initargs=settings
            )
        self._learning: Future[OptimizationStats] | OptimizationStats = NO_STATS

    @property
    def learning_rate(self) -> float:
        return self.optimizer.learning_rates[1]

    def initialize(self, actor: LanguagePolicy) -> None:
        """Do nothing: the critic has its weights already."""

    @torch.no_grad()
    def values(self, obs: Rows, mask: Tensor) -> Tensor:
        value = torch.zeros(mask.shape, device=mask.device)
        limit = value_batch_size(self.config)
        for part, ids, place, rows in column_parts(
            obs, mask, self.tokens, limit, self.optimizer.ranks
        ):
            value[:rows, part] = torch.where(
                mask[:rows, part], self.module.value(ids, place).T, 0.0
            )
        return value

    def begin(self, obs: Rows, mask: Tensor, value: Tensor, returns: Tensor, update: int) -> None:
        """See ``learner.Critic``. Optimises in the critic's thread if it has one."""
        batch = Batch(
            inputs=dict(obs),
            action=obs["place"],  # the loss reads neither action nor log_prob nor advantage
            replay={},
            log_prob=value,
            value=value,
            advantage=value,
            returns=returns,
            mask=mask,
        )

        def learn() -> OptimizationStats:
            return self.optimizer.optimize(batch, update, critic_only=False, entropy_coef=0.0)

        self._learning = learn() if self.pool is None else self.pool.submit(learn)

    def end(self) -> OptimizationStats:
        learning, self._learning = self._learning, NO_STATS
        return learning.result() if isinstance(learning, Future) else learning

    def state(self) -> dict[str, Any]:
        return {"critic": self.optimizer.state(), "critic_weights": self.module.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state(state["critic"])
        self.module.load_state_dict(
            self.optimizer.ranks.shard_state(self.module, state["critic_weights"])
        )

    def state_tensors(self) -> Any:
        return [self.state(), [p.grad for p in self.module.parameters() if p.grad is not None]]

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
        self.optimizer.close()


# -------------------------------------------------------------------------------------------- actor
class LanguageActor:
    """A language model and its reference; see ``learner.Actor``."""

    scores_sequences = True

    def __init__(
        self,
        policy: LanguagePolicy,
        reference: Reference | None,
        config: AlgorithmConfig,
        *,
        tokens: int | None,
        recompute: bool,
    ) -> None:
        """Create an actor.

        Args:
            policy: The language model.
            reference: The frozen reference, None without one.
            config: Options.
            tokens: Limit of tokens in a forward pass.
            recompute: See ``learner.Actor``.
        """
        self.policy, self.reference, self.config, self.tokens = policy, reference, config, tokens
        self.recompute = recompute
        self.optimizer: MinibatchOptimizer | None = None

    @property
    def ranks(self) -> Ranks:
        assert self.optimizer is not None
        return self.optimizer.ranks

    @property
    def local_reference(self) -> LanguagePolicy | None:
        """The reference's model, if it is in this process."""
        return self.reference.policy if isinstance(self.reference, FrozenReference) else None

    def reshard(self) -> None:
        self.ranks.reshard(self.policy)

    def encode(self, t: Trajectory) -> Any:
        return t.obs

    def log_prob(self, inputs: Rows, t: Trajectory) -> Tensor:
        limits: dict[str, Any] = {
            "tokens": self.tokens,
            "columns": log_prob_batch_size(self.config),
            "ranks": self.ranks,
        }
        return evaluate_tokens(self.policy, inputs, t.mask, t.action, **limits)["log_prob"]

    def reference_view(self, t: Trajectory) -> Evaluation | None:
        """See ``Actor``. Logits are hidden states [T, N, D]; None unless a full KL needs them."""
        if self.reference is None:
            return None
        assert isinstance(t.obs, dict)
        view = self.reference.view(t.obs, t.mask, t.action, hidden=full_kl(self.config))
        log_prob = view["log_prob"]
        # The learner reads neither entropy nor value.
        return Evaluation(log_prob, log_prob, log_prob, view.get("hidden"))

    @torch.no_grad()
    def kl_to_reference(
        self, inputs: Rows, t: Trajectory, behaviour: Tensor, reference: Evaluation
    ) -> Tensor:
        c, mask = self.config, t.mask
        if c.kl_penalty != "full":
            return kl.estimate(behaviour, reference.log_prob, c.kl_penalty)
        assert reference.logits is not None
        distance = torch.zeros_like(behaviour)
        for part, ids, place, rows in column_parts(
            inputs, mask, self.tokens, log_prob_batch_size(c), self.ranks
        ):
            view = self.policy.view_where(
                mask[:rows, part],
                self.policy.hidden(ids, place),
                t.action[:rows, part],
                reference=self.local_reference,
                ref=reference.logits[:rows, part],
                entropy=False,
            )
            assert view.distance is not None
            distance[:rows, part] = view.distance
        return distance

    def observe(self, t: Trajectory) -> None:
        """Do nothing: tokens are not normalised."""

    def initialize(self) -> None:
        if self.reference is not None:
            self.reference.initialize(self.policy)

    def reference_state(self) -> Any:
        return None if self.reference is None else self.reference.state()

    def load_reference(self, state: Any) -> None:
        assert self.reference is not None
        self.reference.load_state(state)

    def state_tensors(self) -> list[Any]:
        return [] if self.reference is None else [self.reference.state_tensors()]


# ------------------------------------------------------------------------------------------ learner
def separate_critic_learner(
    policy: LanguagePolicy,
    critic: Critic | None,
    config: AlgorithmConfig,
    *,
    length: int,
    columns: int,
    tokens: int | None = None,
    recompute: bool = False,
    num_sequences: int,
    updates: int,
    seed: int,
    compile_schedule: compile.CompileSchedule | None = None,
    dump_dir: Path | None = None,
    notice: Callable[[str], None] = lambda text: None,
    ranks: Ranks | None = None,
    reference: Reference | None = None,
) -> Learner:
    """Return the learner of a language model.

    The observations of its trajectories are ``Rows``. Their values are not read, because the critic
    computes them.

    Args:
        policy: The language model.
        critic: None for estimators that use no values.
        config: Options of the algorithm.
        length: response_length (T).
        columns: Sequences of an optimiser step.
        tokens: Limit of tokens in a forward pass (config.micro_batch_size limits its sequences).
            None: no limit.
        recompute: Whether the behaviour's log-probabilities are recomputed before the first epoch,
            instead of using those of the rollout.
        num_sequences: N of all ranks.
        updates, seed, compile_schedule, dump_dir, ranks: As for ``MinibatchOptimizer``.
        notice: Called with messages for the user.
        reference: None: a copy of ``policy`` if the options need a reference.

    Raises:
        ConfigError: The estimator needs a critic, or the KL estimator is not possible.
    """
    if not (config.use_kl_loss or config.use_kl_in_reward):
        reference = None
    else:
        if config.use_kl_loss:
            kl.check_loss_type(config.kl_loss_type)
        reference = reference or FrozenReference(
            copy.deepcopy(policy), tokens=tokens, columns=log_prob_batch_size(config), ranks=ranks
        )
    if critic is None and config.adv_type == "gae":
        raise ConfigError(
            "algorithm.adv_type = gae: needs a critic; write critic.use_critic_model=true"
        )
    (ranks or Ranks()).shard(policy, POLICY_METHODS)
    config = replace(config, minibatch_unit="column")
    actor = LanguageActor(policy, reference, config, tokens=tokens, recompute=recompute)
    optimizer = MinibatchOptimizer(
        ActorLoss(policy, config, length=length, reference=actor.local_reference),
        {"actor": list(policy.parameters()), "critic": []},
        config,
        TokenBudgetCutter(columns, tokens, config.micro_batch_size),
        updates=updates,
        seed=seed,
        buffers=[name for name, _ in policy.named_buffers()],
        compile_schedule=compile_schedule,
        dump_dir=dump_dir,
        ranks=ranks,
    )
    actor.optimizer = optimizer
    device = next(policy.parameters()).device
    return Learner(actor, critic, optimizer, columns=num_sequences, device=device, notice=notice)
