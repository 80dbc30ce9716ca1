"""π0's and π0.5's published files: configuration, weights, statistics and tokenizer.

``read`` accepts the directories of transformers, of lerobot, and those that openpi's conversion to
torch writes (their keys lack lerobot's ``model.``). Published weights were not available:
everything is tested with synthetic directories of the published layout, and against lerobot with
random weights (``make test-lerobot``).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied_envs.base.errors import ConfigError, show
from embodied_ppo.options import openpi_configs
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies import checkpoint_files, peft_files
from embodied_ppo.policies.checkpoint_files import config_errors, import_transformers, read_json
from embodied_ppo.policies.vla import published_weights
from embodied_ppo.policies.vla.published_weights import TABLES, Patterns, load, patterns, substitute

# Tokens of a prompt after which lerobot and openpi cut it off, where config.json has no number.
MAX_WORDS = {"pi0": 48, "pi05": 200}
OPENPI_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
_WRIST = re.compile("wrist|hand|gripper", re.IGNORECASE)
# Values of lerobot's options that are read here.
SUPPORTED: dict[str, list[Any]] = TABLES["pi0"]["supported"]
# Values of lerobot's and openpi's options for the published sizes, the defaults of PI0Config.
VARIANTS = {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"}
PERIODS = ("min_period", "max_period")
# Fields that the config.json of lerobot and of transformers have in common.
SHARED_FIELDS = ("chunk_size", "max_state_dim", "max_action_dim", "num_inference_steps", *PERIODS)
# Largest accepted values of fields of config.json that are positive whole numbers.
LARGEST: dict[str, int] = TABLES["largest"]
# Fields of config.json that are objects.
SECTIONS = ("vlm_config", "dit_config", "normalization_mapping")
OPTIONAL = ("tokenizer_max_length", "normalization_mapping")  # fields that may be null

# Substitutions: a weight's name in published files or transformers -> that in ``pi0.PI0``.
PARAMETERS = patterns("pi0", "parameters")
# The expert embeds no words; some files lack its unused embeddings.
UNREAD = "expert.embed_tokens.weight"
# Substitutions that map names of ``pi0.PI0`` to those of the modules of lerobot's model.
MODULES = patterns("pi0", "modules")
TRANSFORMERS_MODULES = patterns("pi0", "transformers_modules")
OPENPI_MODULES: Patterns = (*MODULES, (r"^model\.", ""))


class Statistics(nn.Module):
    """Mean and standard deviation of a dataset, float32 [n], in its units.

    They are buffers that a checkpoint does not contain. A normalised mean is -``shift``.
    """

    def __init__(self, mean: Any, std: Any, shift: float = 0.0) -> None:
        """Convert lists or tensors of n numbers."""
        super().__init__()
        self.shift = shift
        numbers = (torch.as_tensor(x, dtype=torch.float32).flatten() for x in (mean, std))
        self.mean, self.std = (nn.Buffer(x, persistent=False) for x in numbers)

    @classmethod
    def from_quantiles(cls, low: Tensor, high: Tensor) -> Statistics:
        """Return the statistics that map the quantiles low [n] to -1, also where high is equal."""
        return cls(low, ((high - low) / 2).clamp(min=5e-9), shift=1.0)

    def normalize(self, x: Tensor) -> Tensor:
        """Return (x - mean) / (std + 1e-8) - shift, as lerobot; quantiles have no 1e-8."""
        return (x - self.mean) / (self.std + 1e-8 * (self.shift == 0)) - self.shift

    def denormalize(self, x: Tensor) -> Tensor:
        """Return (x + shift) std + mean."""
        return (x + self.shift) * self.std + self.mean

    def used_size(self) -> int:
        """Return the numbers before padding, which is always 0 in openpi's statistics."""
        used = ((self.mean.abs() > 1e-5) | (self.std > 1e-5)).nonzero()
        return int(used.max()) + 1 if len(used) else 0

    def first(self, n: int, name: str, label: str) -> Statistics:
        """Return the statistics of the first n numbers; the others are padding.

        Args:
            n: Numbers of the task.
            name: states or actions.
            label: Option and value, for messages.

        Raises:
            ConfigError: There are fewer numbers.
        """
        if len(self.mean) < n:
            raise ConfigError(
                f"{label}: its statistics of {name} have {len(self.mean)} numbers, the"
                f" task's {name} {n}; use a checkpoint of this robot, or a directory without"
                " statistics (model.normalize_obs then computes them)"
            )
        return Statistics(self.mean[:n], self.std[:n], self.shift)


