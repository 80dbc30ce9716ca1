"""Test every reader of untrusted input with generated and damaged input (docs/security.md).

    python scripts/fuzz.py [TARGET ...] [--inputs N] [--seed N]     all targets: over 100,000 inputs
    python scripts/fuzz.py TARGET --atheris [SECONDS]               guided by coverage (atheris)

Only the errors that a target declares may be raised; any other ends the run with the number of the
input, the input and a traceback. An input is a function of a random.Random: numbered here, chosen
by hypothesis in tests/scripts/test_fuzz.py, which also shrinks failing inputs, or by atheris.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import io
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from copy import deepcopy
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, get_args, get_origin

import numpy as np
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from embodied_ppo.commands import main as cli
from embodied_ppo.config import compose, readers, validation
from embodied_ppo.config import loader as strict
from embodied_ppo.config import placement as plan
from embodied_ppo.config.schema import (
    OWN_OPTIONS,
    BenchmarkConfig,
    Config,
    DemosConfig,
    EvaluateConfig,
    ExportConfig,
)
from embodied_ppo.core.errors import (
    LONGEST_LINE,
    CheckpointError,
    ConfigError,
    EnvError,
    PlacementError,
    ProcessLost,
    one_line,
    shorten,
)
from embodied_ppo.data import lerobot_reader, prompts
from embodied_ppo.placement import channels
from embodied_ppo.placement.channels import (
    HELLO,
    PREFIX,
    Connection,
    Exchange,
    Message,
    connect,
    pack,
)
from embodied_ppo.training import checkpoint, run_directory


@dataclass(frozen=True)
class Target:
    """A reader of untrusted input.

    Attributes:
        make: Generates an input.
        run: Reads an input.
        errors: Declared errors.
        count: Number of inputs of a long run.
        every: All possible inputs, which a long run uses instead of ``count`` random ones.
    """

    make: Callable[[Random], Any]
    run: Callable[[Any], object]
    errors: tuple[type[Exception], ...]
    count: int
    every: Callable[[], Sequence[Any]] | None = None


# ------------------------------------------------------------------------------------------- inputs
ODD = [
    None,
    True,
    False,
    0,
    -1,
    1 << 70,
    0.5,
    float("inf"),
    float("nan"),
    "",
    "???",
    "null",
    "all",
    "0-3",
    "1:30",
    "../x",
]
ODD += [
    "/etc/passwd",
    "{",
    "${seed}",
    "${oc.env:HOME}",
    "a\0b",
    "\ud800",
    "1e400",
    "9" * 5000,
    [],
    {},
    [[]],
    {"": None},
]


LETTERS = "abz_.:,-=+~'\"{}[]()$#&*!|>%@\\/ \t\n019eE\0\x85é中\ud800🙂"


def text(r: Random, most: int = 8) -> str:
    return "".join(r.choice(LETTERS) for _ in range(r.randrange(most + 1)))


def junk(r: Random, depth: int = 2) -> Any:
    """Return any value that YAML or JSON can contain."""
    kind = r.randrange(12 if depth else 8)
    if kind < 3:
        return deepcopy(r.choice(ODD))
    if kind == 3:
        return r.randint(-9, 9) * 10 ** r.choice((0, 0, 1, 4, 20))
    if kind == 4:
        return r.uniform(-2, 2) * 10.0 ** r.choice((0, 0, -9, 9, 300))
    if kind == 5:
        return r.choice((b"", b"\xff\0", date(1, 1, 1), date(9999, 12, 31)))
    if kind < 8:
        return text(r)
    if kind < 10:
        return [junk(r, depth - 1) for _ in range(r.randrange(4))]
    return {
        r.choice((text(r, 3), text(r, 3), 1, None)): junk(r, depth - 1)
        for _ in range(r.randrange(4))
    }


Changes = list[tuple[float, str, bytes]]


def changes(r: Random) -> Changes:
    """Return changes of bytes: position (relative to the length), operation and new bytes."""
    hows = ("set", "set", "set", "insert", "delete", "cut", "repeat")
    return [
        (r.random(), r.choice(hows), bytes(r.randrange(256) for _ in range(r.randint(1, 4))))
        for _ in range(r.randint(1, 5))
    ]


def damaged(data: bytes, changes: Changes) -> bytes:
    """Return ``data`` after ``changes``."""
    x = bytearray(data)
    for part, operation, new in changes:
        at = int(part * len(x))
        if operation == "set":
            x[at : at + len(new)] = new
        elif operation == "insert":
            x[at:at] = new
        elif operation == "delete":
            del x[at : at + len(new)]
        elif operation == "repeat":
            x[at:at] = x[at : at + 64 * len(new)]
        else:
            del x[at:]
    return bytes(x)


Edits = list[tuple[int, str, Any]]


def edited(tree: Any, edits: Edits) -> Any:
    """Return JSON after edits: the n-th value is replaced, deleted or repeated."""
    tree = json.loads(json.dumps(tree))
    for number, operation, value in edits:
        places = list(_places(tree))
        if not places:
            break
        node, key = places[number % len(places)]
        if operation == "set":
            node[key] = deepcopy(value)
        elif operation == "delete":
            del node[key]
        elif isinstance(node, list):
            node.append(deepcopy(node[key]))
        else:
            node[f"{key}2"] = deepcopy(node[key])
    return tree


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    for key in (
        list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    ):
        yield node, key
        yield from _places(node[key])


def edits(r: Random) -> Edits:
    hows = ("set", "set", "set", "delete", "repeat")
    return [(r.randrange(200), r.choice(hows), junk(r)) for _ in range(r.randint(1, 3))]


def as_json(value: Any) -> bytes:
    return json.dumps(value, default=str).encode()


def _scratch() -> Path:
    """Return the temporary folder of this process."""
    return Path(_folder().name)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(
        prefix="embodied_ppo_fuzz_", dir=memory if os.access(memory, os.W_OK) else None
    )


# ------------------------------------------------------------------------------------------- config
CONFIGS = (Config, EvaluateConfig, DemosConfig, ExportConfig, BenchmarkConfig)


@cache
def _paths() -> dict[str, list[Any]]:
    """Return for each option its default, its choices and unusual values."""
    values: dict[str, list[Any]] = {}
    for cls in CONFIGS:
        for path, option in strict.describe(cls).items():
            words = [x.strip() for x in option.type.removeprefix("one of ").split(",")]
            values[path] = [option.default, *words]
        values |= {path: [1, 0.5, True, "auto"] for path in strict.alias_paths(cls)}
    return values


def config_inputs(r: Random) -> tuple[Any, list[tuple[str, Any]], bool]:
    def option() -> tuple[str, Any]:
        path = r.choice(_names())
        if r.random() < 0.2:
            return r.choice((path.partition(".")[0], path + text(r, 2), text(r))), junk(r)
        return path, r.choice(_paths()[path]) if r.random() < 0.6 else junk(r)

    return r.choice(CONFIGS), [option() for _ in range(r.randrange(6))], r.random() < 0.5


@cache
def _names() -> list[str]:
    return sorted(_paths())


def config_run(case: tuple[Any, list[tuple[str, Any]], bool]) -> None:
    cls, options, nested = case
    tree: dict[Any, Any] = {}
    for path, value in options:
        node, parts = tree, path.split(".") if nested else [path]
        for part in parts[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                return
        node[parts[-1]] = value
    config = strict.load(cls, tree, source="fuzz")
    assert strict.read(cls, [("", strict.dump(config))]).config == config


SCRAPS = [
    "&a ",
    "*a",
    "<<: ",
    "!!int ",
    "!!bool x",
    "!!timestamp 1",
    "2000-99-99",
    "[",
    "{",
    "? ",
    "- ",
    ": ",
    "!!set ",
]
SCRAPS += [
    "\t",
    "\n",
    "seed: ",
    "env: ",
    "--- ",
    "'",
    '"',
    "| ",
    "%",
    "!!python/object/apply:os.system [x]",
    "0b",
    "1:99",
]


@cache
def _dumped() -> bytes:
    return yaml.safe_dump(strict.dump(Config())).encode()


def yaml_inputs(r: Random) -> str:
    kind = r.randrange(200)
    if kind == 0:
        return "{a: " + "[" * r.randrange(3000)
    if kind < 150:
        return "".join(
            r.choice(SCRAPS) if r.random() < 0.7 else text(r, 4) for _ in range(r.randrange(12))
        )
    text_bytes = _dumped()
    start = r.randrange(len(text_bytes))
    return damaged(text_bytes[start : start + 400], changes(r)).decode(errors="replace")


def yaml_run(text: str) -> None:
    tree = strict.plain_yaml(text)
    if isinstance(tree, dict):
        strict.load(Config, tree)


# ------------------------------------------------------------------------------------- command line
def line_inputs(r: Random) -> list[str]:
    return [_line(r) for _ in range(r.randint(1, 3))]


def _line(r: Random) -> str:
    if r.random() < 0.2:
        return text(r, 12)
    name = (
        r.choice(("experiment", "model", "env", "placement", "x"))
        if r.random() < 0.2
        else r.choice(_names())
    )
    value = r.choice(
        (
            "[",
            "{a: 1}",
            "1,2",
            "'",
            '{"a,b": [0]}',
            "${",
            "${seed}",
            "null",
            "",
            text(r, 10),
            str(junk(r)),
        )
    )
    return f"{r.choice(('', '', '', '+', '++', '~', 'hydra.'))}{name}={value}"


@cache
def _loader() -> Any:
    return compose.loader_of(cli.parse_arguments(["train"]))[0]


def line_run(lines: list[str]) -> None:
    """Hydra's grammar and our checks around it; nothing is composed."""
    compose.parse([compose.quoted(x) for x in lines], _loader())


