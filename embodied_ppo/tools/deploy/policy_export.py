"""Write the model of a checkpoint for other programs: `embodied-ppo export`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from embodied_envs.base.errors import CheckpointError, ConfigError
from embodied_envs.base.random import env_seeds
from embodied_ppo.evaluation import language_evaluation, robot_evaluation
from embodied_ppo.policies import causal_lm, language_models, lora, peft_files, robot_policy
from embodied_ppo.policies.checkpoint_files import copy_permissions
from embodied_ppo.policies.vla.pi0 import PI0
from embodied_ppo.policies.vla.pretrained import PublishedVLA
from embodied_ppo.rollout import environments, language_inputs
from embodied_ppo.tools.deploy import bundle
from embodied_ppo.training.progress import Progress
from embodied_ppo.training.run_directory import export_folder, report_write_errors
from embodied_ppo.training.trained_run import TrainedRun, open_run

# ------------------------------------------------------------------------------------ data of a run


def export(path: str, out: str, *, adapter: bool = False) -> dict[str, Any]:
    """Write a checkpoint for other programs.

    An actor-critic policy becomes a deployment bundle (``bundle``); a language
    model, or a published vision-language-action model, is written in its published layout.

    Args:
        path: A checkpoint or a run directory.
        out: Directory to write.
        adapter: Write the adapters of a model with lora_rank only.

    Raises:
        CheckpointError, ConfigError, EnvError: The model cannot be exported, or not be written.
    """
    run, folder = open_run(path, say=Progress(quiet=False).say), Path(out)
    check(run, adapter=adapter)
    with export_folder(folder):
        if run.config.mode == "reasoning":
            measurements = _write_language_model(run, folder, adapter=adapter)
        elif run.config.model.policy == "actor_critic":
            measurements = bundle.write(run, folder)
        else:
            measurements = _write_vla(run, folder, adapter=adapter)
    mb = round(sum(file.stat().st_size for file in folder.rglob("*")) / 1e6, 1)
    return {"checkpoint": str(run.source.path), "out": str(folder), "mb": mb, **measurements}


def check(run: TrainedRun, *, adapter: bool) -> None:
    """Raise ConfigError where the model cannot be exported."""
    model, path = run.config.model, run.source.path
    reasoning = run.config.mode == "reasoning"
    if adapter and not (run.config.actor.model if reasoning else model).lora_rank:
        raise ConfigError(
            f"lora=adapter: {path.name} has no adapters (lora_rank=0); write lora=merged"
        )
    if reasoning:
        return
    if adapter and peft_files.base_folder(source := Path(str(model.checkpoint))) != source:
        raise ConfigError(
            f"write lora=merged: model.checkpoint={source} is an adapter, not the base of another"
        )
    if model.policy == "actor_critic":
        bundle.check_packages()
    elif model.checkpoint is None:
        raise ConfigError(
            f"checkpoint={path.name}: model.policy={model.policy} cannot be exported; export"
            " writes language models, model.policy=actor_critic, and policies with"
            " model.checkpoint"
        )


def _write_vla(run: TrainedRun, out: Path, *, adapter: bool) -> dict[str, Any]:
    """Write a vision-language-action model, or its adapters, in the published layout; read it back.

    Returns:
        ``logit_difference`` or ``action_difference``, the largest one.
    """
    assert run.config.model.checkpoint is not None
    source = Path(run.config.model.checkpoint).resolve()
    if out.resolve().is_relative_to(source):
        raise ConfigError(
            f"out={out}: is inside model.checkpoint={source}, which stays as it is; name a"
            " directory outside of it"
        )
    config = replace(run.config, env=replace(run.config.env, num_envs=2))
    task = robot_evaluation.evaluated_task(run, config.env, allow=False)
    seeds, cpu = env_seeds(0, 0, 2), torch.device("cpu")
    with closing(environments.make_env(seeds, config=config.env, device=cpu, task=task)) as env:
        policy = robot_policy.make_policy(config, env)
        assert isinstance(policy, PublishedVLA | PI0) and config.model.checkpoint is not None
        run.load_weights(policy)
        obs = env.reset()
        before = policy.act(policy.encode(obs))
        # Acting with a cache of keys rounds differently than ``evaluate``, so that log-
        # probabilities are compared between two calls of ``evaluate``.
        expected = policy.evaluate(policy.encode(obs), before.action, before.replay)
        with report_write_errors(out):
            if adapter:
                if isinstance(policy, PublishedVLA) and policy.heads:
                    raise ConfigError(
                        f"write lora=merged: an adapter cannot hold {' and '.join(policy.heads)}"
                    )
                rank, alpha = config.model.lora_rank, config.model.lora_alpha
                peft_files.save(policy.published_parameters(), source, out, rank=rank, alpha=alpha)
            else:
                policy.export(config.model.checkpoint, out)
        if adapter:
            exported: Any = robot_policy.make_policy(config, env)
            peft_files.load_into(exported.published_parameters(), out)
        else:
            model = replace(config.model, checkpoint=str(out), lora_rank=0)
            exported = robot_policy.make_policy(replace(config, model=model), env)
        if config.model.policy != "token":
            # The directory has no normaliser of states where the run computed its own.
            exported.trunk.encoder.load_state_dict(policy.trunk.encoder.state_dict())
            action = exported.act(exported.encode(obs)).action
            return {"action_difference": float((action - before.action).abs().max())}
        after = exported.evaluate(exported.encode(obs), before.action, before.replay)
    return {"logit_difference": float((after.log_prob - expected.log_prob).detach().abs().max())}


def _write_language_model(run: TrainedRun, out: Path, *, adapter: bool) -> dict[str, Any]:
    """Write a language model with its tokenizer and read it back; return ``logit_difference``."""
    tokenizer = language_inputs.make_tokenizer(run.config)
    policy = language_evaluation.restore(run, tokenizer, torch.device("cpu"))
    model, m = policy.model.float(), run.config.actor.model  # sums are float32 in any case
    ids = torch.arange(8).unsqueeze(0) % model.get_input_embeddings().num_embeddings
    trained = {
        name.removeprefix("model.").replace(".default.", "."): p
        for name, p in policy.named_parameters()
        if p.requires_grad
    }
    if not adapter:
        lora.merge(model)
    expected = _logits(model, ids)
    with report_write_errors(out):
        if adapter:
            scale = {"rank": m.lora_rank, "alpha": language_models.LORA_ALPHA}
            peft_files.save(trained, str(m.path), out, **scale, task="CAUSAL_LM")
        else:
            model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        copy_permissions(out)
    if adapter:
        peft_files.load_into(trained, out)
    else:
        model = causal_lm.load(str(out), {}, section="out")
    difference = float((_logits(model, ids) - expected).abs().max())
    if difference:
        raise CheckpointError(f"out={out}: read back, logits differ by {difference:g}; report this")
    return {"logit_difference": difference}


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of transformers' model, [1, L, V]."""
    return model(input_ids=ids).logits
