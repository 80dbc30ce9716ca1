"""Compiled code: equal results, a fixed first update, and messages if it is not available."""

from __future__ import annotations

import copy
import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import run_helpers
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from embodied_ppo import run as build
from embodied_ppo.algorithms.actor_critic_learner import actor_critic_learner
from embodied_ppo.algorithms.learner import Learner
from embodied_ppo.algorithms.ppo_loss import SETTINGS, STEP_OPTIONS, ActorLoss, MinibatchStep
from embodied_ppo.config.schema import AlgorithmConfig, Config
from embodied_ppo.core import compile, tree
from embodied_ppo.core.random import env_seeds
from embodied_ppo.core.types import (
    ArraySpec,
    Batch,
    Box,
    ConfigError,
    TrainingError,
    Trajectory,
)
from embodied_ppo.models.actor_critic import ActorCritic
from embodied_ppo.modes.base import RunRequest
from embodied_ppo.modes.embodied import components as embodied
from embodied_ppo.rollout.simulation import Acting, ActProgram
from tests.algorithms.test_actor_critic_learner import experience, make, numbers, weights
from tests.integration.test_resume import assert_same, contents, rows, tiny
from tests.models.test_causal_lm import make as language_model
from tests.recording_cuda import RecordingCuda

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and "NO_SKIPS" not in os.environ,
    reason="no C++ compiler (Debian: apt-get install g++)",
)


class Double:
    """Add y to x in place and return 2 x."""

    def __init__(self, comment: str = "") -> None:
        self.comment = comment

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return 2 * x


class DataDependent(Double):
    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else y


# ------------------------------------------------------------------------------------------ library
@pytest.mark.slow
def test_two_compilers_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one does not know all instructions of the processor.

    Each compilation runs in its own folder, because torch names files by the code's hash. The first
    one finds a damaged library and replaces it.
    """
    assert compile.unavailable_reason() == ""
    log, compiler = tmp_path / "log", tmp_path / "old_compiler"
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\ncase "$*" in *-mavx512vnni*|*-mavx512bf16*)\n'
        ' echo "unrecognized option" >&2; exit 1;; esac\nexec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    x, y = torch.zeros(3), torch.ones(3)
    both = [compile.Library(Double(), [x, y])]
    monkeypatch.setenv("CXX", str(compiler))
    both.append(compile.Library(Double(), [x, y]))
    assert len({library.path for library in both}) == 2
    for library in both:
        assert library.is_compiling() and not library.path.exists()
    both[0].path.write_bytes(b"no archive")
    folders = [Path(library.work.name) for library in both if library.work is not None]
    assert len({*folders}) == 2 and all(folder.is_dir() for folder in folders)
    for library in both:
        assert library.load()([torch.ones(3), torch.ones(3)])[0].tolist() == [4.0] * 3
        assert library.path.exists()
    assert torch.equal(x, torch.zeros(3))  # the example is not changed
    assert "-mavx512vnni" not in log.read_text().splitlines()[-1]
    assert not any(folder.exists() for folder in folders)


@pytest.mark.slow
def test_library_writes_in_place_and_is_cached() -> None:
    x, y = torch.zeros(3), torch.ones(3)
    first = compile.Library(Double(), [x, y])  # as of the first test
    run = first.load()
    for i in (1.0, 2.0):
        (out,) = run([x, y])
        assert x.tolist() == [i] * 3 and out.tolist() == [2 * i] * 3
    again = compile.Library(Double(), [x, y])
    assert not again.is_compiling() and again.path == first.path
    hidden = again.path.rename(again.path.with_suffix(".hidden"))  # the cache is emptied
    again.load()([x, y])
    hidden.rename(again.path)
    assert x.tolist() == [3.0] * 3


@pytest.mark.slow
def test_results_are_freed() -> None:
    x, y = torch.zeros(3), torch.ones(3)
    run = compile.Library(Double(), [x, y]).load()  # as of the first test
    before = resident_kb()
    for _ in range(50_000):
        run([x, y])
    assert resident_kb() - before < 5_000  # 25,000 if results are not freed


def resident_kb() -> int:
    """Return the memory of this process in kB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1000