def command_inputs(r: Random) -> tuple[str, list[str]]:
    words = ("config", "plan", "--only", "--json", "--quiet", "-m", "train", "--config-name")
    return r.choice(("config", "plan")), [
        r.choice(words) if r.random() < 0.2 else _line(r) for _ in range(r.randrange(4))
    ]


def command_run(case: tuple[str, list[str]]) -> None:
    """Return a command that starts nothing."""
    stderr = io.StringIO()
    with redirect_stderr(stderr), open(os.devnull, "w") as nowhere:
        shown, sys.stdout = sys.stdout, nowhere
        try:
            code = cli.main([case[0], *case[1]])
        finally:
            sys.stdout = shown
    assert code in (0, cli.REFUSED), f"exit code {code}: {stderr.getvalue()[-1500:]}"
    assert code == 0 or stderr.getvalue().splitlines()[-1].startswith("error: "), stderr.getvalue()


# ------------------------------------------------------------------------------------------ options
TYPES = [
    "null",
    "true",
    "-1",
    "0",
    "1",
    "2",
    "0.5",
    "7e300",
    "1e400",
    "nan",
    "-inf",
    "x",
    "''",
    "[]",
    "[1]",
    "[x]",
    "[[]]",
    "[null]",
    "{}",
    "{a:1}",
    "{a:[]}",
    "0-3",
    "???",
]
TYPES += [str(10**18), "9" * 4000, "x" * 4000, "[" + ",".join("1" * 400) + "]"]
INTERPOLATIONS = [
    "${seed}",
    "${name}",
    "${env}",
    "${nothing.there}",
    "x${seed}y",
    "[${seed},${nothing}]",
    "{a:${nothing}}",
    "${oc.env:NO_SUCH_VARIABLE}",
    "${no_such_resolver:1}",
    "${",
    "'${'",
    "'${nothing'",
]
SECONDS = 3.0
"""Longest time of a refusal, CPU seconds."""
BASES = {
    "embodied": ("train", ["experiment=quickstart"]),
    "reasoning": ("train", ["mode=reasoning"]),
    "evaluate": ("evaluate", ["checkpoint=x"]),
    "demos": ("demos", ["out=x", "experiment=tabletop_token"]),
    "export": ("export", ["checkpoint=x", "out=x"]),
    "benchmark": ("benchmark", ["out=x"]),
}
"""Name -> the command and the arguments that an option is added to."""


