"""Every option with type, bounds, default, the mode that reads it, and its meaning and unit.

``loader.read`` turns a dictionary into these classes; ``embodied-ppo config`` prints the text below
each field. The formulas of the algorithm's options are in ``ppo/advantages``, ``losses`` and
``kl``.

``option(default, mode=.., read_if=..)`` declares that only one mode, or only some values of other
options, lead to the option being read. ``readers`` collects these declarations, and ``validation``
refuses an option that is set but not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from embodied_envs.base.errors import show

T = TypeVar("T")
Mode: TypeAlias = Literal["embodied", "reasoning"]


@dataclass(frozen=True)
class Limit:
    """Bounds of a number: ``Annotated[float, Limit(ge=0, le=1)]``."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def allows(self, x: float) -> bool:
        """Return whether ``x`` is within the bounds."""
        below = (self.gt is not None and x <= self.gt) or (self.ge is not None and x < self.ge)
        above = (self.lt is not None and x >= self.lt) or (self.le is not None and x > self.le)
        return not (below or above)

    def __str__(self) -> str:
        bounds = ((">", self.gt), (">=", self.ge), ("<", self.lt), ("<=", self.le))
        given = ((operator, bound) for operator, bound in bounds if bound is not None)
        return " and ".join(f"{o} {b:,}" if isinstance(b, int) else f"{o} {b:g}" for o, b in given)


@dataclass(frozen=True)
class NotEmpty:
    """Text of at least one character, without NUL: ``Annotated[str, NotEmpty()]``."""

    def allows(self, x: str) -> bool:
        """Return whether ``x`` has a character and no NUL."""
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
Weight = Annotated[float, Limit(ge=0.001, le=1000)]


# ------------------------------------------------------------------------------------- declarations
@dataclass(frozen=True)
class ReadIf:
    """A condition on other options under which an option is read."""

    text: str
    """The condition as messages state it: "it needs TEXT; otherwise remove this option"."""
    holds: Callable[[Any], bool]
    """Return whether a config fulfils the condition."""
    mode: Mode | None = None
    """The only mode that has the condition; None: both modes have it."""

    def __and__(self, other: ReadIf) -> ReadIf:
        """Return the condition that both hold."""
        text = f"{self.text} and {other.text}"
        return ReadIf(text, lambda config: self.holds(config) and other.holds(config))


def equals(path: str, *values: Any) -> ReadIf:
    """Return the condition that the option ``path`` has one of ``values``."""
    *first, last = map(show, values)
    allowed = f"{', '.join(first)} or {last}" if first else last
    return ReadIf(f"{path}={allowed}", lambda config: attrgetter(path)(config) in values)


def is_set(path: str) -> ReadIf:
    """Return the condition that the option ``path`` is not null."""
    return ReadIf(path, lambda config: attrgetter(path)(config) is not None)


def positive(path: str) -> ReadIf:
    """Return the condition that the whole number ``path`` is not 0."""
    return ReadIf(f"{path} >= 1", lambda config: attrgetter(path)(config) > 0)


Conditions: TypeAlias = ReadIf | Sequence[ReadIf]


def option(default: T, *, mode: Mode | None = None, read_if: Conditions = ()) -> T:
    """Declare an option that is not always read.

    Args:
        default: Its default; each config gets its own copy of a dictionary.
        mode: The only mode that reads the option; None: as its section.
        read_if: Conditions that must all hold; none: as its section.

    Returns:
        The field of the dataclass, typed as the default, as ``dataclasses.field`` does.
    """
    metadata = {"mode": mode, "read_if": _as_tuple(read_if)}
    if isinstance(default, dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type[T], *, mode: Mode | None = None, read_if: Conditions = ()) -> T:
    """Declare a section of options.

    Args:
        cls: Its dataclass.
        mode: The only mode that reads its options; None: both modes do.
        read_if: Conditions of all its options that declare none.

    Returns:
        The field of the dataclass, typed as the section, as ``dataclasses.field`` does.
    """
    metadata = {"section": cls, "mode": mode, "read_if": _as_tuple(read_if)}
    return field(default_factory=cls, metadata=metadata)


def _as_tuple(conditions: Conditions) -> tuple[ReadIf, ...]:
    """Return one condition, or several, as a tuple."""
    return (conditions,) if isinstance(conditions, ReadIf) else tuple(conditions)


# ------------------------------------------------------------------------------------------- robots
Delay = Annotated[int, Limit(ge=0, le=1000)]
PartialDelay = Annotated[float, Limit(ge=0, le=1000)]


@dataclass(frozen=True)
class RealismConfig:
    """Properties of a real robot that simulators lack; the defaults are those of the simulator.

    obs_delay, obs_noise, obs_bias and obs_dropout change the observations of model.actor_obs, or
    all except privileged ones; or those that a section of values names. An observation that is one
    array is named state.
    """

    action_delay: Delay | PartialDelay | tuple[Delay, ...] | tuple[PartialDelay, ...] = 0
    """Delay of actions in control steps, k or [low, high] drawn per episode. Until the first action
    arrives, the simulator executes 0 or the nearest valid value. Tasks of this package also have
    fractions, rounded to physics steps."""
    joint_delay: Delay | PartialDelay | tuple[Delay, ...] | tuple[PartialDelay, ...] = 0
    """Delay that each element of the action has besides action_delay, in control steps, k or
    [low, high] drawn per episode and element; fractions as there."""
    obs_delay: Delay | tuple[Delay, ...] | dict[str, Any] = 0
    """Delay of observations in control steps, k or [low, high] drawn per episode; or a section of
    such values by name. The first observation is repeated until the second one arrives."""
    obs_noise: NonNegative | dict[str, Any] = 0.0
    """Standard deviation of the normal noise of each element and step, in the unit of the
    observation; or a section by name. Images and integers have none."""
    obs_bias: NonNegative | dict[str, Any] = 0.0
    """Half-width b of the constant error of each element, from [-b, b] per episode; or by name."""
    obs_dropout: Fraction | dict[str, Any] = 0.0
    """Probability that an observation is lost, so that the policy reads the previous one again; or
    a section by name. The first observation of an episode is never lost."""
    action_rate_limit: Positive | None = None
    """Largest change of each element of the action in one control step, in the unit of the policy's
    actions ([-1, 1] with env.action_mapping=rescale); null: no limit."""
    push_velocity: NonNegative | tuple[NonNegative, ...] | None = None
    """Size of random pushes, m/s, v or [low, high]: every 5 to 10 s the base of the robot (a root
    free joint) receives a change of its horizontal velocity of this size in a random direction.
    Tasks of this package; null: no pushes."""


SEVERAL_TASKS = ReadIf("env.id=[A,B,..]", lambda c: not isinstance(c.env.id, str))