def test_fingerprint_depends_on_program_options_and_shapes() -> None:
    x = torch.zeros(3)
    base = compile.fingerprint(Double(), [x, x])
    assert base == compile.fingerprint(Double(), [x + 1, x])
    others = [
        (Double("b"), [x, x]),
        (DataDependent(), [x, x]),
        (Double(), [torch.zeros(4), x]),
        (Double(), [x.double(), x]),
    ]
    assert len({base, *(compile.fingerprint(p, e) for p, e in others)}) == 5
    learners = [make(o) for o in ({}, {"clip_ratio_low": 0.1}, {"adam_eps": 1e-3}, {})] + [
        make(model={"hidden": [8]})
    ]
    batch = learners[0]._prepare(experience(learners[0]))[0]
    steps = [
        MinibatchStep(
            one.optimizer.loss, one.optimizer.names["actor"], one.optimizer.names["critic"], batch
        )
        for one in learners
    ]
    assert len({compile.fingerprint(step, [x]) for step in steps}) == 4  # two of them are equal


def test_runs_share_a_library_unless_an_option_of_the_minibatch_differs() -> None:
    x = torch.zeros(3)
    options: list[dict[str, Any]] = [
        {},
        {"lr": 1e-2, "update_epoch": 3, "entropy_bonus": 0.1, "gamma": 0.5, "reward_norm": "off"},
        *({name: "another"} for name in STEP_OPTIONS),
    ]
    one = make()
    batch = one._prepare(experience(one))[0]
    fingerprints = []
    for changes in options:
        objective = copy.copy(one.optimizer.loss)
        objective.config = replace(objective.config, **changes)
        step = MinibatchStep(objective, [], [], batch)
        fingerprints.append(compile.fingerprint(step, [x]))
    assert fingerprints[0] == fingerprints[1]
    assert len({*fingerprints}) == 1 + len(STEP_OPTIONS)


def test_fingerprint_of_language_model_is_reproducible() -> None:
    # It depends on the reference, which is no submodule, and not on memory addresses.
    x = torch.zeros(3)
    fingerprints, batch = [], (one := make())._prepare(experience(one))[0]
    for eps in (1e-6, 1e-6, 1e-5):
        objective = ActorLoss(
            language_model(),
            AlgorithmConfig(),
            length=4,
            reference=language_model(rms_norm_eps=eps),
        )
        step = MinibatchStep(objective, [], [], batch)
        fingerprints.append(compile.fingerprint(step, [x]))
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


@pytest.mark.slow
def test_damaged_library_is_recompiled() -> None:
    """The first test loads the result of such a compilation."""
    x = torch.zeros(3)
    library = compile.Library(Double(), [x, x])  # as of the first test
    library.load()
    content = library.path.read_bytes()
    middle = len(content) // 2
    empty = b"PK\5\6" + bytes(18)  # a valid archive without files
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    try:
        for bad in (b"no archive", content[:middle], empty, flipped):
            library.path.write_bytes(bad)
            library = compile.Library(Double(), [x, x])
            assert library.is_compiling()
            library.close()
    finally:
        library.path.write_bytes(content)
    assert not compile.Library(Double(), [x, x]).is_compiling()


@pytest.mark.slow
def test_intact_library_that_fails_to_load_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(3)
    library = compile.Library(Double(), [x, x])  # as of the first test
    library.load()
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        with pytest.raises(RuntimeError, match="compiled code cannot be loaded"):
            compile.Library(Double(), [x, x])
    assert library.path.exists() and not compile.Library(Double(), [x, x]).is_compiling()


def test_class_without_file_is_not_compiled() -> None:
    """The file of its definition is a part of the fingerprint."""
    names: dict[str, Any] = {"__name__": "typed_at_a_prompt"}
    exec("from torch import nn\nclass Typed(nn.Linear): pass", names)
    program, x, notices = Double(), torch.zeros(3), list[str]()
    program.module = names["Typed"](3, 3)
    schedule = compile.CompileSchedule(0, notice=notices.append)
    assert schedule.get(0, lambda: compile.Example(program, [x], [x])) is None
    (notice,) = notices
    assert "Typed is defined in no file" in notice and "continues without compiled" in notice


@pytest.mark.slow
def test_fingerprint_is_the_same_in_all_processes() -> None:
    # The order of a set of strings depends on PYTHONHASHSEED.
    # This process has another seed than each of the two.
    script = """
import torch
from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core import compile
from embodied_ppo.core.types import ArraySpec, Box
from embodied_ppo.models.actor_critic import ActorCritic
from embodied_ppo.rollout.simulation import ActProgram
names = ("a", "bc", "def", "ghij")
spec = ArraySpec((2,), torch.float32)
model = ActorCritic(dict.fromkeys(names, spec), Box((-1.0,), (1.0,)), ModelConfig())
program = ActProgram(model, dict.fromkeys(names, torch.zeros(3, 2)))
fingerprint = compile.fingerprint(program, [torch.zeros(3)])
print(fingerprint)
"""
    outputs = {
        subprocess.check_output(
            [sys.executable, "-c", script], text=True, env=os.environ | {"PYTHONHASHSEED": seed}
        ).strip()
        for seed in ("1", "2")
    }
    exec(script, variables := dict[str, Any]())
    assert outputs == {variables["fingerprint"]}