@dataclass(frozen=True)
class Published:
    """Contents of a checkpoint directory.

    Attributes:
        model: transformers' PI0ForConditionalGeneration, or one with its attributes; float32.
        tokenize: Sentence -> ids, including begin of sequence and end of line; ``read`` returns a
            PromptTokenizer.
        state: Statistics of the state, None: the model uses the robot's units.
        action: Statistics of the actions, None: the model uses the robot's units.
        antialias: Whether images are filtered before they are reduced to the size of the model's;
            lerobot omits this.
        relative: Indices of the dimensions of an action that are relative to the state; None: the
            directory does not record them.
        discrete_state: Whether the prompt of π0.5 contains the state; None: the directory does not
            record it.
        names: Configurations of openpi that fit the directory, see ``openpi_configs``.
        cameras: Cameras of the training, in order; empty: not known.
        modules: Name in the policy -> name in the publisher's model. Keys of a file may differ,
            because the publisher's code renames keys of old files.
    """

    model: Any
    tokenize: Callable[[str], Sequence[int]]
    state: Statistics | None = None
    action: Statistics | None = None
    antialias: bool = True
    relative: tuple[int, ...] | None = ()
    discrete_state: bool | None = True
    names: Sequence[str] = ()
    cameras: Sequence[str] = ()
    modules: Patterns = MODULES


def targets_of(model: nn.Module, patterns: Patterns) -> published_weights.Targets:
    """Return the weights of a model by their names in the policy."""
    return {
        substitute(name, patterns): published_weights.PublishedTensor(tuple(x.shape), (x,))
        for name, x in model.state_dict().items()
    }


def rename(keys: Iterable[str]) -> dict[str, str]:
    """Return key of a file -> name of the parameter of ``pi0.PI0``.

    lerobot's first checkpoints hold the tied words as lm_head. Those of lerobot 0.5 and later hold
    both, of which only embed_tokens is trained and used. Statistics are no weights.
    """
    names = {key: substitute(key, PARAMETERS) for key in keys if "normalize_" not in key}
    others = {name for key, name in names.items() if "lm_head" not in key}
    return {key: name for key, name in names.items() if "lm_head" not in key or name not in others}


# ------------------------------------------------------------------------------------ configuration
def build_model(raw: Mapping[str, Any], folder: str | Path) -> Any:
    """Return the model of a config.json with new weights.

    Raises:
        ConfigError: config.json is damaged.
    """
    config = read_config(raw, folder)
    with config_errors(f"model.checkpoint={folder}: config.json is refused: "):
        return import_transformers("model.checkpoint").PI0ForConditionalGeneration(config)


