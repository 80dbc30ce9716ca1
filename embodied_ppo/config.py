"""Every option, once: name, type, limit, default, and under each its meaning and unit.

``strict.load`` turns a dictionary into these classes; ``embodied-ppo config`` prints the text below each field.
Formulas of the algorithm's options stand in ``advantages``, ``losses`` and ``kl``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal


@dataclass(frozen=True)
class Limit:
    """Bounds of a number: ``Annotated[float, Limit(ge=0, le=1)]``."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def allows(self, x: float) -> bool:
        return (
            (self.gt is None or x > self.gt)
            and (self.ge is None or x >= self.ge)
            and (self.lt is None or x < self.lt)
            and (self.le is None or x <= self.le)
        )

    def __str__(self) -> str:
        words = ((">", self.gt), (">=", self.ge), ("<", self.lt), ("<=", self.le))
        return " and ".join(f"{op} {bound:g}" for op, bound in words if bound is not None)


Count = Annotated[int, Limit(ge=1)]
Natural = Annotated[int, Limit(ge=0)]
Positive = Annotated[float, Limit(gt=0)]
NonNegative = Annotated[float, Limit(ge=0)]
Fraction = Annotated[float, Limit(ge=0, le=1)]


@dataclass(frozen=True)
class EnvConfig:
    id: str = "HalfCheetah-v4"
    """Task: one of ours, a name of EnvPool's or Gymnasium's, package.module:Class for a Task of your own,
    package.module:function for simulator torch, Mjlab-.., libero/.."""
    simulator: Literal["auto", "mujoco", "warp", "envpool", "gymnasium", "torch", "mjlab", "libero"] = "auto"
    """Which adapter; mujoco (CPU threads) and warp (GPU): our engines for tasks of ours; torch: a function that makes a
    batched environment of tensors; auto: who knows the id, ours first, EnvPool before Gymnasium."""
    num_envs: Count = 64
    """Environments stepped together (N)."""
    num_threads: Natural = 0
    """Simulator threads; 0: one per usable core, at most num_envs."""
    max_episode_steps: Count | None = None
    """Clock limit of an episode in primitive steps; null: the task's own."""
    action_mapping: Literal["rescale", "clip", "none"] = "rescale"
    """Continuous actions: rescale clamps to [-1, 1] and maps to the bounds, clip clamps to them, none passes on."""
    success_key: str | None = None
    """Entry of the simulator's info that says success; null: `success` or `is_success` where present."""
    action_chunk: Count = 1
    """Primitive steps that one decision plans (C); an episode's end cuts it short. horizon counts decisions."""
    cameras: tuple[str, ...] = ()
    """Cameras of the model that the policy sees (tasks of ours); observations are then state and images."""
    image_size: Count = 64
    """Height and width of what they show, pixels."""
    randomize: bool = False
    """Domain randomisation of each episode's model by the task's own ranges (tasks of ours); evaluation.randomize says
    whether evaluation has it, too."""
    ranges: dict[str, Any] = field(default_factory=dict)
    """Bounds [low, high] over the task's own: mass, friction, damping, gains, gravity, light (factors), camera_position
    (m), camera_angle (rad), colour (0 to 1)."""
    restart_each_rollout: bool = False
    """Begin every rollout with new episodes, use only the first of each environment (for group advantages)."""
    restart_every: Natural = 16384
    """Steps of each environment after which all episodes begin anew; 0: never. It bounds what a checkpoint holds and a
    resumed run repeats: a simulator that cannot save itself is resumed by replaying its actions since then."""
    stagger: bool = True
    """The first episode of each environment is cut at another step: a rollout then holds every phase of an episode, not
    one phase of all. Where the clock limit is known and group_size is 1."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the simulator's own constructor."""


