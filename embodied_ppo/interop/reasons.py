"""Reasons, shared by several frameworks, why an option has no counterpart here."""

from __future__ import annotations

SHARDED = (
    "how their backend shards, casts and checkpoints a model; here a model is replicated, or "
    "sharded with cluster.shard=true"
)
OFFLOAD = (
    "roles that wait on a shared device are offloaded to host memory automatically; "
    "cluster.component_placement sets which roles share one"
)
ENGINE = (
    "a setting of their inference engine; here only rollout.engine, rollout.slots and"
    " rollout.gpu_memory_utilization exist"
)
MEMORY = (
    "changes memory only; algorithm.micro_batch_size or micro_batch_tokens limit every forward pass"
    " here"
)
LOGGING = (
    "a run directory holds TensorBoard files, metrics.jsonl, checkpoints and reports: "
    "runs/NAME/<date>-<seed>, or run_dir=; trackers=[wandb] and [mlflow] receive the metrics, too"
)
PROFILE = "profiling and debugging of their code"
THEIR_CODE = "names a part of their code; nothing in the file is imported or run"
HYDRA = (
    "read by Hydra; a defaults list is not followed: import the composed file, which `--cfg job`"
    " prints"
)
REMOTE = "code in a model directory is never run here"
SHUFFLE = "every epoch draws a fresh permutation here, from seed"
RESUME = "on the command line: resume=auto or resume=DIR"
SEEDS = "there is one seed here; all others are derived from it"
LOADER = "the process that generates reads the prompts; there is no data loader to configure"
DATASET = (
    "nothing is downloaded; write data.train=[FILE] and data.eval=[FILE] (.jsonl, .json, .parquet)"
)
EPOCHS = "epochs of the data; write updates = epochs x prompts / algorithm.rollout_batch_size"
TOOLS = "tools, images and multi-turn responses are not supported"
NO_ADAPTERS = "adapters of language models are not supported"
MICRO_BATCH_TOKENS = "algorithm.micro_batch_tokens, if set, has this effect"
NO_REFERENCE_OPTIONS = "the reference is the actor at the start of training; it needs no options"
OTHER_LOSS = "a loss other than PPO's; here the loss is the clipped surrogate with dual clip"
MODEL_TOKENIZER = "null: the model's, as here"
ACTOR_WEIGHTS = "the rollout uses the actor's weights"
LONG_PROMPTS = "longer prompts are always dropped, and counted"
WEIGHT_TRANSFER = "cluster.weights sets how weights are transferred"
CHAT_TEMPLATE = "only data.chat_template and data.system exist here"