def read_config(raw: Mapping[str, Any], folder: str | Path) -> Any:
    """Return transformers' PI0Config for the config.json of transformers, lerobot or openpi.

    Raises:
        ConfigError: It is damaged.
    """
    transformers, label = import_transformers("model.checkpoint"), f"model.checkpoint={folder}"
    check_numbers(raw, label)
    raw = dict(raw) | {name: float(raw[name]) for name in PERIODS if name in raw}
    with config_errors(f"{label}: config.json is refused: "):
        if raw.get("model_type") == "pi0":
            return transformers.PI0Config.from_dict(raw)
        for name, value in VARIANTS.items():
            checkpoint_files.check_supported(
                f"{label}: config.json has ", name, raw.get(name, value), value
            )
        fields = lerobot_fields(raw) if "type" in raw else openpi_fields(raw)
        # Sizes other than the published ones are in fields of our own.
        fields |= {name: raw[name] for name in ("vlm_config", "dit_config") if name in raw}
        config = transformers.PI0Config(**fields)
        if "vlm_config" not in fields:
            side = raw.get("image_resolution") or raw.get("resize_imgs_with_padding") or (224, 224)
            config.vlm_config.vision_config.image_size = side[0]
        return config


def check_numbers(raw: Mapping[str, Any], label: str, path: str = "") -> None:
    """Check the types and ranges of the fields of a config.json and of its sections.

    Args:
        raw: The config.json, or a section.
        label: Option and value, for messages.
        path: Path of the section, ending in a dot.

    Raises:
        ConfigError: A field has another type, or is out of range.
    """
    for name, x in raw.items():
        expected = ""
        if name in PERIODS:
            is_number = isinstance(x, int | float) and not isinstance(x, bool)
            expected = "" if is_number and 0 < x < math.inf else "a finite number > 0"
        elif name in SECTIONS:
            expected = "" if isinstance(x, dict) else "an object"
        elif limit := LARGEST.get(name):
            valid = type(x) is int and 1 <= x <= limit
            expected = "" if valid else f"a whole number >= 1 and <= {limit}"
        if expected and not (x is None and name in OPTIONAL):
            raise ConfigError(
                f"{label}: config.json has {path}{name}={show(x)}; it must be {expected}, download"
                " it again"
            )
        if isinstance(x, dict):
            check_numbers(x, label, f"{path}{name}.")


def lerobot_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of transformers for lerobot's config.json; missing ones are as
    published.
    """
    fields = {name: raw[name] for name in SHARED_FIELDS if name in raw}
    if "num_steps" in raw:  # lerobot before 0.4
        fields.setdefault("num_inference_steps", raw["num_steps"])
    return fields


def openpi_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of transformers for the config.json that openpi's conversion writes."""
    size, horizon = int(raw.get("action_dim", 32)), int(raw["action_horizon"])
    return {"chunk_size": horizon, "max_state_dim": size, "max_action_dim": size}


