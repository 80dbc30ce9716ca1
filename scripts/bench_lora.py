"""Measure an update with adapters against one that trains all weights, in CPU time.

    OMP_NUM_THREADS=1 python scripts/bench_lora.py [--pairs 9] [any.option=value ...]

Both runs use the options of ``experiment=arithmetic`` with a model of 30 M random parameters and 64
responses. Their updates alternate, so that other load of the machine slows both. Printed are the
seconds of each update, the ratio of each pair, and the medians of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
import transformers

from embodied_ppo.cluster.worker import Worker, WorkerSpec
from embodied_ppo.data import synthetic_tasks
from embodied_ppo.options import compose, validation
from embodied_ppo.programs import language
from embodied_ppo.programs.run_spec import RunSpec
from embodied_ppo.training.progress import Messages

SIZES = {
    "vocab_size": 24,
    "hidden_size": 512,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("options", nargs="*", help="any.option=value of both runs")
    a = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        base = Path(folder) / "base"
        fields = transformers.AutoConfig.for_model("qwen2", **SIZES)
        transformers.AutoModelForCausalLM.from_config(fields).save_pretrained(base)
        synthetic_tasks.tokenizer().save_pretrained(base)
        workers = [make_worker(base, Path(folder), rank, a.options, stack) for rank in (0, a.rank)]
        rows = list[list[float]]()
        for update in range(a.pairs + 1):  # the first one warms up
            row = list[float]()
            for worker in workers:
                start = time.process_time()
                worker.collect(4, update)
                middle = time.process_time()
                worker.update(update, (0, 1))
                row += [middle - start, time.process_time() - middle]
            line = "full: rollout {:.2f}, training {:.2f}; adapters: {:.2f}, {:.2f}".format(*row)
            print(f"{line}; ratio of training {row[1] / row[3]:.2f}", flush=True)
            rows.append(row)
        training = statistics.median(r[1] / r[3] for r in rows[1:])
        whole = statistics.median((r[0] + r[1]) / (r[2] + r[3]) for r in rows[1:])
        print(f"full / adapters: training {training:.2f}, whole update {whole:.2f}")
        for worker in workers:
            worker.close()


def make_worker(
    base: Path, folder: Path, rank: int, options: list[str], stack: ExitStack
) -> Worker:
    """Return a process with all roles; rank 0 trains all weights."""
    lines = [
        "experiment=arithmetic",
        "~actor.model.architecture",
        f"actor.model.path={base}",
        "warm_start.steps=0",
        "algorithm.rollout_batch_size=64",
        "algorithm.global_batch_size=32",
        "compile=never",
        *options,
        *([f"actor.model.lora_rank={rank}"] if rank else []),
    ]
    flags = argparse.Namespace(config_dir=None, config_name=None, command="train")
    config = compose.prepare(flags, lines).config
    spec = RunSpec(config, torch.device("cpu"), folder, 3)
    process = WorkerSpec(tuple(validation.roles(config)), {"rollout": (0, 1)})
    return language.build(spec, process, None, Messages(print), stack)[0]


if __name__ == "__main__":
    main()
