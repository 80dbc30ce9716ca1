"""`embodied-ppo fit`: the written recipe learns the same on fewer devices; what changed, and what
cannot fit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied_ppo import run as build
from embodied_ppo.commands import fit as fitting
from embodied_ppo.commands import main
from embodied_ppo.config import compose, loader
from embodied_ppo.config.schema import ClusterConfig, Config
from embodied_ppo.modes.registry import mode
from embodied_ppo.training import checkpoint
from tests.integration.test_placements import rows

ROBOT = [
    "experiment=null",
    "env.id=CartPole-v1",
    "env.num_envs=32",
    "algorithm.horizon=64",
    "algorithm.update_epoch=1",
    "algorithm.max_grad_norm=null",
    "evaluation.episodes=2",
    "updates=1",
    "threads=1",
    "device=cpu",
    "name=pole",
]
LANGUAGE = [
    "experiment=arithmetic",
    "warm_start.steps=2",
    "algorithm.rollout_batch_size=64",
    "algorithm.global_batch_size=32",
    "algorithm.max_grad_norm=null",
    "algorithm.missing_eos_penalty=0.5",  # something to learn from the start
    "actor.model.architecture.hidden_size=16",
    "actor.model.architecture.intermediate_size=32",
    "evaluation.episodes=8",
    "updates=1",
    "threads=1",
    "device=cpu",
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> None:
    assert main.main(list(words)) == 0


def needed(*words: str) -> list[dict[str, int]]:
    """Bytes at the peak of a process of each group of a local run, by what for."""
    config = loader.load(Config, yaml.safe_load(_resolved(words)))
    plan = build.place(config, torch.device("cpu"))
    return list(mode(config).memory_estimator(config).needs(plan).values())


def _resolved(words: tuple[str, ...]) -> str:
    args = main.parse_arguments(["train", *words])
    return yaml.safe_dump(loader.relevant(compose.prepare(args, args.overrides).config))


def learned(run_dir: Path) -> dict[str, torch.Tensor]:
    """Weights after the update, and the optimisers' first moments: after one step (1 - beta1) x the
    gradient.
    """
    source = checkpoint.open_checkpoint(run_dir / "checkpoints" / "step_000001")
    found = dict(source.policy())

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            for name, value in node.items():
                walk(value, f"{path}.{name}")
        elif isinstance(node, (list, tuple)):
            for i, value in enumerate(node):
                walk(value, f"{path}.{i}")
        elif isinstance(node, torch.Tensor) and node.is_floating_point() and "exp_avg" in path:
            found[path] = node

    walk(source.training()["learner"], "learner")
    assert any("exp_avg" in name for name in found)
    return found


def same(one: Path, other: Path) -> None:
    ours, theirs = learned(one), learned(other)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        assert torch.allclose(x, theirs[name], rtol=0, atol=1e-6), (
            name,
            (x - theirs[name]).abs().max(),
        )
    moved = [name for name in ours if "exp_avg" in name and ours[name].abs().max() > 1e-4]
    assert moved  # there is a gradient


def fit(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    run("fit", "--json", *words)
    return json.loads(capsys.readouterr().out)


def changed(told: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {change["option"]: (change["old"], change["new"]) for change in told["changes"]}


FITTED = ["--config-dir", "mine", "experiment=small"]


@pytest.mark.parametrize("unit", ["step", "column"])
def test_several_passes_train_what_one_does(
    unit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four minibatches of 512, whole and in parts."""
    words = [*ROBOT, "algorithm.global_batch_size=512", f"algorithm.minibatch_unit={unit}"]
    (whole,) = needed(*words)
    few = (sum(whole.values()) - 0.6 * whole["activations"]) / 0.92 / 1e9
    told = fit(
        capsys,
        *words,
        "--devices",
        "1",
        f"cluster.device_memory_gb={few}",
        "--out",
        "mine/experiment/small.yaml",
    )
    ((option, (old, micro)),) = changed(told).items()
    assert (option, old) == ("algorithm.micro_batch_size", None) and 64 <= micro < 512
    assert micro % (64 if unit == "column" else 1) == 0
    assert told["command"] == "embodied-ppo train --config-dir mine experiment=small"
    # the largest that fits: one pass less does not
    passes = -(-512 // micro)
    (now,), (more,) = (
        needed(*words, f"algorithm.micro_batch_size={m}")
        for m in (micro, _even(512, passes - 1, unit))
    )
    assert sum(now.values()) <= 0.92 * few * 1e9 < sum(more.values())
    run("train", *words, f"run_dir={tmp_path / 'large'}", "--quiet")
    run("train", *FITTED, "run_dir=small", "--quiet")
    same(tmp_path / "large", tmp_path / "small")
    large, small = rows(tmp_path / "large"), rows(tmp_path / "small")
    for tag, value in large[-1].items():
        assert small[-1][tag] == pytest.approx(value, rel=1e-4, abs=1e-5), tag


def _even(batch: int, passes: int, unit: str) -> int:
    size = 64 if unit == "column" else 1
    return -(-batch // size // passes) * size


@pytest.mark.usefixtures("eight_slots")
def test_two_devices_become_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes that learn together, without parts; then one, with parts: the same gradient,
    the same weights.
    """
    words = [
        *ROBOT,
        "algorithm.global_batch_size=2048",
        "placement=disaggregated",
        "cluster.devices_per_node=4",
    ]
    (whole,) = needed(*ROBOT, "algorithm.global_batch_size=2048")
    memory = f"cluster.device_memory_gb={(sum(whole.values()) - 0.4 * whole['activations']) / 0.92 / 1e9}"
    told = fit(capsys, *words, memory, "--devices", "1", "--out", "mine/experiment/small.yaml")
    found = changed(told)
    many = changed(
        fit(capsys, *words, "--devices", "1000")
    )  # tried are only as many as there are environments
    assert (
        many["placement"] == ("disaggregated", "fused")
        and many["cluster.devices_per_node"][1] < 1000
    )
    assert found.pop("placement") == ("disaggregated", "local") and found.pop(
        "cluster.devices_per_node"
    ) == (4, 0)
    assert found.pop("algorithm.micro_batch_size")[0] is None and not found
    whys = {change["option"]: change["why"] for change in told["changes"]}
    assert (
        "needs 2 devices, and there is 1" in whys["placement"]
        and "more than 92%" in whys["algorithm.micro_batch_size"]
    )
    run("train", *words, f"run_dir={tmp_path / 'large'}", "--quiet")
    run("train", *FITTED, "run_dir=small", "--quiet")
    same(tmp_path / "large", tmp_path / "small")


@pytest.mark.parametrize("limited", ["responses", "tokens"])
def test_a_language_model_in_parts(
    limited: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*LANGUAGE, *(["algorithm.micro_batch_tokens=100000"] if limited == "tokens" else [])]
    (whole,) = needed(*words)
    few = (sum(whole.values()) - 0.6 * whole["activations"]) / 0.92 / 1e9
    told = fit(
        capsys,
        *words,
        "--devices",
        "1",
        f"cluster.device_memory_gb={few}",
        "--out",
        "mine/experiment/small.yaml",
    )
    ((option, (_, new)),) = changed(told).items()
    assert option == f"algorithm.micro_batch_{'tokens' if limited == 'tokens' else 'size'}"
    assert new < (100_000 if limited == "tokens" else 32)
    run("train", *words, f"run_dir={tmp_path / 'large'}", "--quiet")
    run("train", *FITTED, "run_dir=small", "--quiet")
    same(tmp_path / "large", tmp_path / "small")


def test_what_fits_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    told = fit(capsys, *ROBOT, "algorithm.micro_batch_size=64", "compile=always", "--devices", "1")
    assert (
        told["changes"] == []
        and told["file"] is None
        and told["recipe"]["algorithm"]["micro_batch_size"] == 64
    )
    told = fit(capsys, *ROBOT, "placement=fused", "cluster.devices_per_node=4", "--devices", "2")
    assert (
        changed(told) == {"cluster.devices_per_node": (4, 2)}
        and told["recipe"]["placement"] == "fused"
    )
    assert told["notes"][0].startswith("2 learning now")
    given = "cluster.component_placement={env: 0-1, rollout: 2, actor: 3}"
    told = fit(
        capsys, *ROBOT, given, "cluster.devices_per_node=4", "cluster.max_lag=1", "--devices", "3"
    )
    found = changed(told)  # 32 environments cannot be dealt out over 3
    assert found["cluster.devices_per_node"] == (4, 2) and found["placement"] == ("local", "fused")
    assert found["cluster.max_lag"] == (1, 0) and told["notes"][0] == "uses 2 of 3 devices"
    assert "0-1" not in str(told["recipe"])


def test_compiled_minibatches_have_one_shape(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ROBOT, "algorithm.global_batch_size=2048"]
    (whole,) = needed(*words)
    few = (sum(whole.values()) - 0.5 * whole["activations"]) / 0.92 / 1e9
    told = fit(
        capsys, *words, "compile=always", f"cluster.device_memory_gb={few}", "--devices", "1"
    )
    assert changed(told)["compile"] == ("always", "auto")
    assert "compiled code is not used where micro-batches cut minibatches" in told["notes"]


def test_to_stdout_and_for_a_gpu_that_is_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "fit",
        "experiment=halfcheetah",
        "seed=3",
        "device=cuda",
        "cluster.device_memory_gb=16",
        "--devices",
        "1",
    ]
    run(*words)
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == "nothing has to change" and "minibatches of" in err
    recipe = yaml.safe_load(out)
    assert out.startswith("# @package _global_\n# embodied-ppo fit experiment=halfcheetah seed=3")
    assert recipe["seed"] == 3 and recipe["device"] == "cuda" and "cluster" not in recipe
    run(*words, "--quiet")
    assert capsys.readouterr() == (out, "")
    if not torch.cuda.is_available():
        assert main.main([word for word in words if not word.startswith("cluster")]) == 2
        assert "write cluster.device_memory_gb=24" in capsys.readouterr().err


def test_the_recipe_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    """Read back it is what was fitted, also where a shipped experiment sets what another flag
    leaves unread.
    """
    words = [
        "experiment=arithmetic",
        "algorithm.adv_type=grpo",
        "algorithm.group_size=4",
        "device=cpu",
    ]
    run("fit", *words, "--devices", "1", "--out", "mine/experiment/small.yaml")
    capsys.readouterr()

    def resolved(*words: str) -> dict[str, Any]:
        config = loader.load(Config, yaml.safe_load(_resolved(words)), source="configs/x")
        return fitting.settings(config)

    assert resolved(*FITTED) == resolved(*words) and "critic" not in resolved(*FITTED)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([*ROBOT, "--devices", "0"], "0 is not an integer >= 1"),
        (
            [*ROBOT, "--devices", "1000000000"],
            "cluster.devices_per_node = 1000000000 devices, more than 16384",
        ),
        (ROBOT, "the following arguments are required: --devices"),
        (
            [*ROBOT, "--devices", "1", "--out", "small.yaml"],
            "write --out my_configs/experiment/small.yaml",
        ),
        (
            [*ROBOT, "--devices", "1", "--out", "mine/experiment/a,b=c.yaml"],
            "no experiment can be called 'a,b=c'",
        ),
        ([*ROBOT, "--devices", "1", "resume=auto"], "resume = auto: fit writes a recipe"),
        (
            [*ROBOT, "--devices", "1", "cluster.stages=2"],
            "cluster.stages = 2: is not read with placement=local",
        ),
        (
            [*ROBOT, "--devices", "1", "cluster.device_memory_gb=0.0001"],
            (
                "more than 92% of its 0.1 MB; one process of env,rollout,actor: .. lower"
                " algorithm.horizon or env.num_envs"
            ),
        ),
        (
            [
                *LANGUAGE,
                "--devices",
                "1",
                "cluster.device_memory_gb=0.0003",
                "algorithm.rollout_batch_size=256",
            ],
            "more than 92% of its 0.3 MB .. lower rollout.slots",
        ),
    ],
)
def test_what_is_refused(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["fit", *words]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    for part in line.split(" .. "):
        assert part in err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine/experiment/small.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("seed: 1\n")
    assert main.main(["fit", *ROBOT, "--devices", "1", "--out", str(file)]) == 2
    assert "is there already" in capsys.readouterr().err and file.read_text() == "seed: 1\n"


def test_every_option_of_the_cluster_is_of_a_placement() -> None:
    """What ``local`` leaves: a recipe for one device says nothing about a cluster."""
    assert fitting.settings(Config()).keys() == {"name"} and ClusterConfig() == Config().cluster
