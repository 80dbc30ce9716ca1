"""Tests of `embodied-ppo fit`: equal updates on fewer devices, the changes, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
import yaml
from run_helpers import assert_refused, run_command
from torch.utils import _pytree as pytree

from embodied_ppo.cluster import run_plan
from embodied_ppo.cluster.language_memory import LanguageMemoryEstimator
from embodied_ppo.commands import main
from embodied_ppo.options import compose
from embodied_ppo.options.schema import Config
from embodied_ppo.rollout.generation import decode_model
from embodied_ppo.tools import memory_fit
from tests.integration.test_placements import rows

ROBOT = run_helpers.words("""experiment=null env.id=CartPole-v1 env.num_envs=32
    algorithm.horizon=64 algorithm.update_epoch=1 algorithm.max_grad_norm=null
    evaluation.episodes=2 updates=1 threads=1 device=cpu name=pole""")
# missing_eos_penalty gives a learning signal from the first update on.
LANGUAGE = run_helpers.words("""experiment=arithmetic warm_start.steps=2
    algorithm.rollout_batch_size=64 algorithm.global_batch_size=32 algorithm.max_grad_norm=null
    algorithm.missing_eos_penalty=0.5 actor.model.architecture.hidden_size=16
    actor.model.architecture.intermediate_size=32 evaluation.episodes=8 updates=1 threads=1
    device=cpu""")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> None:
    assert main.main(list(arguments)) == 0


def config_of(*options: str) -> Config:
    """Return the options of ``train``."""
    args = main.parse_arguments(["train", *options])
    return compose.prepare(args, args.overrides).config


def memory_needs(*options: str) -> dict[str, int]:
    """Return purpose -> peak bytes of the process of a local run."""
    config = config_of(*options)
    plan = run_plan.resolve_plan(config, torch.device("cpu"))
    (needs,) = run_plan.memory_estimator(config).estimate_memory(plan).values()
    return needs


@pytest.mark.slow
def test_a_gpu_needs_a_copy_of_the_weights_for_decoding() -> None:
    """The copy is bfloat16 and about half of the float32 weights; a CPU decodes without it."""
    config = config_of(*LANGUAGE, "actor.model.dtype=bfloat16")
    plan = run_plan.resolve_plan(config, torch.device("cpu"))
    estimator = run_plan.memory_estimator(config)
    (on_cpu,) = estimator.estimate_memory(plan).values()
    gpu = replace(plan, hardware=replace(plan.hardware, kind="cuda", memory=24 << 30))
    (on_gpu,) = estimator.estimate_memory(gpu).values()
    assert isinstance(estimator, LanguageMemoryEstimator)
    copied = decode_model.copy_bytes(estimator.policy)
    assert on_gpu == on_cpu | {"weights": on_cpu["weights"] + copied}
    parameters = sum(p.numel() for p in estimator.policy.parameters())
    assert 2 * parameters < copied < 3 * parameters
    assert estimator.policy.logit_bytes == 384 << 20
    # The cache has a row for each response that is decoded, also for those begun in addition and
    # those of an evaluation.
    begun = "rollout.oversampling=0.5", "algorithm.off_policy_correction=token"
    for more in (begun, ("evaluation.episodes=96",)):
        assert memory_needs(*LANGUAGE, *more)["cache"] == 1.5 * memory_needs(*LANGUAGE)["cache"]


def device_memory(needs: dict[str, int], less: float) -> str:
    """Return the option for a device in which ``less`` of the activations do not fit."""
    bytes_needed = sum(needs.values()) - less * needs["activations"]
    return f"cluster.device_memory_gb={bytes_needed / 0.92 / 1e9}"


def weights_and_moments(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return the weights after the update, and the first moments: (1 - beta1) x the gradient."""
    source = run_helpers.stored(run_dir, 1)
    pairs, _ = pytree.tree_flatten_with_path(source.training()["learner"])
    moments = {path: x for key, x in pairs if "exp_avg" in (path := pytree.keystr(key))}
    assert moments
    return {**source.policy(), **moments}


