"""Tests of the console command: refusals, composition of options, sweeps, exit codes."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_helpers import run_command

from embodied_ppo.commands import main, output, train
from embodied_ppo.commands.experiments import experiments
from embodied_ppo.config import loader as strict
from embodied_ppo.config import readers
from embodied_ppo.config.compose import shipped
from embodied_ppo.config.schema import OWN_OPTIONS, Config, EvaluateConfig
from embodied_ppo.core.errors import LONGEST_LINE, ProcessLost, show

TINY = [
    "experiment=cartpole",
    "env.num_envs=4",
    "algorithm.horizon=8",
    "algorithm.global_batch_size=32",
    "algorithm.update_epoch=1",
    "updates=1",
    "evaluation.episodes=1",
    "evaluation.num_envs=1",
    "device=cpu",
]


GSM8K = ["actor.model.path", "data.eval", "data.train"]
"""Options of experiment=gsm8k_qwen2_5_0_5b that the user must set."""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run every test in its own empty folder."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def user_configs(tmp_path: Path) -> Path:
    """Write configs of a user: primary configs, experiments and groups; return the folder."""
    files = {
        "mine.yaml": (
            "defaults:\n  - train\n  - override experiment: hopper\n  - _self_\nalgorithm:\n "
            " vf_coef: 0.25\n"
        ),
        "experiment/own.yaml": (
            "# @package _global_\n# My own task\nalgorithm:\n  clip_ratio_low: 0.1\n  gamma: 0.9\n"
        ),
        "experiment/tuned.yaml": (
            "# @package _global_\ndefaults: [override /algorithm: fast]\nalgorithm: {lr: 2e-3}\n"
        ),
        "algorithm/fast.yaml": "lr: 1.0e-2\ngamma: 0.95\n",
        "algorithm/slow.yaml": "lr: 1.0e-5\ngamma: 0.97\n",
        "env/pole.yaml": "id: CartPole-v1\nnum_envs: 8\n",
        "lost.yaml": "defaults:\n  - train\n  - override experiment: nowhere\n",
        "broken.yaml": "defaults: [train, _self_]\nalgorithm: {gamma: [}\n",
        "listed.yaml": "- train\n",
        "twice.yaml": (
            "defaults: [train, _self_]\nalgorithm: {clip_ratio: 0.1, clip_ratio_low: 0.3}\n"
        ),
        "typo.yaml": "defaults: [train, _self_]\nalgorithm: {gama: 0.1}\n",
        "loop.yaml": "defaults: [loop, _self_]\n",
    }
    for name, text in files.items():
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "mine"


def files_in_cwd() -> list[str]:
    return sorted(str(p) for p in Path.cwd().rglob("*"))


def config(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, dict[str, Any]]:
    """Return the output of ``embodied-ppo config --json``."""
    return run_command(capsys, "config", *argv)


def values(rows: dict[str, dict[str, Any]], *paths: str) -> list[Any]:
    return [rows[path]["value"] for path in paths]


LONGEST_REFUSAL_S = 8.0
"""Largest number of CPU seconds of a refusal. The first ones import torch (2 s) and Ray (1 s)."""


def cpu_of_children() -> float:
    """Return the CPU seconds of child processes; wall time depends on the machine's load."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def command(*argv: object) -> list[str]:
    return [sys.executable, "-m", "embodied_ppo.commands.main", *map(str, argv)]


