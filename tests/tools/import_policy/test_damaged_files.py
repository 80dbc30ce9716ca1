"""Damaged files, and files with other numbers than weights, are refused with one line."""

from __future__ import annotations

import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_helpers import assert_refused

from embodied_envs.base.errors import ConfigError
from embodied_ppo.tools.import_policy import libraries
from tests.tools.import_policy import foreign_checkpoints as foreign
from tests.tools.import_policy.foreign_checkpoints import ACTIONS, COUNT, MEAN, OBS, VAR
from tests.tools.import_policy.test_libraries import CASES, written


def pickled(**changes: Any) -> bytes:
    """Return a pickle with other statistics."""
    return pickle.dumps({"mean": MEAN, "var": VAR, "count": COUNT, **changes}, protocol=2)


def cleanrl(**changes: Any) -> bytes:
    """Return a file of CleanRL for choices with other tensors."""
    state = foreign.state(foreign.mlp(4), "actor") | foreign.state(foreign.mlp(1), "critic")
    buffer = io.BytesIO()
    torch.save({**state, **{k.replace("__", "."): v for k, v in changes.items()}}, buffer)
    return buffer.getvalue()


def npz(**changes: Any) -> bytes:
    """Return a .npz file with other statistics."""
    buffer = io.BytesIO()
    values: dict[str, Any] = {"mean": MEAN, "var": VAR, "count": COUNT, **changes}
    np.savez(buffer, **values)
    return buffer.getvalue()


MATRIX = torch.zeros(8, OBS)
FILES: dict[str, bytes] = {
    "pickle-memo-index": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "pickle-text": b"\x80\x04\x8d" + (2**40).to_bytes(8, "little") + b".",
    "pickle-extension": b"\x80\x02\x82\x01.",
    "pickle-deep": b"]" * 40_000 + b"a" * 39_999 + b".",
    "pickle-control": b"c\x1b[31m\nb\n.",
    "pickle-complex": pickled(mean=MEAN + 1j),
    "pickle-1e300": pickled(mean=MEAN + 1e300),
    "pickle-variance": pickled(var=-VAR),
    "pickle-count": pickled(count="a"),
    "cleanrl-weights-3d": cleanrl(actor__0__weight=MATRIX[None]),
    "cleanrl-complex": cleanrl(actor__0__weight=MATRIX.to(torch.complex64)),
    "cleanrl-sparse": cleanrl(actor__0__weight=MATRIX.to_sparse()),
    "cleanrl-meta": cleanrl(actor__0__weight=MATRIX.to("meta")),
    "cleanrl-bool": cleanrl(actor__0__weight=MATRIX.bool()),
    "cleanrl-int8": cleanrl(actor__0__weight=MATRIX.to(torch.int8)),
    "cleanrl-1e300": cleanrl(actor__0__weight=torch.full((8, OBS), 1e300, dtype=torch.float64)),
    "cleanrl-nan": cleanrl(actor__0__weight=MATRIX * torch.nan),
    "cleanrl-chain": cleanrl(actor__2__weight=torch.zeros(5, 9)),
    "cleanrl-empty": cleanrl(actor__0__weight=MATRIX[:0], actor__0__bias=torch.zeros(0)),
    "cleanrl-no-tensor": cleanrl(actor__0__weight="x" * 100_000),
    "normalizer-mean-4": npz(mean=np.zeros(4)),
    "normalizer-variance": npz(var=-VAR),
    "normalizer-nan": npz(mean=VAR * np.nan),
    "normalizer-1e300": npz(mean=MEAN + 1e300),
    "normalizer-count": npz(count=-5.0),
    "normalizer-counts": npz(count=np.ones(3)),
    "normalizer-epsilon": npz(epsilon=-1.0),
    "normalizer-returns": npz(return_var=-1.0, return_count=5.0),
    "normalizer-object": npz(mean=np.array([{}], dtype=object)),
    "normalizer-complex": npz(mean=MEAN + 1j),
    "rsl_rl-list": pickle.dumps([1, 2]),
}


def arguments(name: str, folder: Path) -> tuple[str, Path, Path | None]:
    """Write a file; return library, file and normaliser."""
    library, _, _ = name.partition("-")
    suffixes = {"normalizer": ".npz", "pickle": ".pkl"}
    file = folder / f"damaged{suffixes.get(library, '.bin')}"
    file.write_bytes(FILES[name])
    if library not in suffixes:
        return library, file, None
    foreign.cleanrl(folder / "x.bin")
    return "cleanrl", folder / "x.bin", file


@pytest.mark.parametrize("name", FILES)
def test_damaged_file_is_refused(name: str, tmp_path) -> None:
    """One line of at most 300 characters, hint first."""
    with pytest.raises(ConfigError) as error:
        libraries.read(*arguments(name, tmp_path), critic=True)
    line = str(error.value)
    assert len(f"error: {line}") <= 300 and line.isprintable(), line
    assert line.split()[0] in ("copy", "name", "remove", "save", "use", "write"), line


@pytest.mark.parametrize("name", ["pickle-memo-index", "cleanrl-bool", "normalizer-mean-4"])
def test_command_refuses_and_writes_nothing(name: str, tmp_path, capsys) -> None:
    library, file, normalizer = arguments(name, tmp_path)
    line = [library, str(file), "experiment=halfcheetah", f"run_dir={tmp_path / 'run'}"]
    line += [] if normalizer is None else [f"normalizer={normalizer}"]
    assert_refused(capsys, ["import-policy", *line])
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [*CASES, "sb3-normalizer"])
def test_mutated_files_are_imported_or_refused(name: str, tmp_path) -> None:
    """Bytes that are replaced, removed, repeated or exchanged raise no other exception."""
    torch.manual_seed(5)
    library = name.partition("-")[0]
    _, checkpoint, normalizer = written(library, tmp_path)
    file = checkpoint if name == library or normalizer is None else normalizer
    original, generator = file.read_bytes(), random.Random(name)
    imported = 0
    for _ in range(60):
        data = bytearray(original)
        for _ in range(generator.randint(1, 3)):
            position, length = generator.randrange(len(data)), generator.choice((1, 1, 4, 64))
            part = bytes(data[position : position + length])
            data[position : position + length] = generator.choice(
                (generator.randbytes(length), b"", part * 2, part[::-1], b"\xff" * length)
            )
        file.write_bytes(data)
        try:
            libraries.read(library, checkpoint, normalizer, critic=True)
            imported += 1
        except ConfigError as error:
            assert "\n" not in str(error)
    assert imported < 60


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_point_types_and_the_legacy_format(kind: torch.dtype, tmp_path) -> None:
    """Half precision is exact as float32; files before PyTorch 1.6 are no archives."""
    state = foreign.state(foreign.mlp(4), "actor") | foreign.state(foreign.mlp(1), "critic")
    state = {name: x.to(kind) for name, x in state.items()}
    for zipped in (True, False):
        torch.save(state, tmp_path / "x", _use_new_zipfile_serialization=zipped)
        policy = libraries.read("cleanrl", tmp_path / "x", None, critic=True)
        assert torch.equal(policy.actor[0].weight.to(kind), state["actor.0.weight"])


def test_sizes_of_deviations(tmp_path) -> None:
    foreign.sb3(tmp_path / "x.zip", extra={"log_std": torch.zeros(ACTIONS - 1)})
    with pytest.raises(ConfigError, match="do not fit its standard deviations"):
        libraries.read("sb3", tmp_path / "x.zip", None, critic=True)