@cache
def every_option() -> list[tuple[str, str, str]]:
    """(base, option, value) for every option of every command: types, bounds and interpolations."""
    cases: list[tuple[str, str, str]] = []
    for cls, command in zip(CONFIGS, ("", "evaluate", "demos", "export", "benchmark"), strict=True):
        for path, option in strict.describe(cls).items():
            values = [*TYPES, *INTERPOLATIONS, f"${{{path}}}", *_bounds(option.hint)]
            base = command or readers.mode_of(path) or "embodied"
            cases += [(base, path, value) for value in dict.fromkeys(values)]
    return cases


def _bounds(hint: Any) -> list[str]:
    """The bounds of a number and the values next to them; the choices of a Literal."""
    if get_origin(hint) is Annotated:
        kind, *limits = get_args(hint)
        bounds = [x for limit in limits for x in vars(limit).values() if x is not None]
        step = 1 if kind is int else 1e-9
        return [str(bound + side * step) for bound in bounds for side in (-1, 0, 1)]
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    return [value for inner in get_args(hint) for value in _bounds(inner)]


@cache
def _base(name: str) -> tuple[Any, Any, Any, list[tuple[str, Any]]]:
    """Arguments, loader, options' class and layers of a base."""
    command, channels = BASES[name]
    args = cli.parse_arguments([command])
    cls = OWN_OPTIONS.get(command, Config)
    defaults = strict.dump(Config()) | strict.dump(cls())
    nodes = [node for _, node in compose._layers(args, channels, defaults, compose.FLAGS)]
    merged = OmegaConf.merge(OmegaConf.create(defaults if cls is Config else {}), *nodes)
    layers = [(f"{strict.SHIPPED}{name}", merged)]  # one layer: merging all of them takes 40 ms
    return args, compose.loader_of(args)[0], cls, layers