@dataclass(frozen=True)
class ModelConfig:
    backbone: Literal["auto", "mlp", "cnn"] = "auto"
    """Trunk; auto: cnn for uint8 images, mlp otherwise."""
    hidden: tuple[Count, ...] = (64, 64)
    """Widths of the hidden layers (after the convolutions, for a cnn)."""
    activation: Literal["tanh", "relu", "elu", "silu", "gelu"] = "tanh"
    """Non-linearity of the hidden layers (the cnn's convolutions use relu)."""
    layer_norm: bool = False
    """Layer normalisation before each hidden activation."""
    shared_backbone: bool = True
    """One trunk for policy and value; false: separate trunks."""
    distribution: Literal["auto", "gaussian", "squashed_gaussian", "categorical"] = "auto"
    """Action distribution; auto: categorical for discrete actions, gaussian for continuous."""
    state_dependent_std: bool = False
    """Gaussian scale from the observation; false: one learned scale per action dimension."""
    init_log_std: float = 0.0
    """Logarithm of the initial Gaussian scale."""
    min_log_std: float = -5.0
    """Lower limit of the logarithm of the Gaussian scale."""
    max_log_std: float = 2.0
    """Upper limit of the logarithm of the Gaussian scale."""
    orthogonal_init: bool = True
    """Orthogonal weights and zero biases; false: torch's default initialisation."""
    hidden_gain: Positive = 1.4142135623730951
    """Gain of the hidden layers' orthogonal initialisation."""
    policy_gain: Positive = 0.01
    """Gain of the policy head's orthogonal initialisation."""
    value_gain: NonNegative = 1.0
    """Gain of the value head's orthogonal initialisation; 0 starts V at 0."""
    normalize_obs: bool = True
    """Subtract the running mean of vector observations and divide by their deviation; images are divided by 255."""
    obs_clip: Positive | None = 10.0
    """Normalised vector observations are clamped to +-this; null: not."""