@dataclass(frozen=True)
class EnvConfig:
    id: Text | tuple[Text, ...] = "HalfCheetah-v4"
    """Task: a task of this package, a task of EnvPool or Gymnasium, package.module:Name for a
    Task, a class or a function of your own (docs/tasks.md), Mjlab-.. or libero/... A list [A,B]:
    one policy learns several tasks with equal actions (docs/tasks.md)."""
    task_weights: tuple[Small, ...] | None = option(None, read_if=SEVERAL_TASKS)
    """Relative number of environments of each task of env.id; null: equal numbers."""
    tasks: tuple[Text, ...] | None = None
    """Tasks whose observations and indices the policy reads, to train or evaluate a policy of
    several tasks in others (env.id); null: those of env.id. evaluate sets it."""
    simulator: Literal[
        "auto",
        "mujoco",
        "warp",
        "envpool",
        "gymnasium",
        "torch",
        "mjlab",
        "libero",
        "remote",
        "maniskill",
        "simpler",
        "robocasa",
        "robotwin",
        "calvin",
    ] = "auto"
    """Simulator adapter. mujoco (CPU threads) and warp (GPU) run the tasks of this package; torch
    calls a function that returns a batched environment of tensors; remote is a server of
    environments at env.kwargs.address; auto takes the first adapter that has the id: the tasks of
    this package, then EnvPool, then Gymnasium."""
    num_envs: Count = 64
    """Number of environments that are stepped together (N)."""
    num_threads: Threads = 0
    """Number of simulator threads; 0: one per usable core, at most num_envs. With more than one,
    a policy and a value function that share no weight learn in two threads (placement=local)."""
    max_episode_steps: Count | None = None
    """Time limit of an episode in primitive steps; null: the limit of the task."""
    action_mapping: Literal["rescale", "clip", "none"] = "rescale"
    """Mapping of continuous actions to the bounds of the task. rescale clamps to [-1, 1] and maps
    that range to the bounds, but only clips a dimension with an infinite bound at its finite one;
    clip clamps to the bounds; none passes actions on unchanged."""
    obs_keys: tuple[Text, ...] | None = option(None, read_if=equals("model.actor_obs", None))
    """Names of the observations that the policy and its critic read, besides images of env.cameras;
    null: all, or those of model.actor_obs and model.critic_obs. Null is refused where a name marks
    a privileged observation (privileged_state, critic)."""
    action_chunk: Small = 1
    """Primitive steps of a decision (C), cut short by the episode. horizon counts decisions."""
    cameras: tuple[Text, ...] = ()
    """Cameras of the model whose images the policy reads beside the state (our own tasks)."""
    image_size: Pixels = 64
    """Height and width of the images of env.cameras, pixels."""
    image_layout: Literal["hwc", "chw"] | None = None
    """Order of the dimensions of images of a simulator: channels last (hwc) or first (chw), after a
    stack of frames if any. null: the shape decides; an ambiguous one is refused."""
    randomize: bool = False
    """Randomise the model of each training episode within the ranges of the task (our tasks)."""
    ranges: dict[str, Any] = field(default_factory=dict)
    """Bounds [low, high] of domain randomisation that replace those of the task: mass, friction,
    damping, armature, friction_loss, gains (of actuators, without their force limit), kp, kd,
    motor_strength (force of actuators with its limit), gravity, light (factors), payload (kg) and
    com (centre of mass, m) of a floating base, joint_offset (zero error of joint encoders, rad;
    tasks that declare it), camera_position (m), camera_angle (rad), colour (0 to 1)."""
    commands: dict[str, Any] = field(default_factory=dict)
    """Ranges [low, high] of commands that replace those of the task: lin_vel_x, lin_vel_y (m/s) and
    ang_vel_yaw (rad/s), or x, y and z (m) of a target (tasks with commands)."""
    rewards: dict[str, Any] = field(default_factory=dict)
    """Terms of the reward, {weight: .., parameter: ..} each, that replace those of the task (tasks
    with terms, docs/tasks.md). The reward is the sum of weight · term; 0 removes a term."""
    realism: RealismConfig = section(RealismConfig)
    restart_each_rollout: bool = False
    """Begin every rollout with new episodes, and use only the first ones (for group advantages)."""
    restart_every: Natural = 16384
    """Number of steps of each environment after which all episodes are restarted; 0: never. It
    bounds checkpoints and the work of resuming: a simulator that cannot save its state is resumed
    by replaying the actions since then. Running episodes are cut, and what environments of
    Gymnasium and EnvPool keep between episodes (a curriculum) is lost. The restart waits for the
    time limit of an episode; without one, until each environment has ended an episode."""
    step_timeout_s: Positive | None = 1800.0
    """Time limit of one call of the simulator (constructor, reset or step), seconds; the run then
    ends and can be resumed. null: no limit. A first call may compile for minutes."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the simulator's constructor."""

    @property
    def ids(self) -> tuple[str, ...]:
        """The simulated tasks."""
        return (self.id,) if isinstance(self.id, str) else self.id

    @property
    def period(self) -> int:
        """Number of environments after which the tasks repeat."""
        return sum(self.task_weights or (1,) * len(self.ids))

    @property
    def title(self) -> str:
        """``id`` as it is written."""
        return self.id if isinstance(self.id, str) else f"[{','.join(self.id)}]"


ACTOR_CRITIC = equals("model.policy", "actor_critic")
TOKEN = equals("model.policy", "token")
FLOW = equals("model.policy", "flow")
VLA = equals("model.policy", "token", "flow", "gaussian")
NEW_VLA = VLA & equals("model.checkpoint", None)
PRETRAINED_VLA = is_set("model.checkpoint")
PRETRAINED_FLOW = equals("model.policy", "flow") & is_set("model.checkpoint")
PRETRAINED_TOKEN = equals("model.policy", "token") & is_set("model.checkpoint")
OWN_NETWORK = ACTOR_CRITIC & is_set("model.network")
TRUNK = ACTOR_CRITIC & equals("model.network", None)
CONTINUOUS = ACTOR_CRITIC & ReadIf(
    "model.distribution=gaussian or squashed_gaussian",
    # auto may become one of the two
    lambda c: c.model.distribution not in ("categorical", "beta"),
)
GAUSSIAN = ReadIf(
    "model.policy=gaussian, or actor_critic and model.distribution=gaussian or squashed_gaussian",
    lambda c: c.model.policy == "gaussian" or CONTINUOUS.holds(c),
)


