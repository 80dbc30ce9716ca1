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
        bounds = [(op, bound) for op, bound in words if bound is not None]
        return " and ".join(f"{op} {bound:,}" if isinstance(bound, int) else f"{op} {bound:g}" for op, bound in bounds)


@dataclass(frozen=True)
class NotEmpty:
    """Text of at least one character, without NUL: ``Annotated[str, NotEmpty()]``."""

    def allows(self, x: str) -> bool:
        return bool(x) and "\0" not in x

    def __str__(self) -> str:
        return "that is not empty"


Text = Annotated[str, NotEmpty()]
# Upper bounds refuse what would exhaust memory or time before any other check could run.
Count = Annotated[int, Limit(ge=1, le=10**9)]
Natural = Annotated[int, Limit(ge=0, le=10**9)]
Seed = Annotated[int, Limit(ge=0, le=2**63 - 1)]
Threads = Annotated[int, Limit(ge=0, le=1024)]
Pixels = Annotated[int, Limit(ge=1, le=4096)]
Width = Annotated[int, Limit(ge=1, le=10**5)]
Small = Annotated[int, Limit(ge=1, le=1000)]
Positive = Annotated[float, Limit(gt=0)]
NonNegative = Annotated[float, Limit(ge=0)]
Fraction = Annotated[float, Limit(ge=0, le=1)]


@dataclass(frozen=True)
class EnvConfig:
    id: Text = "HalfCheetah-v4"
    """Task: one of ours, a name of EnvPool's or Gymnasium's, package.module:Class for a Task of your own,
    package.module:function for simulator torch, Mjlab-.., libero/.."""
    simulator: Literal["auto", "mujoco", "warp", "envpool", "gymnasium", "torch", "mjlab", "libero"] = "auto"
    """Which adapter; mujoco (CPU threads) and warp (GPU): our engines for tasks of ours; torch: a function that makes a
    batched environment of tensors; auto: who knows the id, ours first, EnvPool before Gymnasium."""
    num_envs: Count = 64
    """Environments stepped together (N)."""
    num_threads: Threads = 0
    """Simulator threads; 0: one per usable core, at most num_envs."""
    max_episode_steps: Count | None = None
    """Clock limit of an episode in primitive steps; null: the task's own."""
    action_mapping: Literal["rescale", "clip", "none"] = "rescale"
    """Continuous actions: rescale clamps to [-1, 1] and maps to the bounds, clip clamps to them, none passes on."""
    success_key: Text | None = None
    """Entry of the simulator's info that says success; null: `success` or `is_success` where present."""
    obs_keys: tuple[Text, ...] | None = None
    """Observations that the policy reads, by name, where a simulator gives several (images of env.cameras are kept);
    null: all, which is refused where a name says that the observation is privileged (privileged_state, critic)."""
    action_chunk: Small = 1
    """Primitive steps that one decision plans (C); an episode's end cuts it short. horizon counts decisions."""
    cameras: tuple[Text, ...] = ()
    """Cameras of the model that the policy sees (tasks of ours); observations are then state and images."""
    image_size: Pixels = 64
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
    step_timeout_s: Positive | None = 1800.0
    """Time limit of one call of the simulator (its constructor, reset or step), seconds; then the run ends, and resume
    continues from the last checkpoint. null: no limit. A first call may compile for minutes."""
    stagger: bool = True
    """The first episode of each environment is cut at another step: a rollout then holds every phase of an episode, not
    one phase of all. Where the clock limit is known and group_size is 1."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the simulator's own constructor."""


