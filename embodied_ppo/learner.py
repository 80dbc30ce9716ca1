"""Learn from a trajectory: advantages once, then epochs x minibatches of the joint actor-critic loss."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied_ppo import advantages, kl, losses, tree
from embodied_ppo.config import AlgorithmConfig
from embodied_ppo.moments import expand_mask, explained_variance, masked_moments, masked_sum
from embodied_ppo.rollout import sampling_key
from embodied_ppo.types import Batch, ConfigError, Evaluation, Mean, Metrics, Policy, TrainingError, Trajectory


def learning_rate_factor(config: AlgorithmConfig, update: int, updates: int) -> float:
    """What the schedule multiplies the learning rates with in ``update`` (from 0) of ``updates``.

    warm-up rises linearly over its updates; linear: 1 -> lr_end; cosine: half a cosine from 1 to lr_end (Loshchilov &
    Hutter 2017, eq. 5 without restarts). Beyond the last update the factor stays.
    """
    warmup = min(1.0, (update + 1) / (config.lr_warmup + 1))
    progress = min(1.0, update / max(1, updates))
    if config.lr_schedule == "linear":
        return warmup * (1.0 + (config.lr_end - 1.0) * progress)
    if config.lr_schedule == "cosine":
        return warmup * (config.lr_end + (1.0 - config.lr_end) * 0.5 * (1.0 + math.cos(math.pi * progress)))
    return warmup


class JointLearner:
    """PPO on one module with policy and value head: one loss, one backward, one AdamW with two learning rates."""

    def __init__(
        self,
        policy: Policy,
        config: AlgorithmConfig,
        *,
        num_envs: int,
        updates: int,
        seed: int,
        dump_dir: Path | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``policy`` is an ``nn.Module``. ``updates`` is the length of the run that schedules span. ``dump_dir``
        receives the batch that made a loss or gradient non-finite. ``notice`` hears what a user should know once."""
        assert isinstance(policy, nn.Module)
        self.policy, self.module, self.config = policy, policy, config
        self.updates, self.seed, self.dump_dir, self.notice = updates, seed, dump_dir, notice
        groups = policy.parameter_groups()
        self.actor, self.critic = groups["actor"], groups["critic"]
        self.lr = {"actor": config.lr, "critic": config.lr if config.value_lr is None else config.value_lr}
        self.optimizer = torch.optim.AdamW(
            [{"params": self.actor, "lr": self.lr["actor"]}, {"params": self.critic, "lr": self.lr["critic"]}],
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.adaptive_factor = 1.0
        self.returns = advantages.ReturnScaler(num_envs).to(self.critic[0].device)
        self.kl = kl.controller(**vars(config.kl_ctrl))
        self.entropy = losses.EntropyController(config.entropy_bonus, config.entropy_target)
        self.reference = None
        if config.use_kl_loss or config.use_kl_in_reward:
            if config.use_kl_loss:
                kl.check_loss_type(config.kl_loss_type)
            self.reference = copy.deepcopy(policy)
        losses.check_levels(
            logprob_type=config.logprob_type, entropy_type=config.entropy_type, reward_type=config.reward_type
        )

    # --------------------------------------------------------------------------------------------- one update
    def update(self, trajectory: Trajectory, *, update: int) -> Metrics:
        """Train on one trajectory, then merge its observations into the policy's normaliser."""
        c = self.config
        warming = update < c.critic_warmup
        self._set_learning_rates(update)
        batch, metrics = self._prepare(trajectory)
        sums: dict[str, Any] = defaultdict(float)
        ratio_max, epochs = 0.0, 0
        for epoch in range(c.update_epoch):
            before = float(sums["approx_kl"]), float(sums["count"])
            for index in self._minibatches(batch, update, epoch):
                part = self._take(batch, index)
                stats = self._step(part, warming=warming, where=f"update {update}, epoch {epoch}")
                ratio_max = max(ratio_max, float(stats.pop("ratio_max", 0.0)))
                for name, value in stats.items():
                    sums[name] += value
            epochs = epoch + 1
            epoch_kl = (float(sums["approx_kl"]) - before[0]) / max(1.0, float(sums["count"]) - before[1])
            if c.target_kl_stop is not None and epoch_kl > c.target_kl_stop:
                break
        metrics |= self._summary(sums, ratio_max, epochs)
        self._steer(metrics, sums, warming=warming)
        self.policy.observe(tree.flatten_time(trajectory.obs), trajectory.mask.flatten())
        return metrics

    def _prepare(self, trajectory: Trajectory) -> tuple[Batch, Metrics]:
        """Rewards, advantages and everything the losses read, as [T*N, ..] (steps) or [T, N, ..] (columns)."""
        c, t = self.config, trajectory
        mask, done = t.mask, t.terminated | t.truncated
        inputs = self.policy.encode(tree.flatten_time(t.obs))  # [T*N, ..]
        metrics: Metrics = {}
        reward = advantages.clip(t.reward, c.reward_clip)
        if c.reward_norm == "running":
            self.returns.update(reward, done, mask, c.gamma)
        reward = advantages.shape_rewards(
            reward,
            mask,
            norm=c.reward_norm,
            shift=c.reward_shift,
            scale=c.reward_scale,
            group_size=c.group_size,
            running_std=self.returns.std,
        )
        if c.whiten_rewards:
            reward = advantages.whiten_rewards(reward, mask)
        weight, behaviour = None, t.log_prob
        if c.off_policy_correction is not None:
            behaviour = self._view(self.policy, inputs, t).log_prob
            old, acted = (losses.reduce_log_prob(x, c.logprob_type, batch_dims=2) for x in (behaviour, t.log_prob))
            weight = losses.off_policy_weight(old, acted, mask, kind=c.off_policy_correction, cap=c.off_policy_cap)
            count = float(expand_mask(mask, weight).sum())
            metrics["policy/off_policy_weight"] = Mean(float(masked_sum(weight, mask)), count)
        reference = None
        if self.reference is not None:  # it sees raw observations through its own, frozen normaliser
            reference = self._view(self.reference, self.reference.encode(tree.flatten_time(t.obs)), t)
        if reference is not None and c.use_kl_in_reward:
            logits = self._view(self.policy, inputs, t).logits if c.kl_penalty == "full" else None
            distance = self._distance(behaviour, reference.log_prob, c.kl_penalty, logits, reference.logits, dims=2)
            reward = kl.penalize(reward, distance, mask, coef=self.kl.coef)
            columns = float(losses.denominator(mask, how="seq-mean-token-mean"))
            per_column = float(losses.aggregate(distance, mask, how="seq-mean-token-mean"))
            metrics |= {"kl/to_reference": Mean(per_column * columns, columns), "kl/coef": self.kl.coef}
        advantage, returns = advantages.estimate(
            c.adv_type,
            reward=reward,
            value=t.value,
            next_value=t.next_value,
            terminated=t.terminated,
            truncated=t.truncated,
            mask=mask,
            gamma=c.gamma,
            gae_lambda=c.gae_lambda,
            group_size=c.group_size,
            bootstrap_type=c.bootstrap_type,
            whiten=False,  # normalize_advantages says whether
        )
        metrics |= {
            "value/explained_variance": float(explained_variance(t.value, returns, mask)),
            "advantage/mean": float((raw := masked_moments(advantage, mask)).mean),
            "advantage/std": float(raw.var.sqrt()),
            "advantage/zero_fraction": Mean(float(((advantage == 0) & mask).sum()), float(mask.sum())),
        }
        if c.normalize_advantages:
            advantage, used = advantages.normalize(advantage, mask)
            if float(used.count) < 2:
                self.notice("algorithm.normalize_advantages: skipped, fewer than 2 samples in the rollout")
        advantage = advantages.clip(advantage, c.advantage_clip)
        batch = Batch(
            inputs=tree.map(lambda x: x.unflatten(0, mask.shape), inputs),
            action=t.action,
            replay=t.replay,
            log_prob=losses.reduce_log_prob(behaviour, c.logprob_type, batch_dims=2),
            value=t.value,
            advantage=advantage,
            returns=returns,
            mask=mask,
            weight=weight,
            ref_log_prob=reference.log_prob if reference is not None and c.use_kl_loss else None,
            ref_logits=reference.logits if reference is not None and c.use_kl_loss else None,
        )
        return (batch if c.minibatch_unit == "column" else tree.flatten_time(batch)), metrics

    @torch.no_grad()
    def _view(self, policy: Policy, inputs: Any, t: Trajectory) -> Evaluation:
        """What ``policy`` thinks of the trajectory's actions, [T, N, ..], in micro-batches."""
        action, replay = tree.flatten_time(t.action), tree.flatten_time(t.replay)
        size = self.config.micro_batch_size or self.config.global_batch_size
        parts = []
        for i in range(0, action.shape[0], size):
            cut = slice(i, i + size)
            parts.append(policy.evaluate(tree.index(inputs, cut), action[cut], tree.index(replay, cut)))
        joined = tree.map(lambda *xs: torch.cat(xs), parts[0], *parts[1:])
        return tree.map(lambda x: x.unflatten(0, t.mask.shape), joined)

    def _distance(
        self, log_prob: Tensor, ref_log_prob: Tensor, kind: str, logits: Any, ref_logits: Any, *, dims: int
    ) -> Tensor:
        """KL(policy || reference) of each decision, [..] of ``dims`` dimensions."""
        own, other = (losses.reduce_log_prob(x, "chunk_level", batch_dims=dims) for x in (log_prob, ref_log_prob))
        return kl.estimate(own, other, kind, logits=logits, ref_logits=ref_logits)

    # --------------------------------------------------------------------------------------------- minibatches
    def _minibatches(self, batch: Batch, update: int, epoch: int) -> Iterator[Tensor]:
        """Index tensors of a fresh permutation; every sample (or column) once."""
        columns = self.config.minibatch_unit == "column"
        total = batch.mask.shape[1 if columns else 0]
        size = self.config.global_batch_size // (batch.mask.shape[0] if columns else 1)
        generator = torch.Generator().manual_seed(sampling_key(self.seed, update, "shuffle", epoch))
        order = torch.randperm(total, generator=generator).to(batch.mask.device)
        yield from order.split(size)

    def _take(self, batch: Batch, index: Tensor) -> Batch:
        dim = 1 if self.config.minibatch_unit == "column" else 0
        return tree.map(lambda x: x.index_select(dim, index), batch)

    def _micro(self, part: Batch) -> Iterator[Batch]:
        """The minibatch cut so that a forward holds at most micro_batch_size samples."""
        size = self.config.micro_batch_size
        columns = self.config.minibatch_unit == "column"
        total = part.mask.shape[1 if columns else 0]
        size = total if size is None else size // (part.mask.shape[0] if columns else 1)
        if size >= total:
            yield part
            return
        for i in range(0, total, size):
            cut = slice(i, i + size)
            yield tree.index(part, (slice(None), cut) if columns else cut)

    # --------------------------------------------------------------------------------------------- one step
    def _step(self, part: Batch, *, warming: bool, where: str) -> dict[str, Any]:
        """Gradient of one minibatch and one optimiser step; nothing where all is masked (momentum would move weights).

        Raises TrainingError before training on a NaN.
        """
        c = self.config
        rows = losses.denominator(part.mask)
        if not float(rows):
            return {}
        self.optimizer.zero_grad(set_to_none=True)
        whole = losses.denominator(part.mask, how=c.loss_agg_func)
        total: dict[str, Any] = {}
        for micro in self._micro(part):
            loss, stats = self._loss(micro, whole, rows, warming=warming)
            loss.backward()
            if not total:
                total = stats
            else:
                top = max(total["ratio_max"], stats["ratio_max"])
                total = {name: total[name] + value for name, value in stats.items()} | {"ratio_max": top}
        if warming:
            for p in self.actor:
                p.grad = None
        actor, critic = (_gradient_norm(group) for group in (self.actor, self.critic))
        norm = torch.hypot(actor, critic)
        if not math.isfinite(float(norm) + float(total["loss"])):
            raise TrainingError(self._dump(part, total, norm, where))
        if c.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_([*self.actor, *self.critic], c.max_grad_norm, norm, foreach=True)
        self.optimizer.step()
        return total | {"actor_norm": actor, "critic_norm": critic, "steps": 1.0}

    def _loss(self, b: Batch, whole: Tensor, rows: Tensor, *, warming: bool) -> tuple[Tensor, dict[str, Any]]:
        """L = L_policy - c_H·H + c_kl·KL + c_V·L_value of a micro-batch; statistics are sums that add up."""
        c = self.config
        out = self._evaluate(b)
        dims = b.mask.ndim
        log_prob = losses.reduce_log_prob(out.log_prob, c.logprob_type, batch_dims=dims)
        entropy = losses.reduce_log_prob(out.entropy, c.entropy_type, batch_dims=dims)
        elements, stats = losses.policy_loss(
            log_prob,
            b.log_prob,
            b.advantage,
            b.mask,
            clip_ratio_low=c.clip_ratio_low,
            clip_ratio_high=c.clip_ratio_high,
            clip_ratio_c=c.clip_ratio_c,
            weight=b.weight,
        )

        def agg(x: Tensor) -> Tensor:
            return losses.aggregate(x, b.mask, how=c.loss_agg_func, denominator=whole, length=float(c.horizon))

        policy_loss, entropy_mean = agg(elements), agg(entropy)
        errors, far = losses.value_loss(
            out.value, b.value, b.returns, value_clip=c.value_clip, huber_delta=c.huber_delta
        )
        value_loss = losses.aggregate(errors, b.mask, denominator=rows)
        loss = c.value_loss_coef * value_loss
        if not warming:
            loss = loss + policy_loss - self.entropy.coef * entropy_mean
        if b.ref_log_prob is not None:
            distance = self._distance(out.log_prob, b.ref_log_prob, c.kl_loss_type, out.logits, b.ref_logits, dims=dims)
            if not warming:
                loss = loss + c.kl_loss_coef * agg(distance)
            stats["kl"] = masked_sum(distance.detach(), b.mask)
        return loss, stats | {
            "loss": loss.detach(),
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy_mean.detach(),
            "value_clipped": (far & b.mask).sum(),
            "rows": b.mask.sum(),
        }

    def _evaluate(self, b: Batch) -> Evaluation:
        """The policy's view of the micro-batch; columns are flattened for the model and folded back."""
        if self.config.minibatch_unit == "step":
            return self.policy.evaluate(b.inputs, b.action, b.replay)
        flat = tree.flatten_time
        out = self.policy.evaluate(flat(b.inputs), flat(b.action), flat(b.replay))
        return tree.map(lambda x: x.unflatten(0, b.mask.shape), out)

    def _dump(self, part: Batch, stats: dict[str, Any], norm: Tensor, where: str) -> str:
        """Keep the batch; the message of the error."""
        text = f"{where}: loss {float(stats['loss']):g}, gradient norm {float(norm):g} (not finite), not trained on"
        if self.dump_dir is not None:
            self.dump_dir.mkdir(parents=True, exist_ok=True)
            path = self.dump_dir / "bad_batch.pt"
            leaves = {name: value for name in part.__slots__ if (value := getattr(part, name)) is not None}
            torch.save({"batch": leaves, "policy": self.module.state_dict(), "where": where}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
            text += f"; the batch is in {path}"
        return f"{text}; lower algorithm.lr or look for non-finite rewards and observations"

    # --------------------------------------------------------------------------------------------- after the epochs
    def _summary(self, sums: Mapping[str, Any], ratio_max: float, epochs: int) -> Metrics:
        s = defaultdict(float, {name: float(value) for name, value in sums.items()})
        steps, count, rows = s["steps"], s["count"], s["rows"]
        metrics: Metrics = {
            "policy/loss": Mean(s["policy_loss"], steps),
            "policy/approx_kl": Mean(s["approx_kl"], count),
            "policy/clip_fraction": Mean(s["clip_fraction"], count),
            "policy/ratio_max": ratio_max,
            "policy/entropy": Mean(s["entropy"], steps),
            "policy/grad_norm": Mean(s["actor_norm"], steps),
            "policy/lr": self.optimizer.param_groups[0]["lr"],
            "policy/epochs": float(epochs),
            "value/loss": Mean(s["value_loss"], steps),
            "value/grad_norm": Mean(s["critic_norm"], steps),
            "value/lr": self.optimizer.param_groups[1]["lr"],
        }
        if self.config.clip_ratio_c is not None:
            metrics["policy/dual_clip_fraction"] = Mean(s["dual_clip_fraction"], count)
        if self.config.value_clip is not None:
            metrics["value/clip_fraction"] = Mean(s["value_clipped"], rows)
        if self.config.entropy_target is not None:
            metrics["policy/entropy_coef"] = self.entropy.coef
        if self.config.use_kl_loss and not self.config.use_kl_in_reward:
            metrics["kl/to_reference"] = Mean(s["kl"], rows)
        return metrics

    def _steer(self, metrics: Metrics, sums: Mapping[str, Any], *, warming: bool) -> None:
        """Move what adapts: entropy bonus, KL coefficient, adaptive learning rate. Metrics hold the values before."""
        if warming or not sums["steps"]:
            return
        self.entropy.update(float(sums["entropy"]) / float(sums["steps"]))
        distance = metrics.get("kl/to_reference")
        if self.config.use_kl_in_reward and isinstance(distance, Mean):
            self.kl.update(distance.value, int(distance.count))
        if self.config.lr_schedule == "adaptive":
            approx_kl = float(sums["approx_kl"]) / max(1.0, float(sums["count"]))
            if approx_kl > 2.0 * self.config.desired_kl:
                self.adaptive_factor = max(self.adaptive_factor / 1.5, 1e-3)
            elif approx_kl < 0.5 * self.config.desired_kl:
                self.adaptive_factor = min(self.adaptive_factor * 1.5, 30.0)

    def _set_learning_rates(self, update: int) -> None:
        factor = learning_rate_factor(self.config, update, self.updates) * self.adaptive_factor
        for group, name in zip(self.optimizer.param_groups, ("actor", "critic"), strict=True):
            group["lr"] = self.lr[name] * factor

    # --------------------------------------------------------------------------------------------- checkpoint
    def state(self) -> dict[str, Any]:
        reference = None if self.reference is None else self.reference.state_dict()
        return {
            "optimizer": self.optimizer.state_dict(),
            "adaptive_factor": self.adaptive_factor,
            "returns": self.returns.state_dict(),
            "kl": self.kl.state_dict(),
            "entropy": self.entropy.state_dict(),
            "reference": reference,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, option in zip(self.optimizer.param_groups, options, strict=True):
            group.update(option)  # the configuration's, should it have changed
        self.returns.load_state_dict(state["returns"])
        if self.config.lr_schedule == "adaptive":  # what does not adapt is the configuration's
            self.adaptive_factor = state["adaptive_factor"]
        if self.config.kl_ctrl.type == "adaptive":
            self.kl.load_state_dict(state["kl"])
        if self.config.entropy_target is not None:
            self.entropy.load_state_dict(state["entropy"])
        if self.reference is not None:
            if state["reference"] is None:
                raise ConfigError(
                    "algorithm.use_kl_loss/use_kl_in_reward: the checkpoint holds no reference policy to continue "
                    "with; start a new run, or resume without the KL options"
                )
            self.reference.load_state_dict(state["reference"])


def _gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros((), device=parameters[0].device)
    return torch.nn.utils.get_total_norm(grads, foreach=True)