def test_fingerprint_is_constant_during_training() -> None:
    learner = make()
    obs = torch.randn(4, 5)
    program = ActProgram(learner.policy, obs)
    before = compile.fingerprint(program, [obs])
    learner.policy.observe(obs, torch.ones(4, dtype=torch.bool))
    learner.update(experience(learner), update=0)
    assert compile.fingerprint(program, [obs]) == before


@pytest.mark.slow
def test_compiler_failure_is_reported_once() -> None:
    notices: list[str] = []
    schedule = compile.CompileSchedule(0, notice=notices.append)
    x = torch.zeros(3)
    assert schedule.get(0, lambda: compile.Example(DataDependent(), [x], [x])) is None
    assert schedule.get(1, lambda: compile.Example(DataDependent(), [x], [x])) is None
    assert notices[0].startswith("compile: waiting for the compiler") and len(notices) == 2
    assert "the compiler failed (" in notices[1] and "training continues without" in notices[1]
    failed = schedule._library
    schedule = compile.CompileSchedule(0, required=True, notice=notices.append)
    schedule._library = failed  # one failing compilation is enough for both
    with pytest.raises(
        TrainingError,
        match=r"compile=always: the compiler failed \(.*\); its folder is .*; repair it, or use",
    ):
        schedule.get(0, lambda: compile.Example(DataDependent(), [x], [x]))
    assert compile.CompileSchedule.waiting == 0


def test_unpicklable_program_is_reported() -> None:
    notices: list[str] = []
    schedule = compile.CompileSchedule(3, notice=notices.append)
    assert schedule.get(0, lambda: compile.Example(lambda x: x, [], [torch.zeros(3)])) is None
    assert len(notices) == 1 and "pickle" in notices[0].lower()


def test_hanging_compiler_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(7)
    library = compile.Library(Double("hangs"), [x, x])
    with pytest.raises(RuntimeError, match=r"not compiled after 0\.05 s"):
        library.load(0.05)
    assert not library.is_compiling() and not library.path.exists()
    library.close()


KILLED = """
import os, sys, torch
sys.path += [{root!r}, {root!r} + "/tests"]
from tests.core.test_compile import Double
from embodied_ppo.core import compile as compiled
library = compiled.Library(Double("killed"), [torch.zeros(5)] * 2)
print(library._child.pid, library.work.name, flush=True)
library.load()
"""


@pytest.mark.slow
def test_killed_run_leaves_no_compiler_and_no_folder(tmp_path: Path) -> None:
    """The compiler hangs and the run is killed; files of earlier killed runs are removed."""
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nsleep 1000\n")
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    old, new = cache / "inductor-old", cache / "inductor-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    environment = os.environ | {"EMBODIED_PPO_CACHE": str(cache), "CXX": str(compiler)}
    script = KILLED.format(root=str(Path(__file__).parents[2]))
    run = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    pid, work = run.stdout.readline().split()
    assert Path(work).parent == cache and not old.exists() and new.exists()
    children = Path(f"/proc/{pid}/task/{pid}/children")
    until = time.monotonic() + 60
    while not (started := children.read_text().split()):
        assert time.monotonic() < until
        time.sleep(0.1)
    run.kill()
    run.wait()
    assert run_helpers.processes_ended(int(pid), *map(int, started)) and not Path(work).exists()


