"""Compiled code: equal results, a fixed first update, and messages if it is not available."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_envs.base.errors import TrainingError
from embodied_ppo.core import compile, cuda_graph
from embodied_ppo.core.types import Batch, Trajectory
from embodied_ppo.options.schema import AlgorithmConfig, Config
from embodied_ppo.policies import robot_policy
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.ppo.compiled_step import ADAMW_SETTINGS, STEP_OPTIONS, CompiledStep, MinibatchStep
from embodied_ppo.ppo.language_actor import TokenLoss
from embodied_ppo.ppo.ppo import PPO
from embodied_ppo.ppo.robot_actor import robot_ppo
from embodied_ppo.programs import compilation, runs
from embodied_ppo.rollout.acting import Acting
from tests.integration.test_resume import assert_same, contents, rows, tiny
from tests.policies.test_causal_lm import make as language_model
from tests.ppo.test_compiled_step import parameter_names
from tests.ppo.test_robot_actor import experience, make, numbers, weights
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
def test_two_compilers_at_the_same_time(tmp_path, monkeypatch) -> None:
    """The second one does not know all instructions of the processor.

    Each compilation runs in its own folder, because torch names files by the code's hash.
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


def test_damaged_library_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("EMBODIED_PPO_CACHE", str(tmp_path))
    x = torch.zeros(3)
    (tmp_path / "compiled").mkdir()
    path = tmp_path / "compiled" / f"{compile.fingerprint(Double(), [x, x])}.pt2"
    for content in (b"no archive", b"PK\5\6" + bytes(18)):  # a valid archive without files
        path.write_bytes(content)
        with pytest.raises(RuntimeError, match=f"{path.name}: the compiled code cannot be loaded"):
            compile.Library(Double(), [x, x])


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path, monkeypatch) -> None:
    """Libraries run as code."""
    monkeypatch.setenv("EMBODIED_PPO_CACHE", str(tmp_path))
    assert compile.unavailable_reason() == ""
    (tmp_path / "compiled").chmod(0o777)
    assert "chmod go-w" in compile.unavailable_reason()


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
    batch = learners[0].prepare(experience(learners[0]))[0]
    optimizers = [one.optimizer for one in learners]
    steps = [MinibatchStep(x.loss, *parameter_names(x), batch) for x in optimizers]
    assert len({compile.fingerprint(step, [x]) for step in steps}) == 4  # two of them are equal


def test_runs_share_a_library_unless_an_option_of_the_minibatch_differs() -> None:
    x = torch.zeros(3)
    options: list[dict[str, Any]] = [
        {},
        {"lr": 1e-2, "update_epoch": 3, "entropy_bonus": 0.1, "gamma": 0.5, "reward_norm": "off"},
        *({name: "another"} for name in STEP_OPTIONS),
    ]
    one = make()
    batch = one.prepare(experience(one))[0]
    fingerprints = []
    for changes in options:
        objective = copy.copy(one.optimizer.loss)
        objective.config = replace(objective.config, **changes)
        fingerprints.append(compile.fingerprint(MinibatchStep(objective, [], [], batch), [x]))
    assert fingerprints[0] == fingerprints[1]
    assert len({*fingerprints}) == 1 + len(STEP_OPTIONS)


@pytest.mark.slow
def test_fingerprint_is_the_same_in_all_processes() -> None:
    # The order of a set of strings depends on PYTHONHASHSEED.
    # This process has another seed than each of the two.
    script = """
import torch
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.core import compile
from embodied_envs.types import ArraySpec, Box
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.rollout.acting import ActProgram
names = ("a", "bc", "def", "ghij")
spec = ArraySpec((2,), torch.float32)
model = ActorCritic(dict.fromkeys(names, spec), Box((-1.0,), (1.0,)), ModelConfig())
program = ActProgram(model, dict.fromkeys(names, torch.zeros(3, 2)))
fingerprint = compile.fingerprint(program, [torch.zeros(3)])
print(fingerprint)
"""
    command = [sys.executable, "-c", script]
    settings = [os.environ | {"PYTHONHASHSEED": seed} for seed in ("1", "2")]
    outputs = {subprocess.check_output(command, text=True, env=env).strip() for env in settings}
    exec(script, variables := dict[str, Any]())
    assert outputs == {variables["fingerprint"]}


