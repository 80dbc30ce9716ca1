"""Program for the Python of ``make test-lerobot``: write small policies of lerobot and run them.

    python lerobot_policies.py

reads lines "pi0|pi05|smolvla FOLDER" and answers each with the line "done": importing lerobot takes
longer than running a policy. FOLDER holds

* ``inputs.safetensors``: observations (images uint8 [B, 3, h, w] by name, ``state`` [B, n]),
  ``noise`` [B, H, P], and the statistics of states and actions,
* ``tasks.json``, the sentences,
* ``options.json``, fields of lerobot's configuration; with ``peft``, fields of peft's, lerobot also
  writes an adapter to ``FOLDER/adapter``, and runs the policy with this adapter merged,
* ``tokenizer/``.

* perhaps ``exported/``, a directory of the policy that is run instead of writing one,
* perhaps ``adapter/``, a directory of an adapter in peft's layout: peft adds it to the policy that
  the adapter's configuration names.

The policy is written to ``FOLDER/policy`` by lerobot's own ``save_pretrained`` and read by its
``from_pretrained``; its actions are in ``FOLDER/actions.safetensors``.

This file imports lerobot and nothing of this repository.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lerobot.configs.policies import PreTrainedConfig  # pyright: ignore
from lerobot.configs.types import FeatureType, PolicyFeature  # pyright: ignore
from lerobot.policies import smolvla
from lerobot.policies.factory import make_pre_post_processors  # pyright: ignore
from lerobot.policies.pi0 import configuration_pi0, modeling_pi0  # pyright: ignore
from lerobot.policies.pi05 import configuration_pi05, modeling_pi05  # pyright: ignore
from lerobot.processor import tokenizer_processor  # pyright: ignore
from peft import PeftConfig, PeftModel  # pyright: ignore
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

VOCABULARY = 300
# Statistics of each number of states and actions.
KINDS = ("mean", "std", "q01", "q99")


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Make trained weights random and large enough for every part to have an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn(p.shape, generator=generator))


def shrink(modeling: Any) -> None:
    """Let a module of lerobot construct small networks: its sizes are constants."""

    def small_gemma(variant: str) -> Any:
        width = {"gemma_2b": 64, "gemma_300m": 32}[variant]
        return modeling.GemmaConfig(
            width=width, depth=2, mlp_dim=2 * width, num_heads=8, num_kv_heads=1, head_dim=8
        )

    modeling.get_gemma_config = small_gemma
    paligemma = modeling.PaliGemmaForConditionalGenerationWithPiGemma
    gemma = modeling.PiGemmaForCausalLM

    def small_paligemma(config: Any) -> Any:
        config.text_config.vocab_size = VOCABULARY
        vision = config.vision_config
        vision.hidden_size, vision.intermediate_size, vision.patch_size = 32, 64, 8
        vision.num_hidden_layers, vision.num_attention_heads = 2, 2
        vision.projection_dim = config.text_config.hidden_size
        return paligemma(config=config)

    def small_expert(config: Any) -> Any:
        config.vocab_size = VOCABULARY
        return gemma(config=config)

    modeling.PaliGemmaForConditionalGenerationWithPiGemma = small_paligemma
    modeling.PiGemmaForCausalLM = small_expert


def shrink_smolvla() -> None:
    """Let lerobot construct a small SmolVLM2 instead of one of the hub."""
    from transformers import SmolVLMConfig

    text = {"model_type": "llama", "hidden_size": 48, "intermediate_size": 64}
    text |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    text |= {"num_hidden_layers": 6, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    config = SmolVLMConfig(text_config=text, vision_config=vision, scale_factor=2)
    words = type("Words", (), {"fake_image_token_id": 1, "global_image_token_id": 2})
    processor = type("Processor", (), {"tokenizer": words})

    def local(result: Any) -> Any:
        return type("Local", (), {"from_pretrained": staticmethod(lambda *_, **__: result)})

    smolvla.smolvlm_with_expert.AutoConfig = local(config)
    smolvla.smolvlm_with_expert.AutoProcessor = local(processor)


def features(inputs: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return lerobot's input and output features of the observations."""
    observed = {
        f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, tuple(x.shape[1:]))
        for name, x in inputs.items()
        if x.dtype == torch.uint8
    }
    state = PolicyFeature(FeatureType.STATE, tuple(inputs["state"].shape[1:]))
    action = PolicyFeature(FeatureType.ACTION, tuple(inputs["action.mean"].shape))
    return observed | {"observation.state": state}, {"action": action}