@pytest.mark.slow
def test_compiling_process_enforces_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiling process ends itself and its children, whatever the time limit of the run."""
    monkeypatch.setattr(
        compile, "__name__", "tests.core.test_compile"
    )  # the module whose entry the process runs
    x = torch.zeros(7)
    library = compile.Library(Double("slow"), [x, x])
    with pytest.raises(
        RuntimeError, match=r"the compiler failed \(TimeoutError: not compiled after 0\.1 s\)"
    ):
        library.load()


def _build_stdin() -> None:
    """Run ``_build_stdin`` with a shorter time limit."""
    compile.DEADLINE_S = 0.1
    compile._build_stdin()


def test_libraries_writable_by_others_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EMBODIED_PPO_CACHE", str(tmp_path))
    folder, x = tmp_path / "compiled", torch.zeros(3)
    assert compile.unavailable_reason() == "" and folder.stat().st_mode & 0o777 == 0o700
    for mode in (0o770, 0o707):
        folder.chmod(mode)
        assert (
            f"other users can write to {folder} (mode {mode:o}), which holds code; run chmod go-w"
            in compile.unavailable_reason()
        )
        with pytest.raises(RuntimeError, match="other users can write"):
            compile.Library(Double("theirs"), [x, x])
    folder.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert (
        f"{folder} belongs to another user (uid {folder.stat().st_uid}); set EMBODIED_PPO_CACHE"
        in compile.unavailable_reason()
    )


@pytest.mark.parametrize("missing", ["compiler", "cache"])
def test_reasons_why_nothing_can_be_compiled(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert compile.unavailable_reason() == ""
    if missing == "compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
        assert (
            "no C++ compiler (no-such-compiler is not on the path" in compile.unavailable_reason()
        )
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("EMBODIED_PPO_CACHE", str(tmp_path / "file" / "below"))
        assert "cannot be written (Not a directory" in compile.unavailable_reason()
        with monkeypatch.context() as patch:
            patch.setenv("CXX", "false")
            assert "compiler does not run (Command '['false'," in compile.unavailable_reason()
    notices: list[str] = []
    c = run_helpers.tiny_config({"compile": "auto", "updates": 10_000})
    since, reason = embodied.compile_from(c, torch.device("cpu"), notices.append)
    assert since is None and notices == [f"compile: not used, {reason}"]
    with pytest.raises(ConfigError, match=r"compile=always: .*; or use compile=auto"):
        embodied.compile_from(replace(c, compile="always"), torch.device("cpu"), notices.append)


def test_first_compiled_update() -> None:
    # 4096 optimiser steps at 3 epochs x 2 minibatches per update are complete after 683 updates.

    def decided(**options: Any) -> tuple[int | None, str]:
        return embodied.compile_from(
            run_helpers.tiny_config({"updates": 2000, **options}), torch.device("cpu"), pytest.fail
        )

    def since(**options: Any) -> int | None:
        return decided(**options)[0]

    assert (
        since() == 683
        and since(updates=5000) == 683
        and since(**{"algorithm.update_epoch": 6}) == 342
    )
    assert since(updates=683) is None  # too short to use it
    assert since(compile="always") == 0 and decided(compile="never") == (None, "compile=never")
    reason = "compile=auto starts after 4096 optimiser steps, in update 684, and the run has 683"
    assert decided(updates=683) == (None, reason)
    notices: list[str] = []
    c = run_helpers.tiny_config({"updates": 2000, "algorithm.micro_batch_size": 4})
    reason = embodied.compile_from(c, torch.device("cpu"), notices.append)[1]
    assert reason.startswith("algorithm.micro_batch_size cuts minibatches") and reason in notices[0]
    assert (
        embodied.compile_from(
            run_helpers.tiny_config({"updates": 2000}), torch.device("cuda"), pytest.fail
        )[0]
        == 0
    )  # a CUDA graph


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ((5, 10), "minibatches from update 6 on, acting from update 11 on"),
        ((5, None), "minibatches from update 6 on"),
        ((None, None), "never (training ends before it would be used)"),
    ],
)
def test_log_says_what_is_compiled(updates: tuple[int | None, int | None], expected: str) -> None:
    schedules = dict(
        zip(("minibatches", "acting"), map(compile.CompileSchedule, updates), strict=True)
    )
    c, lines = run_helpers.tiny_config({"learner_threads": 2}), list[str]()
    request = RunRequest(c, torch.device("cpu"), Path(), 9, "", {}, print, print, lines)
    env: Any = SimpleNamespace(
        num_envs=4,
        action_spec=Box((-1.0,), (1.0,)),
        obs_spec=ArraySpec((3,)),
        max_episode_steps=None,
    )
    policy: Any = torch.nn.Identity()
    embodied.log_settings(request, env, policy, schedules, "")
    assert lines[-1].endswith(f"compiled code: {expected}")
    unread = "learner_threads=2: not used, minibatches are not compiled"
    assert (unread in lines) == (updates[0] is None)


# ---------------------------------------------------------------------------- run, learner, acting
def run_config() -> Config:
    """Return the options of a run whose critic reads more than the actor.

    The tests of its learner and of its acting load the libraries that the run has compiled.
    """
    c = tiny(Path())
    groups = {"actor_obs": ["state"], "critic_obs": ["state", "privileged"]}
    options = {"horizon": 8, "global_batch_size": 16, "clip_ratio_c": 1.5, "value_clip": 0.1}
    return replace(
        c,
        env=replace(c.env, id="toy_envs:Grouped"),
        model=replace(c.model, distribution="squashed_gaussian", **groups),
        algorithm=replace(c.algorithm, **options),
    )


def run_policy() -> ActorCritic:
    """Return an untrained policy of ``run_config``."""
    c = run_config()
    env = embodied.make_env(
        env_seeds(c.seed, 0, c.env.num_envs, c.algorithm.group_size),
        config=embodied.training_env(c),
        device=torch.device("cpu"),
        model=c.model,
    )
    policy = embodied.make_policy(c, env)
    env.close()
    assert isinstance(policy, ActorCritic)
    return policy


def run_observations(*leading: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random observations [leading, ..] for ``run_policy``."""
    sizes = {"state": 4, "privileged": 3}
    return {name: 3 * torch.randn(*leading, n, generator=generator) for name, n in sizes.items()}