@dataclass(frozen=True)
class ModelConfig:
    policy: Literal["actor_critic", "token", "flow", "gaussian"] = "actor_critic"
    """Policy family. actor_critic: a trunk with a policy head and a value head. token, flow and
    gaussian are vision-language-action models, which read an instruction; their actions are tokens,
    the result of flow matching, or Gaussian. They read the options from width on, actor_critic
    reads those from network to critic_obs."""
    network: Text | None = option(None, read_if=ACTOR_CRITIC)
    """Your own trunk, FILE.py:Class (docs/networks.md), of which the run keeps a copy; null: one of
    hidden and activation, after convolutions where there are images."""
    network_options: dict[str, Any] = option({}, read_if=OWN_NETWORK)
    """Arguments of the class of network."""
    pooling: Literal["flatten", "spatial_softmax"] = option("flatten", read_if=TRUNK)
    """What the convolutions of images return. flatten: all cells of the last maps (Mnih et al.
    2015); spatial_softmax: the mean position of each map's softmax (Levine et al. 2016), which
    learns from fewer images where objects are."""
    hidden: tuple[Width, ...] = option((64, 64), read_if=TRUNK)
    """Widths of the hidden layers (with images: after the convolutions)."""
    critic_hidden: tuple[Width, ...] | None = option(
        None, read_if=TRUNK & equals("model.shared_backbone", False)
    )
    """Widths of the hidden layers of the critic's trunk; null: hidden."""
    activation: Literal["tanh", "relu", "elu", "silu", "gelu"] = option("tanh", read_if=TRUNK)
    """Non-linearity of the hidden layers (convolutions use relu)."""
    base_inputs: Count | None = option(None, read_if=TRUNK)
    """Vector observations of more numbers than this, n, are multiplied by base_inputs / n after
    their normalisation, and the initial weights of the first hidden layer and of model.recurrent by
    sqrt(n / base_inputs), so that their outputs, and the changes by a step of Adam, are no larger
    than with base_inputs inputs; null: off."""
    shared_backbone: bool = True
    """Share one trunk between policy and value; false: separate trunks."""
    distribution: Literal["auto", "gaussian", "squashed_gaussian", "beta", "categorical"] = option(
        "auto", read_if=ACTOR_CRITIC
    )
    """Action distribution; auto: categorical for discrete actions, gaussian for continuous ones.
    Actions of two are in [-1, 1]: squashed_gaussian is tanh(u), u Gaussian, with an entropy
    estimated from the sampled u; beta is 2x - 1, x ~ Beta(1 + softplus(y), 1 + softplus(z)) with
    network outputs y and z, which acts by its mean without sampling."""
    state_dependent_std: bool | Literal["softplus"] = option(False, read_if=CONTINUOUS)
    """Compute the standard deviation from the observation: exp(x) of an output x, or with softplus
    softplus(x) + exp(min_log_std), as in Brax; false: a learned number per action dimension."""
    init_log_std: float = option(0.0, read_if=GAUSSIAN)
    """Initial logarithm of the standard deviation."""
    min_log_std: float = option(-5.0, read_if=GAUSSIAN)
    """Lower bound of the logarithm of the standard deviation. A learned deviation that is equal in
    all states is moved to the bound after each update, where it has a gradient; one that depends on
    the state has none in states beyond the bound."""
    max_log_std: float = option(2.0, read_if=GAUSSIAN)
    """Upper bound of the logarithm of the standard deviation."""
    history: Small = option(1, read_if=ACTOR_CRITIC)
    """Number of observations that the policy reads together (K): the newest one, the K - 1 changes
    before it in the episode and the actions between them; zeros before the start of the episode. 1:
    the newest one only. With actor_obs, those observations have a history and others have none."""
    recurrent: Literal["gru", "lstm"] | None = option(None, read_if=ACTOR_CRITIC)
    """Recurrent layer that reads the observation, with a state for each episode; the hidden layers
    read its output and the observation. Needs algorithm.minibatch_unit=column; null: none."""
    recurrent_size: Width = option(128, read_if=ACTOR_CRITIC & is_set("model.recurrent"))
    """Number of units of the recurrent layer."""
    actor_obs: tuple[Text, ...] | None = option(None, read_if=ACTOR_CRITIC)
    """Names of the observations that the actor reads, through its own normaliser; "a" names a/b and
    a/c, too. Evaluation and deployment need no others. Set together with critic_obs; null: actor
    and critic read what env.obs_keys selects, through one normaliser."""
    critic_obs: tuple[Text, ...] | None = option(
        None, read_if=ACTOR_CRITIC & is_set("model.actor_obs")
    )
    """Names of the observations that the critic reads, privileged ones of the simulator included,
    through its own normaliser. With shared_backbone=true the list contains that of actor_obs: a
    second trunk then reads the features of the actor's trunk and the other observations."""
    normalize_obs: bool = True
    """Normalise vector observations by running mean and deviation. Images are divided by 255."""
    obs_clip: Positive | None = option(10.0, read_if=equals("model.normalize_obs", True))
    """Bound of normalised vector observations, in both directions; null: no clamping."""
    obs_eps: Positive | tuple[NonNegative, ...] = option(
        1e-8, read_if=equals("model.normalize_obs", True)
    )
    """Number that is added to the variance of vector observations before its root divides them; or
    [a, b], of which a is added to the variance and b to that root, the standard deviation."""
    width: Width = option(64, read_if=NEW_VLA)
    """Embedding width of the tokens (D)."""
    depth: Small = option(2, read_if=NEW_VLA)
    """Number of decoder blocks."""
    bins: Annotated[int, Limit(ge=3, le=32767)] = option(256, read_if=TOKEN)
    """Number of tokens of each action dimension (K), which divide [-1, 1] into equal parts: K
    parts, or K - 1 where K is even, so that one token means zero."""
    decode: Literal["parallel", "autoregressive"] = option("parallel", read_if=TOKEN)
    """Order in which the tokens of a chunk are decoded: parallel decodes all of them at once,
    autoregressive decodes each one given the previous ones."""
    temperature: Positive = option(1.0, read_if=VLA)
    """Sampling temperature: divides the logits of action tokens and multiplies standard deviations,
    while acting and while learning. Deterministic evaluation takes the most likely action."""
    flow_steps: Small = option(4, read_if=FLOW)
    """Number of integration steps from noise to an action (K)."""
    flow_noise: Literal["sde", "learned"] = option("sde", read_if=FLOW)
    """Standard deviation of a stochastic step: sde derives it from flow_eta (Flow-SDE), learned
    makes it a network output (Flow-Noise, which has an entropy)."""
    flow_eta: Positive = option(0.5, read_if=FLOW & equals("model.flow_noise", "sde"))
    """Noise scale of flow_noise=sde: the standard deviation of the first step."""
    flow_chain: Literal["one", "sum", "mean"] = option("one", read_if=FLOW)
    """Log-probability of a chain of steps. one: a single randomly drawn step of each chain is
    stochastic; sum: all steps are stochastic and their log-probabilities are added; mean: they are
    averaged, which makes the clip range K + 1 times as wide, as RLinf's joint_logprob does."""
    freeze_trunk: bool = option(False, read_if=VLA)
    """Freeze the vision encoder during PPO and evaluate it once for all epochs of an update.
    Cloning trains it in any case, unless it comes from model.checkpoint. For pi0 this freezes
    PaliGemma, whose keys and values are cached as long as they fit in half of the memory."""
    checkpoint: str | None = option(None, read_if=VLA)
    """Directory of a published model: OpenVLA or OpenVLA-OFT (policy=token, with a regression head
    gaussian), pi0, pi0.5 or SmolVLA (policy=flow); null: a small new model. Extra [vla]."""
    unnorm_key: Text | None = option(None, read_if=PRETRAINED_VLA)
    """Data set whose action statistics an OpenVLA checkpoint uses; null: the only ones in it."""
    delta_actions: tuple[Natural, ...] | None = option(None, read_if=PRETRAINED_FLOW)
    """Dimensions of an action, from 0, that the checkpoint predicts relative to the number of the
    state with the same index (openpi's DeltaActions; the gripper is usually absolute). []: none;
    null: those of config_name, or of the directory."""
    config_name: Text | None = option(None, read_if=PRETRAINED_FLOW)
    """Configuration that an openpi directory was trained with, such as pi05_libero: its relative
    actions, prompt and cameras, which the directory does not record. null: the one that the horizon
    and the folder of the statistics identify."""
    discrete_state_input: bool | None = option(None, read_if=PRETRAINED_FLOW)
    """Whether pi0.5's prompt contains the state; null: as config_name or the directory."""
    center_crop: bool = option(
        False, read_if=equals("model.policy", "token", "gaussian") & is_set("model.checkpoint")
    )
    """OpenVLA: crop the centre of images, 90 % of their area, and resize it, as the publishers do
    to evaluate models that were fine-tuned with random crops (image_aug)."""
    omit_stop_token: bool = option(
        False, read_if=PRETRAINED_TOKEN & equals("model.decode", "parallel")
    )
    """OpenVLA-OFT: omit the token "end of sequence" after the placeholders of the actions, as for
    the models that RLinf trained; false: it follows them, as in moojink/openvla-oft."""
    lora_rank: Annotated[int, Limit(ge=0, le=10**5)] = option(0, read_if=PRETRAINED_VLA)
    """Rank of low-rank adapters on the language model of a checkpoint, whose own weights stay
    frozen (Hu et al. 2021); the run's checkpoints contain adapters and heads only. 0: none."""
    lora_alpha: Positive = option(32.0, read_if=positive("model.lora_rank"))
    """Scale of the adapters: they are multiplied by lora_alpha / lora_rank."""
    dtype: Literal["float32", "bfloat16"] = option("float32", read_if=PRETRAINED_VLA)
    """Type in which a checkpoint's model computes; trained weights are float32 in any case."""
    gradient_checkpointing: bool = option(False, read_if=PRETRAINED_VLA)
    """Recompute a checkpoint's activations in the backward pass: less memory, more time."""
    detach_value: bool | None = option(
        None,
        read_if=ReadIf(
            "model.policy=token, flow or gaussian (actor_critic has a trunk for each with"
            " model.shared_backbone=false)",
            lambda c: c.model.policy != "actor_critic",
        ),
    )
    """true: the value loss trains the value head only, because its gradient in the trunk can undo
    what cloning learned; null: true for token, flow and gaussian, false for actor_critic."""


# ---------------------------------------------------------------------------------------- algorithm
KL_IN_REWARD = equals("algorithm.use_kl_in_reward", True)
ADAPTIVE_KL = KL_IN_REWARD & equals("algorithm.kl_ctrl.type", "adaptive")
KL_LOSS = equals("algorithm.use_kl_loss", True)
REWARD_NORM = equals("algorithm.reward_norm", "batch", "group")
GAE = equals("algorithm.adv_type", "gae")
FILES = equals("data.task", None)
FIXED_LAMBDA = ReadIf(
    "algorithm.gae_lambda_value=null or length_adaptive_alpha=null",
    lambda c: None in (c.algorithm.gae_lambda_value, c.algorithm.length_adaptive_alpha),
)
SUM_NORM = "seq-mean-token-sum-norm"
# A language model has a critic with GAE only, a robot policy always has a value head.
CRITIC_MODEL = replace(GAE, mode="reasoning")
ENTROPY = ReadIf(
    "model.flow_noise=learned, as flow_noise=sde has an entropy that nothing can change",
    lambda c: c.model.policy != "flow" or c.model.flow_noise == "learned",
    mode="embodied",
)


@dataclass(frozen=True)
class KLControlConfig:
    type: Literal["fixed", "adaptive"] = option("fixed", read_if=KL_IN_REWARD)
    """Coefficient of the KL. fixed: kl_coef; adaptive: so that the KL approaches target_kl."""
    kl_coef: NonNegative = option(0.001, read_if=KL_IN_REWARD)
    """Initial coefficient (beta) of the KL penalty in the reward."""
    horizon: Positive = option(10000.0, read_if=ADAPTIVE_KL)
    """Sequences over which the adaptive coefficient changes by at most a factor of e^0.2."""
    target_kl: Positive = option(0.1, read_if=ADAPTIVE_KL)
    """Target of the adaptive controller, KL in nats per token."""


@dataclass(frozen=True)
class RewardGroupConfig:
    """Entry of ``algorithm.reward_groups``; the user chooses its name."""

    terms: tuple[Text, ...] | Literal["rest"] = "rest"
    """Reward terms, named as the curves ``env/NAME``; rest: the reward minus all other terms."""
    gamma: Fraction | None = None
    """null: algorithm.gamma."""
    gae_lambda: Fraction | None = None
    """null: algorithm.gae_lambda."""
    normalize: bool = False
    """Standardise the advantages of the group before they are added."""
    weight: NonNegative = 1.0
    """Factor of the advantages of the group."""


CURIOUS = ReadIf("algorithm.curiosity.weight > 0", lambda c: c.algorithm.curiosity.weight > 0)