def run(
    folder: Path, config: Any, policy_class: Any, unused: str | None, peft: dict[str, Any] | None
) -> None:
    """Write a policy of random weights, read it back and write its actions.

    Args:
        folder: See the module.
        config: lerobot's configuration.
        policy_class: lerobot's class of the policy.
        unused: Part of the name of weights to remove from the file before it is read.
        peft: Fields of peft's configuration of an adapter to write, None: of no adapter.
    """
    inputs = load_file(folder / "inputs.safetensors")
    # The processors name a tokenizer of the hub.
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer_processor.AutoTokenizer = type(
        "Local", (), {"from_pretrained": staticmethod(lambda *_, **__: tokenizer)}
    )
    statistics = {
        feature: {kind: inputs[f"{name}.{kind}"] for kind in KINDS}
        for feature, name in (("observation.state", "state"), ("action", "action"))
    }
    preprocess, postprocess = make_pre_post_processors(config, dataset_stats=statistics)
    out, adapter = folder / "exported", folder / "adapter"
    if adapter.is_dir():
        write_actions(folder, read_adapter(adapter, policy_class), preprocess, postprocess)
        return
    if not out.is_dir():
        policy = policy_class(config)
        randomize(policy, seed=1)
        out = folder / "policy"
        for part in (policy, preprocess, postprocess):
            part.save_pretrained(out)
        tokenizer.save_pretrained(out)
    if unused is not None:
        weights = load_file(out / "model.safetensors")
        remaining = {name: x for name, x in weights.items() if unused not in name}
        assert len(remaining) == len(weights) - 1, sorted(weights)
        save_file(remaining, out / "model.safetensors")
    policy = policy_class.from_pretrained(out)
    if peft is not None:
        policy.config.pretrained_path = out
        adapted = policy.wrap_with_peft(peft_cli_overrides=peft)
        randomize(adapted, seed=2)
        for part in (adapted, policy.config, preprocess, postprocess):
            part.save_pretrained(adapter)
        policy = adapted.merge_and_unload()
    write_actions(folder, policy, preprocess, postprocess)


def read_adapter(folder: Path, policy_class: Any) -> Any:
    """Return the policy of an adapter, read as lerobot's ``make_policy`` does with use_peft."""
    assert PreTrainedConfig.from_pretrained(folder).use_peft
    config = PeftConfig.from_pretrained(folder)
    policy = policy_class.from_pretrained(config.base_model_name_or_path)
    return PeftModel.from_pretrained(policy, folder, config=config).eval()


def write_actions(folder: Path, policy: Any, preprocess: Any, postprocess: Any) -> None:
    """Write the actions of a policy for the observations of ``folder``."""
    inputs = load_file(folder / "inputs.safetensors")
    tasks = json.loads((folder / "tasks.json").read_text())
    batch: dict[str, Any] = {
        f"observation.images.{name}": x.float() / 255
        for name, x in inputs.items()
        if x.dtype == torch.uint8
    }
    batch |= {"observation.state": inputs["state"], "task": tasks}
    actions = policy.predict_action_chunk(preprocess(batch), noise=inputs["noise"])
    save_file({"action": postprocess(actions).float().contiguous()}, folder / "actions.safetensors")


# Name -> lerobot's classes of the configuration and the policy, and fields of small images.
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "pi0": (configuration_pi0.PI0Config, modeling_pi0.PI0Policy, {"image_resolution": (16, 16)}),
    "pi05": (
        configuration_pi05.PI05Config,
        modeling_pi05.PI05Policy,
        {"image_resolution": (16, 16)},
    ),
    "smolvla": (
        smolvla.configuration_smolvla.SmolVLAConfig,
        smolvla.modeling_smolvla.SmolVLAPolicy,
        {"resize_imgs_with_padding": (16, 16), "num_vlm_layers": 4},
    ),
}


def main() -> None:
    """Run the policies that the lines of the input name."""
    shrink(modeling_pi0)
    shrink(modeling_pi05)
    shrink_smolvla()
    for line in sys.stdin:
        family, name = line.split()
        folder, (config_class, policy_class, small) = Path(name), FAMILIES[family]
        torch.manual_seed(0)
        observed, actions = features(load_file(folder / "inputs.safetensors"))
        options = json.loads((folder / "options.json").read_text())
        others = [options.pop(name, None) for name in ("unused", "peft")]
        common = {"input_features": observed, "output_features": actions, "device": "cpu"}
        run(folder, config_class(**small, **common, **options), policy_class, *others)
        print("done", flush=True)


if __name__ == "__main__":
    main()