@dataclass(frozen=True)
class KLControlConfig:
    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed keeps kl_coef, adaptive steers it towards target_kl."""
    kl_coef: NonNegative = 0.001
    """Initial weight (beta) of the KL penalty in the reward."""
    horizon: Positive = 10000
    """Adaptive: sequences over which the coefficient can change by a factor e^0.2."""
    target_kl: Positive = 0.1
    """Adaptive: KL to hold, nats per token."""


@dataclass(frozen=True)
class AlgorithmConfig:
    # --- rollout and batches
    horizon: Count = 32
    """Steps of each environment in one rollout (T)."""
    update_epoch: Count = 10
    """Passes over one rollout."""
    global_batch_size: Count = 256
    """Samples (steps) in one optimiser step, over all ranks; must divide horizon x num_envs."""
    micro_batch_size: Count | None = None
    """Samples in one forward and backward: less memory, the same numbers to rounding; null: global_batch_size."""
    minibatch_unit: Literal["step", "column"] = "step"
    """Minibatches are cut by single steps, or by whole columns (all T steps of an environment)."""
    # --- advantages
    adv_type: Literal["gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = "gae"
    """Advantage estimator."""
    gamma: Fraction = 0.99
    """Discount per primitive step."""
    gae_lambda: Fraction = 0.95
    """Decay of the advantage estimator's trace."""
    normalize_advantages: bool = True
    """Standardise advantages over the whole rollout, once per update."""
    advantage_clip: Positive | None = None
    """Clamp advantages to +-this after normalisation; null: not."""
    reward_clip: Positive | None = None
    """Clamp rewards to +-this, before everything else; null: not."""
    reward_norm: Literal["batch", "group", "running"] | None = None
    """Reward normalisation over the rollout, over the group, or by the running deviation of the discounted return."""
    reward_shift: bool = False
    """With reward_norm: only subtract the mean."""
    reward_scale: bool = False
    """With reward_norm: only divide by the deviation."""
    whiten_rewards: bool = False
    """Divide rewards by their deviation over the rollout, keeping the mean."""
    group_size: Count = 1
    """Neighbouring environments (responses) that share a start state (prompt)."""
    bootstrap_type: Literal["standard", "always"] = "standard"
    """standard bootstraps where the clock cut the episode; always: also where the task ended."""
    # --- policy loss
    loss_type: Literal["actor_critic", "actor"] = "actor_critic"
    """actor_critic: one model, one backward; actor: two models (mode=reasoning)."""
    clip_ratio_low: Positive = 0.2
    """Lower clip range of the probability ratio, 1 - this."""
    clip_ratio_high: Positive = 0.2
    """Upper clip range of the probability ratio, 1 + this."""
    clip_ratio_c: Annotated[float, Limit(gt=1)] | None = None
    """Dual clip: bound of the loss at -A x this for negative advantages; null: off."""
    entropy_bonus: NonNegative = 0.0
    """Weight of the entropy in the loss (the initial weight where entropy_target is set)."""
    entropy_target: float | None = None
    """Entropy (nats, aggregated) that the bonus adapts to hold; null: constant bonus."""
    loss_agg_func: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How per-sample losses become one; seq-*: over columns (minibatch_unit=column)."""
    logprob_type: Literal["token_level", "action_level", "chunk_level"] = "action_level"
    """Granularity of the ratio: per action dimension, per action, per chunk."""
    entropy_type: Literal["token_level", "action_level", "chunk_level"] = "action_level"
    """Granularity of the entropy."""
    reward_type: Literal["action_level", "chunk_level"] = "chunk_level"
    """Granularity of rewards and advantages."""
    target_kl_stop: Positive | None = None
    """Skip the update's remaining epochs once an epoch's mean approx_kl exceeds this (nats); null: never."""
    use_kl_loss: bool = False
    """Add kl_loss_coef x KL(policy || reference) to the loss; the reference is the policy training began with."""
    kl_loss_coef: NonNegative = 0.001
    """Weight of the KL loss."""
    kl_loss_type: Literal["k1", "abs", "k2", "k3", "full", "k1+", "abs+", "k2+", "k3+"] = "k3"
    """KL estimator of the loss; plain k1 is refused (its expected gradient is zero)."""
    use_kl_in_reward: bool = False
    """Subtract kl_ctrl.kl_coef x KL per step from the reward."""
    kl_penalty: Literal["k1", "abs", "k2", "k3", "full"] = "k1"
    """KL estimator in the reward."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    """Coefficient of the KL penalty in the reward."""
    off_policy_correction: Literal["token", "sequence"] | None = None
    """Truncated importance weights where the acting and the learning policy's log-probabilities differ; null: off.
    They differ where rollouts lag or another engine acts; with placement=local every weight is 1."""
    off_policy_cap: Positive = 2.0
    """Upper limit of the importance weights."""
    # --- value loss
    value_clip: Positive | None = 0.2
    """Clip range of the value's change; null: off."""
    huber_delta: Positive | None = 10.0
    """Error up to which the value loss is quadratic; null: everywhere."""
    value_loss_coef: NonNegative = 1.0
    """Weight of the value loss."""
    critic_warmup: Natural = 0
    """First updates in which only the critic learns."""
    # --- optimiser
    lr: Positive = 3e-4
    """Learning rate of the policy (and of a shared trunk)."""
    value_lr: Positive | None = None
    """Learning rate of the value head (and of its own trunk); null: as lr."""
    lr_schedule: Literal["constant", "linear", "cosine", "adaptive"] = "constant"
    """linear, cosine: to lr_end x lr over the run; adaptive: steered to keep approx_kl near desired_kl."""
    lr_end: Fraction = 0.0
    """Final learning rate as a fraction of lr (linear, cosine)."""
    lr_warmup: Natural = 0
    """First updates over which the learning rate rises linearly."""
    desired_kl: Positive = 0.01
    """Adaptive schedule: approx_kl (nats) to hold."""
    max_grad_norm: Positive | None = 0.5
    """Gradients are scaled down to this global norm; null: not."""
    adam_beta1: Annotated[float, Limit(ge=0, lt=1)] = 0.9
    """AdamW's decay of the first moment."""
    adam_beta2: Annotated[float, Limit(ge=0, lt=1)] = 0.999
    """AdamW's decay of the second moment."""
    adam_eps: Positive = 1e-5
    """AdamW's epsilon."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay."""