def check_equal_training(options: list[str], tmp_path: Path) -> None:
    """Train the original and the fitted recipe in ``large`` and ``small``; compare the tensors."""
    run("train", *options, f"run_dir={tmp_path / 'large'}", "--quiet")
    run("train", *FITTED, "run_dir=small", "--quiet")
    large, small = (weights_and_moments(tmp_path / name) for name in ("large", "small"))
    assert large.keys() == small.keys()
    for name, x in large.items():
        error = (x - small[name]).abs().max()
        assert torch.allclose(x, small[name], rtol=0, atol=1e-6), (name, error)
    assert any("exp_avg" in name and x.abs().max() > 1e-4 for name, x in large.items())


def fit(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return the summary; write the recipe to ``mine/experiment/small.yaml``."""
    summary = run_command(capsys, "fit", *arguments)
    run("fit", *arguments, "--quiet")
    file = Path("mine/experiment/small.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(capsys.readouterr().out)
    return summary


def changed_options(summary: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {change["option"]: (change["old"], change["new"]) for change in summary["changes"]}


FITTED = ["--config-dir", "mine", "experiment=small"]
ONE = ["--devices", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["step", "column"])
def test_micro_batches_train_like_one_minibatch(unit: str, tmp_path, capsys) -> None:
    """Compare four minibatches of 512 in one pass each with micro-batches."""
    options = [*ROBOT, "algorithm.global_batch_size=512", f"algorithm.minibatch_unit={unit}"]
    memory = device_memory(memory_needs(*options), less=0.6)
    summary = fit(capsys, *options, memory, *ONE)
    ((option, (old, micro)),) = changed_options(summary).items()
    assert (option, old) == ("algorithm.micro_batch_size", None) and 64 <= micro < 512
    assert micro % (64 if unit == "column" else 1) == 0
    # The micro-batch is the largest that fits: one pass less does not.
    size = 64 if unit == "column" else 1
    passes = -(-512 // micro)
    larger = -(-512 // size // (passes - 1)) * size
    fitted, too_large = (
        memory_needs(*options, f"algorithm.micro_batch_size={m}") for m in (micro, larger)
    )
    limit = 0.92 * float(memory.partition("=")[2]) * 1e9
    assert sum(fitted.values()) <= limit < sum(too_large.values())
    check_equal_training(options, tmp_path)
    large, small = rows(tmp_path / "large"), rows(tmp_path / "small")
    for tag, value in large[-1].items():
        assert small[-1][tag] == pytest.approx(value, rel=1e-4, abs=1e-5), tag


@pytest.mark.slow
@pytest.mark.usefixtures("eight_slots")
def test_one_learner_with_micro_batches_trains_like_two(tmp_path, capsys) -> None:
    options = [
        *ROBOT,
        "algorithm.global_batch_size=2048",
        "placement=disaggregated",
        "cluster.devices_per_node=4",
    ]
    needs = memory_needs(*ROBOT, "algorithm.global_batch_size=2048")
    # No more devices than environments are tried.
    many = changed_options(fit(capsys, *options, "--devices", "1000"))
    summary = fit(capsys, *options, device_memory(needs, less=0.4), *ONE)
    changes = changed_options(summary)
    assert many["placement"] == ("disaggregated", "fused")
    assert many["cluster.devices_per_node"][1] < 1000
    assert changes.pop("placement") == ("disaggregated", "local")
    assert changes.pop("cluster.devices_per_node") == (4, 0)
    assert changes.pop("algorithm.micro_batch_size")[0] is None and not changes
    reasons = {change["option"]: change["why"] for change in summary["changes"]}
    assert "needs 2 devices, and there is 1" in reasons["placement"]
    assert "more than 92%" in reasons["algorithm.micro_batch_size"]
    check_equal_training(options, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "changed", "original"),
    [
        ([], "algorithm.micro_batch_size", 32),
        (["algorithm.micro_batch_tokens=100000"], "algorithm.micro_batch_tokens", 100_000),
    ],
    ids=["responses", "tokens"],
)
def test_micro_batches_train_a_language_model_like_one_minibatch(
    options: list[str], changed: str, original: int, tmp_path, capsys
) -> None:
    options = [*LANGUAGE, *options]
    summary = fit(capsys, *options, device_memory(memory_needs(*options), less=0.6), *ONE)
    ((option, (_, new)),) = changed_options(summary).items()
    assert option == changed and new < original
    check_equal_training(options, tmp_path)


def test_recipe_that_fits_keeps_its_micro_batches(capsys) -> None:
    options = [*ROBOT, "algorithm.micro_batch_size=64", "compile=always"]
    summary = fit(capsys, *options, "--devices", "1")
    assert summary["changes"] == []
    assert summary["recipe"]["algorithm"]["micro_batch_size"] == 64


def test_placement_is_kept_or_becomes_fused(capsys) -> None:
    options = [*ROBOT, "cluster.devices_per_node=4"]
    summary = fit(capsys, *options, "placement=fused", "--devices", "2")
    assert changed_options(summary) == {"cluster.devices_per_node": (4, 2)}
    assert summary["recipe"]["placement"] == "fused"
    assert summary["notes"][0].startswith("2 learning now")
    roles = "cluster.component_placement={env: 0-1, rollout: 2, actor: 3}"
    summary = fit(capsys, *options, roles, "cluster.max_lag=1", "--devices", "3")
    changes = changed_options(summary)  # 3 does not divide 32 environments
    assert changes["cluster.devices_per_node"] == (4, 2)
    assert changes["placement"] == ("local", "fused")
    assert changes["cluster.max_lag"] == (1, 0) and summary["notes"][0] == "uses 2 of 3 devices"
    assert "0-1" not in str(summary["recipe"])


@pytest.mark.slow
def test_cut_minibatches_are_not_compiled(capsys) -> None:
    """Compiled minibatches have one shape."""
    options = [*ROBOT, "algorithm.global_batch_size=2048"]
    memory = device_memory(memory_needs(*options), less=0.5)
    summary = fit(capsys, *options, "compile=always", memory, "--devices", "1")
    assert changed_options(summary)["compile"] == ("always", "auto")


def test_recipe_for_an_absent_gpu_is_printed(capsys) -> None:
    arguments = run_helpers.words("""fit experiment=halfcheetah seed=3 device=cuda
        cluster.device_memory_gb=16 --devices 1""")
    run(*arguments)
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == "nothing has to change" and "minibatches of" in err
    recipe = yaml.safe_load(out)
    assert out.startswith("# @package _global_\n# embodied-ppo fit experiment=halfcheetah seed=3")
    assert recipe["seed"] == 3 and recipe["device"] == "cuda" and "cluster" not in recipe
    run(*arguments, "--quiet")
    assert capsys.readouterr() == (out, "")
    if not torch.cuda.is_available():
        arguments = [text for text in arguments if not text.startswith("cluster")]
        assert_refused(capsys, arguments, "write cluster.device_memory_gb=24")


@pytest.mark.slow
def test_written_recipe_is_complete(capsys) -> None:
    """The file composes to the fitted options, without those that GRPO does not read."""
    options = ["experiment=arithmetic", "algorithm.adv_type=grpo", "algorithm.group_size=4"]
    options += ["device=cpu"]
    fit(capsys, *options, *ONE)
    fitted, original = (memory_fit.settings(config_of(*x)) for x in (FITTED, options))
    assert fitted == original and "critic" not in fitted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*ROBOT, "--devices", "0"], "0 is not a whole number from 1 to 1,024"),
        (ROBOT, "the following arguments are required: --devices"),
        ([*ROBOT, "--devices", "1", "resume=auto"], "resume = auto: fit writes a recipe"),
        (
            [*ROBOT, "--devices", "1", "cluster.max_lag=2"],
            "remove cluster.max_lag .. placement=local",
        ),
        (
            [*ROBOT, "--devices", "1", "cluster.device_memory_gb=0.0001"],
            "more than 92% of its 0.1 MB; .. lower algorithm.horizon or env.num_envs",
        ),
    ],
)
def test_invalid_input_is_refused(arguments: list[str], message: str, tmp_path, capsys) -> None:
    assert_refused(capsys, ["fit", *arguments], message)
    assert list(tmp_path.iterdir()) == []
