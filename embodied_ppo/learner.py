"""Learn from a trajectory: advantages once, then epochs x minibatches of the joint actor-critic loss."""

from __future__ import annotations

import copy
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied_ppo import advantages, compiled, kl, losses, tree
from embodied_ppo.config import AlgorithmConfig
from embodied_ppo.moments import expand_mask, explained_variance, masked_moments, masked_sum
from embodied_ppo.objective import SETTINGS, MinibatchStep, Objective, adamw_settings, kl_distance, take
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
        later: compiled.Later | None = None,
        dump_dir: Path | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``policy`` is an ``nn.Module``. ``updates`` is the length of the run that schedules span. ``later``: from
        when on minibatches run as compiled code (None: never). ``dump_dir`` receives the batch that made a loss or
        gradient non-finite. ``notice`` hears what a user should know once."""
        assert isinstance(policy, nn.Module)
        self.policy, self.module, self.config = policy, policy, config
        self.objective = Objective(policy, config)
        self.later = later or compiled.Later(None)
        self.cpu_s = {"advantages": 0.0, "update": 0.0}  # CPU seconds of this process, whole run
        self.updates, self.seed, self.dump_dir, self.notice = updates, seed, dump_dir, notice
        groups = policy.parameter_groups()
        self.actor, self.critic = groups["actor"], groups["critic"]
        name = {id(p): n for n, p in policy.named_parameters()}
        self.names = {who: [name[id(p)] for p in group] for who, group in groups.items()}
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
        start = time.process_time()
        batch, metrics = self._prepare(trajectory)
        prepared = time.process_time()
        run = self._compiled(batch, update, warming=warming)
        if run is None:
            unit = c.minibatch_unit
            step = lambda index, where: self._step(take(batch, index, unit), warming=warming, where=where)  # noqa: E731
        else:
            step = self._compiled_step(run, batch)
        told: list[Tensor] = []  # per minibatch; on the device until the last one is done
        epochs = 0
        for epoch in range(c.update_epoch):
            before = len(told)
            for index in self._minibatches(batch, update, epoch):
                told.append(step(index, f"update {update}, epoch {epoch}"))
            epochs = epoch + 1
            if c.target_kl_stop is not None and len(told) > before:
                kl_sum, count = self._totals(told[before:], "approx_kl", "count")
                if kl_sum / max(1.0, count) > c.target_kl_stop:
                    break
        sums, ratio_max = self._sums(told, f"update {update}")
        if run is not None:
            for count in _adam_state(self.optimizer).steps:
                count += sums["steps"]
        self.cpu_s["advantages"] += prepared - start
        self.cpu_s["update"] += time.process_time() - prepared
        metrics |= self._summary(sums, ratio_max, epochs)
        self._steer(metrics, sums, warming=warming)
        self.policy.observe(tree.flatten_time(trajectory.obs), trajectory.mask.flatten())
        return metrics

    def _prepare(self, trajectory: Trajectory) -> tuple[Batch, Metrics]:
        """Rewards, advantages and everything the losses read, as [T*N, ..] (steps) or [T, N, ..] (columns)."""
        c, t = self.config, trajectory
        mask, done, steps = t.mask, t.terminated | t.truncated, 1 if t.steps is None else t.steps
        inputs = self.policy.encode(tree.flatten_time(t.obs))  # [T*N, ..]
        metrics: Metrics = {}
        reward = advantages.clip(t.reward, c.reward_clip)
        if c.reward_norm == "running":
            self.returns.update(reward, done, mask, c.gamma, steps)
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
            distance = kl_distance(behaviour, reference.log_prob, c.kl_penalty, logits, reference.logits, dims=2)
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
            steps=steps,
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

    def _totals(self, told: list[Tensor], *names: str) -> list[float]:
        columns = [self.statistics.index(name) for name in names]
        return torch.stack(told)[:, columns].double().sum(0).tolist()

    def _sums(self, told: list[Tensor], where: str) -> tuple[dict[str, float], float]:
        """Sums of the statistics over all minibatches, ``steps`` among them, and the largest ratio.

        Raises TrainingError where a minibatch was not finite and nobody looked yet; it trained nothing.
        """
        if not told:
            return defaultdict(float), 0.0
        table = torch.stack(told).double().cpu()  # [minibatches, statistics]
        column = {name: table[:, i] for i, name in enumerate(self.statistics)}
        bad = (~column["finite"].isfinite()).nonzero().flatten().tolist()
        if bad:
            stats = dict(zip(self.statistics, table[bad[0]].tolist(), strict=True))
            raise self._not_finite(stats, f"{where}, minibatch {bad[0]}")
        sums = defaultdict(float, {name: float(x.sum()) for name, x in column.items()})
        sums["steps"] = float((column["rows"] > 0).sum())
        return sums, float(column["ratio_max"].max())

    # --------------------------------------------------------------------------------------------- minibatches
    def _minibatches(self, batch: Batch, update: int, epoch: int) -> Sequence[Tensor]:
        """Index tensors of a fresh permutation; every sample (or column) once, but minibatches that are all masked."""
        columns = self.config.minibatch_unit == "column"
        mask = batch.mask.any(0) if columns else batch.mask
        size = self.config.global_batch_size // (batch.mask.shape[0] if columns else 1)
        generator = torch.Generator(mask.device).manual_seed(sampling_key(self.seed, update, "shuffle", epoch))
        order = torch.randperm(mask.shape[0], generator=generator, device=mask.device)
        if self.later.captures:  # the graph itself leaves them out, and nobody has to wait for the mask
            return order.split(size)
        counts = [bool(part.any()) for part in mask[order].split(size)]  # momentum alone would move weights
        return [index for index, counts in zip(order.split(size), counts, strict=True) if counts]

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
    def _compiled(self, batch: Batch, update: int, *, warming: bool) -> compiled.Function | None:
        """The minibatch as compiled code, None before its time. Sets the names of the statistics."""
        c = self.config
        program = MinibatchStep(self.objective, self.names["actor"], self.names["critic"], batch)
        self.statistics = program.statistics()

        def example() -> compiled.Example:
            size = c.global_batch_size // (batch.mask.shape[0] if c.minibatch_unit == "column" else 1)
            state, where = _adam_state(self.optimizer), batch.mask.device
            settings, index = torch.zeros(len(SETTINGS), device=where), torch.arange(size, device=where)
            state = [*state.parameters, *state.first, *state.second]
            return compiled.Example(program, state, [settings, index, *(x.contiguous() for x in tree.leaves(batch))])

        run = self.later.get(update, example)
        return None if warming else run

    def _compiled_step(self, run: compiled.Function, batch: Batch) -> Callable[[Tensor, str], Tensor]:
        """``_step`` as one call into the library; equal to float32 rounding."""
        c, state = self.config, _adam_state(self.optimizer)
        settings = adamw_settings(
            c,
            c.update_epoch * (batch.mask.numel() // c.global_batch_size),
            lr=[group["lr"] for group in self.optimizer.param_groups],
            steps=[int(self.optimizer.state[group[0]]["step"]) for group in (self.actor, self.critic)],
            entropy_coef=self.entropy.coef,
        )
        rows, leaves = iter(settings.to(batch.mask.device).unbind()), [x.contiguous() for x in tree.leaves(batch)]
        tensors = [*state.parameters, *state.first, *state.second]

        def step(index: Tensor, where: str) -> Tensor:
            (stats,) = run([*tensors, next(rows), index, *leaves])
            if not self.later.captures and not math.isfinite(stats[-1].item()):  # nothing has changed
                named = dict(zip(self.statistics, stats.tolist(), strict=True))
                raise self._not_finite(named, where, take(batch, index, c.minibatch_unit))
            return stats

        return step

    def _step(self, part: Batch, *, warming: bool, where: str) -> Tensor:
        """Gradient of one minibatch and one optimiser step. Raises TrainingError before training on a NaN."""
        c = self.config
        rows = losses.denominator(part.mask)
        self.optimizer.zero_grad(set_to_none=True)
        whole = losses.denominator(part.mask, how=c.loss_agg_func)
        total: dict[str, Any] = {}
        for micro in self._micro(part):
            loss, stats = self.objective(micro, whole, rows, entropy_coef=self.entropy.coef, warming=warming)
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
        total |= {"actor_norm": actor, "critic_norm": critic, "finite": norm + total["loss"]}
        if not math.isfinite(float(total["finite"])):
            raise self._not_finite(total, where, part)
        if c.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_([*self.actor, *self.critic], c.max_grad_norm, norm, foreach=True)
        self.optimizer.step()
        return torch.stack([total[name].float() for name in self.statistics])

    def _not_finite(self, stats: Mapping[str, Any], where: str, part: Batch | None = None) -> TrainingError:
        """The error to raise; keeps the batch, where it is known, with the policy that it made non-finite."""
        norm = math.hypot(float(stats["actor_norm"]), float(stats["critic_norm"]))
        text = f"{where}: loss {float(stats['loss']):g}, gradient norm {norm:g} (not finite), not trained on"
        if part is not None and self.dump_dir is not None:
            self.dump_dir.mkdir(parents=True, exist_ok=True)
            path = self.dump_dir / "bad_batch.pt"
            leaves = {name: value for name in part.__slots__ if (value := getattr(part, name)) is not None}
            torch.save({"batch": leaves, "policy": self.module.state_dict(), "where": where}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
            text += f"; the batch is in {path}"
        return TrainingError(f"{text}; lower algorithm.lr or look for non-finite rewards and observations")

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

    def close(self) -> None:
        self.later.close()

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


@dataclass(frozen=True)
class _AdamState:
    """Every parameter, actor first, with its moments and its count of steps."""

    parameters: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]


def _adam_state(optimizer: torch.optim.Optimizer) -> _AdamState:
    """The optimiser's state, made where its first step has not made it yet."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        if not optimizer.state[p]:
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
    state = [optimizer.state[p] for p in parameters]
    lists = ([s[key] for s in state] for key in ("exp_avg", "exp_avg_sq", "step"))
    return _AdamState([p.detach() for p in parameters], *lists)


def _gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros((), device=parameters[0].device)
    return torch.nn.utils.get_total_norm(grads, foreach=True)