# ----------------------------------------------------------------------------------------- refusals
REFUSALS = [
    # typos
    (
        "train algorithm.gama=0.9",
        "algorithm.gama = 0.9 (command line): no such option; did you mean algorithm.gamma?",
    ),
    ("train gamma=0.9", "gamma = 0.9 .. gamma belongs to algorithm.gamma .. default 0.99"),
    ("train +foo=1", "foo = 1 .. no such option; the top level has: mode"),
    (
        "train ++algorithm.lr_shedule=linear",
        "did you mean algorithm.lr_schedule? .. constant, linear, cosine, adaptive",
    ),
    ("train env.kwarg.x=1", "env.kwarg.x = 1 .. no such option"),
    ("train model.rnn_type=lstm", "model.rnn_type = lstm (command line): no such option"),
    ("train algorithm.adv_type=gea", "did you mean algorithm.adv_type=gae?"),
    (
        "train experiment=quickstrat",
        "experiment = quickstrat: no such experiment; did you mean quickstart?",
    ),
    (
        "train algorithm=mujocco",
        "algorithm = mujocco: no such algorithm; did you mean mujoco? there are: atari",
    ),
    ("train model=resnet", "model = resnet: no such model; there are: cnn"),
    ("train mode=embodid", "mode = embodid: no such mode; did you mean embodied?"),
    ("train experimnt=hopper", "experimnt = hopper .. no such option"),
    # types and limits
    (
        "train algorithm.gamma=1.5",
        "algorithm.gamma = 1.5 (command line) must be .. >= 0 and <= 1; .. =0.99",
    ),
    ("train algorithm.gamma=", "algorithm.gamma = '' .. number"),
    ("train algorithm.gamma=null", "algorithm.gamma = null .. number"),
    ("train algorithm.lr=nan", "algorithm.lr = nan .. finite"),
    ("train algorithm.lr=-1e-3", "algorithm.lr = -0.001 .. > 0"),
    ("train env.num_envs=many", "env.num_envs = many .. whole number >= 1"),
    ("train env.num_envs=6.5", "env.num_envs = 6.5 .. whole number"),
    ("train env_steps=1.5", "env_steps = 1.5 .. whole number"),
    ("train algorithm.use_kl_loss=yes", "algorithm.use_kl_loss = yes .. true or false .. =true"),
    ("train algorithm.lr_schedule=linea", "did you mean algorithm.lr_schedule=linear?"),
    ("train model.hidden=64", "model.hidden = 64 .. list .. model.hidden=[64]"),
    ("train model.hidden=[64,-1]", "model.hidden[1] = -1 .. >= 1"),
    ("train algorithm.kl_ctrl=0.1", "algorithm.kl_ctrl = 0.1 .. section .. kl_coef"),
    ("train device=gpu", "device = gpu .. device=cpu"),
    ("train name=7", "name = 7 .. text; quote it"),
    ("train seed=-1", "seed = -1 .. >= 0"),
    # conflicts
    (
        "train algorithm.clip_ratio=0.1 algorithm.clip_ratio_low=0.2",
        "clip_ratio = 0.1 .. different values; keep one",
    ),
    (
        "train algorithm.vf_coef=1.5 algorithm.c1=2",
        "vf_coef = 1.5 .. c1 = 2 .. algorithm.value_loss_coef",
    ),
    (
        "train experiment=null algorithm.global_batch_size=300",
        "32 x 64 = 2048 .. = 300; nearest: 256, 512",
    ),
    ("train algorithm.adv_type=grpo", "adv_type = grpo .. algorithm.group_size=4"),
    (
        "train algorithm.desired_kl=0.01",
        "algorithm.desired_kl = 0.01 is set but not read; it needs .. =adaptive",
    ),
    ("train algorithm.loss_type=actor", "algorithm.loss_type=actor_critic"),
    (
        "train algorithm.use_kl_loss=true algorithm.kl_loss_type=kl",
        "kl_loss_type = k1 .. k2, k3 or k1+",
    ),
    ("train env_steps=null updates=null", "updates = null and env_steps = null"),
    (
        "train mode=reasoning updates=null",
        "updates = null: the length of training is not set; write updates=100",
    ),
    (
        "train mode=reasoning experiment=hopper",
        "env.id = Hopper-v4 is set but not read: only mode=embodied",
    ),
    ("train mode=embodied experiment=arithmetic", "is set but not read: only mode=reasoning"),
    (
        "train experiment=arithmetic env.num_envs=3",
        "env.num_envs = 3 is set but not read: only mode=embodied",
    ),
    ("train experiment=arithmetic algorithm.clip_ratio_c=1", "algorithm.clip_ratio_c = 1 .. > 1"),
    (
        "train experiment=arithmetic algorithm.adv_type=rloo",
        "compares responses .. algorithm.group_size=4",
    ),
    (
        "train experiment=arithmetic algorithm.global_batch_size=100",
        "= 256 is not a multiple .. nearest: 64, 128",
    ),
    (
        "train experiment=arithmetic rollout.top_p=0.9",
        "rollout.top_p = 0.9 .. refused .. evaluation.top_p",
    ),
    (
        "train mode=reasoning updates=1 actor.model.path=x",
        "data.train = [] .. data.train=[FILE.jsonl]",
    ),
    (
        "train mode=reasoning actor.model.path=x data.train=x.jsonl",
        "must be a list .. write data.train=[x.jsonl]",
    ),
    ("train experiment=gsm8k_qwen2_5_0_5b", "actor.model.path = ??? .. has no value yet"),
    (
        "train experiment=arithmetic critic.use_critic_model=false",
        "adv_type = gae needs a critic .. =grpo",
    ),
    ("train experiment=arithmetic data.task=null", "data.train = [] .. data.task=arithmetic"),
    (
        "train experiment=arithmetic algorithm.loss_type=actor_critic",
        "write algorithm.loss_type=actor",
    ),
    ("train experiment=arithmetic evaluation.n=4", "evaluation.deterministic=false"),
    (
        "train experiment=arithmetic component_placement={actor:all,critic:all}",
        "no device for rollout",
    ),
    (
        "train experiment=arithmetic component_placement='{\"actor,critc\":all}'",
        "did you mean critic?",
    ),
    (
        "train placement=fuzed",
        "placement = fuzed: no such placement; did you mean fused? there are: colocated",
    ),
    (
        "train placement=fused cluster.devices_per_node=1 cluster.stages=3",
        "env.num_envs = 64: cannot be divided evenly .. write env.num_envs=63",
    ),
    (
        "train experiment=arithmetic placement=hybrid",
        "sets the simulators apart .. use fused, colocated or",
    ),
    (
        "train algorithm.train_batch_size=8",
        "algorithm.rollout_batch_size = 8 .. set mode=reasoning",
    ),
    ("train cluster.num_nodes=2", "cluster.num_nodes = 2 .. placement=local"),
    (
        "train placement=fused cluster.num_nodes=2 cluster.devices_per_node=1",
        "cluster.num_nodes = 2: no Ray cluster",
    ),
    (
        "tune experiment=arithmetic compile=always",
        "compile = always: tune times language models without the compiler",
    ),
    ("tune experiment=arithmetic placement=fused", "placement = fused: tune chooses this option"),
    (
        "tune placement=hybrid",
        "placement = hybrid: tune chooses this option; remove it, or use it with train",
    ),
    (
        "tune cluster.shard=true",
        "cluster.shard = true: tune cannot predict the cost of gathering a sharded model",
    ),
    ("tune cluster.stages=2", "cluster.stages = 2: tune chooses this option; remove it"),
    (
        "tune component_placement={actor:0,rollout:0,env:0}",
        "cluster.component_placement = {actor: 0, rollout: 0, env: 0}: tune chooses this option",
    ),
    ("tune resume=auto", "resume = auto: is not read by tune, which does not continue a run"),
    ("tune device=cuda:99", "device=cuda:99: torch finds .. CUDA devices"),
    ("tune cluster.num_nodes=2", "cluster.num_nodes = 2: no Ray cluster is named"),
    ("tune cluster.max_lag=1 cluster.weights=ipc", "only cluster.weights=store keeps them"),
    (
        "tune cluster.device_memory_gb=1e-5",
        "tune: no placement is left; local: placement: node 0 needs 1 x",
    ),
    (
        "train experiment=cartpole env.num_envs=100000000 algorithm.global_batch_size=100000000",
        (
            "placement: node 0 needs 1 x .. to collect, more than 92% of its .. lower"
            " algorithm.horizon or env.num_envs"
        ),
    ),
    (
        (
            "train experiment=gsm8k_qwen2_5_0_5b actor.model.path=nowhere data.train=[a.jsonl]"
            " data.eval=[b.jsonl] placement=fused cluster.devices_per_node=1 device=cpu"
        ),
        "actor.tokenizer= .. nowhere: is no directory",
    ),
    (
        "tune cluster.max_lag=1 cluster.devices_per_node=1",
        "no placement is left; local: cluster.max_lag = 1: one process",
    ),
    # bounds, lists for groups, empty texts and interpolations
    ("train mode=[]", "mode = [] must be one name, not a list; write mode=NAME"),
    (
        "train experiment=[hopper,ant]",
        "experiment = [hopper, ant] must be one name .. --multirun experiment=hopper,ant",
    ),
    ("train algorithm=[]", "algorithm = [] must be one name, not a list"),
    (
        "train algorithm.learning_rate=0.1 algorithm.lr=0.2",
        "algorithm.learning_rate = 0.1 and algorithm.lr = 0.2 (command line) are the same option",
    ),
    ("train run_dir=", "run_dir = '' (command line) must be text that is not empty, or null"),
    ("train env.id=", "env.id = '' (command line) must be text that is not empty"),
    ("train resume=", "resume = '' (command line) must be text that is not empty, or null"),
    (
        "train env.num_envs=1000000000001",
        "env.num_envs = 1000000000001 .. >= 1 and <= 1,000,000,000",
    ),
    (
        "train experiment=null env.num_envs=1000000000",
        "32 x 1000000000 = 32000000000 steps must be <= 10,000,000,000",
    ),
    (
        "train algorithm.horizon=1000000000000000003",
        "algorithm.horizon = 1000000000000000003 .. <= 1,000,000,000",
    ),
    (
        "train mode=reasoning algorithm.rollout_batch_size=1000000000000000003",
        "algorithm.rollout_batch_size = 1000000000000000003 .. <= 10,000,000",
    ),
    (
        (
            "train experiment=arithmetic algorithm.rollout_batch_size=1280000"
            " algorithm.group_size=10000"
        ),
        "1280000 x 10000 x .. tokens must be <= 10,000,000,000",
    ),
    ("train threads=100000000", "threads = 100000000 .. <= 1,024"),
    ("train env.image_size=1000000", "env.image_size = 1000000 .. <= 4,096"),
    (
        "train algorithm.lr=${algorithm.lr}",
        "algorithm.lr = ${algorithm.lr} (command line): Recursive interpolation",
    ),
    (
        "train algorithm.lr=${nothing.there}",
        "algorithm.lr = ${nothing.there} .. Interpolation key 'nothing.there'",
    ),
    (
        "train env.id=${oc.env:NO_SUCH_VARIABLE}",
        "env.id = ${oc.env:NO_SUCH_VARIABLE} (command line): .. not found",
    ),
    (
        "train model.hidden=[8,${nothing}]",
        "model.hidden = [8, ${nothing}] (command line): .. 'nothing' not found",
    ),
    (
        "train env.kwargs=[1]",
        "env.kwargs = [1] (command line) must be a section of names and values",
    ),
    (
        "train env.kwargs=[${seed}]",
        "env.kwargs = [${seed}] (command line) must be a section of names and values",
    ),
    ("train env=[1]", "env = [1] (command line) is a section, not a value"),
    (
        "train algorithm.nosuch=1",
        "algorithm.nosuch = 1 (command line): no such option; algorithm has: .. in all)",
    ),
    (
        "train experiment=arithmetic reward.grader=os:path",
        "reward.grader = os:path: path is no function",
    ),
    (
        "train experiment=arithmetic reward.format='('",
        "reward.format = ( is no regular expression .. =null",
    ),
    # syntax
    (
        "train algorithm.gamma",
        "algorithm.gamma is not of the form option=value; write algorithm.gamma=VALUE",
    ),
    ("train quickstart", "quickstart is not of the form option=value; write experiment=quickstart"),
    ("train =3", "=3 .. no option's name; write section.option=value"),
    ("train .gamma=3", ".gamma=3 .. no option's name"),
    ("train env..id=3", "env..id=3 .. no option's name"),
    ("train env.id=[a", "env.id=[a is not understood .. quote the value: \"env.id='[a'\""),
    ("train run_dir=a(b", "run_dir=a(b is not understood .. quote"),
    ("train placement=[0.5]", "placement = 0.5: no such placement; there are: "),
    ("train run_dir=${nowhere}", "Interpolation key 'nowhere' not found"),
    ("train seed=0,1", "seed=0,1 names several values; add --multirun"),
    (
        "train algorithm.gamma=interval(0.9,0.99)",
        "is an interval, which only embodied-ppo search reads; write one value",
    ),
    (
        "train hydra.verbose=true",
        "hydra.verbose=true is set but not read; hydra.* is for --multirun",
    ),
    ("train ~algorithm.adam_eps", "~algorithm.adam_eps: no file sets algorithm.adam_eps"),
    ("train algorithm@x=atari", "algorithm@x"),
    # commands, flags and paths
    (
        "",
        (
            "no command; commands: train, demos, clone, distill, evaluate, compare, fork, replay,"
            " .. new-task"
        ),
    ),
    ("trian", "trian: no such command; did you mean train?"),
    ("plann experiment=hopper", "plann: no such command; did you mean plan? commands: train"),
    ("tun", "tun: no such command; did you mean tune? commands: train"),
    ("import-policy", "import-policy needs a library and a file"),
    ("import-policy sb3 x.zip run", "run is not of the form option=value"),
    ("import-policy ppo2 x.zip", "import-policy ppo2: no such library .. sb3, rsl_rl, cleanrl"),
    ("import-policy sb3 x.zip critic=old", "critic=old: must be new"),
    ("import-policy sb3 x.zip env.idd=x", "did you mean env.id?"),
    ("import-policy sb3 x.zip", "x.zip: cannot be read (No such file or directory)"),
    ("--verbose", "--verbose: no such flag"),
    ("train --jsn", "unrecognized arguments: --jsn; did you mean --json?"),
    ("train --config-dir", "--config-dir: expected one argument"),
    ("train --config-dir nowhere", "--config-dir nowhere: no such directory"),
    ("experiments --config-dir nowhere", "--config-dir nowhere: no such directory"),
    ("experiments hopper", "hopper is not read by experiments"),
    (
        "train --config-name mine",
        "--config-name mine: no such config; .. there are: benchmark, clone, demos, .. train",
    ),
    (
        "train resume=true",
        "resume = true (command line) must be text .. resume=auto for what run_dir holds",
    ),
    ("train resume=nowhere", "resume = nowhere: no such directory; .. resume=auto"),
    ("evaluate", "checkpoint = '' .. checkpoint=runs/"),
    ("evaluate checkpoint=nowhere", "nowhere"),
    ("evaluate runs/x", "write checkpoint=runs/x"),
    ("evaluate episodes", "episodes is not of the form option=value; write episodes=VALUE"),
    ("export runs/x", "write checkpoint=runs/x"),
    ("evaluate checkpoint=x episods=3", "episods = 3 .. did you mean episodes?"),
    ("evaluate checkpoint=x episodes=0", "episodes = 0 .. >= 1"),
    (
        "evaluate checkpoint=x env.max_episode_step=3",
        "env.max_episode_step = 3 .. env.max_episode_steps",
    ),
    # demonstrations and cloning
    ("demos", "out = '' must name a folder to record into; write out=demos/reach"),
    (
        "demos out=x episods=3",
        "episods = 3 (command line): no such option; did you mean episodes? .. default 2000",
    ),
    (
        "demos out=x episodes=0",
        (
            "episodes = 0 (command line) must be a whole number >= 1 and <= 1,000,000,000; give"
            " episodes"
        ),
    ),
    (
        "config env.realism.action_delay=-1",
        "env.realism.action_delay = -1 (command line) must be a finite number >= 0 and <= 1,000, or"
        " a list of such numbers; the default is",
    ),
    (
        "config env.realism.obs_delay=0.5",
        "must be a whole number >= 0 and <= 1,000, or a list of such numbers, or a section of names"
        " and values; the default",
    ),
    ("demos out=x noise=1", "noise = 1 (command line) must be a finite number >= 0 and < 1"),
    (
        "demos out=x seed=-1",
        (
            "seed = -1 (command line) must be .. >= 0 and <= 9,223,372,036,854,775,807; the default"
            " is seed=0"
        ),
    ),
    (
        "demos out=x algorithm.lam=0.9",
        "algorithm.gae_lambda = 0.9 (command line) is set but not read by demos",
    ),
    (
        "demos out=x algorithm=mujoco",
        "algorithm = .. is set but not read by demos; leave it out. Read are out, episodes",
    ),
    ("demos out=x algorithm.gama=1", "algorithm.gama = 1 .. no such option"),
    ("demos out=x env.num_envs=8", "env.num_envs = 8 .. is set but not read by demos"),
    ("demos out=x env.simulator=warp", "env.simulator = warp .. is set but not read by demos"),
    ("demos out=x env.camera=[a]", "env.camera = [a] .. did you mean env.cameras?"),
    ("demos out=x env.cameras=[]", "env.cameras = []: .. write env.cameras=[front]"),
    ("demos out=x env.cameras=[back]", "the model has no camera 'back'; it has front"),
    (
        "demos out=x env.kwargs.families=[fly]",
        "families has 'fly', which is unknown; there are reach",
    ),
    ("demos out=x env.kwargs.obs=state", "env.kwargs.obs = state .. write env.kwargs.obs=language"),
    (
        "demos out=x env.randomize=true env.ranges.mass=[0.5,1]",
        "env.ranges = .. is set but not read by demos",
    ),
    (
        "demos out=x experiment=hopper",
        "env.id = Hopper-v4: has no expert .. experiment=tabletop_token .. LeRobot",
    ),
    (
        "demos out=x experiment=arithmetic",
        "mode = reasoning: demos records a robot's expert; write experiment=",
    ),
    ("demos out=x resume=auto", "resume = auto .. is set but not read by demos"),
    (
        "clone cloning.steps=0",
        "cloning.steps = 0: nothing would be learned; write cloning.steps=1500",
    ),
    (
        "clone experiment=hopper",
        "model.policy = actor_critic: cannot be cloned; write model.policy=token, flow or",
    ),
    (
        "clone experiment=arithmetic",
        "mode = reasoning: clone is for robot policies .. warm_start.steps",
    ),
    (
        "clone updates=3",
        (
            "updates = 3 (command line) is set but not read by clone .. resume=RUN run_dir=NEW"
            " updates="
        ),
    ),
    ("clone env_steps=3", "env_steps = 3 (command line) is set but not read by clone"),
    ("clone resume=nowhere", "resume = nowhere: clone starts a new run; leave it out"),
    ("clone cloning.dataset=nowhere", "cwd/nowhere: does not exist; record it"),
    ("clone cloning.dataset=.", "cwd: holds no meta/info.json"),
    ("clone cloning.step=3", "cloning.step = 3 .. did you mean cloning.steps?"),
    ("config demos env.num_envs=8", "env.num_envs = 8 .. is set but not read by demos"),
    ("config algorithm.gama=1", "did you mean algorithm.gamma?"),
    ("config --only qqq", "--only qqq: no option mentions it; leave --only out"),
    ("config --only binz", "--only binz: no option mentions it; did you mean bins?"),
    (
        "train experiment=tabletop_token model.checkpoint=",
        "model.checkpoint = '' is not a directory",
    ),
    ("train experiment=openvla_7b", "no value yet; give it text, or null: model.checkpoint=.."),
    # sweeps: no job starts when one of them is refused
    (
        "train --multirun seed=0,1 algorithm.gama=1",
        "job 0 (seed=0 algorithm.gama=1): algorithm.gama = 1",
    ),
    ("train --multirun algorithm.gamma=0.9,2", "job 1 (algorithm.gamma=2): algorithm.gamma = 2"),
    ("train --multirun placement=local,fuzed", "job 1 (placement=fuzed): placement = fuzed"),
    (
        "train --multirun seed=0,1 run_dir=here",
        "run_dir = here is that of job 0 and of job 1; leave run_dir out",
    ),
    ("train --multirun seed=range(0,", "seed=range(0, is not understood"),
    (
        "train --multirun algorithm.gamma=interval(0.9,0.99)",
        "algorithm.gamma=interval(0.9,0.99): is an interval, which only embodied-ppo search reads;",
    ),
    ("train --multirun hydra.nothing=1", "hydra.nothing"),
    (
        "train --multirun hydra.launcher._target_=a.B",
        "hydra/launcher = a.B: is not used; --multirun starts the runs itself",
    ),
    (
        "train --multirun resume=nowhere",
        "resume=nowhere: is not the folder of a sweep (No such file or directory",
    ),
    (
        "train --multirun resume=nowhere seed=0,1",
        "seed=0,1: a sweep continues with its own options",
    ),
    ("train --multirun --jobs 0", "--jobs 0: must be 1 to 1024"),
    ("train --jobs 2", "--jobs is read with --multirun only; leave it out"),
    ("train --no-compare", "--no-compare is read with --multirun only; leave it out"),
]