def option_run(case: tuple[str, str, str]) -> None:
    """One option of one command: refused in one short line that names it, soon, or accepted."""
    base, path, value = case
    args, loader, cls, layers = _base(base)
    line, begin = f"{path}={value}", time.process_time()
    try:
        if loader.repository.group_exists(path):
            compose.prepare(args, [*BASES[base][1], line])
        else:
            flags = compose._flags(compose.parse([line], loader), loader)
            defaults = {} if cls is Config else strict.dump(cls())
            merged = compose._resolved([*layers, (compose.FLAGS, flags)], defaults, cls)
            if cls is DemosConfig:
                merged = compose._demos_layers([line], merged)
            loaded = strict.read(cls, merged)
            if not isinstance(loaded.config, DemosConfig):
                validation.check(loaded.config, explicit=loaded.deliberate({compose.FLAGS}))
    except REFUSALS as error:
        message = shorten(f"error: {one_line(error)}")
        assert path in message and len(message) <= LONGEST_LINE, message
        raise
    finally:
        taken = time.process_time() - begin
        assert taken < SECONDS, f"{line}: {taken:.1f} s"


# --------------------------------------------------------------------------------------- checkpoint
def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


@cache
def _checkpoint() -> dict[str, bytes]:
    """Files of a small checkpoint."""
    folder = _scratch() / "whole"
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    training = {
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "update": 3,
        "order": [1, 2],
        "lag": None,
    }
    text, info = (
        yaml.safe_dump(strict.dump(Config())),
        {"env_steps": 64, "versions": {"torch": "2"}, "config_hash": "0" * 12},
    )
    folder_of_checkpoint = checkpoint.save(
        folder,
        update=3,
        policy=model.state_dict(),
        training=training,
        config_text=text,
        info=info,
        keep_last=1,
    )
    return {file.name: file.read_bytes() for file in folder_of_checkpoint.iterdir()}


def checkpoint_inputs(r: Random) -> tuple[str, Changes, Edits | None, bool]:
    c = checkpoint
    name = r.choice((c.MANIFEST, c.POLICY, c.POLICY, c.POLICY, c.TRAINING, c.CONFIG))
    return name, changes(r), edits(r) if r.random() < 0.3 else None, r.random() < 0.9