@dataclass(frozen=True)
class CuriosityConfig:
    weight: NonNegative = option(0.0, read_if=ACTOR_CRITIC)
    """Weight of an intrinsic reward for rarely visited states, a group of reward_groups with its
    own value: the error of a network that predicts a fixed random network (random network
    distillation), divided by the deviation of its newest returns, discounted by 0.99. 0: none; try
    1."""
    decay: Natural = option(0, read_if=CURIOUS)
    """Number of updates over which the weight falls linearly to 0; 0: it is constant."""


@dataclass(frozen=True)
class AlgorithmConfig:
    # --- rollout and batches
    horizon: Count = option(32, mode="embodied")
    """Number of steps of each environment in one rollout (T)."""
    rollout_epoch: Small = option(
        1, mode="embodied", read_if=equals("env.restart_each_rollout", True)
    )
    """Number of passes of a rollout (P): every environment runs P episodes of at most horizon steps
    one after the other, so that a rollout has num_envs x P episodes with num_envs simulators."""
    update_epoch: Annotated[int, Limit(ge=1, le=10**6)] = 10
    """Number of passes over one rollout."""
    global_batch_size: Count = 256
    """Samples (steps; in reasoning prompts) of one optimiser step, summed over all ranks. It must
    divide the rollout (horizon x num_envs x rollout_epoch; in reasoning rollout_batch_size)."""
    micro_batch_size: Count | None = None
    """Samples of one pass: less memory, equal results up to rounding; null: global_batch_size."""
    rollout_micro_batch_size: Count | None = None
    """Rows of one forward pass while acting and computing values (environments; in reasoning
    responses): less memory, equal results up to rounding; null: all environments (in reasoning
    256 responses while acting, micro_batch_size for values)."""
    logprob_forward_micro_batch_size: Count | None = None
    """Samples (steps; in reasoning responses) of one forward pass that recomputes log-probabilities
    without gradient: less memory, equal results up to rounding; null: micro_batch_size."""
    rollout_batch_size: Annotated[int, Limit(ge=1, le=10**7)] = option(256, mode="reasoning")
    """Number of prompts of one update; each gets group_size responses."""
    prompt_length: Annotated[int, Limit(ge=1, le=10**7)] = option(
        1024, mode="reasoning", read_if=FILES
    )
    """Maximum length of a prompt, tokens. Longer prompts are left out and counted."""
    response_length: Annotated[int, Limit(ge=1, le=10**7)] = option(512, mode="reasoning")
    """Maximum length of a response, tokens (T)."""
    micro_batch_tokens: Count | None = option(None, mode="reasoning")
    """Maximum number of tokens of one forward and backward pass, padding included; sequences are
    sorted by length and trimmed: less memory, often faster; null: no limit."""
    recompute_log_probs: bool = option(False, mode="reasoning")
    """Recompute the behaviour policy's log-probabilities in the learner before the first epoch;
    false: take those of the rollout, which are equal up to rounding in the same type."""
    minibatch_unit: Literal["step", "column"] = option("step", mode="embodied")
    """Unit of which minibatches are drawn: step is a single step, column is all T steps of one
    environment, through which the gradients of a recurrent policy pass."""
    # --- advantages
    adv_type: Literal[
        "gae",
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
    ] = "gae"
    """Advantage estimator. reinforce is the discounted return-to-go without a value;
    reinforce_plus_plus is the same, for normalize_advantages=true. dr_grpo is the score minus the
    mean of the group, for normalize_advantages=false."""
    gamma: Fraction = 0.99
    """Discount per primitive step."""
    gae_lambda: Fraction = option(0.95, read_if=(GAE, FIXED_LAMBDA))
    """Decay of the advantage estimator's trace."""
    gae_lambda_value: Fraction | None = option(None, read_if=GAE)
    """gae_lambda of the value's targets, of all reward groups; 1: Monte-Carlo; null: gae_lambda."""
    length_adaptive_alpha: Positive | None = option(None, mode="reasoning", read_if=GAE)
    """Decay of the trace of the advantages by the number l of a response's tokens, 1 - 1 /
    (length_adaptive_alpha x l), at least 0 (VAPO: 0.05); gae_lambda is then that of the value's
    targets. null: gae_lambda for every length."""
    normalize_advantages: bool = True
    """Standardise advantages over the whole rollout, once per update."""
    popart: Annotated[float, Limit(gt=0, le=1)] | None = option(
        None, mode="embodied", read_if=(ACTOR_CRITIC, GAE)
    )
    """Normalise values by the mean and standard deviation of each task's returns, V = sigma x n +
    mu with one output n for each task of env.id, and advantages within each task. The statistics
    are moving averages, in which the newest rollout has this weight; the outputs are rescaled so
    that no V changes (PopArt). null: one value, and advantages of all tasks together."""
    advantage_clip: Positive | None = None
    """Bound of advantages after normalisation, in both directions; null: no clamping."""
    reward_clip: Positive | None = None
    """Bound to which rewards are clamped, in both directions; null: no clamping."""
    reward_clip_order: Literal["before_norm", "after_norm"] = option(
        "before_norm",
        read_if=ReadIf(
            "algorithm.reward_clip, and algorithm.reward_norm or algorithm.use_kl_in_reward=true",
            lambda c: (
                c.algorithm.reward_clip is not None
                and (c.algorithm.reward_norm is not None or c.algorithm.use_kl_in_reward)
            ),
        ),
    )
    """before_norm: clamp raw rewards; after_norm: after reward_norm, and after the KL penalty."""
    missing_eos_penalty: NonNegative = option(
        0.0, mode="reasoning", read_if=equals("rollout.truncation", "terminal")
    )
    """Penalty subtracted from the score of a response that was cut at response_length."""
    reward_norm: Literal["batch", "group", "running"] | None = None
    """Reward normalisation: over the rollout, over the group, or by the running standard deviation
    of the discounted return; null: none."""
    reward_norm_by: Literal["mean_std", "mean", "std"] = option("mean_std", read_if=REWARD_NORM)
    """With reward_norm: mean subtracts the mean and does not divide; std divides by the standard
    deviation and does not subtract the mean; mean_std does both."""
    reward_groups: dict[str, RewardGroupConfig] = option({})
    """Parts of the reward with a value output each (several critics): NAME -> {terms, gamma,
    gae_lambda, normalize, weight}, such as {task: {terms: [forward]}, style: {terms: rest, weight:
    0.5}}. terms lists the simulator's reward terms (curves env/NAME; in reasoning the grader's
    numbers, curves reward/NAME) whose sum is the reward of the group; rest: the reward minus all
    other terms. A = sum of weight x A_k, each with the gamma and gae_lambda of its group (null:
    those above), standardised with normalize=true. The value loss is the sum over groups, reward
    options apply to each. {}: one group."""
    curiosity: CuriosityConfig = section(CuriosityConfig, mode="embodied")
    """Intrinsic reward."""
    whiten_rewards: bool = False
    """Divide rewards by their deviation over the rollout, keep the mean; before the KL penalty."""
    group_size: Annotated[int, Limit(ge=1, le=10**4)] = 1
    """Neighbouring environments with one start state (in reasoning: responses to one prompt)."""
    group_filter: Literal["success"] | None = None
    """Groups to train on. success: those with a member that succeeds and one that does not, and
    further groups are collected until the batch is full. null: all groups."""
    group_filter_rounds: Annotated[int, Limit(ge=1, le=1000)] = option(
        8, read_if=is_set("algorithm.group_filter")
    )
    """Maximum number of rounds of collection of an update. If the batch is not full after the last
    one, the update trains on the groups collected. A round runs all environments (in reasoning: as
    many prompts as the batch lacks). 1: dropped groups are not replaced. Each of several processes
    fills its own share of the batch."""
    bootstrap_type: Literal["standard", "always", "never"] = option("standard", mode="embodied")
    """Where the value of the next state is added at the end of an episode. standard: where the time
    limit ended it; always: also where the task ended it; never: at neither end."""
    # --- policy loss
    loss_type: Literal["actor_critic", "actor"] = "actor_critic"
    """actor_critic: one model, one backward pass (mode=embodied); actor: two (mode=reasoning)."""
    policy_loss: Literal["clip", "cispo"] = "clip"
    """clip: PPO's clipped surrogate, whose gradient is 0 where the ratio is clipped. cispo: the
    log-probability times the advantage times the clipped ratio, which is a weight without gradient,
    so that clipped entries have a gradient, too."""
    clip_ratio_low: Positive = 0.2
    """Lower clip range of the probability ratio, which is clipped at 1 - clip_ratio_low; with
    policy_loss=cispo, 1 or more means no lower bound."""
    clip_ratio_high: Positive = 0.2
    """Upper clip range of the probability ratio, which is clipped at 1 + clip_ratio_high."""
    ratio_level: Literal["token", "chunk", "sequence"] = "token"
    """Probability ratio of the policy loss. token: of each entry of logprob_type (in reasoning:
    token). chunk: the geometric mean over one decision (mode=embodied). sequence: that over an
    episode or response (GSPO, whose clip ranges are 3e-4 and 4e-4 for long responses); robots need
    minibatch_unit=column and env.restart_each_rollout=true."""
    clip_ratio_c: Annotated[float, Limit(gt=1)] | None = option(
        None, read_if=equals("algorithm.policy_loss", "clip")
    )
    """Dual clip: upper bound -A x clip_ratio_c of the loss for negative advantages A; null: off."""
    positive_nll_weight: NonNegative = option(0.0, mode="reasoning")
    """Weight of the negative log-likelihood of responses whose score, before normalisation and with
    its penalties, is above 0: the mean over their tokens in the minibatch (VAPO: 0.1)."""
    entropy_bonus: NonNegative = option(0.0, read_if=ENTROPY)
    """Coefficient of the entropy in the loss; with entropy_target the initial one."""
    entropy_schedule: Literal["constant", "linear", "relative"] = option(
        "constant",
        read_if=positive("algorithm.entropy_bonus") & equals("algorithm.entropy_target", None),
    )
    """linear: the coefficient falls from entropy_bonus to 0 over the run. relative: the same, times
    the moving average of the advantages' standard deviation over about ten rollouts: advantages
    become small where the value explains the returns, and a fixed bonus would outweigh them."""
    rpo_alpha: NonNegative | None = option(None, mode="embodied", read_if=CONTINUOUS)
    """Robust policy optimisation (Rahman and Xue 2022): the policy loss uses the means mu + z, z ~
    U(-rpo_alpha, rpo_alpha) per sample and number, new in each pass over the rollout, so that the
    policy stays random; 0.5 is usual, in the units of actions (before the tanh). Acting, the
    entropy and the recorded log-probabilities have no z. approx_kl contains it, about A rpo_alpha^2
    / (6 std^2) for A numbers, which target_kl_stop and the adaptive schedules see. null: off."""
    noise_correlation: Annotated[float, Limit(ge=0, lt=1)] = option(
        0.0, mode="embodied", read_if=CONTINUOUS
    )
    """Correlation of the noise of neighbouring steps where an environment finds no reward: where
    all rewards of its last rollout are equal, and 0 or less. Noise that is independent in time
    cancels in the motion, so that a reward that few states have is not found. Gaussian actions
    only; the recorded log-probabilities are those of independent noise. An update whose rewards are
    all 0 trains the value only, and multiplies the policy's last layer by 0.99 (not that of
    initial_policy)."""
    symmetry: Literal["augment", "loss", "both"] | None = option(None, mode="embodied")
    """Learn that left and right of a robot are equal. The mirror image M is derived from the model
    and the task; more than 20 % of difference is refused (our own tasks with a free base). augment:
    learn from (s, a) and from (M s, M a), with the same advantage and return. loss: add
    symmetry_coef x |mean(M s) - M mean(s)|^2, averaged over the numbers of an action. null: off."""
    symmetry_coef: NonNegative = option(
        1.0, mode="embodied", read_if=equals("algorithm.symmetry", "loss", "both")
    )
    """Coefficient of the symmetry loss; 0 only measures policy/symmetry_error."""
    entropy_target: Annotated[float, Limit(le=50)] | None = option(None, read_if=ENTROPY)
    """Entropy, nats, aggregated as the loss, to which its coefficient adapts; null: constant."""
    loss_agg_func: Literal[
        "token-mean",
        "trajectory-mean",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ] = "token-mean"
    """Aggregation of per-sample losses to one number; seq-*: over columns
    (minibatch_unit=column). trajectory-mean: every episode of the rollout has the same weight in
    policy and value loss, whatever its length, and the denominator counts masked samples, too, as
    in RLinf without auto_reset (mode=embodied, env.restart_each_rollout=true)."""
    loss_scale_factor: Positive | None = option(
        None,
        read_if=ReadIf(
            f"algorithm.loss_agg_func (or critic.loss_agg_func) = {SUM_NORM}",
            lambda c: SUM_NORM in (c.algorithm.loss_agg_func, c.critic.loss_agg_func),
        ),
    )
    """Divisor of a column's sum in seq-mean-token-sum-norm; null: horizon, or response_length."""
    logprob_type: Literal["token_level", "action_level", "chunk_level"] = option(
        "action_level", mode="embodied"
    )
    """Granularity of the probability ratio: per action dimension, per action, or per chunk."""
    entropy_type: Literal["token_level", "action_level", "chunk_level"] = option(
        "action_level", mode="embodied"
    )
    """Granularity of the entropy: per action dimension, per action, or per chunk."""
    reward_type: Literal["action_level", "chunk_level", "chunk_sum"] = option(
        "chunk_level", mode="embodied"
    )
    """Granularity of rewards and advantages. chunk_level: a chunk of actions has one value and one
    reward, discounted by gamma per primitive step; chunk_sum: the same with the plain sum, as in
    RLinf; action_level: each action of a chunk has its own."""
    target_kl_stop: Positive | None = None
    """Mean approx_kl of an epoch, nats, above which an update skips further epochs; null: never."""
    use_kl_loss: bool = False
    """Add kl_loss_coef x KL(policy || reference) to the loss. Reference: the first policy; of a
    language model with adapters its base, without those of initial_policy or a clone."""
    kl_loss_coef: NonNegative = option(0.001, read_if=KL_LOSS)
    """Coefficient of the KL loss."""
    kl_loss_type: Literal["k1", "abs", "k2", "k3", "full", "k1+", "abs+", "k2+", "k3+"] = option(
        "k3", read_if=KL_LOSS
    )
    """KL estimator of the loss. Plain k1 is refused, because its expected gradient is zero."""
    use_kl_in_reward: bool = False
    """Subtract kl_ctrl.kl_coef x KL of each step from the reward."""
    kl_penalty: Literal["k1", "abs", "k2", "k3", "full"] = option("k1", read_if=KL_IN_REWARD)
    """KL estimator of the penalty in the reward."""
    kl_ctrl: KLControlConfig = section(KLControlConfig)
    """Coefficient of the KL penalty in the reward."""
    off_policy_correction: Literal["token", "sequence"] | None = None
    """Truncated importance weights for differences between the log-probabilities of the acting and
    the learning policy, where rollouts lag behind or another engine acts; null: off. Advantages of
    a robot's rollouts that lag behind use the values of the newest critic."""
    off_policy_cap: Positive = option(
        2.0, read_if=equals("algorithm.off_policy_correction", "token", "sequence")
    )
    """Upper bound of the importance weights."""
    # --- value loss
    value_clip: Positive | None = option(0.2, read_if=CRITIC_MODEL)
    """Clip range of the change of the value; null: no clipping."""
    huber_delta: Positive | None = option(10.0, read_if=CRITIC_MODEL)
    """Error up to which the value loss is quadratic, beyond it linear; null: always quadratic."""
    value_loss_coef: NonNegative = option(1.0, mode="embodied")
    """Coefficient of the value loss."""
    critic_warmup: Natural = option(0, read_if=CRITIC_MODEL)
    """Number of first updates in which only the critic is trained."""
    critic_warmup_variance: Annotated[float, Limit(gt=0, lt=1)] | None = option(
        None, read_if=(CRITIC_MODEL, positive("algorithm.critic_warmup"))
    )
    """Explained variance of new returns (value/explained_variance) that ends critic_warmup after
    its update. At the end of critic_warmup a checkpoint is saved, from which other runs can start
    (initial_policy). Needs gae_lambda_value=1. null: critic_warmup updates."""
    # --- optimiser
    lr: NonNegative = 3e-4
    """Learning rate of the policy (and of a shared trunk); 0: it is not trained."""
    value_lr: NonNegative | None = option(None, mode="embodied")
    """Learning rate of the value head (and of its own trunk); 0: it is not trained; null: lr."""
    lr_schedule: Literal["constant", "linear", "cosine", "adaptive"] = "constant"
    """Schedule of the learning rate. linear and cosine decay to lr_end x lr over the run (after
    lr_warmup); adaptive keeps approx_kl near desired_kl."""
    lr_end: Fraction = option(0.0, read_if=equals("algorithm.lr_schedule", "linear", "cosine"))
    """Final learning rate as a fraction of lr."""
    lr_warmup: Natural = 0
    """Number of first updates over which the learning rate rises linearly."""
    desired_kl: Positive = option(0.01, read_if=equals("algorithm.lr_schedule", "adaptive"))
    """Target of the adaptive schedule, approx_kl in nats."""
    max_grad_norm: Positive | None = 0.5
    """Global norm to which gradients are clipped; null: no clipping."""
    adam_betas: tuple[Annotated[float, Limit(ge=0, lt=1)], ...] = (0.9, 0.999)
    """Decays of AdamW's first and second moment. If they are equal, no step changes a weight by
    more than the learning rate, even where gradients were small for long."""
    adam_eps: Positive = 1e-5
    """Epsilon of AdamW."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of AdamW."""


