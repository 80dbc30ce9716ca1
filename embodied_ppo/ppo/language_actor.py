"""PPO of a language model: an actor, a separate critic, and a frozen reference.

Critic and reference may be in other processes (``cluster.remote_models``). T response tokens, N
sequences, L tokens of a row, D size of a hidden state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from embodied_ppo.core import compile
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.types import Batch, Evaluation, Trajectory
from embodied_ppo.options.schema import AlgorithmConfig
from embodied_ppo.policies import lora
from embodied_ppo.policies.causal_lm import LanguagePolicy
from embodied_ppo.policies.decoder import ModuleReference
from embodied_ppo.ppo import kl
from embodied_ppo.ppo.agreement import Tolerances
from embodied_ppo.ppo.minibatches import PolicyTerms, TokenBudgetCutter, column_parts
from embodied_ppo.ppo.optimizer import MinibatchOptimizer
from embodied_ppo.ppo.ppo import PPO, PPOLoss
from embodied_ppo.ppo.roles import Critic, Reference, Rows

POLICY_METHODS = ("hidden", "view_where")  # methods of actor and reference that read weights


def log_prob_batch_size(c: AlgorithmConfig) -> int | None:
    """Return the limit of sequences in a forward pass for log-probabilities; None: no limit."""
    return c.logprob_forward_micro_batch_size or c.micro_batch_size


def full_kl(c: AlgorithmConfig) -> bool:
    """Return whether loss or reward uses the exact KL of the distributions to the reference."""
    return (c.use_kl_loss and c.kl_loss_type == "full") or (
        c.use_kl_in_reward and c.kl_penalty == "full"
    )


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
    # Rows of similar length are evaluated together, without their padding.
    zero = torch.zeros(mask.shape, device=mask.device)
    out = {"log_prob": zero}
    if hidden:
        out["hidden"] = zero.new_zeros(*zero.shape, policy.decoder.module.hidden_size)
    for part, ids, place, rows in column_parts(obs, mask, tokens, columns, ranks):
        # Hidden states [b, r, D] at the tokens before each response token; others need no logits.
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
        """Freeze ``policy`` without its adapters; the others are limits of a forward pass."""
        lora.remove(policy)
        self.policy, self.ranks = policy.requires_grad_(False), ranks or Ranks()
        # A reference needs as much memory for its weights as the policy, so it is sharded, too.
        self.ranks.shard(policy, POLICY_METHODS)
        self.limits: dict[str, Any] = {"tokens": tokens, "columns": columns, "ranks": self.ranks}

    def initialize(self, actor: LanguagePolicy) -> None:
        """Do nothing: the reference is a copy of the policy."""

    def view(self, obs: Rows, mask: Tensor, action: Tensor, *, hidden: bool) -> dict[str, Tensor]:
        view = evaluate_tokens(self.policy, obs, mask, action, hidden=hidden, **self.limits)
        # Free the gathered weights of the reference before those of the policy are gathered.
        self.ranks.reshard(self.policy)
        return view

    def state(self) -> dict[str, Any]:
        return self.policy.state_dict()

    def load_state(self, state: Mapping[str, Any]) -> None:
        # A checkpoint contains full tensors, of which this rank keeps its shards.
        self.policy.load_state_dict(self.ranks.shard_state(self.policy, state))

    def state_tensors(self) -> Any:
        return list(self.policy.parameters())  # with adapters, a state_dict lacks the base


# -------------------------------------------------------------------------------------------- actor
class TokenLoss(PPOLoss):
    """The loss of a language model, whose critic is a separate model.

    A batch's inputs are ``Rows`` [L, B] and [T, B]; everything else is [T, B].
    """

    def __init__(
        self,
        policy: LanguagePolicy,
        config: AlgorithmConfig,
        *,
        length: int,
        reference: LanguagePolicy | None = None,
    ) -> None:
        """Create the loss.

        Args:
            policy: The language model.
            config: Coefficients and aggregation.
            length: response_length.
            reference: The reference policy, which ``kl_loss_type=full`` reads. It is not a part of
                this module's state.
        """
        super().__init__(policy, config, length=length, has_value_head=False)
        self.reference = ModuleReference(reference)

    def evaluate(self, b: Batch) -> PolicyTerms:
        """See ``PolicyLoss``."""
        # The exact KL compares distributions and reads hidden states of the reference. The other
        # estimators read the log-probability of the taken token only.
        full = b.ref_log_prob is not None and self.config.kl_loss_type == "full"
        view = self.model.view_where(
            b.mask,
            self.model.hidden(b.inputs["row"].T, b.inputs["place"].T),
            b.action,
            reference=self.reference.module if full else None,
            ref=b.ref_logits,
        )
        distance = view.distance
        if b.ref_log_prob is not None and not full:
            distance = kl.estimate(view.log_prob, b.ref_log_prob, self.config.kl_loss_type)
        assert view.entropy is not None
        return PolicyTerms(view.log_prob, view.entropy, distance)


@dataclass(eq=False)
class LanguageActor:
    """A language model and its reference; see ``roles.Actor``.

    Attributes:
        policy: The language model.
        reference: The frozen reference, None without one.
        config: Options.
        tokens: Limit of tokens in a forward pass.
        recompute: See ``roles.Actor``.
        optimizer: Set by ``language_ppo``: its loss reads the reference of this actor.
    """

    # A grader gives one score to a response, see ``rewards.shape_rewards``.
    scores_sequences = True

    policy: LanguagePolicy
    reference: Reference | None
    config: AlgorithmConfig
    tokens: int | None
    recompute: bool
    optimizer: MinibatchOptimizer | None = field(default=None, init=False)

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
        # The tokens are the inputs of the model.
        return t.obs

    def log_prob(self, inputs: Rows, t: Trajectory) -> tuple[Tensor, None]:
        limits: dict[str, Any] = {"tokens": self.tokens, "ranks": self.ranks}
        limits["columns"] = log_prob_batch_size(self.config)
        return evaluate_tokens(self.policy, inputs, t.mask, t.action, **limits)["log_prob"], None

    def reference_view(self, t: Trajectory) -> Evaluation:
        """See ``Actor``. Logits are hidden states [T, N, D]; None unless a full KL needs them."""
        assert self.reference is not None and isinstance(t.obs, dict)
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
        # Logits [T, N, V] of all sequences would be too large. Compute them part by part; those of
        # the reference follow from its hidden states.
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
def language_ppo(
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
    notice: Callable[[str], None] = lambda text: None,
    ranks: Ranks | None = None,
    reference: Reference | None = None,
    tolerances: Tolerances | None = None,
) -> PPO:
    """Return the PPO of a language model.

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
        updates, seed, compile_schedule, ranks, tolerances: As for ``MinibatchOptimizer``.
        notice: Called with messages for the user.
        reference: None: a copy of ``policy`` if the options need a reference.
    """
    # A reference costs memory and a forward pass, so it exists only where an option reads it.
    if not (config.use_kl_loss or config.use_kl_in_reward):
        reference = None
    else:
        reference = reference or FrozenReference(
            copy.deepcopy(policy), tokens=tokens, columns=log_prob_batch_size(config), ranks=ranks
        )
    # After the copy of the reference, which is sharded by itself.
    (ranks or Ranks()).shard(policy, POLICY_METHODS)
    # A forward pass reads whole sequences, so minibatches consist of columns.
    config = replace(config, minibatch_unit="column")
    actor = LanguageActor(policy, reference, config, tokens=tokens, recompute=recompute)
    optimizer = MinibatchOptimizer(
        TokenLoss(policy, config, length=length, reference=actor.local_reference),
        # The critic is a separate model with an optimiser of its own.
        {"actor": [p for p in policy.parameters() if p.requires_grad], "critic": []},
        config,
        TokenBudgetCutter(columns, tokens, config.micro_batch_size),
        updates=updates,
        seed=seed,
        buffers=[name for name, _ in policy.named_buffers()],
        compile_schedule=compile_schedule,
        ranks=ranks,
        tolerances=tolerances,
    )
    actor.optimizer = optimizer
    # Rewards and advantages are computed on the device of the policy.
    device = next(policy.parameters()).device
    return PPO(actor, critic, optimizer, columns=num_sequences, device=device, notice=notice)