def checkpoint_run(case: tuple[str, Changes, Edits | None, bool]) -> None:
    """One file damaged; the manifest, which might be the attacker's, agrees with it."""
    name, damage, of_manifest, sign = case
    contents = dict(_checkpoint())
    if name != checkpoint.MANIFEST or of_manifest is None:
        contents[name] = damaged(contents[name], damage)
    if sign and name != checkpoint.MANIFEST:
        manifest = json.loads(contents[checkpoint.MANIFEST])
        digest = hashlib.sha256(contents[name]).hexdigest()
        manifest["files"][name] = {"bytes": len(contents[name]), "sha256": digest}
        contents[checkpoint.MANIFEST] = as_json(manifest)
    elif of_manifest is not None:
        contents[checkpoint.MANIFEST] = as_json(
            edited(json.loads(contents[checkpoint.MANIFEST]), of_manifest)
        )
    folder = _scratch() / "checkpoint"
    folder.mkdir(exist_ok=True)
    for file, content in contents.items():
        (folder / file).write_bytes(content)
    source = checkpoint.open_checkpoint(folder)
    if name == checkpoint.CONFIG:
        strict.load(Config, run_directory.stored_options(source))
    source.training()
    checkpoint.load_weights(_model(), source.policy(), "fuzz")


# ------------------------------------------------------------------------------------------ dataset
@cache
def _parquet(kind: str) -> bytes:
    """A table of frames or of episodes or of tasks, with pictures in the table."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    out = io.BytesIO()
    if kind == "data":
        pictures = []
        for form in ("PNG", "JPEG", "WEBP", "GIF"):
            encoded = io.BytesIO()
            Image.fromarray(np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3)).save(
                encoded, form
            )
            pictures.append({"bytes": encoded.getvalue(), "path": "x"})
        columns: dict[str, Any] = {
            "observation.state": pa.array([[0.0, 1.0]] * 4, pa.list_(pa.float32())),
            "action": pa.array([[0.5]] * 4, pa.list_(pa.float32())),
            "observation.images.front": pictures,
            "episode_index": [0, 0, 1, 1],
            "frame_index": [0, 1, 0, 1],
            "task_index": [0, 0, 1, 1],
        }
    elif kind == "episodes":
        columns = {
            "episode_index": [0, 1],
            "length": [2, 2],
            "data/chunk_index": [0, 0],
            "data/file_index": [0, 0],
        }
    else:
        columns = {"task_index": [0, 1], "task": ["lift it", "put it down"]}
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


INFO = {
    "codebase_version": "v3.0",
    "fps": 20,
    "total_episodes": 2,
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": None,
    "features": {
        "observation.state": {"dtype": "float32", "shape": [2]},
        "action": {"dtype": "float32", "shape": [1]},
        "observation.images.front": {"dtype": "image", "shape": [8, 6, 3]},
    },
}
FILES = {
    "data": "data/chunk-000/file-000.parquet",
    "episodes": "meta/episodes/chunk-000/file-000.parquet",
    "tasks": "meta/tasks.parquet",
}
LINES = {
    "episodes": [{"episode_index": 0, "length": 2}, {"episode_index": 1, "length": 2}],
    "tasks": [],
}
LINES["tasks"] = [{"task_index": 0, "task": "lift it"}, {"task_index": 1, "task": "put it down"}]


KINDS = ("data", "data", "episodes", "tasks", "info", "info", "picture", "columns")


def dataset_inputs(r: Random) -> tuple[bool, str, Changes, Edits, list[Any]]:
    return (
        r.random() < 0.5,
        r.choice(KINDS),
        changes(r),
        edits(r),
        [junk(r) for _ in range(r.randrange(5))],
    )


def dataset_run(case: tuple[bool, str, Changes, Edits, list[Any]]) -> None:
    old, kind, damage, of_json, column = case
    root = _scratch() / "dataset"
    shutil.rmtree(root, ignore_errors=True)
    for file in FILES.values():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
    for name, file in FILES.items():
        content = _parquet(name)
        (root / file).write_bytes(damaged(content, damage) if name == kind else content)
    info: Any = INFO
    if old:
        info = {
            **INFO,
            "codebase_version": "v2.1",
            "data_path": "data/chunk-{episode_chunk:03d}/file-000.parquet",
        }
        for name, rows in LINES.items():
            content = edited(rows, of_json) if name == kind else rows
            (root / f"meta/{name}.jsonl").write_bytes(b"\n".join(map(as_json, content)))
    (root / "meta/info.json").write_bytes(
        as_json(edited(info, of_json) if kind == "info" else info)
    )
    if kind in ("picture", "columns"):
        _changed_table(root / FILES["data"], kind, damage, column)
    lerobot_reader.read(root)


def _changed_table(file: Path, kind: str, damage: list[Any], column: list[Any]) -> None:
    """One picture damaged, or a column of other values."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(file)
    number = sum(len(new) for _, _, new in damage) % table.num_columns
    name = table.column_names[number] if kind == "columns" else "observation.images.front"
    if kind == "picture":
        values = table[name].to_pylist()
        values[number % 4]["bytes"] = damaged(values[number % 4]["bytes"], damage)
    else:
        values = (column + [None] * 4)[:4]
    out = io.BytesIO()
    try:
        pq.write_table(
            table.set_column(table.column_names.index(name), name, pa.array(values)), out
        )
    except (pa.ArrowException, ValueError, OverflowError, TypeError):
        return  # not what a table can hold
    file.write_bytes(out.getvalue())