SAMPLED = equals("evaluation.deterministic", False)
SAMPLED_TOKENS = (
    "evaluation.deterministic=false and a language model or vision-language-action model"
)
EVALUATED = positive("evaluation.episodes")
OWN_SIMULATORS = (EVALUATED, equals("evaluation.env", "own"))


@dataclass(frozen=True)
class EvaluationConfig:
    episodes: Natural = 10
    """Number of episodes of one evaluation (in reasoning: of held-out prompts, the first ones, or
    all where there are fewer). 0: no evaluation, no report, and no best checkpoint."""
    env: Literal["own", "training"] = option("own", mode="embodied", read_if=EVALUATED)
    """Simulators of an evaluation. own: a second set, which is built for each evaluation.
    training: those of the training, which start new episodes afterwards, so that a simulator that
    can exist only once in a process (Isaac Lab, a robot) is built once (docs/tasks.md)."""
    num_envs: Count = option(16, mode="embodied", read_if=OWN_SIMULATORS)
    """Number of environments that are evaluated together. It does not change results."""
    deterministic: bool = True
    """Act with the mode of the distribution (the most likely token); false: sample."""
    n: Small = option(1, mode="reasoning")
    """Number of responses to each prompt; with more than one, pass@k and maj@n are reported too."""
    temperature: Positive = option(
        1.0,
        read_if=(
            ReadIf(SAMPLED_TOKENS, SAMPLED.holds),
            ReadIf(SAMPLED_TOKENS, VLA.holds, mode="embodied"),
        ),
    )
    """Sampling temperature."""
    env_kwargs: dict[str, Any] = option({}, mode="embodied")
    """Changes to env.kwargs in all evaluations, such as episodic_life=false for Atari."""
    randomize: bool = option(False, mode="embodied", read_if=equals("env.randomize", True))
    """Evaluate with the domain randomisation of env.randomize; false: with the unchanged model."""
    video_episodes: Natural = option(0, mode="embodied", read_if=OWN_SIMULATORS)
    """Number of episodes that are recorded as an mp4 video."""