@dataclass(frozen=True)
class EvaluationConfig:
    episodes: Count = 10
    """Episodes of one evaluation."""
    num_envs: Count = 16
    """Environments evaluated together; changes no number."""
    deterministic: bool = True
    """Act with the distribution's mode; false: sample."""
    seed: Natural = 0
    """First seed of the evaluation's initial states (never one of training's)."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to env.kwargs while evaluating, also in ``embodied-ppo evaluate`` (Atari: episodic_life=false)."""
    randomize: bool = False
    """Evaluate with env.randomize's domain randomisation; false: in the model as it is."""
    video_episodes: Natural = 0
    """Episodes filmed into an mp4."""
    video_steps: Count = 300
    """Longest filmed part of an episode, in steps."""
    video_size: Count = 256
    """Height and width of the film, pixels."""


@dataclass(frozen=True)
class Config:
    mode: Literal["embodied", "reasoning"] = "embodied"
    """embodied trains a robot policy, reasoning a language model."""
    placement: Literal["local"] = "local"
    """Where the parts run; local: everything in this process."""
    name: str = "custom"
    """Name of the run; its directory is runs/NAME/<date>-<seed>."""
    description: str = ""
    """One line about the experiment."""
    run_dir: str | None = None
    """Directory of the run; null: runs/NAME/<date>-<seed>."""
    seed: Natural = 0
    """Seed of weights, actions, data order and environments."""
    updates: Count | None = None
    """Updates to train for; null: as many as env_steps holds."""
    env_steps: Count | None = 1_000_000
    """Environment steps to train for (used where updates is null)."""
    resume: str | None = None
    """auto: continue the newest run of this name and seed; or a run or checkpoint directory; null: start anew."""
    save_every: Natural = 50
    """Updates between checkpoints; 0: only at the end."""
    keep_last: Count = 3
    """Checkpoints kept besides the best."""
    eval_every: Natural = 0
    """Updates between evaluations; 0: only before and after training."""
    device: str = "auto"
    """Where policy and learner run: auto, cpu, cuda, cuda:N."""
    threads: Natural = 1
    """Threads of one tensor operation; 0: torch's own choice."""
    compile: Literal["auto", "always", "never"] = "auto"
    """Run minibatches and acting as compiled code, 2 to 10 times faster for small networks. always: from the first
    update, which waits for the compiler (15 to 60 s the first time, then cached); auto: after 8192 optimiser steps,
    during which it is made in the background. Needs a C++ compiler."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Products of float32 matrices while training: highest in float32, high in tf32 (GPU), medium in bfloat16 (GPU, and
    CPUs with AMX); torch.set_float32_matmul_precision."""
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