def test_number_with_thousands_of_digits_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["config", "seed=" + "9" * 5000]) == 2
    assert "is not understood (Exceeds the limit (4300 digits)" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "parts"), REFUSALS, ids=[line or "(no arguments)" for line, _ in REFUSALS]
)
def test_refusal_is_one_line_and_writes_nothing(
    line: str, parts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = time.process_time()
    code = main.main(line.split(" ") if line else [])
    seconds, out = time.process_time() - before, capsys.readouterr()
    assert code == 2, out.err
    assert seconds < LONGEST_REFUSAL_S, "seconds of processor time"
    assert out.out == "" and out.err.startswith("error: ") and out.err.count("\n") == 1, out.err
    assert len(out.err) <= LONGEST_LINE + 1, out.err
    for part in parts.split(" .. "):
        assert part in out.err
    assert files_in_cwd() == []


@pytest.mark.parametrize(
    "option", ["model.rnn_type", "env.robot", "algorithm.whatever", "optimizer"]
)
def test_unknown_option_without_a_similar_name_has_no_suggestion(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["config", f"{option}=x"]) == 2
    assert "did you mean" not in (err := capsys.readouterr().err) and f"{option} = x" in err


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("lost", "Could not find 'experiment/nowhere'; there are: ant, ant_gpu, arithmetic"),
        ("broken", "broken.yaml .. line 2"),
        ("listed", "listed"),
        ("twice", "clip_ratio = 0.1 .. clip_ratio_low = 0.3 .. twice.yaml"),
        ("typo", "algorithm.gama = 0.1 .. typo.yaml .. algorithm.gamma"),
        ("loop", "name each other for ever"),
        ("min", "did you mean mine?"),
    ],
)
def test_invalid_user_config_is_refused(
    name: str, parts: str, user_configs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["train", "--config-dir", str(user_configs), "--config-name", name]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    for part in parts.split(" .. "):
        assert part in err
    assert files_in_cwd() == []


def test_deleted_working_directory_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("deleted").mkdir()
    parent = Path.cwd()
    monkeypatch.chdir("deleted")
    (parent / "deleted").rmdir()
    try:
        assert main.main(["train", "experiment=cartpole"]) == 2
    finally:
        os.chdir(parent)
    message = "error: the current folder has been deleted; change to an existing one\n"
    assert capsys.readouterr().err == message


@pytest.mark.slow
def test_refusals_of_a_process() -> None:
    for line, part in (
        ("train algorithm.gama=0.9", "algorithm.gamma"),
        ("trian", "did you mean train?"),
    ):
        before = cpu_of_children()
        process = subprocess.run(command(*line.split()), capture_output=True, text=True, timeout=60)
        assert (process.returncode, process.stdout) == (2, "")
        assert process.stderr.startswith("error: ") and process.stderr.count("\n") == 1
        assert part in process.stderr
        assert cpu_of_children() - before < 2, "seconds of processor time"
    assert files_in_cwd() == []


# --------------------------------------------------------------------------------------------- plan
@pytest.mark.slow
def test_plan_of_a_robot_policy(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "experiment=bench_wide", "compile=auto", "placement=pipelined"]
    arguments += ["cluster.devices_per_node=2", "device=cpu"]
    assert main.main(arguments) == 0
    table = capsys.readouterr().out
    assert "cpu 1   0     -       rank 0   rank 1" in table
    assert "weight transfer                               ipc (1)" in table
    assert main.main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["facts"]["samples per optimiser step and actor process"] == 512
    assert plan["facts"]["time sharing"][-1] == "actor with env and rollout"
    assert plan["memory"][0] == ["memory per process", "env", "rollout", "actor"]
    rows = {row[0]: row[1:] for row in plan["memory"]}
    assert rows["weights"][0] == "0 MB"
    assert rows["weights"][1] == rows["weights"][2] == rows["gradients"][2]
    assert rows["gradients"][1] == rows["optimiser"][1] == "0 MB"
    assert files_in_cwd() == []
    arguments[-1] = "cluster.device_memory_gb=0.001"
    assert main.main(arguments) == 2
    assert "lower algorithm.micro_batch_size" in capsys.readouterr().err


@pytest.mark.slow
def test_plan_of_a_language_model(capsys: pytest.CaptureFixture[str]) -> None:
    # The dictionary is written in the syntax of JSON.
    placement = (
        'cluster.component_placement={"rollout,reward": 0, "actor": 1, "critic": 1, "reference": 0}'
    )
    plan_command = ["plan", "--json", "experiment=arithmetic"]
    arguments = [*plan_command, "cluster.devices_per_node=2", "device=cpu"]
    assert main.main([*arguments, placement, "algorithm.use_kl_loss=true"]) == 0
    plan = json.loads(capsys.readouterr().out)
    header = ["memory per process", "rollout,reward", "actor", "critic", "reference"]
    assert plan["memory"][0] == header
    rows = {row[0]: row[1:] for row in plan["memory"]}
    assert rows["gradients"][0] == rows["gradients"][3] == "0 MB" and rows["gradients"][1] != "0 MB"
    assert rows["cache"][0] != "0 MB" and rows["cache"][1:] == ["0 MB"] * 3
    assert plan["facts"]["time sharing"] == [
        "rollout,reward with reference",
        "actor with critic",
        "critic with actor",
        "reference with rollout,reward",
    ]
    assert plan["weights"] == {"rollout rank 0": "broadcast"}
    assert plan["facts"]["responses per update"] == 256
    assert main.main([*plan_command, "device=cpu"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["memory"][0] == ["memory per process", "rollout,actor,critic,reward"]
    assert main.main([*arguments, "placement=fused", "cluster.device_memory_gb=0.01"]) == 2
    assert "cache 1.31 MB" in capsys.readouterr().err
    assert main.main([*plan_command, "algorithm.adv_type=grpo", "algorithm.group_size=4"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["memory"][0][1] == "rollout,actor,reward", "GRPO has no critic"


# -------------------------------------------------------------------------------------- composition
def test_source_of_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    rows = config(capsys, "experiment=null")
    composed = {path for path, row in rows.items() if row["source"] != "default"}
    assert composed == {"mode", "placement"}
    options = strict.describe(Config)
    assert set(rows) == {path for path in options if readers.mode_of(path) != "reasoning"}
    assert rows["algorithm.gamma"] == {
        "value": 0.99,
        "default": 0.99,
        "source": "default",
        "meaning": "Discount per primitive step.",
        "type": "a finite number",
        "limit": ">= 0 and <= 1",
    }


def test_quickstart_is_the_default_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert config(capsys) == config(capsys, "experiment=quickstart")
    rows = config(capsys)
    assert rows["env.id"]["source"] == "configs/experiment/quickstart.yaml"
    assert rows["name"]["value"] == "quickstart"


def test_source_of_each_option(capsys: pytest.CaptureFixture[str], user_configs: Path) -> None:
    rows = config(
        capsys, "--config-dir", user_configs, "--config-name", "mine", "algorithm.lam=0.9", "seed=3"
    )
    sources = {path: row["source"] for path, row in rows.items()}
    assert sources["env.id"] == "configs/experiment/hopper.yaml"
    assert rows["env.id"]["value"] == "Hopper-v4"
    assert sources["algorithm.value_loss_coef"] == str(user_configs / "mine.yaml")
    assert sources["algorithm.gae_lambda"] == "command line"
    assert rows["algorithm.gae_lambda"]["value"] == 0.9
    assert sources["mode"] == "configs/mode/embodied.yaml"
    assert sources["algorithm.adam_eps"] == "default"
    assert sources["seed"] == "command line"
    assert rows["name"]["value"] == "hopper"


def test_command_line_overrides_files_under_any_alias(
    capsys: pytest.CaptureFixture[str], user_configs: Path
) -> None:
    rows = config(
        capsys,
        "--config-dir",
        user_configs,
        "experiment=own",
        "algorithm.pg_clip=0.3",
        "algorithm.dual_clip_loss=true",
    )
    paths = (
        "algorithm.clip_ratio_low",
        "algorithm.clip_ratio_high",
        "algorithm.clip_ratio_c",
        "algorithm.gamma",
    )
    assert values(rows, *paths) == [0.3, 0.3, 1.6, 0.9]
    rows = config(
        capsys, "--config-dir", user_configs, "--config-name", "mine", "algorithm.value_loss_coef=2"
    )
    assert rows["algorithm.value_loss_coef"]["value"] == 2.0


def test_group_on_the_command_line_overrides_the_experiment(
    capsys: pytest.CaptureFixture[str], user_configs: Path
) -> None:
    paths = ("algorithm.lr", "algorithm.gamma")
    assert values(config(capsys, "--config-dir", user_configs, "experiment=tuned"), *paths) == [
        2e-3,
        0.95,
    ]
    rows = config(capsys, "--config-dir", user_configs, "experiment=tuned", "algorithm=slow")
    assert values(rows, *paths) == [1e-5, 0.97]
    assert rows["algorithm.lr"]["source"] == str(user_configs / "algorithm" / "slow.yaml")
    rows = config(capsys, "--config-dir", user_configs, "env=pole", "env.num_envs=16")
    assert values(rows, "env.id", "env.num_envs") == ["CartPole-v1", 16]
    # The order of the arguments does not matter.
    flags = ["algorithm.lr=1e-4", "algorithm=slow", "experiment=tuned"]
    assert config(capsys, "--config-dir", user_configs, *flags)["algorithm.lr"]["value"] == 1e-4


def test_values_of_all_types(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "env.kwargs.a=1",
        "env.kwargs.b=[x,2]",
        "model.hidden=[8,4]",
        "run_dir=runs/${algorithm.gamma}-${seed}",
    ]
    rows = config(
        capsys, "experiment=null", *flags, "+seed=4", "++updates=2", "algorithm={gamma: 0.5}"
    )
    paths = ("env.kwargs", "model.hidden", "run_dir", "seed", "updates", "algorithm.gamma")
    assert values(rows, *paths) == [{"a": 1, "b": ["x", 2]}, [8, 4], "runs/0.5-4", 4, 2, 0.5]


def test_deletion_restores_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    rows = config(capsys, "experiment=cartpole", "~algorithm.gamma")
    assert rows["algorithm.gamma"]["source"] == "default"
    assert config(capsys, "~experiment")["env.id"]["source"] == "default"


def test_env_steps_conflict_with_updates_of_a_file(
    capsys: pytest.CaptureFixture[str], user_configs: Path
) -> None:
    (user_configs / "experiment" / "short.yaml").write_text("# @package _global_\nupdates: 3\n")
    flags = ["--config-dir", str(user_configs), "experiment=short", "env_steps=100000"]
    assert main.main(["config", *flags]) == 2
    assert "updates = 3" in (err := capsys.readouterr().err) and "add updates=null" in err
    assert config(capsys, *flags, "updates=null")["env_steps"]["value"] == 100000
    assert config(capsys, *flags, "updates=5")["updates"]["value"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", [e["name"] for e in experiments(None)])
def test_shipped_experiment_is_valid(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    language = ["actor.model.path=x", "data.train=[x]", "data.eval=[x]"]
    required = language if name == "gsm8k_qwen2_5_0_5b" else []
    text = (shipped() / "experiment" / f"{name}.yaml").read_text()
    for section, option in (("model", "checkpoint"), ("cloning", "dataset")):
        if f"  {option}: ???" in text:
            required.append(f"{section}.{option}=x")
    rows = config(capsys, f"experiment={name}", *required)
    assert rows["name"]["value"] == name and rows["description"]["value"]


def test_config_prints_value_source_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["experiment=cartpole", "algorithm.lam=0.9", "--only", "gae_lambda"]
    assert main.main(["config", *arguments]) == 0
    out = capsys.readouterr()
    row = "  gae_lambda  0.9  command line  Decay of the advantage estimator's trace.\n"
    assert out.out == f"algorithm\n{row}"
    assert out.err == "algorithm.lam is read as algorithm.gae_lambda\n"
    for mode, other in (("embodied", "reasoning"), ("reasoning", "embodied")):
        assert main.main(["config", f"mode={mode}"]) == 0
        text = capsys.readouterr().out
        assert "\x1b" not in text
        for path, option in strict.describe(Config).items():
            line = rf"^  {re.escape(path.rpartition('.')[2])} .*{re.escape(option.meaning[:30])}"
            assert readers.mode_of(path) == other or re.search(line, text, re.M), path
    assert files_in_cwd() == []


def test_config_of_evaluate(capsys: pytest.CaptureFixture[str]) -> None:
    assert config(capsys, "evaluate", "episodes=3")["episodes"] == {
        "value": 3,
        "default": 100,
        "source": "command line",
        "meaning": strict.describe(EvaluateConfig)["episodes"].meaning,
        "type": "a whole number",
        "limit": ">= 1 and <= 1,000,000,000",
    }


def test_config_shows_options_without_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["config", "--json", "experiment=gsm8k_qwen2_5_0_5b"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    missing = {path: row["source"] for path, row in rows.items() if row["value"] == "???"}
    assert missing == dict.fromkeys(GSM8K, "configs/experiment/gsm8k_qwen2_5_0_5b.yaml")
    assert err == f"without a value, so nothing is checked: {', '.join(GSM8K)}\n"
    arguments = ["experiment=gsm8k_qwen2_5_0_5b", "actor.model.path=x", "seed=-1"]
    assert main.main(["config", "--json", *arguments]) == 2
    assert "seed = -1" in capsys.readouterr().err


@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_help_lists_the_options_of_the_command(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([name, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for path, option in strict.describe(OWN_OPTIONS[name]).items():
        if "." not in path:
            assert f" {path}={show(option.default)} {' '.join(option.meaning.split())}" in text


@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_config_name_selects_the_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert config(capsys, "--config-name", name) == config(capsys, name)
    assert set(config(capsys, name)) == set(strict.describe(OWN_OPTIONS[name]))


@pytest.mark.slow
def test_closed_pipe_is_not_an_error() -> None:
    script = f"{' '.join(command('config', '--json'))} | true; exit ${{PIPESTATUS[0]}}"
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (0, "")


def test_json_is_strict() -> None:
    value = {"a": [float("nan"), 1.5], "b": (float("inf"), Path("x"))}
    assert output.as_json(value) == '{"a": [null, 1.5], "b": [null, "x"]}'


# -------------------------------------------------------------------------------------- experiments
def test_closed_streams_are_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):  # the values after >&- 2>&-
        monkeypatch.setattr(sys, name, None)
    assert main.main(["experiments"]) == 0 and main.main(["experiments", "x"]) == 2
    for stream in (sys.stdout, sys.stderr):
        stream.close()


def test_experiments_lists_shipped_and_user_experiments(
    capsys: pytest.CaptureFixture[str], user_configs: Path
) -> None:
    assert main.main(["experiments"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match(r"quickstart +\S.*", line) for line in lines)
    assert main.main(["experiments", "--json", "--config-dir", str(user_configs)]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["own"]["description"] == "My own task"
    assert rows["own"]["file"] == str(user_configs / "experiment" / "own.yaml")
    assert len(rows) == len(lines) + 2 and files_in_cwd() == []


@pytest.mark.parametrize(
    "line",
    ["--help", "--version", "train --help", "evaluate --help", "experiments", "trian"]
    + ["train --jsn"],
)
def test_help_and_refusals_import_neither_torch_nor_hydra(line: str) -> None:
    code = (
        f"import sys; from embodied_ppo.commands import main; main.main({line.split()!r});"
        " print(sorted(sys.modules))"
    )
    before = cpu_of_children()
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    modules = process.stdout.splitlines()[-1]
    assert "'torch'" not in modules and "'hydra'" not in modules
    assert cpu_of_children() - before < 0.5, "seconds of processor time"


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "clone cloning.dataset=.",
        "train experiment=tabletop_token cloning.dataset=nowhere",
    ],
)
def test_refusals_before_torch_is_loaded(line: str) -> None:
    code = (
        f"import sys; from embodied_ppo.commands import main; main.main({line.split()!r});"
        " print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False" and "cloning.dataset=" in done.stderr


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in main.COMMANDS:
        assert re.search(rf"^  {name} ", text, re.M)
        assert main.main([name, "--help"]) == 0
        assert f"usage: embodied-ppo {name}" in capsys.readouterr().out
    assert main.main(["--version"]) == 0
    assert re.match(r"embodied-ppo \d+\.\d+", capsys.readouterr().out)


# ---------------------------------------------------------------------------------------- real runs
@pytest.mark.slow
def test_train_resume_and_evaluate(capsys: pytest.CaptureFixture[str]) -> None:
    pole = "gymnasium.envs.classic_control:CartPoleEnv"
    register = f"import gymnasium\ngymnasium.register('Pole-v0', '{pole}')\n"
    Path("printing.py").write_text(f"print('output of a simulator')\n{register}")
    options = [*TINY, "env.id=printing:Pole-v0", "env.max_episode_steps=20"]
    assert main.main(["train", "--json", *options, "run_dir=run", "algorithm.vf_coef=0.7"]) == 0
    out = capsys.readouterr()
    summary = json.loads(out.out)
    assert "output of a simulator" in out.err
    assert (summary["updates"], summary["env_steps"]) == (1, 32)
    assert "algorithm.vf_coef is read as algorithm.value_loss_coef" in out.err
    reason = "compile=auto starts after 4096 optimiser steps, in update 4097, and the run"
    assert f"compiled code: never ({reason}" in out.err
    stored = Path("run/config.yaml")
    assert yaml.safe_load(stored.read_text())["algorithm"]["value_loss_coef"] == 0.7

    # Without an experiment, a resumed run keeps its configuration.
    for resume in ("run", "run/checkpoints/latest"):
        rows = config(capsys, f"resume={resume}", "seed=0", "updates=2")
        paths = ("env.num_envs", "algorithm.value_loss_coef", "updates", "resume")
        assert values(rows, *paths) == [4, 0.7, 2, resume]
        assert rows["env.num_envs"]["source"] == f"{strict.STORED}, {resume}/config.yaml"
        assert rows["updates"]["source"] == "command line" and rows["run_dir"]["value"] is None
    assert config(capsys, "resume=run", "experiment=hopper")["env.id"]["value"] == "Hopper-v4"
    assert main.main(["train", "run"]) == 2
    assert "run is not of the form option=value; write resume=run\n" in capsys.readouterr().err
    assert main.main(["train", "--quiet", "resume=run", "updates=2"]) == 0
    out = capsys.readouterr()
    assert re.search(r"^updates +2$", out.out, re.M) and out.err == ""

    options = ["checkpoint=run", "episodes=2", "num_envs=2", "video=false", "out=report"]
    assert main.main(["evaluate", "--json", *options]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["episodes"] == 2 and summary["ci95"].keys() == {"eval/return", "eval/length"}
    low, high = summary["ci95"]["eval/return"]
    assert low <= summary["eval/return"] <= high
    output.print_summary(summary)
    row = rf"^eval/return +\S+ \({low:.6g} to {high:.6g}, 95 %\)$"
    assert re.search(row, capsys.readouterr().out, re.M)
    names = {path.name for path in Path.cwd().iterdir()}
    assert names - {"__pycache__"} == {"printing.py", "report", "run"}


@pytest.mark.parametrize("text", [None, "", "{", "- 1", "\x00"])
def test_run_with_a_damaged_config_is_refused(
    text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run").mkdir()
    if text is not None:
        Path("run/config.yaml").write_text(text)
    before = files_in_cwd()
    assert main.main(["train", "resume=run"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: resume = run: ") and "config.yaml" in err and err.count("\n") == 1
    assert files_in_cwd() == before


def test_last_line_of_a_failed_run_states_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["train", *TINY, "algorithm.lr=1e38", "updates=20", "run_dir=run"]) == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and len(last) > 20


LONG = "a" * 300
PATHS = (
    ["train", *TINY, f"run_dir=folder/{LONG}"],
    ["train", *TINY, f"name={LONG}"],
    ["train", f"resume={LONG}"],
    ["train", "--config-dir", LONG],
    ["evaluate", f"checkpoint={LONG}"],
    ["import-config", "verl", LONG],
)


@pytest.mark.parametrize("arguments", PATHS, ids=lambda arguments: arguments[-1][:12])
def test_long_path_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has 300 bytes, the limit is 255); shorten it" in line and len(line) < 200
    assert not list(Path.cwd().iterdir())


def test_config_that_is_not_utf8_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine/experiment").mkdir(parents=True)
    Path("mine/experiment/latin.yaml").write_bytes('name: "caf\xe9"\n'.encode("latin-1"))
    message = "byte 10 (0xe9) is not UTF-8; save the file as UTF-8"
    for flags in ([], ["-m"]):
        assert main.main(["train", *flags, "--config-dir", "mine", "experiment=latin"]) == 2
        assert capsys.readouterr().err == f"error: mine/experiment/latin.yaml: {message}\n"
    assert main.main(["experiments", "--config-dir", "mine"]) == 0
    assert "(not UTF-8)" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "name", "code", "message"),
    [(1_200_000, "train", 2, "ulimit -v is 1200000: "), (250_000, "plan", 3, "out of memory (")],
)
def test_small_address_space(limit: int, name: str, code: int, message: str) -> None:
    shell = f"ulimit -v {limit}; exec {shlex.join(command(name))}"
    process = subprocess.run(["sh", "-c", shell], capture_output=True, text=True)
    (line,) = process.stderr.splitlines()
    assert process.returncode == code and len(line) <= 300
    assert line.startswith(f"error: {message}")


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt", "checkpoints", "tensorboard"])
def test_run_directory_with_an_entry_of_another_kind(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = Path("run", name)
    if "." in name:
        entry.mkdir(parents=True)
    else:
        entry.parent.mkdir()
        entry.touch()
    assert main.main(["train", "run_dir=run"]) == 2
    kind, written = ("directory", "file") if "." in name else ("file", "directory")
    assert capsys.readouterr().err == (
        f"error: {entry}: is a {kind}, and a run writes a {written} of this name; remove it, or"
        " name another run_dir\n"
    )
    assert [str(path) for path in Path("run").iterdir() if path.name != ".lock"] == [str(entry)]


def test_unexpected_error_has_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bug(_: Any) -> None:
        raise KeyError("requested")

    monkeypatch.setattr(train, "run", bug)
    assert main.main(["train"]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and lines[-1] == "error: KeyError: 'requested'"


def test_last_line_has_no_stacks_of_other_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(_: Any) -> None:
        raise ProcessLost(
            "no answer for 8 s: actor rank 0, update\n--- actor rank 0\nFile process.py, in wait"
        )

    monkeypatch.setattr(train, "run", lost)
    assert main.main(["train"]) == 3
    assert capsys.readouterr().err == "error: no answer for 8 s: actor rank 0, update\n"


@pytest.mark.slow
def test_interrupt_saves_and_exits_130() -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    flags = [*TINY[:-4], "updates=100000", "evaluation.episodes=1", "device=cpu", "run_dir=run"]
    process = subprocess.Popen(command("train", *flags), stderr=subprocess.PIPE, text=True, env=env)
    metrics, deadline = Path("run/metrics.jsonl"), time.monotonic() + 60
    while (
        process.poll() is None
        and time.monotonic() < deadline
        and not (metrics.exists() and metrics.stat().st_size)
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and any(Path("run/checkpoints").glob("step_*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "train experiment=cartpole initial_policy=runs/none",
        "clone initial_policy=runs/none",
        "evaluate checkpoint=runs/none",
        "compare runs/none",
        "fork runs/none update=1",
        "bisect runs/none policy/approx_kl>1",
    ],
)
def test_missing_run_is_refused_before_torch_is_loaded(line: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was loaded')")
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join(map(str, (tmp_path, root, root / "envs")))
    process = subprocess.run(
        [sys.executable, "-m", "embodied_ppo.commands.main", *line.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2 and len(process.stderr.splitlines()) == 1
    assert "runs/none: does not exist; " in process.stderr