# ------------------------------------------------------------------------------------------ prompts
ROWS = [
    {
        "data_source": "x",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "reward_model": {"ground_truth": "4"},
    },
    {"question": "2+2?", "answer": "so #### 4"},
    {"prompt": "2+2?", "ground_truth": 4, "extra_info": {"split": "test"}},
]


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "2": 1, "+": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", chat_template=template
    )


def prompts_inputs(r: Random) -> tuple[str, Edits, Changes | None]:
    return (
        r.choice((".jsonl", ".json", ".parquet")),
        edits(r),
        changes(r) if r.random() < 0.5 else None,
    )


def prompts_run(case: tuple[str, Edits, Changes | None]) -> None:
    suffix, of_json, damage = case
    rows = edited(ROWS, of_json)
    if suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        out = io.BytesIO()
        try:
            pq.write_table(pa.Table.from_pylist(json.loads(as_json(rows[:1]))), out)
        except (pa.ArrowException, ValueError, OverflowError, TypeError, AttributeError):
            return  # not what a table can hold
        content = out.getvalue()
    else:
        content = as_json(rows) if suffix == ".json" else b"\n".join(map(as_json, rows))
    file = _scratch() / f"prompts{suffix}"
    file.write_bytes(content if damage is None else damaged(content, damage))
    prompts.load_prompts(file, _tokenizer(), prompt_length=64, chat_template="auto", system=None)


# ---------------------------------------------------------------------------------------- placement
WORDS = [
    *plan.ROLES["embodied"],
    *plan.ROLES["reasoning"],
    "x",
    "",
    " env , rollout ",
    "rollout,reward",
]
SPLITS = [
    "env,rollout,actor",
    "env/rollout,actor",
    "env/rollout/actor",
    "rollout,actor",
    "rollout,reward/actor,reference/critic",
]
SPLITS += ["rollout,actor,critic,reference,reward", "rollout,reward/actor,critic,reference"]
PLACES = [
    "all",
    "all",
    "first half",
    "second half",
    "0-3",
    "0-1",
    "0",
    0,
    1,
    [0, 1],
    "1-0",
    "0-",
    "-1",
    "²",
    "٣",
    "1:30",
    "9" * 5000,
]


