"""Conversion of another framework's PPO options: complete, correct values, a reason for the rest.

cases.yaml has the options and what they become; the documented blocks of each framework convert
without an unknown or refused option.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import yaml

from embodied_ppo.commands import main
from embodied_ppo.options import config_folders, loader, readers, validation
from embodied_ppo.options.aliases import REFUSED
from embodied_ppo.options.removed import REMOVED
from embodied_ppo.options.rules.select import REQUIRED_OPTIONS
from embodied_ppo.options.schema import Config
from embodied_ppo.tools.import_config import convert as migrate
from embodied_ppo.tools.import_config import trl
from embodied_ppo.tools.import_config.table import Reason, Source

CASES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())
DOCUMENTED = CASES["documented"]
VERL, ROLL = DOCUMENTED["verl"]["theirs"], DOCUMENTED["roll"]["theirs"]
FILL = {"env.id": "HalfCheetah-v4", "updates": "5", "actor.model.path": "model"}
FILL |= {"data.train": "[a.jsonl]", "data.eval": "[b.jsonl]"}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch) -> Path:
    """Every test runs in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def convert(peer: str, flat: dict[str, Any] | str) -> migrate.Migration:
    """Convert options of a case, or those of a documented block."""
    options = DOCUMENTED[flat]["theirs"] if isinstance(flat, str) else flat
    Path("source.yaml").write_text(yaml.safe_dump(run_helpers.nested(options), sort_keys=False))
    return migrate.convert(peer, "source.yaml")


def reasons_of(migration: migrate.Migration) -> dict[str, str]:
    """Return their option -> the reason why it has no counterpart, or what differs."""
    rows = (*migration.differences, *migration.meaningless, *migration.refused, *migration.unknown)
    return {row["theirs"]: row["why"] for row in rows}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_block_converts_without_loss(name: str, capsys):
    peer, block = DOCUMENTED[name]["framework"], DOCUMENTED[name]["theirs"]
    migration = convert(peer, block)
    assert not migration.unknown and not migration.refused and migration.conflict is None
    mapped = {row["theirs"] for row in migration.mapped if not row["default"]}
    assert mapped | set(reasons_of(migration)) == set(block), (
        "every option is mapped or has a reason"
    )

    out = "configs/experiment/imported.yaml"  # neither folder exists
    assert main.main(["import-config", peer, "source.yaml", "--out", out]) == 0
    capsys.readouterr()
    fill = [f"{path}={FILL[path]}" for path in migration.to_write]
    command = ["config", "--json", "--config-dir", "configs", "experiment=imported", *fill]
    assert main.main(command) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert "read as" not in captured.err, "the file has canonical names"
    for path, value in migration.options.items():
        assert rows[path]["value"] == value and rows[path]["source"].endswith("imported.yaml"), path