@pytest.mark.slow
def test_compiler_failure_is_reported_once() -> None:
    notices: list[str] = []
    schedule = compile.CompileSchedule(0, notice=notices.append)
    x = torch.zeros(3)
    assert schedule.get(0, lambda: cuda_graph.Example(DataDependent(), [x], [x])) is None
    assert schedule.get(1, lambda: cuda_graph.Example(DataDependent(), [x], [x])) is None
    assert notices[0].startswith("compile: waiting for the compiler") and len(notices) == 2
    assert "the compiler failed (" in notices[1] and "training continues without" in notices[1]
    failed = schedule._libraries
    schedule = compile.CompileSchedule(0, required=True, notice=notices.append)
    schedule._libraries = failed  # one failing compilation is enough for both
    with pytest.raises(
        TrainingError,
        match=r"compile=always: the compiler failed \(.*\); its folder is .*; repair it, or use",
    ):
        schedule.get(0, lambda: cuda_graph.Example(DataDependent(), [x], [x]))
    assert compile.CompileSchedule.waiting == 0


def test_hanging_compiler_times_out(monkeypatch) -> None:
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
def test_killed_run_leaves_no_compiler_and_no_folder(tmp_path) -> None:
    """The compiler hangs and the run is killed."""
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nsleep 1000\n")
    compiler.chmod(0o755)
    environment = os.environ | {"EMBODIED_PPO_CACHE": str(tmp_path / "cache"), "CXX": str(compiler)}
    script = KILLED.format(root=str(Path(__file__).parents[2]))
    run = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    pid, work = run.stdout.readline().split()
    children = Path(f"/proc/{pid}/task/{pid}/children")
    until = time.monotonic() + 60
    while not (started := children.read_text().split()):
        assert time.monotonic() < until
        time.sleep(0.1)
    run.kill()
    run.wait()
    assert run_helpers.processes_ended(int(pid), *map(int, started)) and not Path(work).exists()


def test_first_compiled_update() -> None:
    # 4096 optimiser steps at 3 epochs x 2 minibatches per update are complete after 683 updates.

    def decided(**options: Any) -> tuple[int | None, str]:
        return compilation.compile_from(
            run_helpers.tiny_config({"updates": 2000, **options}), torch.device("cpu"), pytest.fail
        )

    def since(**options: Any) -> int | None:
        return decided(**options)[0]

    assert since() == since(updates=5000) == 683 and since(**{"algorithm.update_epoch": 6}) == 342
    assert since(updates=683) is None  # too short to use it
    assert since(compile="always") == 0 and decided(compile="never") == (None, "compile=never")
    reason = "compile=auto starts after 4096 optimiser steps or 262144 samples, in update 684, and"
    assert decided(updates=683) == (None, f"{reason} the run has 683")
    # 128 x 64 samples: the limit of samples is reached after 32 updates of 6 optimiser steps.
    large = {"env.num_envs": 128, "algorithm.horizon": 64, "algorithm.global_batch_size": 4096}
    assert since(**large) == 32
    notices: list[str] = []
    c = run_helpers.tiny_config({"updates": 2000, "algorithm.micro_batch_size": 4})
    reason = compilation.compile_from(c, torch.device("cpu"), notices.append)[1]
    assert reason.startswith("algorithm.micro_batch_size cuts minibatches") and reason in notices[0]
    c = run_helpers.tiny_config({"updates": 2000})
    assert compilation.compile_from(c, torch.device("cuda"), pytest.fail)[0] == 0  # a CUDA graph


# ---------------------------------------------------------------------------- run, learner, acting
MANY = {"update_epoch": 2, "entropy_bonus": 0.01, "critic_warmup": 1, "clip_ratio_c": 1.5}
MANY |= {"value_clip": 0.1}
SEPARATE: dict[str, Any] = {"model": {"shared_backbone": False}}


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
    env = run_helpers.tiny_env(c)
    policy = robot_policy.make_policy(c, env)
    env.close()
    assert isinstance(policy, ActorCritic)
    return policy


