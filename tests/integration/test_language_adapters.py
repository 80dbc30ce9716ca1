"""Adapters of language models: one base for three models, files, memory, placements, refusals."""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
import transformers
from torch import Tensor, nn

from embodied_envs.base import tree
from embodied_envs.base.errors import CheckpointError, ConfigError
from embodied_ppo.cluster import run_plan
from embodied_ppo.cluster.worker import WorkerSpec
from embodied_ppo.commands import main
from embodied_ppo.data import synthetic_tasks
from embodied_ppo.options import validation
from embodied_ppo.policies import language_models, lora
from embodied_ppo.policies.causal_lm import LanguagePolicy
from embodied_ppo.ppo.critic import LocalCritic
from embodied_ppo.ppo.language_actor import FrozenReference, LanguageActor
from embodied_ppo.programs import language
from embodied_ppo.programs.run_spec import RunSpec
from embodied_ppo.rollout.generation.engine import Engine
from embodied_ppo.rollout.generation.sampling import Sampling
from embodied_ppo.training.progress import Messages
from tests.integration import test_placements_language
from tests.integration.test_placements import assert_close, equal_tensors
from tests.integration.test_placements_language import EQUAL_TO_LOCAL, KL, SHARDED, SMALL, config

pytestmark = pytest.mark.usefixtures("few_problems")
RANK = 3
IDS = torch.arange(40).view(2, 20) * 7 % 24


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The directory of a model whose head is tied to its embedding."""
    folder = tmp_path_factory.mktemp("models") / "base"
    sizes = {**SMALL["actor.model.architecture"], "num_hidden_layers": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fields = transformers.AutoConfig.for_model(**sizes, tie_word_embeddings=True)
        transformers.AutoModelForCausalLM.from_config(fields).save_pretrained(folder)
    synthetic_tasks.tokenizer().save_pretrained(folder)
    return folder


def options(base: Path, **more: Any) -> dict[str, Any]:
    adapters = {"actor.model.path": str(base), "actor.model.lora_rank": RANK}
    return {**adapters, "warm_start.steps": 0, "algorithm.lr": 1e-2, **KL, **more}


def train(run_dir: Path, base: Path, **more: Any) -> list[dict[str, Any]]:
    named = {name.replace(".", "__"): x for name, x in options(base).items()}
    return test_placements_language.train(run_dir, **named | more)


def trained_policy(base: Path, **more: Any) -> LanguagePolicy:
    """Return an actor whose adapters are random."""
    policy = language_models.make_policy(
        config(options(base, **more)), synthetic_tasks.tokenizer(), torch.device("cpu")
    )
    torch.manual_seed(1)
    for layer in lora.adapted_layers(policy).values():
        nn.init.normal_(layer.lora_B["default"].weight, std=0.02)
    return policy


@torch.no_grad()
def logits(policy: LanguagePolicy) -> Tensor:
    return policy.logits(policy.hidden(IDS, torch.arange(20).expand(2, 20)))


def test_models_share_the_base_and_compute_pefts_formula(base: Path) -> None:
    """W + (32 / rank) B A is the weight of peft; without adapters the base is equal bit for bit."""
    policy = trained_policy(base)
    expected = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        off = logits(LanguagePolicy(copy.deepcopy(expected)))
        for name, layer in lora.adapted_layers(policy.model).items():
            a, b = (layer.get_parameter(f"lora_{x}.default.weight") for x in "AB")
            expected.get_submodule(name).weight += 32.0 / RANK * b @ a
        assert (logits(policy) - expected(IDS).logits).abs().max() < 1e-6
    state = dict(lora.merged_state(policy.model))
    assert state.keys() == expected.state_dict().keys()
    run_helpers.assert_states_close(state, dict(expected.state_dict()))

    reference = FrozenReference(copy.deepcopy(policy), tokens=None, columns=None)
    assert torch.equal(logits(reference.policy), off) and not torch.equal(logits(policy), off)
    critic = language_models.make_critic(config(options(base)), policy, torch.device("cpu"))
    assert critic is not None
    frozen = {id(p) for p in policy.parameters() if not p.requires_grad}
    for other in (reference.policy, critic):
        assert {id(p) for p in other.parameters() if not p.requires_grad} <= frozen
    names = {name for name, p in critic.named_parameters() if p.requires_grad}
    assert critic.state_dict().keys() == {*names, lora.BASE} and "value_head.weight" in names
    assert reference.state().keys() == {lora.BASE}

    whole = config(options(base, **{"critic.model.lora_rank": 0}))
    critic = language_models.make_critic(whole, policy, torch.device("cpu"))
    assert critic is not None and all(p.requires_grad for p in critic.parameters())
    assert frozen.isdisjoint(map(id, critic.parameters()))


def test_engine_decodes_with_a_merged_copy(base: Path) -> None:
    policy, sampling = trained_policy(base), Sampling(max_tokens=6)
    prompts = [[3, 4], [5, 6, 7], [8]]
    engines = [Engine(policy, slots=2, pad_id=0, static=x, copy_weights=x) for x in (True, False)]
    merged, plain = (engine.generate(prompts, sampling, seed=0) for engine in engines)
    assert engines[0]._model is not None and torch.equal(merged.token, plain.token)
    torch.testing.assert_close(merged.log_prob, plain.log_prob)
    rounded = trained_policy(base, **{"actor.model.dtype": "bfloat16"})
    layer = next(iter(lora.adapted_layers(rounded).values()))
    assert layer.base_layer.weight.dtype == torch.bfloat16 and layer.a.dtype == torch.float32
    assert (logits(rounded) - logits(policy)).abs().max() < 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_without_adapters_equals_the_base(base: Path, dtype: str) -> None:
    """Adapters that are new (B = 0), or removed after a training, change no bit."""
    more, sampling = {"actor.model.dtype": dtype}, Sampling(max_tokens=6)
    new = language_models.make_policy(
        config(options(base, **more)), synthetic_tasks.tokenizer(), torch.device("cpu")
    )
    removed = trained_policy(base, **more)
    lora.remove(removed)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    policies = (LanguagePolicy(plain, compute=getattr(torch, dtype)), new, removed)
    for copied in (True, False):
        engines = [
            Engine(p, slots=2, pad_id=0, static=copied, copy_weights=copied) for p in policies
        ]
        expected, *others = (
            e.generate([[3, 4], [5, 6, 7], [8]], sampling, seed=0) for e in engines
        )
        for other in others:
            assert torch.equal(other.token, expected.token)
            assert torch.equal(other.log_prob, expected.log_prob)


@pytest.fixture(scope="module")
def exported(base: Path, tmp_path_factory) -> Path:
    """A folder with a run and its two exports."""
    folder = tmp_path_factory.mktemp("exported")
    _, first, *_, last = train(folder / "run", base)
    # The first rollout acts with the base.
    assert abs(first["kl/to_reference"]) < 1e-7 < last["kl/to_reference"]
    command = ["export", "--quiet", f"checkpoint={folder / 'run'}"]
    assert main.main([*command, f"out={folder / 'merged'}"]) == 0
    assert main.main([*command, f"out={folder / 'adapter'}", "lora=adapter"]) == 0
    return folder


@pytest.mark.slow
def test_run_resumes_bit_for_bit_and_stores_adapters_only(
    base: Path, exported: Path, tmp_path
) -> None:
    stored = weights(exported / "run")
    assert not [name for name in stored if "base_layer" in name or "embed" in name]
    train(tmp_path / "half", base, resume=str(exported / "run" / "checkpoints" / "step_000002"))
    assert equal_tensors(weights(tmp_path / "half"), stored)
    fields = json.loads((exported / "adapter" / "adapter_config.json").read_text())
    assert (fields["r"], fields["lora_alpha"], fields["task_type"]) == (RANK, 32, "CAUSAL_LM")


@pytest.mark.slow
def test_peft_and_transformers_read_both_exports(exported: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft accelerate")
    read = transformers.AutoModelForCausalLM.from_pretrained
    models = [read(exported / "merged"), read(exported / "adapter")]
    models.append(peft.AutoPeftModelForCausalLM.from_pretrained(exported / "adapter"))
    with torch.no_grad():
        first, *others = (model(IDS).logits for model in models)
    assert all((x - first).abs().max() < 1e-6 for x in others)


def weights(run_dir: Path) -> dict[str, Tensor]:
    return test_placements_language.weights(run_dir)


@pytest.mark.slow
@pytest.mark.usefixtures("eight_slots")
def test_placements_equal_one_process(base: Path, tmp_path) -> None:
    expected = train(tmp_path / "local", base)
    for name, placed in EQUAL_TO_LOCAL.items():
        assert train(tmp_path / name, base, **placed) == expected
        assert equal_tensors(weights(tmp_path / name), weights(tmp_path / "local")), name


@pytest.mark.slow
@pytest.mark.usefixtures("eight_slots")
def test_sharded_learners_equal_unsharded_ones(base: Path, tmp_path) -> None:
    """Each sharded model has shards of a base of its own."""
    two = train(tmp_path / "two", base, **SHARDED["fused"], algorithm__lr=1e-3)
    sharded = {"cluster__shard": True, "algorithm__lr": 1e-3}
    assert_close(train(tmp_path / "sharded", base, **SHARDED["fused"], **sharded), two)
    run_helpers.assert_states_close(weights(tmp_path / "sharded"), weights(tmp_path / "two"))


@pytest.mark.parametrize("ranks", [(RANK, None), (RANK, 0), (0, RANK), (0, None)])
def test_predicted_memory_is_that_of_the_models(
    base: Path, tmp_path, ranks: tuple[int, int | None]
) -> None:
    """A shared base counts once: within 5 % of the storages after an update."""
    actor_rank, critic_rank = ranks
    more = {"actor.model.lora_rank": actor_rank, "critic.model.lora_rank": critic_rank}
    c = config(options(base, **more))
    plan = run_plan.resolve_plan(c, torch.device("cpu"))
    (needs,) = run_plan.memory_estimator(c).estimate_memory(plan).values()
    with ExitStack() as stack:
        spec = RunSpec(c, torch.device("cpu"), tmp_path, 3)
        process = WorkerSpec(tuple(validation.roles(c)), {"rollout": (0, 1)})
        worker, _ = language.build(spec, process, None, Messages(print), stack)
        worker.collect(4, 0)
        worker.update(0, (0, 1))
        learner: Any = worker.learner
        assert isinstance(learner.actor, LanguageActor) and isinstance(learner.critic, LocalCritic)
        reference: Any = learner.actor.local_reference
        modules = [worker.module, learner.critic.module, reference]
        tensors = [x for m in modules for x in (*m.parameters(), *m.buffers())]
        tensors += [p.grad for p in tensors if p.grad is not None]
        tensors += [x for x in tree.leaves(learner.state()) if isinstance(x, Tensor)]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
        measured = sum(x.nbytes() for x in storages.values())
        worker.close()
    predicted = sum(needs[x] for x in ("weights", "gradients", "optimiser"))
    assert predicted == pytest.approx(measured, rel=0.05)


def test_wrong_input_is_refused(base: Path, tmp_path) -> None:
    for more, named in (
        ({"actor.model.path": None}, "actor.model.path"),
        ({"actor.model.lora_rank": -1}, "lora_rank"),
        ({"critic.model.lora_rank": RANK, "algorithm.adv_type": "reinforce"}, "critic"),
        ({"compile": "always"}, "compile"),
    ):
        with pytest.raises(ConfigError, match=named):
            config(options(base, **more))
    policy, other = trained_policy(base), tmp_path / "other"
    other.mkdir()
    for file in base.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    changed = json.loads((other / "config.json").read_text()) | {"rope_theta": 5e5}
    (other / "config.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=f"actor.model.path={other}"):
        trained_policy(other).load_state_dict(policy.state_dict())