# ---------------------------------------------------------------------------------- language models


@dataclass(frozen=True)
class LanguageModelConfig:
    path: Text | None = None
    """Directory of a transformers model (config.json, weights, tokenizer); null: a new one."""
    architecture: dict[str, Any] = option({}, read_if=equals("actor.model.path", None))
    """Architecture of a new model: model_type and other fields of transformers' configuration."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of computations; trained weights, moments, log-probabilities and losses are float32."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: less memory, a third more time."""
    lora_rank: Annotated[int, Limit(ge=0, le=10**5)] = option(0, read_if=is_set("actor.model.path"))
    """Rank of low-rank adapters on the linear layers (Hu et al. 2021), scaled by 32 / lora_rank.
    All other weights stay frozen, those of these layers in the type dtype; actor, critic and
    reference of a process share them, and checkpoints contain no others. 0: none."""


@dataclass(frozen=True)
class ActorConfig:
    model: LanguageModelConfig = section(LanguageModelConfig)
    """The language model that is trained."""
    tokenizer: Text | None = option(None, read_if=FILES)
    """Directory of the tokenizer; null: model.path (data.task has one token per character)."""


CRITIC_FILES = ReadIf(
    "actor.model.path or critic.model.path",
    lambda c: c.actor.model.path is not None or c.critic.model.path is not None,
)


@dataclass(frozen=True)
class CriticModelConfig:
    path: Text | None = None
    """Directory of the critic's model, a second model with a value head; null: a copy of the actor.
    It computes in the type of actor.model.dtype and with actor.model.gradient_checkpointing."""
    lora_rank: Annotated[int, Limit(ge=0, le=10**5)] | None = option(
        None, read_if=(CRITIC_MODEL, CRITIC_FILES)
    )
    """Rank of adapters on the critic; 0: all weights learn; null: actor.model.lora_rank."""


@dataclass(frozen=True)
class CriticConfig:
    """The critic of a language model, which adv_type=gae trains.

    Options that are null have the value of the actor's option in section algorithm, as has
    everything that is not listed here. Its learning rate never adapts to the KL divergence:
    lr_schedule=adaptive is constant here.
    """

    model: CriticModelConfig = section(CriticModelConfig)
    loss_agg_func: (
        Literal[
            "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
        ]
        | None
    ) = None
    """Aggregation of the value losses; null: token-mean, whatever algorithm.loss_agg_func is."""
    update_epoch: Count | None = None
    """Number of passes over one rollout."""
    global_batch_size: Count | None = None
    """Number of prompts of one optimiser step."""
    lr: NonNegative | None = None
    """Learning rate; 0: the critic is not trained."""


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["builtin", "vllm"] = "builtin"
    """builtin shares the actor's weights; vllm needs CUDA and is installed separately."""
    gpu_memory_utilization: Annotated[float, Limit(gt=0, le=1)] = option(
        0.4, read_if=equals("rollout.engine", "vllm")
    )
    """Share of the GPU's memory that vLLM allocates for its copy of the weights and its cache."""
    temperature: Positive = 1.0
    """Sampling temperature: logits are divided by it, while sampling and while training."""
    stop: tuple[Text, ...] = ()
    """Texts that end a response, besides the end-of-sequence tokens of model and tokenizer."""
    oversampling: Annotated[float, Limit(ge=0, le=10)] = 0.0
    """Share of the prompts of a batch that are begun in addition. An update ends when its batch is
    complete; the other responses go on in the next with the newest weights (partial rollouts), and
    algorithm.off_policy_correction corrects for the older ones. 0: all responses are completed."""
    truncation: Literal["terminal", "drop"] = "terminal"
    """Response cut at response_length: terminal grades it as it is, drop omits it from the loss."""
    overlong_buffer: Natural = 0
    """Number of last tokens before response_length over which a penalty, which is subtracted
    from the score, rises linearly from 0 to 1 (DAPO); 0: no penalty."""
    dump: Literal["sample", "all"] | None = None
    """Write responses of each update and evaluation to RUN/generations as JSON lines, see
    ``embodied-ppo watch``: all, or as a sample those to the 8 first prompts; null: none."""


@dataclass(frozen=True)
class DataConfig:
    task: Literal["arithmetic", "scratchpad"] | None = None
    """A generated task, which needs no files; null: prompts come from files."""
    train: tuple[Text, ...] | dict[str, Weight] = option((), read_if=FILES)
    """Files of training prompts (.jsonl, .json, .parquet), or directories of .jsonl and .parquet,
    in one of these layouts: {prompt, answer}, GSM8K, verl. {FILE: weight} instead of a list: an
    epoch has each row weight times, a fraction at random."""
    eval: tuple[Text, ...] = option((), read_if=FILES)
    """Files of held-out prompts, as train."""
    prompt_key: Text | None = option(None, read_if=FILES)
    """Field of a row that contains the prompt; null: prompt or question."""
    answer_key: Text | None = option(None, read_if=FILES)
    """Field of the correct answer; null: reward_model.ground_truth, ground_truth or answer."""
    chat_template: Literal["auto", "always", "never"] = option("auto", read_if=FILES)
    """Whether prompts go through the tokenizer's chat template; auto: where there is one."""
    shuffle: bool | Literal["success"] = True
    """Draw a new order in each epoch; false: the order of the files; success: as true, with weights
    x 6 E[p (1 - p)] from the second epoch on, where p is the probability of a right response to the
    prompt (a new estimate in each epoch; earlier responses count half)."""


ONE_TERM = equals("reward.terms", {})


@dataclass(frozen=True)
class RewardModelConfig:
    path: Text | None = option(None, read_if=ONE_TERM)
    """Directory of a sequence classifier with one label, whose output is the reward; null: none."""


@dataclass(frozen=True)
class RewardTermConfig:
    """Entry of ``reward.terms``; the user chooses its name."""

    grader: Text | None = None
    """As reward.grader."""
    model: Text | None = None
    """Directory of a reward model, instead of a grader; as reward.model.path."""
    weight: float = 1.0
    """Factor of the score; 0: the term is measured only."""
    timeout_s: Positive | None = None
    """Time limit of one call with its retries, seconds; null: reward.timeout_s."""
    retries: Natural = 2
    """Number of times that a call of an async function that raises is repeated."""
    concurrency: Small = 64
    """Largest number of calls of an async function at the same time."""