@dataclass(frozen=True)
class ModelConfig:
    policy: Literal["actor_critic", "token", "flow", "gaussian"] = "actor_critic"
    """actor_critic: trunk and two heads; the others are vision-language-action models, told what to do: their actions
    are tokens, flow out of noise, or are Gaussian. The options from width on are theirs, those from backbone to
    value_gain actor_critic's."""
    backbone: Literal["auto", "mlp", "cnn"] = "auto"
    """Trunk; auto: cnn for uint8 images, mlp otherwise."""
    hidden: tuple[Width, ...] = (64, 64)
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
    width: Width = 64
    """Of tokens (D)."""
    depth: Small = 2
    """Blocks of the decoder."""
    heads: Small = 4
    """Attention heads; must divide width."""
    bins: Annotated[int, Limit(ge=3, le=32767)] = 256
    """Tokens of each action dimension (K), the range [-1, 1] in equal parts: K of them, or K - 1 of an even K, so that
    standing still is one."""
    decode: Literal["parallel", "autoregressive"] = "parallel"
    """All tokens of a chunk at once, or each after those before it."""
    temperature: Positive = 1.0
    """Logits of action tokens are divided by it, deviations multiplied, acting and learning; deterministic evaluation
    takes the likeliest."""
    flow_steps: Small = 4
    """Steps from noise to an action (K)."""
    flow_noise: Literal["sde", "learned"] = "sde"
    """Deviation of a stochastic step: from flow_eta (Flow-SDE), or learned (Flow-Noise, which has an entropy)."""
    flow_eta: Positive = 0.5
    """Noise of flow_noise=sde: the deviation of the first step."""
    flow_chain: Literal["one", "sum", "mean"] = "one"
    """one: a single step of a chain is stochastic, drawn anew for each; sum: all are and their log-probabilities are
    added; mean: their mean, and so a clip range K + 1 times as wide, as RLinf's joint_logprob."""
    freeze_trunk: bool = False
    """What sees is not trained by PPO, and run once for all epochs of an update (cloning trains it in any case, unless
    it is a checkpoint's). pi0: PaliGemma; its keys and values are kept while half of the memory holds them."""
    checkpoint: str | None = None
    """Directory of a published model instead of a small new one: OpenVLA, OpenVLA-OFT or a vision-language model of
    transformers (policy=token), pi0 (policy=flow). Needs the extra [vla]."""
    unnorm_key: Text | None = None
    """Whose action statistics of an OpenVLA checkpoint to use; null: the only ones there are."""
    lora_rank: Annotated[int, Limit(ge=0, le=10**5)] = 0
    """Rank of low-rank adapters on the language model of a checkpoint, which stays as it is otherwise (Hu et al.
    2021); 0: none, everything is trained. A run's checkpoints then hold adapters and heads only."""
    lora_alpha: Positive = 32.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the arithmetic of a checkpoint's model; what is trained is kept in float32 in any case."""
    gradient_checkpointing: bool = False
    """A checkpoint's model computes activations twice instead of keeping them."""
    detach_value: bool | None = None
    """true: the value loss trains the value head only (its gradient in the features was seen to undo a clone); null:
    true for policy=token, flow and gaussian, false for actor_critic, where shared_backbone=false separates both."""
    word_buckets: Annotated[int, Limit(ge=2, le=10**7)] = 1024
    """Words of instructions are known by their hash, one of so many."""


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
    update_epoch: Annotated[int, Limit(ge=1, le=10**6)] = 10
    """Passes over one rollout."""
    global_batch_size: Count = 256
    """Samples (steps; prompts in reasoning) in one optimiser step, over all ranks; must divide the rollout (horizon x
    num_envs; rollout_batch_size)."""
    micro_batch_size: Count | None = None
    """Samples (steps; responses in reasoning) in one forward and backward: less memory, the same numbers to rounding;
    null: global_batch_size."""
    rollout_micro_batch_size: Count | None = None
    """Rows of one forward pass while acting and valuing (environments; in reasoning responses decoded or valued
    together): less memory, the same numbers to rounding; null: all environments (rollout.slots, micro_batch_size)."""
    logprob_forward_micro_batch_size: Count | None = None
    """Samples (steps; responses in reasoning) of one forward pass without gradient, which computes log-probabilities
    again (KL, off_policy_correction, recompute_log_probs): less memory, the same numbers to rounding; null:
    micro_batch_size."""
    rollout_batch_size: Annotated[int, Limit(ge=1, le=10**7)] = 256
    """Prompts of one update; each gets group_size responses."""
    prompt_length: Annotated[int, Limit(ge=1, le=10**7)] = 1024
    """Longest prompt, tokens; longer ones are left out, and counted."""
    response_length: Annotated[int, Limit(ge=1, le=10**7)] = 512
    """Longest response, tokens (T)."""
    micro_batch_tokens: Count | None = None
    """Tokens in one forward and backward, padding included: columns are sorted by length, cut and trimmed; less memory,
    and faster where lengths differ; null: no limit."""
    recompute_log_probs: bool = False
    """The learner computes the behaviour's log-probabilities anew before its first epoch; false: the rollout's are
    taken (they are equal to rounding where both compute in the same type)."""
    minibatch_unit: Literal["step", "column"] = "step"
    """Minibatches are cut by single steps, or by whole columns (all T steps of an environment)."""
    # --- advantages
    adv_type: Literal["gae", "grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = "gae"
    """Advantage estimator. reinforce: the discounted return-to-go, without a value; reinforce_plus_plus is the same
    and is meant for normalize_advantages=true."""
    gamma: Fraction = 0.99
    """Discount per primitive step."""
    gae_lambda: Fraction = 0.95
    """Decay of the advantage estimator's trace."""
    normalize_advantages: bool = True
    """Standardise advantages over the whole rollout, once per update."""
    advantage_clip: Positive | None = None
    """Clamp advantages to +-this after normalisation; null: not."""
    reward_clip: Positive | None = None
    """Clamp rewards to +-this; null: not."""
    reward_clip_order: Literal["before_norm", "after_norm"] = "before_norm"
    """before_norm clamps raw rewards, once; after_norm clamps after reward_norm and again after the KL penalty."""
    missing_eos_penalty: NonNegative = 0.0
    """Taken off the score of a response that response_length cut."""
    reward_norm: Literal["batch", "group", "running"] | None = None
    """Reward normalisation over the rollout, over the group, or by the running deviation of the discounted return."""
    reward_shift: bool = False
    """With reward_norm: only subtract the mean."""
    reward_scale: bool = False
    """With reward_norm: only divide by the deviation."""
    whiten_rewards: bool = False
    """Divide rewards by their deviation over the rollout."""
    whiten_subtract_mean: bool = False
    """With whiten_rewards: also subtract the mean; false: the mean of the rewards is kept."""
    whiten_after_kl: bool = False
    """With whiten_rewards: after the KL penalty is subtracted; false: before."""
    group_size: Annotated[int, Limit(ge=1, le=10**4)] = 1
    """Neighbouring environments (responses) that share a start state (prompt)."""
    bootstrap_type: Literal["standard", "always"] = "standard"
    """standard bootstraps where the clock cut the episode; always: also where the task ended."""
    # --- policy loss
    loss_type: Literal["actor_critic", "actor"] = "actor_critic"
    """actor_critic: one model, one backward (mode=embodied); actor: two models (mode=reasoning)."""
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
    loss_scale_factor: Positive | None = None
    """Constant by which seq-mean-token-sum-norm divides each column's sum; null: horizon (response_length in
    reasoning)."""
    logprob_type: Literal["token_level", "action_level", "chunk_level"] = "action_level"
    """Granularity of the ratio: per action dimension, per action, per chunk."""
    entropy_type: Literal["token_level", "action_level", "chunk_level"] = "action_level"
    """Granularity of the entropy."""
    reward_type: Literal["action_level", "chunk_level"] = "chunk_level"
    """Granularity of rewards and advantages: a chunk of actions has one reward and one value (see chunk_reward), or
    each of its actions has a reward, a value, an advantage and a mask of its own."""
    chunk_reward: Literal["discounted", "sum"] = "discounted"
    """Reward of a chunk of actions (reward_type=chunk_level): the sum of its rewards discounted by gamma per primitive
    step, or the plain sum, as in RLinf."""
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
    """Episodes of one evaluation; in reasoning prompts, the first of the held-out ones (all, where there are fewer)."""
    num_envs: Count = 16
    """Environments evaluated together; changes no number."""
    deterministic: bool = True
    """Act with the distribution's mode (the likeliest token); false: sample."""
    seed: Natural = 0
    """Seed of the initial states, 0 to 16383. Different seeds share no episode; none is one of training's."""
    n: Small = 1
    """Responses to each prompt; with more than one also pass@k and maj@n are told."""
    response_length: Annotated[int, Limit(ge=1, le=10**7)] | None = None
    """Longest response, tokens; null: algorithm.response_length."""
    temperature: Positive = 1.0
    """Of sampled responses."""
    top_k: Natural = 0
    """Sampled responses: only the k likeliest tokens; 0: all."""
    top_p: Annotated[float, Limit(gt=0, le=1)] = 1.0
    """Sampled responses: only the likeliest tokens that together hold this probability; 1: all."""
    min_p: Fraction = 0.0
    """Sampled responses: only tokens at least this times as likely as the likeliest; 0: all."""
    repetition_penalty: Positive = 1.0
    """Logits of tokens that occurred are divided by it where positive, multiplied where negative; 1: nothing."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to env.kwargs while evaluating, also in ``embodied-ppo evaluate`` (Atari: episodic_life=false)."""
    randomize: bool = False
    """Evaluate with env.randomize's domain randomisation; false: in the model as it is."""
    video_episodes: Natural = 0
    """Episodes filmed into an mp4."""
    video_steps: Count = 300
    """Longest filmed part of an episode, in steps."""
    video_size: Pixels = 256
    """Height and width of the film, pixels."""


@dataclass(frozen=True)
class LanguageModelConfig:
    path: Text | None = None
    """Directory of a model as transformers writes it (config.json, safetensors, tokenizer); null: a new one."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """Of a new model: model_type and other fields of transformers' configuration."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What it computes in; weights that learn, their moments, log-probabilities and losses are float32 in any case."""
    gradient_checkpointing: bool = False
    """Keep no layer's inside for the backward pass but compute it again: less memory, a third more time."""


@dataclass(frozen=True)
class ActorConfig:
    model: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    """The language model that learns."""
    tokenizer: Text | None = None
    """Directory of its tokenizer; null: model.path (data.task has its own: one character, one token)."""


@dataclass(frozen=True)
class CriticConfig:
    """Options that are null are as the actor's, in section algorithm."""

    use_critic_model: bool = True
    """A complete second model with a value head of its own; adv_type=gae needs it, the others have none."""
    model: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    """The critic's; without path and architecture it begins as a copy of the actor's."""
    concurrent: bool = False
    """Learn in a thread of its own while the actor learns: the same numbers, and a second core."""
    loss_agg_func: (
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None
    ) = None
    """How the value losses of tokens become one; null: token-mean, whatever algorithm.loss_agg_func is."""
    update_epoch: Count | None = None
    """Passes over one rollout."""
    global_batch_size: Count | None = None
    """Prompts in one optimiser step."""
    lr: Positive | None = None
    """Learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] | None = None
    """As algorithm.lr_schedule; null there with adaptive: constant."""
    lr_end: Fraction | None = None
    """Final learning rate as a fraction of lr."""
    lr_warmup: Natural | None = None
    """First updates over which the learning rate rises linearly."""
    max_grad_norm: Positive | None = None
    """Gradients are scaled down to this global norm."""
    weight_decay: NonNegative | None = None
    """AdamW's decoupled weight decay."""


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["builtin", "vllm"] = "builtin"
    """What generates: our own decode loop, which shares the actor's weights, or vLLM (CUDA, installed separately)."""
    slots: Annotated[int, Limit(ge=1, le=10**6)] = 256
    """Responses that are decoded together; memory only."""
    temperature: Positive = 1.0
    """Logits are divided by it, in sampling as in training."""
    stop: tuple[Text, ...] = ()
    """Texts that end a response."""
    stop_token_ids: tuple[Natural, ...] = ()
    """Tokens that end a response, besides all that model and tokenizer call end of sequence."""
    truncation: Literal["terminal", "drop"] = "terminal"
    """A response that response_length cut is graded as it is, or left out of the loss."""
    overlong_buffer: Natural = 0
    """Last tokens before response_length over which a penalty rises linearly to overlong_penalty (DAPO); 0: none."""
    overlong_penalty: NonNegative = 1.0
    """Taken off the score of a response of full length."""


@dataclass(frozen=True)
class DataConfig:
    task: Literal["arithmetic", "scratchpad"] | None = None
    """A generated task, which needs no files; null: files."""
    train: tuple[Text, ...] = ()
    """Files (.jsonl, .json, .parquet), or directories of them: {prompt, answer}, GSM8K's or verl's layout."""
    eval: tuple[Text, ...] = ()
    """Files of held-out prompts."""
    prompt_key: Text | None = None
    """Where a row's prompt is; null: prompt or question."""
    answer_key: Text | None = None
    """Where a row's true answer is; null: reward_model.ground_truth, ground_truth or answer."""
    suffix: str | None = None
    """Added to every prompt; null: what the layout is known to need (GSM8K)."""
    system: str | None = None
    """First message of every chat."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """Use the tokenizer's: where it has one, always, or never."""
    shuffle: bool = True
    """Each epoch in an order of its own; false: as the files have it."""


@dataclass(frozen=True)
class RewardModelConfig:
    path: Text | None = None
    """Directory of a sequence-classification model with one label; its score is the reward."""
    pairs: Natural = 0
    """Preferences of data.task that a new reward model learns from before PPO; 0: none."""
    steps: Count = 200
    """Optimiser steps of that."""
    batch_size: Count = 64
    """Preferences in one of them."""
    lr: Positive = 1e-3
    """Its learning rate."""


@dataclass(frozen=True)
class RewardConfig:
    grader: Text = "auto"
    """A built-in (exact, gsm8k_strict, gsm8k_flexible, gsm8k_numeric, math_verify), module:function or FILE.py:function
    with verl's signature (data_source, solution_str, ground_truth, extra_info), which may be async; auto: the grader of
    data.task or of the data source."""
    path: Text | None = None
    """File of a grader, as in verl's custom_reward_function; it replaces grader."""
    name: Text = "compute_score"
    """Function in the file of reward.path."""
    workers: Annotated[int, Limit(ge=0, le=1024)] | None = None
    """Number of grading processes; 0: grade in the main process, without a time limit; null: 0 for the graders of
    synthetic tasks and for built-ins except math_verify, else 2."""
    timeout_s: Positive = 10.0
    """Time limit of one response in a grading process, seconds; a response that exceeds it scores 0 and is counted."""
    format: Text | None = None
    """Regular expression that a whole response should match."""
    format_weight: NonNegative = 0.1
    """Added to the score of a response that matches reward.format."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """A model that scores instead of the grader; the grader then only decides between right and wrong."""


@dataclass(frozen=True)
class WarmStartConfig:
    steps: Natural = 0
    """Supervised steps on demonstrations of data.task before PPO, kept on disk between runs; 0: none."""
    batch_size: Count = 128
    """Demonstrations in one step."""
    lr: Positive = 1e-3
    """Learning rate of these steps."""
    forget: Fraction | None = None
    """How often the demonstrator forgets to carry; null: the task's own."""


@dataclass(frozen=True)
class CloningConfig:
    steps: Natural = 0
    """Supervised steps on demonstrations before PPO, kept on disk between runs; 0: none. For vision-language-action
    models."""
    dataset: Text | None = None
    """Folder of demonstrations in LeRobot's layout (v2.0 to v3.0); null: the task's own expert records some, once
    (Tabletop has one)."""
    episodes: Count = 2000
    """Demonstrations that are learned from, the first ones of a dataset."""
    foresight_steps: Natural = 400
    """Steps before these that predict where a demonstration leads, and how its picture ends: they teach the words
    (``cloning``)."""
    batch_size: Count = 64
    """Frames in one step."""
    lr: Positive = 4e-3
    """Learning rate of these steps."""
    coef: NonNegative = 0.0
    """Weight of the cloning loss of batch_size demonstrated frames that every minibatch of PPO adds to its own; 0:
    PPO alone."""


@dataclass(frozen=True)
class ClusterConfig:
    num_nodes: Annotated[int, Limit(ge=1, le=10**4)] = 1
    """Machines."""
    devices_per_node: Annotated[int, Limit(ge=0, le=1024)] = 0
    """Devices of each machine: GPUs, or slots for a process on the CPU; 0: as many as this machine has."""
    device_memory_gb: NonNegative = 0.0
    """Memory of one GPU (on the CPU: of one machine) to plan with, GB; 0: what this machine has."""
    node_groups: dict[str, Any] = field(default_factory=dict)
    """Labels of machines, {sim: 0, train: 1-2}; Ray's label node-group says which machine is meant."""
    component_placement: dict[str, Any] = field(default_factory=dict)
    """Roles to devices, as RLinf writes it: {"env,rollout,actor": 0-3}. Joined roles share a process, entries with
    common devices take turns, the rest run at once. Devices: all, 2, 0-3, a list of these, 'first half', 'second half',
    or {devices: .., processes: n, node: label}. {}: as placement says."""
    stages: Small = 1
    """Parts of a rollout process's environments that take turns: while one simulates, the policy acts for the next."""
    max_lag: Annotated[int, Limit(ge=0, le=1000)] = 0
    """Rollouts that run ahead of the updates; 0: strictly on-policy. Needs actor on devices of its own."""
    weights: Literal["auto", "ipc", "broadcast", "store"] = "auto"
    """How the actor's weights reach rollout processes: ipc through memory of one device or machine, broadcast by a
    collective, store through Ray; auto: ipc where they share a device, else broadcast; with max_lag store."""
    shard: bool = False
    """Each process of actor holds a part of every parameter, gradient and optimiser state (FSDP2): for models that do
    not fit one device. A layer is whole only while it computes."""
    check_weights: bool = False
    """Compare a checksum of all processes' weights after each update."""
    address: Text | None = None
    """Ray cluster to join (auto, HOST:6379); null: what RAY_ADDRESS names, else one is started here for the run."""
    start_timeout_s: Positive = 300.0
    """Longest wait for devices and processes, seconds."""
    step_timeout_s: Positive = 1800.0
    """Longest wait for a process in one phase, seconds; then it is named, with what it was doing."""
    max_restarts: Natural = 0
    """Times that a run whose processes were lost is rebuilt from its last checkpoint."""


@dataclass(frozen=True)
class Config:
    mode: Literal["embodied", "reasoning"] = "embodied"
    """embodied trains a robot policy, reasoning a language model."""
    placement: Literal["local", "fused", "colocated", "disaggregated", "hybrid", "pipelined"] = "local"
    """Where the parts run. local: everything in this process; the others are processes of a Ray cluster, one for each
    device: fused: all roles in each; colocated: a process per role on every device, taking turns; disaggregated: acting
    on one half of the devices, learning on the other; hybrid: simulators on one half, rollout and actor on the other;
    pipelined: simulators on one half, rollout on the other, both taking turns with actor on all."""
    name: str = "custom"
    """Name of the run; its directory is runs/NAME/<date>-<seed>."""
    description: str = ""
    """One line about the experiment."""
    run_dir: Text | None = None
    """Directory of the run; null: runs/NAME/<date>-<seed>."""
    seed: Seed = 0
    """Seed of weights, actions, data order and environments."""
    updates: Count | None = None
    """Updates to train for; null: as many as env_steps holds (reasoning needs a number)."""
    env_steps: Annotated[int, Limit(ge=1, le=10**15)] | None = 1_000_000
    """Environment steps to train for (used where updates is null)."""
    resume: Text | None = None
    """auto: continue the newest run of this name and seed; or a run or checkpoint directory; null: start anew."""
    allow_changed_task: bool = False
    """With resume: go on although files of the user's task (env.id=module:Class) are not those of the checkpoint."""
    save_every: Natural = 50
    """Updates between checkpoints; 0: only at the end."""
    keep_last: Count = 3
    """Checkpoints kept besides the best."""
    eval_every: Natural = 0
    """Updates between evaluations; 0: only before and after training."""
    device: Text = "auto"
    """Where policy and learner run: auto, cpu, cuda, cuda:N."""
    threads: Threads = 1
    """Threads of one tensor operation; 0: torch's own choice."""
    compile: Literal["auto", "always", "never"] = "auto"
    """Run minibatches and acting as compiled code, 2 to 10 times faster for small networks. always: from the first
    update, which waits for the compiler (15 to 60 s the first time, then cached); auto: after 8192 optimiser steps,
    during which it is made in the background (reasoning: never). Needs a C++ compiler."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Products of float32 matrices while training: highest in float32, high in tf32 (GPU), medium in bfloat16 (GPU, and
    CPUs with AMX); torch.set_float32_matmul_precision."""
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    cloning: CloningConfig = field(default_factory=CloningConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


@dataclass(frozen=True)
class EvaluateConfig:
    """Options of ``embodied-ppo evaluate``."""

    checkpoint: str = ""
    """A checkpoint directory, or a run directory (its latest checkpoint); required."""
    episodes: Count = 100
    """Episodes to measure, each from a seed of its own; of a language model held-out prompts, the first ones."""
    num_envs: Count = 16
    """Environments evaluated together."""
    seed: Natural = 0
    """Seed of the initial states, 0 to 16383. Different seeds share no episode; none is one of training's."""
    deterministic: bool = True
    """Act with the distribution's mode; false: sample."""
    video: bool = True
    """Film a few episodes into an mp4."""
    video_episodes: Count = 2
    """Episodes filmed."""
    video_steps: Count = 300
    """Longest filmed part of an episode, in steps."""
    video_size: Pixels = 256
    """Height and width of the film, pixels."""
    out: Text | None = None
    """Directory of the report; null: reports/ of the run."""
    device: Text = "cpu"
    """Where the policy runs: auto, cpu, cuda, cuda:N."""
    threads: Threads = 1
    """Threads of one tensor operation; 0: torch's own choice."""
    allow_changed_task: bool = False
    """Execute files of the user's task that have changed since training; false: the run's copies of them."""
    env: dict[str, Any] = field(default_factory=dict)
    """Changes to the environment the checkpoint was trained in (``env.max_episode_steps=200``)."""
    data: tuple[Text, ...] = ()
    """Of a language model: other files of prompts than the run's data.eval."""
    n: Small = 1
    """Of a language model: responses to each prompt; more than one needs deterministic=false."""
    response_length: Annotated[int, Limit(ge=1, le=10**7)] | None = None
    """Of a language model: longest response, tokens; null: as in training."""
    temperature: Positive = 1.0
    """Of sampled responses, as the next four, and of sampled actions of vision-language-action models."""
    top_k: Natural = 0
    """Only the k likeliest tokens; 0: all."""
    top_p: Annotated[float, Limit(gt=0, le=1)] = 1.0
    """Only the likeliest tokens that together hold this probability; 1: all."""
    min_p: Fraction = 0.0
    """Only tokens at least this times as likely as the likeliest; 0: all."""
    repetition_penalty: Positive = 1.0
    """Logits of tokens that occurred are divided by it where positive, multiplied where negative; 1: nothing."""


@dataclass(frozen=True)
class ExportConfig:
    """Options of ``embodied-ppo export``."""

    checkpoint: str = ""
    """A checkpoint of a language model, or its run directory (its latest checkpoint); required."""
    out: str = ""
    """New directory for weights, configuration and tokenizer; required."""


@dataclass(frozen=True)
class DemosConfig:
    """Options of ``embodied-ppo demos``."""

    out: str = ""
    """Folder to record into, LeRobot v3.0; a recording that was begun there is continued; required."""
    episodes: Count = 2000
    """Demonstrations that the folder will hold, with those that are there already."""
    seed: Natural = 0
    """Seed of the initial states and the noise."""
    noise: Annotated[float, Limit(ge=0, lt=1)] = 0.05
    """Probability with which a step executes a random action; recorded is what the expert would have done, so that a
    clone learns to come back. 0: executed as recorded."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """Of the experiment; read are id, kwargs, cameras, image_size, randomize and num_threads."""


OWN_OPTIONS: dict[str, type] = {"evaluate": EvaluateConfig, "demos": DemosConfig, "export": ExportConfig}
"""Commands with options of their own; the others read train's."""