def run_learner(schedule: compile.CompileSchedule, **options: Any) -> Learner:
    """Return a learner of ``run_policy`` with changed options of the algorithm."""
    config = replace(run_config().algorithm, **options)
    return actor_critic_learner(
        run_policy(), config, num_envs=8, updates=10, seed=0, compile_schedule=schedule
    )


@torch.no_grad()
def run_experience(policy: ActorCritic, seed: int) -> Trajectory:
    """Return random experience [8, 8]; the policy that acted differs from ``policy`` by noise."""
    t, g = experience(make(), seed=seed, noise=0.2), torch.Generator().manual_seed(seed)
    obs = run_observations(8, 8, generator=g)
    inputs = policy.encode(tree.map(lambda x: x.flatten(0, 1), obs))
    d = tree.map(lambda x: x.unflatten(0, (8, 8)), policy.act(inputs, noise=policy.noise(64, g)))
    log_prob = d.log_prob + 0.2 * torch.randn(d.log_prob.shape, generator=g)
    return replace(t, obs=obs, action=d.action, log_prob=log_prob, replay=d.replay)


@pytest.mark.slow
def test_compiled_run_repeats_and_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Compiled from update 3 of 8 (acting: 6), with a cold and a warm cache, and after a resume."""
    monkeypatch.setattr(
        embodied, "COMPILE_AFTER", 3 * 2 * (8 * 8 // 16)
    )  # updates x epochs x minibatches
    base_config = replace(run_config(), run_dir=str(tmp_path / "whole"), save_every=2)
    assert embodied.compile_from(base_config, torch.device("cpu"), pytest.fail)[0] == 3
    with monkeypatch.context() as patch:  # an execution that ends before compiles nothing
        patch.setattr(compile, "Library", None)
        short = replace(base_config, run_dir=str(tmp_path / "short"))
        build.train(short, quiet=False, stop_after=3)
        assert "compile:" not in capfd.readouterr().err
    build.train(base_config, quiet=False)  # cold
    assert "compile: waiting for the compiler" in capfd.readouterr().err
    build.train(replace(base_config, run_dir=str(tmp_path / "again")), quiet=False)  # warm
    assert "compile:" not in capfd.readouterr().err
    for at in (4, 6):
        source = tmp_path / "whole" / "checkpoints" / f"step_{at:06d}"
        build.train(
            replace(base_config, run_dir=str(tmp_path / f"from{at}"), resume=str(source)),
            quiet=True,
        )
    build.train(replace(short, resume=str(tmp_path / "short")), quiet=True)
    for other in ("again", "from4", "from6", "short"):
        for a, b in zip(
            contents(tmp_path / "whole", 8), contents(tmp_path / other, 8), strict=True
        ):
            assert_same(a, b)
    assert rows(tmp_path / "whole") == rows(tmp_path / "again")
    eager = replace(base_config, run_dir=str(tmp_path / "eager"), compile="never")
    build.train(eager, quiet=True)
    x, y = (
        torch.tensor([r["policy/loss"] for r in rows(tmp_path / d)[1:]]) for d in ("whole", "eager")
    )
    assert torch.equal(x[:3], y[:3]) and not torch.equal(x, y)
    torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("discrete", [False, True])
def test_compiled_updates_equal_eager_updates(discrete: bool) -> None:
    options = {
        "update_epoch": 2,
        "entropy_bonus": 0.01,
        "critic_warmup": 1,
        "clip_ratio_c": 1.5,
        "value_clip": 0.1,
    }
    schedules = [compile.CompileSchedule(since) for since in (None, 1)]
    if discrete:
        eager, fast = (make(options, discrete=True, compile_schedule=x) for x in schedules)
    else:  # the library of the run above
        eager, fast = (run_learner(x, **options) for x in schedules)
    for update in range(4):  # the critic's warm-up, then three updates of compiled code
        if discrete:
            t = experience(eager, seed=update, noise=0.2)
        else:
            t = run_experience(eager.policy, update)
        one, other = (numbers(learner.update(t, update=update)) for learner in (eager, fast))
        assert one.keys() == other.keys()
        for tag, value in one.items():
            assert other[tag] == pytest.approx(value, rel=1e-4, abs=1e-5), tag
    for name, x in weights(eager).items():
        torch.testing.assert_close(weights(fast)[name], x, rtol=1e-5, atol=1e-5)
    steps = [
        float(fast.optimizer.adamw.state[group[0]]["step"])
        for group in (fast.optimizer.actor, fast.optimizer.critic)
    ]
    assert steps == [
        float(eager.optimizer.adamw.state[group[0]]["step"])
        for group in (eager.optimizer.actor, eager.optimizer.critic)
    ]
    assert steps == [24.0, 32.0]


@pytest.mark.slow
def test_gradients_of_two_threads_equal_those_of_one() -> None:
    """With learner_threads=2."""
    options = {"update_epoch": 2, "entropy_bonus": 0.01, "clip_ratio_c": 1.5, "max_grad_norm": 0.1}
    eager = make(options)
    threaded = [
        make(options, compile_schedule=compile.CompileSchedule(1), threads=2) for _ in range(2)
    ]
    for update in range(3):
        t = experience(eager, seed=update, noise=0.2)
        one, *others = (numbers(learner.update(t, update=update)) for learner in (eager, *threaded))
        assert others[0] == others[1]
        for tag, value in one.items():
            assert others[0][tag] == pytest.approx(value, rel=1e-4, abs=1e-5), tag
    for name, x in weights(eager).items():
        torch.testing.assert_close(weights(threaded[0])[name], x, rtol=1e-5, atol=1e-5)
        assert torch.equal(weights(threaded[0])[name], weights(threaded[1])[name])
    for learner in threaded:
        learner.close()


@pytest.mark.gpu
@pytest.mark.parametrize("discrete", [False, True])
def test_cuda_graph_updates_equal_eager_updates(discrete: bool) -> None:
    options = {"update_epoch": 2, "entropy_bonus": 0.01, "clip_ratio_c": 1.5, "value_clip": 0.1}
    eager, fast = (
        make(options, discrete=discrete, compile_schedule=compile.CompileSchedule(s), device="cuda")
        for s in (None, 1)
    )
    for update in range(4):
        t = experience(make(options, discrete=discrete), seed=update, noise=0.2)
        t = tree.map(lambda x: x.cuda(), t)
        one, other = (numbers(learner.update(t, update=update)) for learner in (eager, fast))
        for tag, value in one.items():
            assert other[tag] == pytest.approx(value, rel=1e-3, abs=1e-4), tag
    for name, x in weights(eager).items():
        torch.testing.assert_close(weights(fast)[name], x, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_cuda_graph_minibatches_do_not_synchronize() -> None:
    learner = make({"update_epoch": 2}, compile_schedule=compile.CompileSchedule(0), device="cuda")
    t = tree.map(lambda x: x.cuda(), experience(make({"update_epoch": 2})))
    learner.update(t, update=0)
    batch, _ = learner._prepare(t)
    functions = learner.optimizer._compiled(batch, 1, critic_only=False)
    assert functions is not None and all(isinstance(x, compile.CudaGraph) for x in functions)
    step = learner.optimizer._compiled_step(functions, batch, entropy_coef=0.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for epoch in range(2):
            for index in learner.optimizer._minibatches(batch, 1, epoch):
                step(index, "")
    finally:
        torch.cuda.set_sync_debug_mode("default")


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that ``clone`` and ``copy_`` write."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.total += result.nbytes
        return result


def captured_programs() -> dict[str, compile.Example]:
    """Return examples: a minibatch after an update, acting, and a language model's minibatch."""
    learner = make({"update_epoch": 1, "entropy_bonus": 0.01})
    learner.update(experience(learner), update=0)
    batch, _ = learner._prepare(experience(learner))
    optimizer, examples = learner.optimizer, dict[str, compile.Example]()

    class Recorder(compile.CompileSchedule):
        def get(self, update: int, make_example: Callable[[], compile.Example]) -> None:
            examples["update"] = make_example()

    optimizer.compile_schedule = Recorder(0)
    optimizer._compiled(batch, 1, critic_only=False)
    obs, noise = torch.randn(6, 5), learner.policy.noise(6, torch.Generator())
    examples["act"] = Acting(learner.policy, compile.CompileSchedule(0))._program(obs, noise)
    config = replace(AlgorithmConfig(), minibatch_unit="column")
    objective, token = ActorLoss(language_model(), config, length=4), torch.arange(8).view(4, 2)
    inputs, value = {"row": torch.arange(12).view(6, 2), "place": token // 2}, torch.randn(4, 2)
    mask = torch.ones(4, 2, dtype=torch.bool)
    batch = Batch(inputs, token, {}, value, value, value, value, mask)
    names = [name for name, _ in objective.model.named_parameters()]
    step = MinibatchStep(objective, names, [], batch)
    parameters = [p.detach() for p in objective.model.parameters()]
    state = [*parameters, *(torch.rand_like(p) for p in parameters * 2)]
    arguments = [torch.rand(len(SETTINGS)), torch.arange(2), *tree.leaves(batch)]
    return {**examples, "language": compile.Example(step, state, arguments)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["update", "act", "language"])
def test_warm_up_of_a_cuda_graph_copies_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs the program on arguments of 0, which leaves weights and moments bit for bit."""
    example, cuda = captured_programs()[name], RecordingCuda(monkeypatch)
    before = [x.clone() for x in example.state]
    with CopiedBytes() as by_program:
        example.program(*example.state, *map(torch.zeros_like, example.arguments))
    with CopiedBytes() as copied:
        graph = compile.CudaGraph(example)
    # Four runs of the program: three to warm up, and the recording.
    assert copied.total - 4 * by_program.total == 0
    assert all(map(torch.equal, before, example.state))
    device = example.arguments[0].device
    assert cuda.recorded == [(device, device)]
    tensors = [*example.state, *example.arguments]
    for total in (sum(x.nbytes for x in example.arguments), 0):  # a second call copies nothing
        with CopiedBytes() as copied:
            graph(tensors)
        assert copied.total == total + sum(x.nbytes for x in graph.results)
    assert all(map(torch.equal, graph.arguments, example.arguments))


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*runs without torch.compile")
@pytest.mark.parametrize("name", ["update", "act"])
def test_fused_program_gives_the_numbers_of_eager_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile traces the program, but generates no code."""
    run_helpers.trace_only(monkeypatch)
    example = captured_programs()[name]
    arguments, before = list(example.arguments), [x.clone() for x in example.state]
    program = compile.fuse(example.program, [*example.state, *map(torch.zeros_like, arguments)])
    assert program is not example.program
    assert all(map(torch.equal, before, example.state))
    results = []
    for run in (example.program, program):
        for x, old in zip(example.state, before, strict=True):
            x.detach().copy_(old)
        result = run(*example.state, *arguments)
        result = [result] if isinstance(result, Tensor) else list(result)
        results.append([*result, *(x.detach().clone() for x in example.state)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_program_that_cannot_be_compiled_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=fail))
    example = captured_programs()["act"]
    with pytest.warns(UserWarning, match=r"^ActProgram runs without .* \(no C compiler\)$"):
        program = compile.fuse(example.program, [*example.state, *example.arguments])
    assert program is example.program


def test_cuda_graph_captures_the_fused_program(monkeypatch: pytest.MonkeyPatch) -> None:
    RecordingCuda(monkeypatch)
    monkeypatch.setattr(compile, "_is_fused", lambda example: True)
    monkeypatch.setattr(compile, "fuse", lambda program, tensors: lambda x: program(x) + 5)
    graph = compile.CudaGraph(compile.Example(lambda x: x + 1, [], [torch.ones(3)]))
    assert graph([torch.ones(3)])[0].tolist() == [6.0] * 3  # of the arguments 0 at the recording


def test_small_programs_on_a_gpu_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_fused(is_cuda: bool, nbytes: int) -> bool:
        tensor: Any = SimpleNamespace(is_cuda=is_cuda, nbytes=nbytes)
        return compile._is_fused(compile.Example(len, [tensor], [tensor]))

    limit = compile.FUSED_BYTES
    assert is_fused(True, limit) and not is_fused(True, limit + 1) and not is_fused(False, 1)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert not is_fused(True, limit)


class WithTensor:
    """A program with a tensor that is no argument, such as the weights of a reference."""

    def __init__(self) -> None:
        self.constant = torch.ones(3)

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.constant


def test_program_that_cannot_be_traced_runs_eagerly() -> None:
    program = WithTensor()
    with pytest.warns(UserWarning, match="^WithTensor runs without torch.compile"):
        assert compile.fuse(program, [torch.zeros(3)]) is program


@pytest.mark.parametrize("inference", [False, True])
def test_cuda_graph_copies_an_argument_that_changed_in_place(
    inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    RecordingCuda(monkeypatch)
    with torch.inference_mode(inference):
        x = torch.zeros(3)
        graph = compile.CudaGraph(compile.Example(lambda x: x + 1, [], [x]))
        for value in (1.0, 2.0):
            x.fill_(value)
            for _ in range(2):
                graph([x])
                assert torch.equal(graph.arguments[0], x)


def test_compiled_update_raises_before_training_on_nan(tmp_path: Path) -> None:
    options = {
        "update_epoch": 2,
        "entropy_bonus": 0.01,
        "critic_warmup": 1,
        "clip_ratio_c": 1.5,
        "value_clip": 0.1,
    }
    # The same library as above.
    schedule = compile.CompileSchedule(0)
    learner = make(options, discrete=True, compile_schedule=schedule, dump_dir=tmp_path)
    learner.update(experience(learner), update=1)
    before = weights(learner)
    t = experience(learner)
    t.reward[:] = torch.nan
    with pytest.raises(
        TrainingError, match=r"update 2, epoch 0: loss nan, gradient norm nan \(not finite\)"
    ):
        learner.update(t, update=2)
    assert all(torch.equal(x, before[name]) for name, x in weights(learner).items())
    assert (tmp_path / "bad_batch.pt").exists()


@pytest.mark.slow
def test_compiled_acting_equals_eager_acting() -> None:
    """The critic reads more than the actor. The run above has compiled the library."""
    policy = run_policy()
    eager, fast = (Acting(policy, compile.CompileSchedule(since)) for since in (None, 1))
    g = torch.Generator().manual_seed(0)
    for update in range(4):
        obs, noise = run_observations(8, generator=g), policy.noise(8, g)
        if update == 3:  # the same numbers in another order of memory
            obs["state"] = obs["state"].T.contiguous().T
            assert not obs["state"].is_contiguous()
        one, other = (a.stack([a(obs, noise, update)] * 2) for a in (eager, fast))
        for a, b in zip(tree.leaves(one), tree.leaves(other), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        if update == 0:
            assert one.replay.keys() == {"pre_squash"}
        with torch.no_grad():  # an update moves weights and moments in place
            policy.policy_head.bias.add_(0.5)
        policy.observe(obs, torch.ones(8, dtype=torch.bool))


# --------------------------------------------------------------------------------------- whole runs
PIPELINE = ["pipeline=true", "algorithm.off_policy_correction=token"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], PIPELINE], ids=["one thread", "pipeline"])
def test_interrupt_ends_wait_for_compiler(options: list[str], tmp_path: Path) -> None:
    """No update runs in the meantime, and no process remains."""
    env = os.environ | {"EMBODIED_PPO_CACHE": str(tmp_path / "cache")}
    command = [
        sys.executable,
        "-m",
        "embodied_ppo.commands.main",
        "train",
        "experiment=cartpole",
        "compile=always",
        *options,
    ]
    command += [
        "evaluation.episodes=2",
        "evaluation.video_episodes=0",
        f"run_dir={tmp_path / 'run'}",
    ]
    run = subprocess.Popen(
        command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert run.stderr is not None
    for line in run.stderr:
        if "waiting for the compiler" in line:
            break
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to the whole group
    output = run.stderr.read()
    assert run.wait(20) == 130 and "interrupted" in output and "compiler failed" not in output
    assert not list((tmp_path / "cache").rglob("*.pt2"))  # the compilation did not end
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))


def test_close_ends_compiling_process(tmp_path: Path) -> None:
    x = torch.zeros(9)
    schedule = compile.CompileSchedule(100)
    schedule.get(0, lambda: compile.Example(Double("left"), [x], [x]))
    assert schedule._library is not None and schedule._library._child is not None
    pid = schedule._library._child.pid
    schedule.close()  # it waits for the process
    assert not os.path.exists(f"/proc/{pid}")


def test_matmul_precision_is_restored_after_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precisions: list[str] = []
    update = embodied.Learner.update

    def note(
        self: embodied.Learner, trajectory: Any, *, update: int, _original: Any = update
    ) -> Any:
        precisions.append(torch.get_float32_matmul_precision())
        return _original(self, trajectory, update=update)

    monkeypatch.setattr(embodied.Learner, "update", note)
    build.train(tiny(tmp_path / "run", updates=2, matmul_precision="medium"), quiet=True)
    assert precisions == ["medium"] * 2 and torch.get_float32_matmul_precision() == "highest"