def test_missing_required_options_are_reported(capsys):
    Path("configs/experiment").mkdir(parents=True)
    migration = convert("verl", VERL)
    assert set(migration.to_write) == {"data.train", "data.eval", "updates"}
    Path("configs/experiment/x.yaml").write_text(migration.text("source.yaml"))
    assert main.main(["train", "--config-dir", "configs", "experiment=x"]) == 2
    assert "= ??? " in capsys.readouterr().err
    assert main.main(["config", "--config-dir", "configs", "experiment=x"]) == 0
    assert (
        "without a value, so nothing is checked: data.eval, data.train, updates"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("case", CASES["values"])
def test_values_are_mapped(case: dict[str, Any]):
    migration = convert(case["framework"], case["theirs"])
    assert {path: migration.options.get(path, "absent") for path in case["ours"]} == case["ours"]
    assert not migration.refused and not migration.unknown


@pytest.mark.parametrize("case", CASES["reasons"])
def test_option_without_counterpart_has_a_reason(case: dict[str, Any]):
    migration = convert(case["framework"], case["theirs"])
    assert case["why"] in reasons_of(migration)[case["option"]]
    assert case["option"] not in {row["theirs"] for row in migration.mapped}
    assert not Path("pwned").exists()


@pytest.mark.parametrize("case", CASES["differences"])
def test_differences_of_mapped_options_are_printed(case: dict[str, Any], capsys):
    rows = convert(case["framework"], case["theirs"]).differences
    assert [row["theirs"] for row in rows] == ([case["option"]] if "option" in case else [])
    if rows:
        assert case["why"] in rows[0]["why"]
        assert (
            main.main(["import-config", case["framework"], "source.yaml", "--out", "x.yaml"]) == 0
        )
        out = capsys.readouterr().out
        assert case["why"] in out[out.index("differences that remain") :]


SCRIPT = Path(__file__).with_name("verl.sh").read_text()


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_command_line_overrides_import_like_a_file(ending: str, capsys):
    Path("run.sh").write_bytes(SCRIPT.replace("\n", ending).encode())
    migration = migrate.convert("verl", "run.sh")
    expected = {
        "algorithm.clip_ratio_high": 0.28,
        "critic.lr": 1e-5,
        "data.train": ["/data/a.parquet", "/data/b.parquet"],
        "data.prompt_key": "a#b",
        "name": "run 1",
        "updates": 3,
    }
    assert {path: migration.options.get(path, "absent") for path in expected} == expected
    unknown = {row["theirs"]: row["value"] for row in migration.unknown}
    assert unknown == {
        "data.val_files": "${HOME}/test.parquet",
        "data.max_prompt_length": "${shell}wc",
        "actor": "megatron",
        "model/engine": "veomni",
        "trainer.my_own": "",
    }
    reasons = reasons_of(migration)
    assert "--cfg job" in reasons["hydra.config-name"] and "algorithm.gamma" not in reasons
    assert "clip_ratio_low" in reasons["actor_rollout_ref.actor.clip_ratio"]

    lines = [f"{path}={json.dumps(value)}" for path, value in VERL.items()]
    Path("lines.txt").write_text("\n".join(lines).replace('"', "'"))  # one override per line
    assert migrate.convert("verl", "lines.txt").options == convert("verl", VERL).options
    assert main.main(["import-config", "verl", "lines.txt", "--quiet"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["algorithm"]["update_epoch"] == 2


FLAGS = Path(__file__).with_name("slime.sh").read_text()


def test_flags_of_a_launch_script(capsys):
    Path("run.sh").write_text(FLAGS)
    migration = migrate.convert("slime", "run.sh")
    expected = {
        "data.train": ["/models/base/train.jsonl"],
        "data.eval": ["/data/a.jsonl", "/data/b.jsonl"],
        "algorithm.rollout_batch_size": 64,
        "algorithm.global_batch_size": 32,
        "algorithm.adv_type": "gae",
        "algorithm.lr": 5e-7,
        "critic.lr": 5e-7,
        "algorithm.clip_ratio_high": 0.3,
        "algorithm.use_kl_loss": True,
        "actor.model.path": "/models/base",
        "data.chat_template": "never",  # their default
    }
    assert {path: migration.options.get(path, "absent") for path in expected} == expected
    assert not migration.unknown and not migration.refused
    reasons = reasons_of(migration)
    assert "colocate" in reasons and "head" not in reasons and "tee" not in str(reasons)
    assert main.main(["import-config", "verl", "run.sh"]) == 2
    assert "write import-config slime" in capsys.readouterr().err


def test_conflicting_options_are_reported():
    actor = "actor_rollout_ref.actor."
    losses = {f"{actor}use_kl_loss": True, f"{actor}kl_loss_type": "kl"}
    migration = convert("verl", losses | {"data.train_batch_size": 256})
    assert migration.conflict is not None and "k2, k3 or k1+" in migration.conflict
    migration = convert("verl", {"data.train_batch_size": 100, f"{actor}ppo_mini_batch_size": 64})
    assert migration.conflict is not None
    assert "algorithm.rollout_batch_size = 100 is not a multiple" in migration.conflict


def test_references_to_each_other_are_unknown():
    options = {"gamma": "${algorithm.gae_lambda}", "gae_lambda": "${algorithm.gamma}"}
    migration = convert("rlinf", {f"algorithm.{name}": x for name, x in options.items()})
    unknown = {row["theirs"] for row in migration.unknown}
    assert unknown == {"algorithm.gamma", "algorithm.gae_lambda"}


# ------------------------------------------------------------------------------------------ command
def test_experiment_goes_to_stdout_and_table_to_stderr(capsys):
    del (theirs := dict(ROLL))["actor_infer.generating_args.top_p"]
    convert("roll", theirs)
    assert main.main(["import-config", "roll", "source.yaml"]) == 0
    out, err = capsys.readouterr()
    experiment = yaml.safe_load(out)
    assert (
        out.startswith("# @package _global_\n") and experiment["algorithm"]["clip_ratio_c"] == 1.4
    )
    assert "lambd = 0.95" in err and "algorithm.gae_lambda = 0.95" in err
    assert "no counterpart" in err and "their default, 0.7" in err
    assert "whiten_advantages = true" in err and " (default of roll)" in err
    assert "to be set by hand" in err
    assert main.main(["import-config", "roll", "source.yaml", "--quiet"]) == 0
    assert capsys.readouterr() == (out, "")


def test_json_contains_all_rows(capsys):
    top_k = "actor_rollout_ref.rollout.top_k"
    convert("verl", VERL | {"my.own": 1, top_k: 50})
    assert main.main(["import-config", "verl", "source.yaml", "--json", "--out", "new.yaml"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert Path("new.yaml").read_text() == report["yaml"]
    assert [row["theirs"] for row in report["unknown"]] == ["my.own"]
    assert [row["theirs"] for row in report["refused"]] == [top_k]
    assert {
        "theirs": "algorithm.lam",
        "value": 0.9,
        "ours": {"algorithm.gae_lambda": 0.9},
        "default": False,
    } in report["mapped"]


FILES = {
    "verl.yaml": yaml.safe_dump(run_helpers.nested(VERL)),
    "roll.yaml": yaml.safe_dump(ROLL),
    "generic.yaml": "learning_rate: 1.0e-6\nbeta: 0.1\n",
    "dpo.yaml": "beta: 0.1\nlabel_smoothing: 0.1\n",
    "sft.yaml": "learning_rate: 1.0e-6\nmax_length: 512\n",
    "loss.yaml": "beta: 0.1\nloss_type: sigmoid\n",
    "rloo.yaml": "num_generations: 4\nreward_clip_range: [-1, 1]\n",
    "rloo2.yaml": "num_generations: 4\nnormalize_advantages: true\n",
    "named.yaml": "_target_: trl.KTOConfig\nbeta: 0.1\n",
    "broken.yaml": "algorithm: {gamma: [}\n",
    "empty.yaml": "",
    "list.yaml": "- 1\n",
    "text.yaml": "gamma\n",
    "foreign.yaml": "services: {web: {image: nginx}}\n",
    "code.yaml": "algorithm: !!python/object/apply:os.mkdir [pwned]\n",
    "self.yaml": "algorithm: &a {b: *a}\n",
    "list_self.yaml": "algorithm: {gamma: &a [*a]}\n",
    "bomb.yaml": (
        "a: &a {x: 1, y: 1}\n"
        + "".join(
            f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n"
            for a, b in zip("abcdefghi", "bcdefghij", strict=True)
        )
    ),
    "large.yaml": "a: 1\n" * 30_000,
    "deep.yaml": f"a: {'[' * 5000}{']' * 5000}\n",
    "hexadecimal.yaml": f"algorithm: {{gamma: 0x{'f' * 6000}}}\n",
}


@pytest.mark.parametrize(("line", "message"), CASES["refusals"])
def test_refusals_are_one_line_and_write_nothing(line: str, message: str, capsys):
    for name, text in FILES.items():
        Path(name).write_text(text)
    assert main.main(["import-config", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    position = 0
    for part in message.split(" .. "):
        position = err.index(part, position)
    assert {p.name for p in Path.cwd().iterdir()} == set(FILES)
    assert Path("verl.yaml").read_text() == FILES["verl.yaml"]


@pytest.mark.parametrize(
    ("peer", "options"),
    [
        ("verl", {"data.seed": "${multiply:[,2}"}),
        ("verl", {"data.seed": "${subtract:2000-99-99,2}"}),
        ("verl", {"data.seed": f"${{multiply:{'9' * 4000},{'9' * 4000}}}"}),
        (
            "verl",
            {f"data.{a}": [f"${{data.{b}}}"] * 30 for a, b in zip("abcdef", "bcdefg", strict=True)}
            | {"data.g": 1},
        ),
        ("verl", {"trainer.nnodes": math.inf}),
        ("trl", {"total_episodes": math.inf}),
        ("roll", {"actor_train.device_mapping": "list(range(0,1000000000000))"}),
    ],
)
def test_absurd_values_are_reported(peer: str, options: dict[str, Any]):
    known = {"verl": {"algorithm.gamma": 0.5}, "trl": {"gamma": 0.5}, "roll": {"gamma": 0.5}}[peer]
    migration = convert(peer, known | options)
    report = {
        row["theirs"]
        for rows in (migration.unknown, migration.refused, migration.meaningless)
        for row in rows
    }
    assert report & options.keys() and migration.options["algorithm.gamma"] == 0.5


# ------------------------------------------------------------------------------------------- tables
# An option of ours in a reason, with the value that the reason proposes.
HINT = re.compile(
    r"(?<![\w.])((?:algorithm|actor|critic|rollout|reward|data|cluster|evaluation)\.[\w.]*\w|updates"
    r"|trackers|placement|compile|keep_last|eval_every|save_every)"
    r"(?:=(\[[^\]]*\]|[\w.+-]*\w))?"
)
PEERS = {**migrate.FRAMEWORKS, "PPOConfig": trl.PPO, "GRPOConfig": trl.GRPO}
ATTRIBUTES = {"to", "if_set", "values", "by", "why", "only", "hint", "neutral", "except"}
ATTRIBUTES |= {"read_if", "unless"}


@pytest.mark.parametrize("peer", PEERS)
def test_hints_are_accepted(peer: str):
    """Options that a reason names exist and are read in its mode; proposed values compose."""
    framework, options = PEERS[peer], loader.describe(Config)
    sections = {path.rpartition(".")[0] for path in options}
    reasons = set[str]()
    for path, entry in framework.table.items():
        for value in (None, True, False, 0, 1, 3, -1, "no", "x", [1]):
            with contextlib.suppress(*migrate.INVALID_VALUE):
                answer = framework.answer(entry, value, Source({path: value}))
                reasons |= {answer} if isinstance(answer, Reason) else set()
    hints = 0
    for reason in reasons:
        values: dict[str, Any] = {}
        for path, value in HINT.findall(reason):
            theirs = any(f".{name}".endswith(f".{path}") for name in framework.table)
            if theirs or path in sections or path in REMOVED or f"{path}_*" in reason:
                continue
            if f"{path}*" in reason:
                continue
            assert path in options, reason
            if peer != "rlinf":
                assert readers.mode_of(path) in (None, "reasoning"), reason
            if value:
                values.setdefault(path, yaml.safe_load(value))
        if values and peer != "rlinf":
            hints += 1
            base = yaml.safe_load(
                (config_folders.shipped() / "mode" / "reasoning.yaml").read_text()
            )
            required = {"actor.model.path": "x", "algorithm.group_size": 2}
            required |= {"data.train": ["x"], "data.eval": ["x"], "updates": 1}
            has_critic = values.get("algorithm.adv_type", "gae") == "gae"
            required |= {"algorithm.normalize_advantages": has_critic}
            loaded = loader.read(Config, [("", base), ("", required | values)])
            validation.check(loaded.config, explicit=frozenset(values))
    assert hints > 2 or peer == "rlinf"


@pytest.mark.parametrize("peer", PEERS)
def test_tables_name_what_exists(peer: str):
    """Entries have known attributes, paths of options, and rules of their framework."""
    framework, options = PEERS[peer], loader.describe(Config)
    entries = [*framework.table.values()]
    entries += [x for e in entries if "embodied" in e for x in (e["embodied"], e["reasoning"])]
    for entry in [e for e in entries if "embodied" not in e]:
        assert entry.keys() <= ATTRIBUTES, entry
        assert "by" not in entry or entry["by"] in framework.rules, entry
        paths = entry.get("to") or entry.get("if_set", [])
        for path in [paths] if isinstance(paths, str) else paths:
            assert path in options or path in REMOVED or path in REFUSED, entry
    for path in framework.defaults:
        assert framework.entry(path) is not None, path
    assert framework.constants.keys() <= options.keys()


def test_required_options_are_of_their_mode():
    for mode, required in REQUIRED_OPTIONS.items():
        assert all(readers.mode_of(path) in (None, mode) for path in required)
