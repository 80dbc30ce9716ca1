"""Parts of the learner around ``ppo.PPO.update``, with its checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from embodied_envs.base.errors import ConfigError
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.types import Batch, Mean, Metrics, Trajectory, UpdateObserver
from embodied_ppo.options.reward_groups import reward_groups
from embodied_ppo.ppo import schedules
from embodied_ppo.ppo.curiosity import RECENT_ROLLOUTS, Curiosity
from embodied_ppo.ppo.optimizer import MinibatchOptimizer
from embodied_ppo.ppo.rewards import ReturnScaler
from embodied_ppo.ppo.roles import Actor, Critic, SharedCritic
from embodied_ppo.ppo.symmetry import Symmetry


class LearnerState:
    """Actor, critic, optimiser and controllers, and everything that a checkpoint stores of them."""

    def __init__(
        self,
        actor: Actor,
        critic: Critic | SharedCritic | None,
        optimizer: MinibatchOptimizer,
        *,
        columns: int,
        device: torch.device,
        curiosity: Curiosity | None = None,
        symmetry: Symmetry | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Create the learner.

        Args:
            actor: The policy, and its reference if there is a KL penalty.
            critic: None for advantage estimators that read no value.
            optimizer: Of the policy's parameters, a value head included; its loss is a ``PPOLoss``.
            columns: N of all ranks together.
            device: Where rewards are shaped.
            curiosity: Computes an intrinsic reward; None: there is none.
            symmetry: Mirrors the samples; None: there are no mirrored ones.
            notice: Called with messages for the user.
        """
        config = optimizer.config
        self.actor, self.critic, self.optimizer = actor, critic, optimizer
        self.config, self.notice = config, notice
        self.cpu_s = {"advantages": 0.0, "update": 0.0}  # CPU seconds since the start
        self.cpu_clock = time.process_time  # measures them
        # Called with each rollout, its batch with advantages, and the number of the update.
        self.record: Callable[[Trajectory, Batch, int], None] | None = None
        # These continue from one update to the next, and checkpoints contain them.
        self.warmup_ended = False  # before critic_warmup, by critic_warmup_variance
        self.groups = reward_groups(config)
        self.curiosity, self.symmetry = curiosity, symmetry
        # The prediction error, whose group names no term, falls by orders of magnitude.
        rollouts = [RECENT_ROLLOUTS if group.terms == () else None for group in self.groups]
        self.returns = [ReturnScaler(columns, x).to(device) for x in rollouts]
        self.kl_coef = config.kl_ctrl.kl_coef
        self.initial_entropy_coef = config.entropy_bonus
        if config.entropy_target is not None:
            smallest, largest = schedules.ENTROPY_COEF_RANGE
            self.initial_entropy_coef = min(max(config.entropy_bonus, smallest), largest)
        self.entropy_coef = self.initial_entropy_coef
        self.mean_std = 0.0  # moving average of the advantages' standard deviation

    @property
    def policy(self) -> Any:
        """The policy that is trained."""
        return self.actor.policy

    @property
    def ranks(self) -> Ranks:
        """The ranks that learn together."""
        return self.optimizer.ranks

    @property
    def separate_critic(self) -> Critic | None:
        """The critic if it is a model of its own."""
        return None if isinstance(self.critic, SharedCritic) else self.critic

    def check_warmup(self, metrics: Metrics, update: int) -> None:
        """End the critic's warm-up after this update if its values explain enough of the returns.

        Adds "value/warmup" to the metrics, 0 in the last update of the warm-up.
        """
        explained, limit = metrics["value/explained_variance"], self.config.critic_warmup_variance
        assert isinstance(explained, float) and limit is not None
        self.warmup_ended = explained >= limit
        ends = self.warmup_ended or update + 1 >= self.config.critic_warmup
        metrics["value/warmup"] = float(not ends)
        if ends:
            self.notice(
                f"algorithm.critic_warmup: ends with update {update + 1}, explained variance"
                f" {explained:.2f}"
            )

    def adapt_coefficients(self, sums: Mapping[str, float], metrics: Metrics) -> None:
        """Adapt coefficients and learning rates to what an update has measured.

        Args:
            sums: Statistics of its minibatches, see ``OptimizationStats``.
            metrics: Its metrics.
        """
        c, optimizer = self.config, self.optimizer
        if c.entropy_target is not None:
            self.entropy_coef = schedules.adapted_entropy_coef(
                self.entropy_coef, sums["entropy"] / sums["steps"], c.entropy_target
            )
        distance = metrics.get("kl/to_reference")
        if c.kl_ctrl.type == "adaptive" and c.use_kl_in_reward and isinstance(distance, Mean):
            n, ctrl = int(distance.count), c.kl_ctrl
            self.kl_coef = schedules.adapted_kl_coef(
                self.kl_coef, distance.value, n, target=ctrl.target_kl, horizon=ctrl.horizon
            )
        if c.lr_schedule.startswith("adaptive"):
            approx_kl = sums["approx_kl"] / max(1.0, sums["count"])
            optimizer.adaptive_factor = schedules.adapted_factor(
                optimizer.adaptive_factor, approx_kl, c.desired_kl
            )

    # --------------------------------------------------------------------- processes and checkpoint
    def initialize(self) -> None:
        """Initialise critic and reference in other processes, before the first update."""
        if (model := self.separate_critic) is not None:
            model.initialize(self.policy)
        self.actor.initialize()

    def state_tensors(self) -> Any:
        """Return the tensors in this process between updates, except those of the policy."""
        model = self.separate_critic
        others = [*([] if model is None else [model.state_tensors()]), *self.actor.state_tensors()]
        others += [] if self.curiosity is None else [self.curiosity.state()]
        return [self.optimizer.state(), [scaler.state_dict() for scaler in self.returns], *others]

    def state(self) -> dict[str, Any]:
        """Return everything beyond the policy's weights that the next update depends on.

        Keys: returns (those of further reward groups: group_returns), kl, entropy, reference; with
        a value head "optimizer" and "adaptive_factor", otherwise these two under "actor", and
        "critic" and "critic_weights".
        """
        optimizer = self.optimizer.state()
        if not isinstance(self.critic, SharedCritic):
            # None shows on resume that the checkpoint has no critic, see ``load_state``.
            empty = {"critic": None, "critic_weights": None}
            critic = empty if self.critic is None else self.critic.state()
            optimizer = {"actor": optimizer, **critic}
        others = [scaler.state_dict() for scaler in self.returns[1:]]
        return optimizer | {
            "returns": self.returns[0].state_dict(),
            **({"group_returns": others} if others else {}),
            **({} if self.curiosity is None else {"curiosity": self.curiosity.state()}),
            **({} if self.symmetry is None else {"symmetry": self.symmetry.state()}),
            **({"warmup_ended": True} if self.warmup_ended else {}),
            "kl": {"coef": self.kl_coef, "initial": self.config.kl_ctrl.kl_coef},
            "entropy": {
                "coef": self.entropy_coef,
                "initial": self.initial_entropy_coef,
                "mean_std": self.mean_std,
            },
            "reference": self.actor.reference_state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state``.

        Raises:
            ConfigError: It has no critic or no reference, which the options need.
        """
        value_head, model = isinstance(self.critic, SharedCritic), self.separate_critic
        if model is not None and state["critic"] is None:
            hint = "start a new run, with initial_policy=RUN"
            raise ConfigError(f"{hint}: the checkpoint contains no critic to continue with")
        c = self.config
        has_reference = c.use_kl_loss or c.use_kl_in_reward
        if has_reference and state["reference"] is None:
            raise ConfigError(
                "start a new run, or resume without algorithm.use_kl_loss/use_kl_in_reward: the"
                " checkpoint contains no reference policy to continue with"
            )
        # A value head has no optimiser of its own, see ``state``.
        self.optimizer.load_state(state if value_head else state["actor"])
        if model is not None:
            model.load_state(state)
        if has_reference:
            self.actor.load_reference(state["reference"])
        # The number of sequences may change on resume, that of environments may not.
        if value_head or c.reward_norm == "running":
            saved = [state["returns"], *state.get("group_returns", ())]
            for scaler, moments in zip(self.returns, saved, strict=True):
                scaler.load_state_dict(moments)
        if self.curiosity is not None:
            self.curiosity.load_state(state["curiosity"])
        if self.symmetry is not None:
            self.symmetry.load_state(state.get("symmetry"))
        self.warmup_ended = state.get("warmup_ended", False)
        # A constant coefficient, or another initial one, is that of the resumed run's options.
        saved_kl, initial = state["kl"], c.kl_ctrl.kl_coef
        if c.kl_ctrl.type == "adaptive" and saved_kl.get("initial", initial) == initial:
            self.kl_coef = float(saved_kl["coef"])
        entropy = state["entropy"]
        if c.entropy_target is not None and entropy["initial"] == self.initial_entropy_coef:
            self.entropy_coef = float(entropy["coef"])
        self.mean_std = entropy.get("mean_std", 0.0)

    def set_observer(self, observer: UpdateObserver) -> None:
        """Call ``observer`` with the batch and the minibatches of each update."""
        self.optimizer.observer = observer

    def close(self) -> None:
        """Stop compilations in progress, and the process of a critic."""
        self.optimizer.close()
        if (model := self.separate_critic) is not None:
            model.close()
