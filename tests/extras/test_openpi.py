"""openpi's client, in an environment of its own, and its transforms: make test-openpi."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from run_helpers import run_process
from served_policies import started, write_mlp, write_pi0
from tiny_pi0_checkpoint import write_checkpoint
from vla_policy_checks import random_observations

from embodied_envs.types import ArraySpec, Box, ObsSpec
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies.vla.published import FLOW_FAMILIES
from embodied_ppo.policies.vla.trunk import VECTOR, WORDS

CLONE = Path(os.environ.get("OPENPI_CLONE") or "/nowhere")
PYTHON = os.environ.get("OPENPI_PYTHON", "")
client = pytest.mark.skipif(
    not PYTHON, reason="OPENPI_PYTHON names no Python with openpi-client: make test-openpi"
)
CLIENT = """
import json, sys, time
import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy
client = WebsocketClientPolicy(sys.argv[1])
obs = {}
for name, spec in client.get_server_metadata()["observations"].items():
    value = np.zeros(spec.get("shape", ()), None if spec["dtype"] == "str" else spec["dtype"])
    obs[name] = "reach the red block" if spec["dtype"] == "str" else value
try:
    client.infer({})
    refusal = None
except RuntimeError as error:
    refusal = str(error)
shape, total, inference = client.infer(obs)["actions"].shape, [], []
for _ in range(200):
    start = time.perf_counter()
    answer = client.infer(obs)
    total.append(1e3 * (time.perf_counter() - start))
    inference.append(answer["server_timing"]["infer_ms"])
added = float(np.median(np.subtract(total, inference)))
print(json.dumps([shape, refusal, 1e3 / float(np.mean(total)), added]))
"""


@client
@pytest.mark.parametrize(("write", "shape"), [(write_mlp, [1, 6]), (write_pi0, [2, 4])])
def test_the_client_gets_chunks_of_actions(
    write: Callable[[Path], Path], shape: list[int], tmp_path
) -> None:
    run = write(tmp_path / "run")
    with started("embodied_ppo.commands.main", "serve", str(run), "--port", "0") as address:
        output = run_process(Path(PYTHON).absolute(), "-c", CLIENT, address, timeout=None)
    actual, refusal, rate, added = json.loads(output.splitlines()[-1])
    print(f"{rate:.0f} requests per second, {added:.2f} ms more than the inference (median)")
    assert actual == shape and "send observation/" in refusal


def import_transforms(monkeypatch: pytest.MonkeyPatch, words: Any) -> tuple[Any, Any]:
    """Import openpi's transforms and tokenizer without JAX; ``words`` gives the ids."""
    unused = ["jax", "orbax", "orbax.checkpoint", "sentencepiece", "openpi.shared.download"]
    unused += ["openpi.models.utils.fsq_tokenizer", "openpi.shared.array_typing", "flax"]
    unused += ["openpi.shared.normalize", "flax.traverse_util"]
    modules: dict[str, Any] = {name: MagicMock() for name in unused}
    modules["flax"].traverse_util.flatten_dict = lambda tree, **_: dict(tree)
    modules["flax"].traverse_util.unflatten_dict = lambda tree, **_: tree
    modules["flax.traverse_util"] = modules["flax"].traverse_util
    for name in ("openpi", "openpi.models", "openpi.models.utils", "openpi.shared"):
        modules[name] = ModuleType(name)
        modules[name].__path__ = [str(CLONE / "src" / name.replace(".", "/"))]

    def encode(text: str, add_bos: bool = False) -> list[int]:
        return [words.bos_token_id] * add_bos + words(text, add_special_tokens=False).input_ids

    modules["sentencepiece"].SentencePieceProcessor.return_value.encode = encode
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("openpi.transforms", "openpi.models.tokenizer"):  # with stubs of another test
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(CLONE / "packages" / "openpi-client" / "src"))
    transforms = importlib.import_module("openpi.transforms")
    transforms._assert_quantile_stats = lambda _: None
    return transforms, importlib.import_module("openpi.models.tokenizer")