@dataclass(frozen=True)
class RewardConfig:
    terms: dict[str, RewardTermConfig] = option({})
    """Parts of the reward by name, {correct: {grader: gsm8k_numeric}, style: {grader:
    FILE.py:style, weight: 0.2}}: the score is the sum of weight x score of each grader or model.
    The first term states which answers are correct. Curves reward/NAME are weight x score, as are
    the terms that algorithm.reward_groups can name. Entries are grader, model (a directory), weight
    (1; 0: measured only), timeout_s, and of async functions retries (2) and concurrency (64). {}:
    the reward is that of reward.grader."""
    grader: Text = option("auto", read_if=ONE_TERM)
    """A built-in grader (exact, gsm8k_strict, gsm8k_flexible, gsm8k_numeric, math_verify), or
    module:function or FILE.py:function with the signature of verl or TRL, which may be async; auto:
    that of data.task or of the data source. math_verify requires all \\boxed{} of a response to
    contain the correct answer, math_verify_last the last one, math_verify_any one of them."""
    workers: Annotated[int, Limit(ge=0, le=1024)] | None = None
    """Number of grading processes; 0: grade in the main process, except math_verify, which has at
    least one; null: 0 for the graders of synthetic tasks and for the other built-ins, else 2."""
    timeout_s: Positive = 10.0
    """Time limit of one call of a grader, seconds: of one response, or with the signature of TRL of
    all responses. A response whose grader exceeds it, or fails in another way, is counted and
    excluded from training and from all means."""
    model: RewardModelConfig = section(RewardModelConfig)
    """Reward model instead of the grader, which then only counts correct responses."""

    @property
    def all_terms(self) -> tuple[tuple[str, RewardTermConfig], ...]:
        """Name and options of each term; without ``terms`` they have no names."""
        if self.terms:
            return tuple(self.terms.items())
        grader = RewardTermConfig(self.grader, retries=0)
        if self.model.path is None:
            return (("", grader),)
        return ("", replace(grader, weight=0.0)), ("", RewardTermConfig(model=self.model.path))


@dataclass(frozen=True)
class WarmStartConfig:
    steps: Natural = option(0, read_if=is_set("data.task"))
    """Supervised steps before PPO on 128 demonstrations of data.task each, cached; 0: none."""


CLONING = positive("cloning.steps")


@dataclass(frozen=True)
class CloningConfig:
    steps: Natural = option(
        0,
        read_if=(
            ReadIf(VLA.text, VLA.holds, mode="embodied"),
            ReadIf(FILES.text, FILES.holds, mode="reasoning"),
        ),
    )
    """Number of supervised optimiser steps on demonstrations before PPO; 0: none. Of
    vision-language-action models, the result is cached on disk between runs. Language models learn
    the responses in the rows of data.train."""
    dataset: Text | None = option(None, mode="embodied", read_if=CLONING)
    """Demonstrations in LeRobot's layout (v2.0 to v3.0); null: record some of the task's expert."""
    episodes: Count = option(2000, mode="embodied", read_if=CLONING)
    """Number of demonstrations to learn from, the first ones of the data set."""
    exclude_episodes: tuple[Natural, ...] = option((), mode="embodied", read_if=CLONING)
    """Indices of demonstrations of the data set to leave out."""
    shuffle_buffer: Count | None = option(None, mode="embodied", read_if=CLONING)
    """Number of frames in memory, from which batches are drawn at random while the images of the
    other frames stay on disk; null: all frames, which must fit into half of the free memory."""
    fps_mismatch: Literal["refuse", "resample", "ignore"] = option(
        "refuse", mode="embodied", read_if=CLONING
    )
    """What to do if the data set has other actions per second than the task. resample: take the
    newest frame of each time, with its action as it is, which suits positions and velocities, but
    not changes of position; ignore: its frames are control steps of the task."""
    foresight_steps: Natural = option(400, mode="embodied", read_if=CLONING)
    """Number of auxiliary optimiser steps before cloning that predict the robot's future state and
    the final image of a demonstration (``imitation/behavior_cloning``)."""
    batch_size: Count = option(64, read_if=CLONING)
    """Number of frames, or responses, of one optimiser step."""
    lr: Positive = option(4e-3, read_if=CLONING)
    """Learning rate of the supervised steps; language models need another one, such as 1e-5."""


DISTILLING = ReadIf("embodied-ppo distill teacher=RUN", lambda c: c.teacher is not None)


@dataclass(frozen=True)
class DistillationConfig:
    """Options of ``embodied-ppo distill``, which reads them instead of PPO's options. It makes 4
    passes over each rollout, with the largest minibatches of at most 256 samples that divide it.
    The formulas are in ``imitation/distillation``."""

    loss: Literal["auto", "mse", "nll", "kl"] = "auto"
    """Loss of a labelled observation. mse: squared error of the student's mode, per action
    dimension; nll: negative log-likelihood of the teacher's action; kl: KL divergence of the
    student's distribution from the teacher's, which trains the standard deviation, too; auto: mse
    for continuous actions, kl for discrete ones."""
    teacher_share_updates: Natural = 10
    """Number of first updates over which the probability falls linearly from 1 to 0 that a step
    executes the teacher's action instead of the student's (beta of DAgger). 1: the teacher acts in
    the first rollout only; 0: the teacher never acts."""
    sample_actions: bool = False
    """Execute samples of the student's distribution; false: its mode."""
    lr: Positive = 1e-3
    """Learning rate of the actor; the critic is not trained."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate. linear and cosine decay to 0 over the run."""


# -------------------------------------------------------------------------------------------- a run
@dataclass(frozen=True)
class ClusterConfig:
    num_nodes: Annotated[int, Limit(ge=1, le=10**4)] = 1
    """Number of machines."""
    devices_per_node: Annotated[int, Limit(ge=0, le=1024)] = 0
    """Devices of each machine (GPUs; on CPU slots of processes); 0: as many as this machine has."""
    device_memory_gb: NonNegative = 0.0
    """Memory to plan with, of a GPU (CPU: of a machine), GB; 0: that of this machine."""
    node_groups: dict[str, Any] = field(default_factory=dict)
    """Labels of machines, {sim: 0, train: 1-2}. Ray's label node-group maps them to machines."""
    component_placement: dict[str, Any] = field(default_factory=dict)
    """Devices of each role, as RLinf writes it: {"env,rollout,actor": 0-3}. Joined roles share a
    process; entries with common devices time-share them; the others run concurrently. Devices are
    all, 2, 0-3, a list of these, 'first half', 'second half', or {devices: .., processes: n, node:
    label}. {}: the preset of option placement."""
    stages: Small = 1
    """Number of parts of the environments of a rollout process. While one part simulates, in
    another process or in EnvPool's threads, the policy acts for the next."""
    max_lag: Annotated[int, Limit(ge=0, le=1000)] = 0
    """Rollouts ahead of the updates; 0: strictly on-policy; more: needs separate actor devices."""
    shard: bool = False
    """Shard every parameter, gradient and optimiser state over the processes of actor (FSDP2), for
    models that do not fit on one device. A layer is gathered only while it computes."""
    step_timeout_s: Positive = 1800.0
    """Time limit of a process in one phase, s. The error names it and its last progress."""
    max_restarts: Natural = 0
    """How often a run that lost processes is rebuilt from its last checkpoint."""