def placement_inputs(r: Random) -> tuple[Any, plan.Hardware, str, list[int]]:
    def simple() -> Any:
        kind = r.random()
        return (
            r.choice(PLACES[:10]) if kind < 0.85 else r.choice(PLACES) if kind < 0.95 else junk(r)
        )

    def devices() -> Any:
        kind = r.randrange(6)
        if kind < 3:
            return simple()
        if kind == 3:
            return [simple() for _ in range(r.randrange(4))]
        full = {
            "devices": simple(),
            "processes": r.choice((1, 2, 3, 4, 0, junk(r))),
            "node": r.choice(("gpu", junk(r))),
        }
        return {key: value for key, value in full.items() if r.random() < 0.5}

    if r.random() < 0.15:
        placement: Any = r.choice(sorted(plan.PRESETS))
    else:
        words = (
            r.choice(SPLITS).split("/")
            if r.random() < 0.8
            else [r.choice(WORDS) for _ in range(r.randrange(5))]
        )
        placement = {word + (text(r, 2) if r.random() < 0.05 else ""): devices() for word in words}
    mode = "embodied" if "env" in str(placement) or r.random() < 0.1 else "reasoning"
    hardware = plan.Hardware(
        per_node=tuple(r.randint(1, 4) for _ in range(r.randint(1, 3))),
        kind=r.choice(("cpu", "cuda")),
        labels=r.choice(({}, {"gpu": (0,)})),
        memory=r.choice((None, 1, 10**9, 10**12)),
    )
    return (
        placement,
        hardware,
        mode,
        [r.choice((1, 2, 4, 8, 64, r.randint(1, 64))) for _ in range(4)],
    )


def placement_run(case: tuple[Any, plan.Hardware, str, list[int]]) -> None:
    placement, hardware, mode, (envs, group, batch, lag) = case
    without = () if lag % 2 else ("critic", "reference", "reward")
    placed = plan.plan(
        placement, hardware, mode=mode, without=without, stages=1 + lag % 3, max_lag=lag % 2
    )
    plan.lines(placed.rows())
    plan.check_memory(
        placed, {g.name: {"weights": batch << 20, "activations": envs << 24} for g in placed.groups}
    )
    if mode == "embodied":
        plan.check_numbers(placed, num_envs=envs, group_size=group, global_batch_size=batch)
    else:
        plan.check_sequences(
            placed,
            prompts=envs,
            group_size=group,
            batches={"algorithm.global_batch_size": batch * group},
        )


# -------------------------------------------------------------------------------------------- lines
MESSAGE = Message(
    "step",
    3,
    {"seeds": [1, 2]},
    {"a": torch.arange(6.0).view(2, 3), "b": {"c": torch.tensor(True), "d": None}},
)


def message_inputs(r: Random) -> tuple[str, Any]:
    if r.random() < 0.5:
        return "bytes", changes(r)
    return "words", edited(json.loads(pack(MESSAGE)[0].tobytes()[PREFIX.size :]), edits(r))


def message_run(case: tuple[str, Any]) -> None:
    """Return the bytes of a peer with the secret."""
    message = b"".join(pack(MESSAGE))
    if case[0] == "bytes":
        content = damaged(message, case[1])
    else:
        length, size = PREFIX.unpack(message[: PREFIX.size])
        words = as_json(case[1])
        content = PREFIX.pack(len(words), size) + words + message[PREFIX.size + length :]
    receiver, sender = socket.socketpair()
    with receiver, sender:
        sender.sendall(content)
        sender.close()
        line = object.__new__(Connection)
        line.socket, line.peer, line.timeout_s, line.waited_s = receiver, "a peer", 1.0, 0.0
        line.receive()


def stranger_inputs(r: Random) -> bytes:
    hello = HELLO.pack(hashlib.sha256(b"guess").digest(), b"rollout rank 0") + b"".join(
        pack(MESSAGE)
    )
    return (
        damaged(hello, changes(r))
        if r.random() < 0.7
        else bytes(r.randrange(256) for _ in range(r.randrange(200)))
    )


@cache
def _exchange() -> tuple[Exchange, Connection]:
    exchange = Exchange("127.0.0.1", "the secret", 5.0)
    return exchange, connect(
        exchange.address, "the secret", "friend", peer="exchange", timeout_s=5.0
    )