def run_observations(*leading: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random observations [leading, ..] for ``run_policy``."""
    sizes = {"state": 4, "privileged": 3}
    return {name: 3 * torch.randn(*leading, n, generator=generator) for name, n in sizes.items()}


def run_learner(schedule: compile.CompileSchedule, **options: Any) -> PPO:
    """Return a learner of ``run_policy`` with changed options of the algorithm."""
    config = replace(run_config().algorithm, **options)
    return robot_ppo(
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
def test_compiled_run_repeats_and_resumes_bit_for_bit(tmp_path, monkeypatch, capfd) -> None:
    """Compiled from update 3 of 8 (acting: 6), with a cold and a warm cache, and after a resume."""
    # updates x epochs x minibatches
    monkeypatch.setattr(compilation, "COMPILE_AFTER", 3 * 2 * (8 * 8 // 16))
    base_config = replace(run_config(), run_dir=str(tmp_path / "whole"), save_every=2)
    assert compilation.compile_from(base_config, torch.device("cpu"), pytest.fail)[0] == 3
    with monkeypatch.context() as patch:  # an execution that ends before compiles nothing
        patch.setattr(compile, "Library", None)
        short = replace(base_config, run_dir=str(tmp_path / "short"))
        runs.train(short, quiet=False, stop_after=3)
        assert "compile:" not in capfd.readouterr().err
    runs.train(base_config, quiet=False)  # cold
    assert "compile: waiting for the compiler" in capfd.readouterr().err
    runs.train(replace(base_config, run_dir=str(tmp_path / "again")), quiet=False)  # warm
    assert "compile:" not in capfd.readouterr().err
    for at in (4, 6):
        source = tmp_path / "whole" / "checkpoints" / f"step_{at:06d}"
        run_dir = str(tmp_path / f"from{at}")
        runs.train(replace(base_config, run_dir=run_dir, resume=str(source)), quiet=True)
    runs.train(replace(short, resume=str(tmp_path / "short")), quiet=True)
    for other in ("again", "from4", "from6", "short"):
        for a, b in zip(
            contents(tmp_path / "whole", 8), contents(tmp_path / other, 8), strict=True
        ):
            assert_same(a, b)
    assert rows(tmp_path / "whole") == rows(tmp_path / "again")
    eager = replace(base_config, run_dir=str(tmp_path / "eager"), compile="never")
    runs.train(eager, quiet=True)
    x, y = (
        torch.tensor([r["policy/loss"] for r in rows(tmp_path / d)[1:]]) for d in ("whole", "eager")
    )
    assert torch.equal(x[:3], y[:3]) and not torch.equal(x, y)
    torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("discrete", [False, True])
def test_compiled_updates_equal_eager_updates(discrete: bool) -> None:
    schedules = [compile.CompileSchedule(since) for since in (None, 1)]
    if discrete:
        eager, fast = (make(MANY, discrete=True, compile_schedule=x) for x in schedules)
    else:  # the library of the run above
        eager, fast = (run_learner(x, **MANY) for x in schedules)
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
    for optimizer in (eager.optimizer, fast.optimizer):
        first = (optimizer.actor[0], optimizer.critic[0])
        assert [float(optimizer.adamw.state[p]["step"]) for p in first] == [24.0, 32.0]


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
    batch, _ = learner.prepare(t)
    optimizer = learner.optimizer
    optimizer.begin(batch, 1)
    assert optimizer.compiled is not None and optimizer.compiled.schedule.captures
    torch.cuda.set_sync_debug_mode("error")
    try:
        for epoch in range(2):
            for index in optimizer.minibatches(epoch):
                optimizer.step(index)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured_programs() -> dict[str, cuda_graph.Example]:
    """Return examples: a minibatch after an update, acting, and a language model's minibatch."""
    learner = make({"update_epoch": 1, "entropy_bonus": 0.01})
    learner.update(experience(learner), update=0)
    batch, _ = learner.prepare(experience(learner))
    optimizer, examples = learner.optimizer, dict[str, cuda_graph.Example]()

    class Recorder(compile.CompileSchedule):
        def get(self, update: int, make_example: Callable[[], cuda_graph.Example]) -> None:
            examples["update"] = make_example()

    optimizer.compiled = CompiledStep(Recorder(0))
    optimizer.begin(batch, 1)
    obs, noise = torch.randn(6, 5), learner.policy.noise(6, torch.Generator())
    examples["act"] = Acting(learner.policy, compile.CompileSchedule(0))._program(obs, noise)
    config = replace(AlgorithmConfig(), minibatch_unit="column")
    objective, token = TokenLoss(language_model(), config, length=4), torch.arange(8).view(4, 2)
    inputs, value = {"row": torch.arange(12).view(6, 2), "place": token // 2}, torch.randn(4, 2)
    mask = torch.ones(4, 2, dtype=torch.bool)
    numbers = dict.fromkeys(("log_prob", "value", "advantage", "returns"), value)
    batch = Batch(inputs=inputs, action=token, replay={}, mask=mask, **numbers)
    names = [name for name, _ in objective.model.named_parameters()]
    step = MinibatchStep(objective, names, [], batch)
    parameters = [p.detach() for p in objective.model.parameters()]
    state = [*parameters, *(torch.rand_like(p) for p in parameters * 2)]
    arguments = [torch.rand(len(ADAMW_SETTINGS) + 1), torch.arange(2), *tree.leaves(batch)]
    return {**examples, "language": cuda_graph.Example(step, state, arguments)}


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*runs without torch.compile")
@pytest.mark.parametrize("name", ["update", "act"])
def test_fused_program_gives_the_numbers_of_eager_code(name: str, monkeypatch) -> None:
    """torch.compile traces the program, but generates no code."""
    run_helpers.trace_only(monkeypatch)
    example = captured_programs()[name]
    arguments, before = list(example.arguments), [x.clone() for x in example.state]
    program = cuda_graph.fuse(example.program, [*example.state, *map(torch.zeros_like, arguments)])
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


def test_program_that_cannot_be_compiled_runs_eagerly(monkeypatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=fail))
    example = captured_programs()["act"]
    with pytest.warns(UserWarning, match=r"^ActProgram runs without .* \(no C compiler\)$"):
        program = cuda_graph.fuse(example.program, [*example.state, *example.arguments])
    assert program is example.program


@pytest.mark.parametrize("inference", [False, True])
def test_cuda_graph_copies_an_argument_that_changed_in_place(inference: bool, monkeypatch) -> None:
    RecordingCuda(monkeypatch)
    with torch.inference_mode(inference):
        x = torch.zeros(3)
        graph = cuda_graph.CudaGraph(cuda_graph.Example(lambda x: x + 1, [], [x]))
        for value in (1.0, 2.0):
            x.fill_(value)
            for _ in range(2):
                graph([x])
                assert torch.equal(graph.arguments[0], x)


@pytest.mark.slow
def test_networks_that_share_no_weight_learn_in_two_threads() -> None:
    """The numbers are those of one thread bit for bit, and those of one program to rounding."""
    learners = []
    for since, threads in ((None, 1), (1, 1), (1, 2)):
        schedule = compile.CompileSchedule(since, threads=threads)
        learners.append(make(MANY, discrete=True, **SEPARATE, compile_schedule=schedule))
    for update in range(4):
        t = experience(learners[0], seed=update, noise=0.2)
        eager, one, two = (numbers(learner.update(t, update=update)) for learner in learners)
        assert one == two and one == pytest.approx(eager, rel=1e-4, abs=1e-5)
    eager_weights, *others = map(weights, learners)
    for name, x in eager_weights.items():
        assert torch.equal(others[0][name], others[1][name])
        torch.testing.assert_close(others[0][name], x, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, SEPARATE], ids=["shared", "separate"])