@dataclass(frozen=True)
class Config:
    mode: Mode = "embodied"
    """embodied trains a robot policy, reasoning trains a language model."""
    placement: Literal["local", "fused", "colocated", "disaggregated", "hybrid", "pipelined"] = (
        "local"
    )
    """Placement of the roles. local: everything in this process. The others are processes of a Ray
    cluster, one per device. fused: all roles in each process; colocated: a process per role on
    every device, time-shared; disaggregated: acting on one half of the devices, learning on the
    other; hybrid: simulators on one half, rollout and actor on the other; pipelined: simulators on
    one half and rollout on the other, and actor on all, time-shared with both."""
    name: str = "custom"
    """Name of the run, whose directory is runs/NAME/<date>-<seed>."""
    description: str = ""
    """Description of the experiment in one line."""
    run_dir: Text | None = None
    """Directory of the run; null: runs/NAME/<date>-<seed>."""
    seed: Seed = 0
    """Seed of weights, actions, data order and environments."""
    updates: Count | None = None
    """Number of updates; null: as many as env_steps allows (reasoning needs a number)."""
    env_steps: Annotated[int, Limit(ge=1, le=10**15)] | None = option(1_000_000, mode="embodied")
    """Number of environment steps to train for (read where updates is null)."""
    resume: Text | None = None
    """Run to continue: auto is the newest of this name and seed; or a directory; null: none."""
    allow_changed_task: bool = option(False, read_if=is_set("resume"))
    """Resume although files of the user's task, of model.network or of graders differ from the
    checkpoint's."""
    initial_policy: Text | None = option(None, read_if=equals("resume", None, "auto"))
    """Run or checkpoint whose policy a new run starts from: weights and normalisers only (in
    reasoning those of the critic, too); counters, optimiser and simulators start anew. The network
    must be the same; null: new weights."""
    teacher: Text | None = option(None, mode="embodied")
    """Run or checkpoint of the teacher of ``embodied-ppo distill``; no other command reads it."""
    save_every: Natural = 50
    """Number of updates between checkpoints; 0: only at the end."""
    keep_last: Count = 3
    """Number of checkpoints that are kept in addition to the best one."""
    eval_every: Natural = option(0, read_if=EVALUATED)
    """Number of updates between evaluations; 0: only before and after training."""
    device: Text = "auto"
    """Device of policy and learner: auto, cpu, cuda, cuda:N."""
    threads: Threads = 1
    """Number of threads of one tensor operation; 0: torch's default."""
    compile: Literal["auto", "always", "never"] = "auto"
    """Run minibatches and acting as compiled code, 2 to 10 times faster for small networks. always:
    from the first update, which waits for the compiler (15 to 60 s the first time, then cached);
    auto: compile in the background and switch over after 4096 optimiser steps or 262144 samples,
    acting after twice as many (in reasoning never). Needs a C++ compiler."""
    deterministic: bool = False
    """Compute equal bits in each run with one seed on one GPU, a resumed run included, where its
    sums otherwise have no fixed order; it takes longer. A CPU computes equal bits anyway. The
    simulators of other packages (mjlab) are outside, and rollout.engine=vllm is refused."""
    pipeline: bool = option(False, mode="embodied")
    """Collect rollout k+1 in a second thread while the learner trains on rollout k, on two CPU
    cores. The policy that acts lags one update behind (rollout/version_lag 1), which
    algorithm.off_policy_correction=token corrects. Needs placement=local and a CPU."""
    trackers: tuple[Literal["wandb", "mlflow"], ...] = ()
    """Tracking tools that receive what TensorBoard receives: wandb (Weights & Biases), mlflow. Each
    needs the extra of its name, and is set up by its environment variables."""
    env: EnvConfig = section(EnvConfig, mode="embodied")
    model: ModelConfig = section(ModelConfig, mode="embodied")
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    evaluation: EvaluationConfig = section(EvaluationConfig)
    actor: ActorConfig = section(ActorConfig, mode="reasoning")
    critic: CriticConfig = section(CriticConfig, mode="reasoning", read_if=CRITIC_MODEL)
    rollout: RolloutConfig = section(RolloutConfig, mode="reasoning")
    data: DataConfig = section(DataConfig, mode="reasoning")
    reward: RewardConfig = section(RewardConfig, mode="reasoning")
    warm_start: WarmStartConfig = section(WarmStartConfig, mode="reasoning")
    cloning: CloningConfig = section(CloningConfig)
    distillation: DistillationConfig = section(
        DistillationConfig, mode="embodied", read_if=DISTILLING
    )
    cluster: ClusterConfig = section(ClusterConfig)


# -------------------------------------------------------------------------- other commands' options
WITH_VIDEO = equals("video", True)
WITH_SAMPLING = equals("deterministic", False)
WITH_ROBUSTNESS = equals("robustness", True)
RobustnessFactor: TypeAlias = Literal[
    "mass",
    "friction",
    "motor_strength",
    "action_delay",
    "obs_delay",
    "obs_noise",
    "obs_dropout",
    "push_velocity",
]


Perturbation: TypeAlias = Literal["wording", "camera", "light", "distractor", "position"]


@dataclass(frozen=True)
class EvaluateConfig:
    """Options of ``embodied-ppo evaluate``; the checkpoint decides which mode's options are
    read."""

    checkpoint: str = ""
    """A checkpoint directory, or a run (its latest checkpoint); required without model."""
    model: Text | None = option(None, mode="reasoning")
    """Directory of a transformers model, measured on data instead of a checkpoint."""
    episodes: Count = 100
    """Number of episodes, each with its own seed; of a language model of held-out prompts."""
    num_envs: Count = option(16, mode="embodied")
    """Number of environments that are evaluated together."""
    seed: Natural = 0
    """Seed of the initial states, 0 to 16383; different seeds and training share no episode."""
    deterministic: bool = True
    """Act with the mode of the distribution; false: sample."""
    video: bool = option(True, mode="embodied")
    """Record a few episodes as an mp4 video."""
    video_episodes: Natural = option(2, mode="embodied", read_if=WITH_VIDEO)
    """Number of recorded episodes; 0: no video."""
    robustness: bool = option(False, mode="embodied")
    """Also measure the policy in environments that differ from that of the training in one property
    at a time, and write robustness.json and a section of the report (docs/deploy.md)."""
    robustness_factors: tuple[RobustnessFactor, ...] = option(
        (), mode="embodied", read_if=WITH_ROBUSTNESS
    )
    """Properties that robustness changes; []: all that the simulator can change. mass, friction and
    motor_strength are factors of the model's values (tasks of this package); action_delay and
    obs_delay control steps; obs_noise a standard deviation in the unit of the observation;
    obs_dropout a probability; push_velocity m/s (tasks of this package)."""
    robustness_values: dict[str, Any] = option({}, mode="embodied", read_if=WITH_ROBUSTNESS)
    """Values of robustness_factors, {obs_noise: [0, 0.5, 1]}; others have standard values."""
    robustness_episodes: Count | None = option(None, mode="embodied", read_if=WITH_ROBUSTNESS)
    """Episodes at each value, with the first seeds, at most episodes; null: 20, or all if fewer."""
    paired: tuple[Perturbation, ...] = option((), mode="embodied")
    """Perturbations with which the same episodes are measured again; paired.json and the report get
    the difference of each with its interval (docs/deploy.md). wording: unseen words; distractor:
    other objects; position: blocks and zones up to twice as far from their cells (Tabletop).
    camera, light: moved and turned, brightness and colours (tasks of this package)."""
    out: Text | None = None
    """Directory of the report; null: reports/ of the run."""
    device: Text = "cpu"
    """Device of the policy: auto, cpu, cuda, cuda:N."""
    threads: Threads = 1
    """Number of threads of one tensor operation; 0: torch's default."""
    allow_changed_task: bool = option(False, mode="embodied")
    """Execute changed files of the user's task and of model.network; false: the run's copies."""
    env: dict[str, Any] = option({}, mode="embodied")
    """Changes to the environment of the training (``env.max_episode_steps=200``)."""
    data: tuple[Text, ...] = option((), mode="reasoning")
    """Language models: files of prompts instead of the run's data.eval."""
    grader: Text | None = option(None, mode="reasoning")
    """Language models: a grader, as reward.grader; null: that of the run, or auto with model."""
    n: Small = option(1, mode="reasoning")
    """Language models: responses to each prompt; more than one needs deterministic=false."""
    response_length: Annotated[int, Limit(ge=1, le=10**7)] | None = option(None, mode="reasoning")
    """Language models: maximum length of a response, tokens; null: as in training."""
    temperature: Positive = option(1.0, read_if=WITH_SAMPLING)
    """Sampling temperature of language models and of vision-language-action models."""
    top_k: Natural = option(0, mode="reasoning", read_if=WITH_SAMPLING)
    """Language models: sample from the k most likely tokens only; 0: from all."""
    top_p: Annotated[float, Limit(gt=0, le=1)] = option(
        1.0, mode="reasoning", read_if=WITH_SAMPLING
    )
    """Language models: sample from the likeliest tokens of this total probability; 1: from all."""


@dataclass(frozen=True)
class ExportConfig:
    """Options of ``embodied-ppo export``."""

    checkpoint: str = ""
    """A checkpoint, or its run directory (its latest checkpoint); required."""
    out: str = ""
    """New directory: a language model with its tokenizer, or a robot policy's bundle; required."""
    lora: Literal["merged", "adapter"] = "merged"
    """Models with adapters. merged: write the whole model with the adapters added. adapter: write
    only what was trained, in the layout of peft, for use with the model that it was trained on."""


@dataclass(frozen=True)
class DemosConfig:
    """Options of ``embodied-ppo demos``."""

    out: str = ""
    """Directory to record into, LeRobot v3.0; one that is unfinished is continued; required."""
    episodes: Count = 2000
    """Demonstrations that the directory will contain, with those that it contains already."""
    seed: Natural = 0
    """Seed of the initial states and the noise."""
    noise: Annotated[float, Limit(ge=0, lt=1)] = 0.05
    """Probability with which a step executes a random action instead of the expert's. The expert's
    action is recorded in any case, so that a clone learns to recover. 0: no random actions."""
    env: EnvConfig = section(EnvConfig)
    """Environment: id, kwargs, cameras, image_size, randomize and num_threads are read."""


# Commands with options of their own; the others read those of train.
OWN_OPTIONS = {"evaluate": EvaluateConfig, "demos": DemosConfig, "export": ExportConfig}
