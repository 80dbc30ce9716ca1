"""Program for the Python of ``make test-lerobot``: merge an adapter of OpenVLA with peft.

    python peft_merge.py ADAPTER OUT.safetensors

OpenVLA's language model is built from the directory that the adapter names, under the path that it
has in OpenVLA's code. Its merged weights are written to OUT by their published names.

This file imports peft, transformers and nothing of this repository.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from peft import PeftConfig, PeftModel  # pyright: ignore
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class OpenVLA(nn.Module):
    """The part of OpenVLA that has adapters."""

    def __init__(self, folder: Path) -> None:
        """Read the language model of a directory."""
        super().__init__()
        text = json.loads((folder / "config.json").read_text())["text_config"]
        self.language_model = LlamaForCausalLM(LlamaConfig(**text))
        weights = load_file(folder / "model.safetensors")
        self.load_state_dict({k: x for k, x in weights.items() if k.startswith("language_model.")})


def main() -> None:
    """Merge the adapter of the first argument."""
    adapter, out = map(Path, sys.argv[1:])
    config = PeftConfig.from_pretrained(adapter)
    model = PeftModel.from_pretrained(OpenVLA(Path(config.base_model_name_or_path)), adapter)
    merged = model.merge_and_unload().state_dict()
    save_file({name: x.contiguous().clone() for name, x in merged.items()}, out)


if __name__ == "__main__":
    main()
