"""Test the readers of untrusted input with generated and damaged input (docs/security.md).

    python scripts/fuzz.py [TARGET ...] [--inputs N] [--seed N]

Only the errors that a target declares may be raised; any other ends the run with the number of the
input, the input and a traceback. An input is a function of a random.Random: numbered here, chosen
by hypothesis in tests/scripts/test_fuzz.py, which also shrinks failing inputs.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from copy import deepcopy
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import yaml

from embodied_envs.base.errors import CheckpointError, ConfigError, EnvError
from embodied_ppo.cluster.channels import HELLO, Connection, Exchange, Message, connect, pack
from embodied_ppo.commands import main as cli
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.data import lerobot_reader, prompts
from embodied_ppo.options import loader as strict
from embodied_ppo.options.schema import (
    Config,
    DataConfig,
    DemosConfig,
    EvaluateConfig,
    ExportConfig,
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
    """

    make: Callable[[Random], Any]
    run: Callable[[Any], object]
    errors: tuple[type[Exception], ...]
    count: int


# ------------------------------------------------------------------------------------------- inputs
ODD: list[Any] = [None, True, False, 0, -1, 1 << 70, 0.5, float("inf"), float("nan"), [], {}, [[]]]
ODD += [
    {"": None},
    *["", "???", "null", "all", "0-3", "1:30", "../x", "/etc/passwd", "{", "${seed}", "a\x00b"],
]
ODD += ["${oc.env:HOME}", "\ud800", "1e400", "9" * 5000]
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
CONFIGS = (Config, EvaluateConfig, DemosConfig, ExportConfig)


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


SCRAPS = ["&a ", "*a", "<<: ", "!!int ", "!!bool x", "!!timestamp 1", "2000-99-99", "[", "{", "? "]
SCRAPS += ["- ", ": ", "!!set ", "\t", "\n", "seed: ", "env: ", "--- ", "'", '"', "| ", "%", "0b"]
SCRAPS += ["!!python/object/apply:os.system [x]", "1:99"]
VALUES = ["[", "{a: 1}", "1,2", "'", '{"a,b": [0]}', "${", "${seed}", "null", ""]


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
def _line(r: Random) -> str:
    if r.random() < 0.2:
        return text(r, 12)
    name = (
        r.choice(("experiment", "model", "env", "placement", "x"))
        if r.random() < 0.2
        else r.choice(_names())
    )
    value = r.choice((*VALUES, text(r, 10), str(junk(r))))
    return f"{r.choice(('', '', '', '+', '++', '~', 'hydra.'))}{name}={value}"


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
        run_directory.stored_config(source)
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
    prompts.load_prompts(file, _tokenizer(), DataConfig(), prompt_length=64)


# -------------------------------------------------------------------------------------------- lines
MESSAGE = Message(
    "step",
    3,
    {"seeds": [1, 2]},
    {"a": torch.arange(6.0).view(2, 3), "b": {"c": torch.tensor(True), "d": None}},
)


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
    "command": Target(command_inputs, command_run, (), 300),
    "checkpoint": Target(checkpoint_inputs, checkpoint_run, (CheckpointError, *REFUSALS), 6_000),
    "dataset": Target(dataset_inputs, dataset_run, (ConfigError, EnvError), 6_000),
    "prompts": Target(prompts_inputs, prompts_run, (ConfigError,), 6_000),
    "stranger": Target(stranger_inputs, stranger_run, (), 3_000),
}


def attempt(target: Target, r: Random) -> bool:
    """Return whether the target refused an input; raise errors that it does not declare."""
    case = target.make(r)
    try:
        target.run(case)
    except target.errors:
        return True
    except BaseException:
        print(f"input: {case!r}"[:4000], file=sys.stderr)
        raise
    return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--inputs", type=int, help="of each target, instead of its own number")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := set(args.targets) - set(TARGETS):
        parser.error(f"no target {min(unknown)}; there are {', '.join(TARGETS)}")
    torch.set_num_threads(1)
    total = 0
    print("| target | inputs | refused | seconds |\n|---|---|---|---|")
    for name in args.targets or TARGETS:
        begin = time.monotonic()
        target = TARGETS[name]
        inputs = args.inputs or target.count
        refused = 0
        for number in range(inputs):
            try:
                refused += attempt(target, Random(f"{name} {args.seed} {number}"))
            except BaseException:
                print(f"input {number} of {name}, --seed {args.seed}:", file=sys.stderr)
                raise
        total += inputs
        print(f"| {name} | {inputs} | {refused} | {time.monotonic() - begin:.0f} |", flush=True)
    print(f"{total} inputs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
