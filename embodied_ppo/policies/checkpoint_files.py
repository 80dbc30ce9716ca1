"""Reading checkpoint directories of other publishers, including damaged ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from embodied_envs.base.errors import ConfigError, one_line, shorten, show
from embodied_ppo.core import guarded_files

# Arguments of ``from_pretrained``: never download files or run code of a checkpoint.
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
# The same for weights: safetensors, or without them files of ``torch.save`` (``.bin``), of which
# tensors and plain values are read; a pickle that would run code is refused.
LOCAL_WEIGHTS = LOCAL | {"weights_only": True}


@contextlib.contextmanager
def config_errors(before: str, after: str = "", *, kind: bool = False) -> Iterator[None]:
    """Convert exceptions of transformers and tokenizers to ConfigError.

    Out-of-memory errors are not converted.

    Args:
        before: Text before the exception's message.
        after: Text after it.
        kind: Include the exception's type, see ``one_line``.
    """
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError):
        raise
    # The libraries do not document their exceptions. 400 invalid configurations raised
    # RuntimeError, AttributeError, KeyError, ZeroDivisionError and two classes of huggingface_hub;
    # safetensors has its own class, tokenizers raises Exception itself, and a chat template can
    # raise anything.
    except Exception as error:
        raise ConfigError(f"{before}{one_line(error, kind=kind)}{after}") from error


TRANSFORMERS = (5, 23)  # first version of transformers that has all models which are read


def import_transformers(purpose: str, extra: str = "vla") -> Any:
    """Return the module transformers, with its progress bars switched off.

    Args:
        purpose: What needs it, for the message.
        extra: Extra of embodied-ppo that installs it.

    Raises:
        ConfigError: It is missing or too old.
    """
    needed = f"{purpose} needs transformers {'.'.join(map(str, TRANSFORMERS))} or later"
    try:
        import transformers
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError(f"{needed} ({error}): pip install 'embodied-ppo[{extra}]'") from error
    version = transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < TRANSFORMERS:
        raise ConfigError(f"{needed}, not {version}: pip install 'embodied-ppo[{extra}]'")
    logging.disable_progress_bar()
    return transformers


def load_tokenizer(folder: Path, owner: str) -> Any:
    """Return the tokenizer of a directory, loaded by transformers.

    Args:
        folder: The directory.
        owner: Published model with this tokenizer, for the message.

    Raises:
        ConfigError: The directory has none, or it is damaged.
    """
    label = f"model.checkpoint={folder}"
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in names):
        raise ConfigError(
            f"{label}: holds no tokenizer; copy tokenizer.json and tokenizer_config.json of {owner}"
            " into it"
        )
    if not (folder / "tokenizer.json").is_file() and (folder / "tokenizer.model").is_file():
        return SentencePiece(folder)
    transformers = import_transformers("model.checkpoint")
    with config_errors(f"{label}: its tokenizer cannot be read: "):
        return transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)


class SentencePiece:
    """Tokenizer of a directory's tokenizer.model, with what policies read of transformers'."""

    def __init__(self, folder: Path) -> None:
        """Read the file.

        Raises:
            ConfigError: The package sentencepiece is missing, or the file is damaged.
        """
        label = f"model.checkpoint={folder}"
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise ConfigError(
                f"{label}: pip install 'embodied-ppo[vla]', or copy tokenizer.json into it: its"
                f" tokenizer.model needs the package sentencepiece ({error})"
            ) from error
        with config_errors(f"{label}: tokenizer.model cannot be read (", "); download it again"):
            self.model: Any = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        self.bos_token_id: int | None = self.model.bos_id() if self.model.bos_id() >= 0 else None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> SimpleNamespace:
        """Return the ids of a text as ``input_ids``, by default after begin of sequence."""
        return SimpleNamespace(input_ids=self.model.encode(text, add_bos=add_special_tokens))


def check_finite(tensors: Iterable[tuple[str, Tensor]], label: str) -> None:
    """Check that weights contain neither NaN nor infinity.

    Args:
        tensors: Published names and weights; tensors on the device meta are not read.
        label: Option and value, for messages; "" if the caller adds it.

    Raises:
        ConfigError: A weight is not finite.
    """
    for name, x in tensors:
        if not x.is_floating_point() or x.is_meta or not x.numel():
            continue
        # Unlike ``isfinite().all()`` this allocates no mask; NaN is the result of both extremes.
        if not all(math.isfinite(float(extreme)) for extreme in x.detach().aminmax()):
            before = f"{label}: " if label else ""
            hint = f"{before}the weight {name} contains NaN or infinity; download it again"
            raise ConfigError(f"{hint}, or use a checkpoint of a run that has not diverged")


def check_supported(label: str, name: str, value: Any, *supported: Any) -> None:
    """Check a field of a configuration.

    Args:
        label: Beginning of the message.
        name: Name of the field.
        value: Its value.
        supported: Supported values, the default first.

    Raises:
        ConfigError: The value is none of them.
    """
    if value not in supported:
        raise ConfigError(f"{label}{name}={show(value)}; supported is {name}={show(supported[0])}")


def copy_permissions(folder: str | Path) -> None:
    """Give safetensors files the permissions of a JSON file beside them.

    safetensors writes files that only their owner may read.
    """
    mode = next(Path(folder).glob("*.json")).stat().st_mode & 0o777
    for file in Path(folder).glob("*.safetensors"):
        file.chmod(mode)


def read_json(file: Path, label: str, hint: str) -> dict[str, Any]:
    """Read a file with one JSON object.

    Args:
        file: The file.
        label: Option and value, for messages; "" if the caller adds it.
        hint: Advice on which directory to name instead.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    label = f"{label}: " if label else ""
    if not file.is_file():
        problem = f"holds no {file.name}" if file.parent.is_dir() else "there is no such directory"
        raise ConfigError(f"{label}{problem}; {hint}")
    try:
        return guarded_files.read_object(file)
    except (ValueError, OSError) as error:
        cause = shorten(one_line(error, kind=True), 100)
        raise ConfigError(
            f"{label}{file.name} cannot be read ({cause}); download it again"
        ) from error


def pad_left(rows: Sequence[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Pad rows of token ids on the left.

    Returns:
        int64 ids [B, L], and bool mask [B, L] of the tokens that are not padding.
    """
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    padding = torch.tensor([width - len(row) for row in rows])
    return ids, torch.arange(width) >= padding.unsqueeze(1)