def stranger_run(content: bytes) -> None:
    """Return bytes of a client without the secret: they are never parsed."""
    exchange, friend = _exchange()
    with socket.create_connection(exchange.address) as stranger:
        stranger.sendall(content)
        stranger.shutdown(socket.SHUT_WR)
        friend.send(Message("ping"))
        line, m = exchange.receive()
        assert (line.peer, m.method) == ("friend", "ping")


# ------------------------------------------------------------------------------------------ running
REFUSALS = (ConfigError, PlacementError)
TARGETS: dict[str, Target] = {
    "config": Target(config_inputs, config_run, REFUSALS, 40_000),
    "yaml": Target(yaml_inputs, yaml_run, (*REFUSALS, yaml.YAMLError), 8_000),
    "option": Target(lambda r: r.choice(every_option()), option_run, REFUSALS, 0, every_option),
    "line": Target(line_inputs, line_run, REFUSALS, 10_000),
    "command": Target(command_inputs, command_run, (), 300),
    "placement": Target(placement_inputs, placement_run, (PlacementError,), 30_000),
    "checkpoint": Target(checkpoint_inputs, checkpoint_run, (CheckpointError, *REFUSALS), 6_000),
    "dataset": Target(dataset_inputs, dataset_run, (ConfigError, EnvError), 6_000),
    "prompts": Target(prompts_inputs, prompts_run, (ConfigError,), 6_000),
    "message": Target(message_inputs, message_run, (ProcessLost,), 10_000),
    "stranger": Target(stranger_inputs, stranger_run, (), 3_000),
}


def attempt(target: Target, r: Random) -> bool:
    """Return whether the target refused an input; raise errors that it does not declare."""
    return attempt_case(target, target.make(r))


def attempt_case(target: Target, case: Any) -> bool:
    """As ``attempt``, of an input that exists."""
    try:
        target.run(case)
    except target.errors:
        return True
    except BaseException:
        print(f"input: {case!r}"[:4000], file=sys.stderr)
        raise
    return False


def guided(name: str, seconds: int) -> None:
    """Run inputs that atheris selects by the coverage of our code."""
    atheris: Any = importlib.import_module("atheris")

    @given(st.randoms(use_true_random=False))
    @settings(
        database=None, deadline=None, suppress_health_check=[*HealthCheck.__members__.values()]
    )
    def test(r: Random) -> None:
        attempt(TARGETS[name], r)

    for module in (checkpoint, cli, prompts, lerobot_reader, run_directory, strict, plan, channels):
        for member in vars(module).values():
            if getattr(member, "__module__", None) == module.__name__ and hasattr(
                member, "__code__"
            ):
                atheris.instrument_func(member)
    fuzz_one: Any = test.hypothesis.fuzz_one_input  # pyright: ignore[reportFunctionMemberAccess]
    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", "-max_len=8192"], fuzz_one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--inputs", type=int, help="of each target, instead of its own number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", type=int, nargs="?", const=60, metavar="SECONDS")
    args = parser.parse_args()
    if unknown := set(args.targets) - set(TARGETS):
        parser.error(f"no target {min(unknown)}; there are {', '.join(TARGETS)}")
    torch.set_num_threads(1)
    if args.atheris:
        if len(args.targets) != 1:
            parser.error("--atheris takes one target")
        guided(args.targets[0], args.atheris)
        return 0
    total = 0
    print("| target | inputs | refused | seconds |\n|---|---|---|---|")
    for name in args.targets or TARGETS:
        begin = time.monotonic()
        target = TARGETS[name]
        every = None if args.inputs or target.every is None else target.every()
        inputs = args.inputs or (target.count if every is None else len(every))
        refused = 0
        for number in range(inputs):
            try:
                if every is None:
                    refused += attempt(target, Random(f"{name} {args.seed} {number}"))
                else:
                    refused += attempt_case(target, every[number])
            except BaseException:
                print(f"input {number} of {name}, --seed {args.seed}:", file=sys.stderr)
                raise
        total += inputs
        print(f"| {name} | {inputs} | {refused} | {time.monotonic() - begin:.0f} |", flush=True)
    print(f"{total} inputs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