# section -> alias -> canonical names. An alias is accepted wherever its canonical name is.
ALIASES: dict[str, dict[str, tuple[str, ...]]] = {
    "": {},
    "env": {"num_workers": ("num_threads",), "env_id": ("id",)},
    "model": {"hidden_sizes": ("hidden",), "hidden_dims": ("hidden",)},
    "algorithm": {
        "adv_estimator": ("adv_type",),
        "lam": ("gae_lambda",),
        "lambd": ("gae_lambda",),
        "whiten_advantages": ("normalize_advantages",),
        "num_return_sequences_in_group": ("group_size",),
        "rollout.n": ("group_size",),
        "clip_ratio": ("clip_ratio_low", "clip_ratio_high"),
        "pg_clip": ("clip_ratio_low", "clip_ratio_high"),
        "cliprange": ("clip_ratio_low", "clip_ratio_high"),
        "entropy_coeff": ("entropy_bonus",),
        "entropy_loss_coef": ("entropy_bonus",),
        "loss_agg_mode": ("loss_agg_func",),
        "target_kl": ("target_kl_stop",),
        "add_token_level_kl": ("use_kl_in_reward",),
        "init_kl_coef": ("kl_ctrl.kl_coef",),
        "kl_horizon": ("kl_ctrl.horizon",),
        "rollout_is": ("off_policy_correction",),
        "importance_sampling_fix": ("off_policy_correction",),
        "value_cliprange": ("value_clip",),
        "cliprange_value": ("value_clip",),
        "vf_coef": ("value_loss_coef",),
        "c1": ("value_loss_coef",),
        "critic_warmup_steps": ("critic_warmup",),
        "ppo_epochs": ("update_epoch",),
        "num_ppo_epochs": ("update_epoch",),
        "ppo_mini_batch_size": ("global_batch_size",),
        "ppo_micro_batch_size": ("micro_batch_size",),
        "rollout_micro_batch_size": ("micro_batch_size",),
        "logprob_forward_micro_batch_size": ("micro_batch_size",),
        "learning_rate": ("lr",),
        "num_steps": ("horizon",),
        "num_steps_per_env": ("horizon",),
    },
    "algorithm.kl_ctrl": {"init_kl_coef": ("kl_coef",), "kl_horizon": ("horizon",)},
}
VALUE_ALIASES: dict[str, dict[str, str]] = {
    "algorithm.kl_loss_type": {
        "kl": "k1",
        "mse": "k2",
        "low_var_kl": "k3",
        "kl+": "k1+",
        "mse+": "k2+",
        "low_var_kl+": "k3+",
    },
    "algorithm.kl_penalty": {"kl": "k1", "mse": "k2", "low_var_kl": "k3"},
}
# Options that are peers' and have no meaning here, or not yet: path -> reason and cure.
REFUSED: dict[str, str] = {
    "cluster": "component placement is not in this version; write placement=local",
    "critic": "a separate critic belongs to mode=reasoning; here algorithm.* is for both (but value_lr)",
    "algorithm.rollout_batch_size": "counts prompts (mode=reasoning); here it is algorithm.horizon x env.num_envs",
    "algorithm.train_batch_size": "counts prompts (mode=reasoning); here it is algorithm.horizon x env.num_envs",
    "algorithm.prompt_length": "belongs to mode=reasoning, which this version does not train",
    "algorithm.response_length": "belongs to mode=reasoning, which this version does not train",
    "algorithm.micro_batch_tokens": "belongs to mode=reasoning; use algorithm.micro_batch_size",
    "algorithm.missing_eos_penalty": "belongs to mode=reasoning, which this version does not train",
}


@dataclass(frozen=True)
class EvaluateConfig:
    """Options of ``embodied-ppo evaluate``."""

    checkpoint: str = ""
    """A checkpoint directory, or a run directory (its latest checkpoint); required."""
    episodes: Count = 100
    """Episodes to measure; each starts from a seed of its own."""
    num_envs: Count = 16
    """Environments evaluated together."""
    seed: Natural = 0
    """First seed of the initial states (always disjoint from training's)."""
    deterministic: bool = True
    """Act with the distribution's mode; false: sample."""
    video: bool = True
    """Film a few episodes into an mp4."""
    video_episodes: Count = 2
    """Episodes filmed."""
    video_steps: Count = 300
    """Longest filmed part of an episode, in steps."""
    video_size: Count = 256
    """Height and width of the film, pixels."""
    out: str | None = None
    """Directory of the report; null: reports/ of the run."""
    device: str = "cpu"
    """Where the policy runs: auto, cpu, cuda, cuda:N."""
    threads: Natural = 1
    """Threads of one tensor operation; 0: torch's own choice."""
    env: dict[str, Any] = field(default_factory=dict)
    """Changes to the environment the checkpoint was trained in (``env.max_episode_steps=200``)."""