def _relative(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """Return the dimensions of actions that lerobot's config.json declares relative."""
    if not raw.get("use_relative_actions"):
        return ()
    with config_errors(f"model.checkpoint={folder}: use_relative_actions: ", kind=True):
        size = int((raw.get("output_features") or {})["action"]["shape"][0])
        names = [str(name).lower() for name in raw.get("action_feature_names") or ()]
        excluded = [str(x).lower() for x in raw.get("relative_exclude_joints") or () if x]
    absolute = {i for i, name in enumerate(names) if any(x in name for x in excluded)}
    return tuple(i for i in range(size) if i not in absolute)


def read(
    folder: str | Path,
    build_model: Callable[[Mapping[str, Any], Path], Any] = build_model,
    mode: str = "MEAN_STD",
) -> Published:
    """Read a checkpoint directory.

    Args:
        folder: The directory.
        build_model: Returns the model of its config.json with new weights.
        mode: Key of ENDS, for directories that name none.

    Raises:
        ConfigError: A file is missing, or the directory holds another kind of model.
    """
    from transformers.initialization import no_init_weights

    folder = Path(folder)
    kind, raw = published_weights.read_kind(folder, "flow")
    lerobot = "type" in raw
    for name, values in SUPPORTED.items() if lerobot else ():
        label = f"model.checkpoint={folder}: config.json has "
        checkpoint_files.check_supported(label, name, raw.get(name, values[0]), *values)

    def build() -> tuple[Any, published_weights.Targets]:
        with no_init_weights():
            model = build_model(raw, folder)
        return model, targets_of(model, PARAMETERS)

    words = raw.get("tokenizer_max_length") or MAX_WORDS[kind]
    published = Published(
        load(folder, build, rename, optional=(UNREAD,)),
        _tokenizer(folder, words, clean=not lerobot),
        *statistics(folder, raw, mode),
        antialias=not lerobot,
        modules=MODULES if lerobot else TRANSFORMERS_MODULES,
    )
    if lerobot:
        return replace(published, relative=_relative(raw, folder), cameras=camera_names(raw))
    if "model_type" in raw:
        return published
    files = sorted(folder.rglob("norm_stats.json"))
    asset = files[0].parent.name if files else None
    names = openpi_configs.candidates(kind, raw["action_horizon"], asset)
    unknown: dict[str, Any] = {"relative": None, "discrete_state": None, "names": names}
    return replace(published, modules=OPENPI_MODULES, **unknown)


def resolve(published: Published, kind: str, config: ModelConfig) -> Published:
    """Return ``published`` with ``relative`` and ``discrete_state`` known, by option or directory.

    Args:
        published: Contents of the directory.
        kind: pi0, pi05 or smolvla.
        config: Options of the section ``model``.

    Raises:
        ConfigError: An option does not fit the directory, or neither says how it was trained.
    """
    label, name = f"model.checkpoint={config.checkpoint}", config.config_name
    relative, state = config.delta_actions, config.discrete_state_input
    if state is not None and kind != "pi05":
        raise ConfigError(
            f"remove model.discrete_state_input={show(state)}: {label} holds {kind}, whose prompt"
            " never contains the state"
        )
    relative = published.relative if relative is None else relative
    state = published.discrete_state if state is None else state
    if name is None and relative is not None and (state is not None or kind != "pi05"):
        return replace(published, relative=relative, discrete_state=bool(state))
    names = [name] if name is not None else published.names
    found = [openpi_configs.find(x, kind, label) for x in names]
    if len({(c.delta, c.state) for c in found}) != 1:
        own = "model.delta_actions=[..]" + " model.discrete_state_input=.." * (kind == "pi05")
        raise ConfigError(
            f"write model.config_name=NAME, the configuration of openpi that trained the model"
            f" ({' or '.join(names) or 'none that is known fits'}), or {own} for one of your own:"
            f" {label} does not record"
            + (" whether the prompt contains the state, and" if kind == "pi05" else "")
            + " which actions are relative to the state"
        )
    return replace(
        published,
        relative=found[0].delta if relative is None else relative,
        discrete_state=found[0].state if state is None else state,
        cameras=OPENPI_CAMERAS[: found[0].images],
    )


def size_notice(
    published: Published, config: ModelConfig, cameras: Sequence[str], task: tuple[int, int]
) -> str | None:
    """Return a log line about inputs of the training that the task does not have, None: it has all.

    Args:
        published: Contents of the directory.
        config: Options of the section ``model``.
        cameras: The task's, in order.
        task: Numbers of a state and of an action of the task.
    """
    names = ("cameras", "numbers of a state", "numbers of an action")
    moments = (published.state, published.action)
    sizes = (len(published.cameras), *(0 if x is None else x.used_size() for x in moments))
    differences = [
        f"{size} {name} (here {here})"
        for name, size, here in zip(names, sizes, (len(cameras), *task), strict=True)
        if size not in (0, here)
    ]
    wrist = [[_WRIST.search(x) is not None for x in y] for y in (published.cameras, cameras)]
    if all(map(any, wrist)) and any(map(operator.ne, *wrist)):
        order = [", ".join(x) for x in (published.cameras, cameras)]
        differences.append(f"the cameras {order[0]} in this order (here {order[1]})")
    if not differences:
        return None
    return (
        "set env.cameras, or use a task of its robot, if success is low:"
        f" model.checkpoint={config.checkpoint} was trained with {', '.join(differences)}"
    )


def camera_names(raw: Mapping[str, Any]) -> list[str]:
    """Return the cameras in lerobot's config.json, in order."""
    names = [str(name) for name in raw.get("input_features") or ()]
    return [x.rpartition(".")[2] for x in names if ".image" in x and "empty_camera" not in x]


# ---------------------------------------------------------------------------------------- tokenizer
class PromptTokenizer:
    """Tokenizer in π0's format: begin of sequence, sentence, end of line.

    ``prompt`` is the beginning of π0.5's format. The ids of the state follow it.
    """

    def __init__(self, tokenizer: Any, words: int, *, clean: bool) -> None:
        """Wrap a tokenizer.

        Args:
            tokenizer: PaliGemma's.
            words: Number of tokens after which a prompt of π0 is cut off.
            clean: Replace underscores and ends of lines in the sentence, as openpi; lerobot does
                not.
        """
        self.tokenizer, self.words, self.clean = tokenizer, words, clean

    def __call__(self, sentence: str) -> list[int]:
        if self.clean:
            sentence = _clean(sentence)
        ids = self.ids(sentence.removesuffix("\n") + "\n")
        return [self.tokenizer.bos_token_id, *ids][: self.words]

    def prompt(self, sentence: str) -> list[int]:
        """Return begin of sequence and the words before the state."""
        return [self.tokenizer.bos_token_id, *self.ids(f"Task: {_clean(sentence)}, State:")]

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text, without begin of sequence."""
        return self.tokenizer(text, add_special_tokens=False).input_ids


def _clean(sentence: str) -> str:
    """Replace underscores and line breaks of a sentence by spaces, as openpi."""
    return sentence.strip().replace("_", " ").replace("\n", " ")


def _tokenizer(folder: Path, words: int, *, clean: bool) -> PromptTokenizer:
    """Load the tokenizer; see ``PromptTokenizer``."""
    file = peft_files.locate(folder, "tokenizer.json")
    tokenizer = checkpoint_files.load_tokenizer(file.parent, "google/paligemma-3b-pt-224")
    if tokenizer.bos_token_id is None:
        raise ConfigError(
            f"model.checkpoint={folder}: its tokenizer has no begin of sequence; use PaliGemma's"
        )
    return PromptTokenizer(tokenizer, words, clean=clean)


# --------------------------------------------------------------------------------------- statistics
# normalization_mapping -> statistics that it uses; QUANTILES maps q01 to -1 and q99 to 1.
ENDS = {"MEAN_STD": ("mean", "std"), "QUANTILES": ("q01", "q99"), "IDENTITY": ()}
OPENPI_MARGIN = 1e-6  # number that openpi adds to deviations and to q99, also when it denormalises


def statistics(
    folder: Path, raw: Mapping[str, Any], default: str
) -> tuple[Statistics | None, Statistics | None]:
    """Return the statistics of states and actions, None where the directory has none.

    transformers stores them in processor_config.json, openpi in norm_stats.json, lerobot in
    *normalizer_processor.safetensors (0.4 and later) or as buffers among the weights.

    Args:
        folder: Checkpoint directory.
        raw: Its config.json.
        default: Key of ENDS that is used without lerobot's normalization_mapping.

    Raises:
        ConfigError: A file is damaged, or uses another normalisation.
    """
    modes, label = raw.get("normalization_mapping") or {}, f"model.checkpoint={folder}"
    found: list[Statistics | None] = []
    for name in ("state", "action"):
        mode = modes.get(name.upper(), default)
        if mode not in ENDS:
            raise ConfigError(
                f"{label}: normalization_mapping.{name.upper()}={mode}; supported are"
                f" {', '.join(ENDS)}"
            )
        folders = dict.fromkeys((folder, peft_files.base_folder(folder))) if ENDS[mode] else ()
        pairs = (_statistics(x, name, mode) for x in folders)
        found.append(next((pair for pair in pairs if pair is not None), None))
    return found[0], found[1]


def _statistics(folder: Path, name: str, mode: str) -> Statistics | None:
    """Search the files that may hold the statistics of ``name`` (state or action)."""
    ends, label = ENDS[mode], f"model.checkpoint={folder}"
    key = {"state": "state", "action": "actions"}[name]
    processor, margin = folder / "processor_config.json", 0.0
    file, pair = processor, [None, None]
    if processor.is_file() and mode == "MEAN_STD":
        options = read_json(processor, label, "")
        pair = [options.get(f"{key}_{end}") for end in ends]
    if None in pair:
        files = sorted(folder.rglob("norm_stats.json"))
        if len(files) > 1:
            raise ConfigError(
                f"{label}: holds statistics of {len(files)} robots"
                f" ({', '.join(file.parent.name for file in files)}); keep one norm_stats.json"
            )
        if files:
            file, margin = files[0], OPENPI_MARGIN
            stats = read_json(file, label, "")
            stats = stats.get("norm_stats", stats)
            if isinstance(stats, dict) and stats.get(key) is None:
                return None
            with config_errors(f"{label}: {file.name} cannot be read: ", kind=True):
                pair = [stats[key][end] for end in ends]
        else:
            file, pair = _lerobot_pair(folder, name, mode)
            if file is None:
                return None
    low, high = _check_pair(pair, file, name, ends)
    build = Statistics.from_quantiles if mode == "QUANTILES" else Statistics
    return build(low, high + margin)


def _lerobot_pair(folder: Path, name: str, mode: str) -> tuple[Path | None, list[Any]]:
    """Return a file of lerobot and the two statistics of states or actions in it, if it has them.

    Their keys are action.mean or, among the weights, normalize_targets.buffer_action.mean.
    """
    from safetensors import safe_open

    feature = {"state": "observation.state", "action": "action"}[name]
    first, second = ENDS[mode]
    files = [*folder.glob("*normalizer_processor.safetensors"), *folder.glob("model*.safetensors")]
    headers = published_weights.read_headers(files)
    tail = f"buffer_{feature.replace('.', '_')}.{first}"
    for key in sorted(k for k in headers if k == f"{feature}.{first}" or k.endswith(tail)):
        other = key.removesuffix(first) + second
        if other in headers:
            with safe_open(headers[key].file, framework="pt") as f:
                pair = [f.get_tensor(x) for x in (key, other)]
            # Buffers are infinite until filled.
            if not all(bool(x.isinf().all()) for x in pair):
                return headers[key].file, pair
    given = sorted(key for key in headers if key.startswith(f"{feature}."))
    if given and not {f"{feature}.{first}", f"{feature}.{second}"} <= headers.keys():
        raise ConfigError(
            f"model.checkpoint={folder}: its statistics of {name}s are {', '.join(given)}, but"
            f" normalization_mapping.{name.upper()}={mode} needs {first} and {second}; download the"
            " files of one model"
        )
    return None, []


def _check_pair(
    pair: Sequence[Any], file: Path, name: str, ends: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Return two lists of statistics as float64 tensors of one length.

    Raises:
        ConfigError: They are damaged.
    """
    label = f"model.checkpoint={file.parent}: statistics of {name}s in {file.name}: "
    with config_errors(label, "; download it again"):
        a, b = (torch.as_tensor(x, dtype=torch.float64).flatten() for x in pair)
        if not len(a) or len(a) != len(b):
            raise ValueError(f"{len(a)} numbers {ends[0]} and {len(b)} {ends[1]}")
        if not (a.isfinite().all() and b.isfinite().all()):
            raise ValueError("they are not finite")
        if (b < (a if ends[1] == "q99" else 0)).any():
            raise ValueError(f"{ends[1]} is below {'q01' if ends[1] == 'q99' else '0'}")
    return a, b
