"""RLinf's 154 composed configs for robots: each converts, or is refused with its one reason.

rlinf_configs.json.xz has the options of the configs at a3816b5, flattened and without paths.
"""

from __future__ import annotations

import json
import lzma
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import yaml

from embodied_envs.adapters import libero_env
from embodied_envs.base.errors import ConfigError
from embodied_ppo.commands import main
from embodied_ppo.options import loader
from embodied_ppo.options.schema import Config
from embodied_ppo.tools.import_config import convert, rlinf

FOLDER = Path(__file__).parent
FILES: dict[str, dict[str, Any]] = json.loads(
    lzma.decompress((FOLDER / "rlinf_configs.json.xz").read_bytes())
)
EXPECTED = yaml.safe_load((FOLDER / "rlinf_expected.yaml").read_text())["files"]
SUITES = ("10", "goal", "object", "spatial")
# Files that lack nothing but the paths of checkpoints.
READY = [
    *(f"libero_{s}_{a}_openpi{p}" for s in SUITES for a in ("ppo", "grpo") for p in ("", "_pi05")),
    *(f"libero_{s}_grpo_openvlaoft" for s in (*SUITES, "90")),
    "libero_spatial_ppo_openpi_quickstart",
    *("libero_spatial_async_ppo_openpi", "libero_spatial_async_ppo_openpi_pi05"),
    *("libero_object_async_ppo_openpi_pi05", "libero_spatial_0_grpo_mlp"),
]


@cache
def converted(name: str, folder: Path) -> convert.Migration | str:
    """Return the conversion of a file, or the message of its refusal."""
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(run_helpers.nested(FILES[name])))
    try:
        return convert.convert("rlinf", str(path))
    except ConfigError as e:
        return str(e)


@pytest.fixture(scope="module")
def conversions(tmp_path_factory) -> dict[str, convert.Migration | str]:
    folder = tmp_path_factory.mktemp("rlinf")
    return {name: converted(name, folder) for name in FILES}


def test_every_file_converts_or_has_one_reason(
    conversions: dict[str, convert.Migration | str],
) -> None:
    kinds: dict[str, list[str]] = {}
    for name, result in conversions.items():
        if isinstance(result, str):
            model, simulator = "which does not exist here", "neither does the simulator"
            kind = "algorithm" if "trains by PPO or GRPO" in result else "model"
            kind = "nothing trains" if "name a file that trains:" in result else kind
            kind = "model and simulator" if simulator in result else kind
            assert kind == "nothing trains" or model in result
        else:
            assert result.conflict is None and not result.refused and not result.unknown, name
            assert set(result.to_write) <= {"env.id"}
            kind = "simulator" if result.to_write else "ready"
            assert ("wraps" in str(result.to_write)) == (kind == "simulator")
            rows = [row["theirs"] for row in (*result.differences, *result.meaningless)]
            assert len(rows) == len(set(rows)), "each difference is one row"
        kinds.setdefault(kind, []).append(name)
    assert sorted(kinds.pop("ready")) == sorted(READY)
    assert {kind: len(names) for kind, names in kinds.items()} == {
        "simulator": 49,
        "model": 15,
        "model and simulator": 15,
        "algorithm": 40,
        "nothing trains": 9,
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_most_valuable_files_have_rlinf_meaning(
    name: str, conversions: dict[str, convert.Migration | str]
) -> None:
    result, expected = conversions[name], EXPECTED[name]
    assert isinstance(result, convert.Migration)
    defaults = {path: option.default for path, option in loader.describe(Config).items()}
    options = defaults | result.options
    assert {path: options[path] for path in expected["options"]} == expected["options"]
    assert {row["theirs"] for row in result.differences} == set(expected["differences"])


@pytest.mark.parametrize(
    "name", ["maniskill_sac_mlp", "libero_spatial_ppo_gr00t", "realworld_eval_dual_franka"]
)
def test_refused_file_is_one_line_and_writes_nothing(name: str, tmp_path, capsys) -> None:
    (tmp_path / "x.yaml").write_text(json.dumps(run_helpers.nested(FILES[name])))
    out = tmp_path / "new" / "x.yaml"
    assert main.main(["import-config", "rlinf", str(tmp_path / "x.yaml"), "--out", str(out)]) == 2
    text, error = capsys.readouterr()
    assert text == "" and error.startswith("error: ") and error.count("\n") == 1
    assert not out.parent.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", READY)
def test_ready_file_has_a_plan(
    name: str, conversions: dict[str, convert.Migration | str], tmp_path, capsys
) -> None:
    result = conversions[name]
    assert isinstance(result, convert.Migration)
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "x.yaml").write_text(result.text("x.yaml"))
    arguments = ["plan", "--config-dir", str(tmp_path), "experiment=x", "device=cpu"]
    arguments += ["cluster.devices_per_node=8", "cluster.device_memory_gb=4000"]
    if (checkpoint := result.options.get("model.checkpoint")) is not None:
        kind = "openvla" if "oft" in name else "pi05" if "Pi05" in checkpoint else "pi0"
        arguments.append(f"model.checkpoint=published/{kind}")
    assert main.main(arguments) == 0, capsys.readouterr().err
    passes, horizon = result.options["algorithm.rollout_epoch"], result.options["algorithm.horizon"]
    samples = result.options["env.num_envs"] * passes * horizon
    assert re.search(rf"samples per update +{samples:,}\n", capsys.readouterr().out)


def test_defaults_beside_the_file_are_followed(tmp_path) -> None:
    """A raw file of Hydra becomes the same as the composed one."""
    flat = FILES["libero_spatial_ppo_openpi"]
    members = {"env.train": "env/libero", "actor.model": "model/pi0"}
    defaults: list[Any] = [f"{name}@{section}" for section, name in members.items()]
    for section, name in members.items():
        own = {k.removeprefix(f"{section}."): v for k, v in flat.items() if k.startswith(section)}
        (tmp_path / name).parent.mkdir()
        # The file itself wins over what it includes.
        text = yaml.safe_dump(run_helpers.nested(own | {"total_num_envs": None, "is_lora": True}))
        (tmp_path / f"{name}.yaml").write_text(text)
    raw = {k: v for k, v in flat.items() if not k.startswith(tuple(members))}
    raw |= {"env.train.total_num_envs": 64, "actor.model.is_lora": False}
    content = {"defaults": [*defaults, {"override hydra/job_logging": "stdout"}]}
    text = yaml.safe_dump({**content, **run_helpers.nested(raw)}, sort_keys=False)
    (tmp_path / "raw.yaml").write_text(text)
    (tmp_path / "composed.yaml").write_text(yaml.safe_dump(run_helpers.nested(flat)))
    one, other = (
        convert.convert("rlinf", str(tmp_path / f"{x}.yaml")) for x in ("raw", "composed")
    )
    assert one.options == other.options and "env.id" in one.options
    assert not [row for row in one.meaningless if row["theirs"].startswith("defaults")]
    # What cannot be followed is reported.
    outside = text.replace("env/libero@env.train", "../env/libero@env.train")
    (tmp_path / "raw.yaml").write_text(outside)
    rows = convert.convert("rlinf", str(tmp_path / "raw.yaml")).meaningless
    assert [row["theirs"] for row in rows if row["theirs"].startswith("defaults")] == ["defaults"]


def test_names_of_the_adapter() -> None:
    assert set(rlinf.SUITES) == set(libero_env.TIME_LIMITS)
    assert tuple(rlinf.CAMERAS) == libero_env.CAMERAS