def test_compiled_update_raises_before_training_on_nan(model: dict[str, Any]) -> None:
    # The same libraries as above.
    schedule = compile.CompileSchedule(0, threads=2)
    learner = make(MANY, discrete=True, **model, compile_schedule=schedule)
    learner.update(experience(learner), update=1)
    before = weights(learner)
    t = experience(learner)
    t.reward[:] = torch.nan
    with pytest.raises(
        TrainingError, match=r"update 2, epoch 0: loss nan, gradient norm nan \(not finite\)"
    ):
        learner.update(t, update=2)
    assert all(torch.equal(x, before[name]) for name, x in weights(learner).items())


# --------------------------------------------------------------------------------------- whole runs
PIPELINE = ["pipeline=true", "algorithm.off_policy_correction=token"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], PIPELINE], ids=["one thread", "pipeline"])
def test_interrupt_ends_wait_for_compiler(options: list[str], tmp_path) -> None:
    """No update runs in the meantime, and no process remains."""
    env = os.environ | {"EMBODIED_PPO_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "embodied_ppo.commands.main", "train"]
    command += ["experiment=cartpole", "compile=always", *options]
    command += ["evaluation.episodes=2", "evaluation.video_episodes=0"]
    command += [f"run_dir={tmp_path / 'run'}"]
    run = subprocess.Popen(
        command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert run.stderr is not None
    for line in run.stderr:
        if "waiting for the compiler" in line:
            break
    early = set((tmp_path / "cache").rglob("*.pt2"))  # on a loaded machine there may be some
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to the whole group
    output = run.stderr.read()
    assert run.wait(60) == 130 and "interrupted" in output and "compiler failed" not in output
    assert set((tmp_path / "cache").rglob("*.pt2")) == early  # no further compilation ended
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))


def test_training_computes_in_float32_and_restores_the_callers_precision(
    tmp_path, monkeypatch
) -> None:
    precisions: list[str] = []
    update = PPO.update

    def note(self: PPO, trajectory: Any, *, update: int, _original: Any = update) -> Any:
        precisions.append(torch.get_float32_matmul_precision())
        return _original(self, trajectory, update=update)

    monkeypatch.setattr(PPO, "update", note)
    torch.set_float32_matmul_precision("medium")
    try:
        runs.train(tiny(tmp_path / "run", updates=2), quiet=True)
        assert precisions == ["highest"] * 2 and torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