@pytest.mark.skipif(not CLONE.is_dir(), reason="OPENPI_CLONE names no clone: make test-openpi")
@pytest.mark.parametrize("kind", ["pi0", "pi05"])
@torch.no_grad()
def test_inputs_and_actions_are_those_of_openpi(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are equal; states and actions up to rounding; pixels up to one level."""
    rows, horizon, state, action, relative = 3, 6, 5, 4, [True, False, True]
    spec: ObsSpec = {"state": ArraySpec((state,)), "instruction": ArraySpec((), torch.int64)}
    spec |= {"front": ArraySpec((3, 24, 40), torch.uint8)}
    generator = np.random.default_rng(0)
    statistics = {}
    for name, size in (("state", state), ("actions", action)):
        low = generator.uniform(-1, 0, size)
        ends = {"mean": low, "std": 1 + low * low, "q01": low, "q99": low + 1}
        statistics[name] = {end: x.tolist() for end, x in ends.items()}
    write_checkpoint(tmp_path / "pi", kind=kind, asset="robot", statistics=statistics)
    tasks = ("push the red_block", " lift it\nslowly ", "reach the blue block, please")
    options: dict[str, Any] = {"delta_actions": (0, 2)}
    options |= {"discrete_state_input": True} if kind == "pi05" else {}
    config = ModelConfig(policy="flow", checkpoint=str(tmp_path / "pi"), flow_steps=2, **options)
    box = Box((-1.0,) * (horizon * action), (1.0,) * (horizon * action))
    policy = FLOW_FAMILIES[kind](spec, box, config, chunk=horizon, sentences=tasks, mapping="clip")
    obs = random_observations(spec, rows, seed=0) | {"instruction": torch.arange(rows)}
    inputs = policy.trunk.encode(obs)
    latent = torch.randn(rows, horizon, action, generator=torch.Generator().manual_seed(2))
    context = policy.encode_context(policy.encode(obs))
    actions = policy.denormalize_actions(latent, context)
    pixels = policy.trunk.pixels(obs["front"])

    tokenizer: Any = policy.trunk.tokenize
    transforms, tokenizers = import_transforms(monkeypatch, tokenizer.tokenizer)
    stats = {
        key: SimpleNamespace(**{end: np.array(x) for end, x in value.items()})
        for key, value in statistics.items()
    }
    quantiles = {"use_quantiles": kind == "pi05"}
    words = tokenizers.PaligemmaTokenizer(200 if kind == "pi05" else 48)
    before = transforms.compose(
        [
            transforms.Normalize(stats, **quantiles),
            transforms.ResizeImages(16, 16),
            transforms.TokenizePrompt(words, discrete_state_input=kind == "pi05"),
            transforms.PadStatesAndActions(8),
        ]
    )
    after = transforms.compose(
        [transforms.Unnormalize(stats, **quantiles), transforms.AbsoluteActions(relative)]
    )
    worst = {"states": 0.0, "actions": 0.0, "levels of pixels": 0.0}
    for row, task in enumerate(tasks):
        raw = obs["state"][row].numpy().astype(np.float64)
        image = obs["front"][row].permute(1, 2, 0).numpy()
        theirs = before({"state": raw, "image": {"front": image}, "prompt": task})
        ids = inputs[WORDS][row]
        mask = theirs["tokenized_prompt_mask"]
        assert ids[ids >= 0].tolist() == theirs["tokenized_prompt"][mask].tolist()
        # Their policy removes the padding of states and actions after Unnormalize.
        normalized = np.concatenate((latent[row].double().numpy(), np.zeros((horizon, 4))), axis=1)
        out = after({"state": theirs["state"], "actions": normalized})
        level = pixels[row].permute(1, 2, 0) * 127.5 + 127.5 - theirs["image"]["front"]
        for name, difference in (
            ("states", inputs[VECTOR][row].double() - torch.from_numpy(theirs["state"])),
            ("actions", actions[row].double() - torch.from_numpy(out["actions"][:, :action])),
            ("levels of pixels", level),
        ):
            worst[name] = max(worst[name], float(difference.abs().max()))
    print(f"{kind} of openpi:", {name: f"{x:.2g}" for name, x in worst.items()})
    assert worst["states"] < 1e-5 and worst["actions"] < 1e-5 and worst["levels of pixels"] < 1.01
