"""Tests of resuming: bitwise continuation, kill -9, interrupts, changed options."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import run_helpers
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard.writer import FileWriter

from embodied_envs.base.errors import ConfigError, EnvError, ProcessLost, TrainingError
from embodied_ppo.cluster import run_plan
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.evaluation import checkpoint_evaluation, robot_evaluation
from embodied_ppo.options import loader, validation
from embodied_ppo.options.schema import AlgorithmConfig, ClusterConfig, Config, EvaluateConfig
from embodied_ppo.ppo.ppo import PPO
from embodied_ppo.programs import runs
from embodied_ppo.tools import verification
from embodied_ppo.training import checkpoint, progress, run_directory, trained_run
from embodied_ppo.training.local_system import LocalSystem
from embodied_ppo.training.logging import Log, Timer
from embodied_ppo.training.run_system import RunSystem

TINY = run_helpers.nested(
    run_helpers.options("""name=tiny updates=8 save_every=4 seed=3 env.id=InvertedPendulum-v4
    env.num_envs=8 env.num_threads=1 env.max_episode_steps=20 model.hidden=[16]
    algorithm.horizon=16 algorithm.global_batch_size=32 algorithm.update_epoch=2
    algorithm.lr_schedule=linear algorithm.reward_norm=running algorithm.use_kl_in_reward=true
    algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.1 algorithm.kl_ctrl.horizon=50.0
    algorithm.entropy_bonus=0.01 algorithm.entropy_target=0.5 evaluation.episodes=4
    evaluation.num_envs=4""")
)


def tiny(run_dir: Path, **changes: object) -> Config:
    return replace(loader.load(Config, TINY), run_dir=str(run_dir), **changes)


def contents(run_dir: Path, update: int) -> tuple[dict, dict]:
    source = run_helpers.stored(run_dir, update)
    return source.policy(), source.training()


def assert_same(a: object, b: object, path: str = "") -> None:
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    else:
        assert a == b, path


def rows(run_dir: Path) -> list[dict]:
    """Return the metrics of a run that do not depend on the machine."""
    measured = ("time/", "speed/", "memory/", "weights/", "device/")
    rows = run_helpers.metric_rows(run_dir)
    return [{k: v for k, v in row.items() if not k.startswith(measured)} for row in rows]


def check_resume(run_dir: Path, folder: Path, *, at: int, updates: int) -> None:
    """Continue a run from a checkpoint in ``folder``; the end is equal bit for bit."""
    config = trained_run.open_run(str(run_dir)).config
    source = str(run_dir / "checkpoints" / f"step_{at:06d}")
    runs.train(replace(config, run_dir=str(folder), resume=source), quiet=True)
    assert_same(contents(run_dir, updates), contents(folder, updates))
    assert [row for row in rows(run_dir) if row["update"] > at] == rows(folder)


class Stop(Exception):
    """Ends a run in the middle of an update."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "restart_every", "save_every"),
    [("envpool", 48, 3), ("gymnasium", 0, 4), ("mujoco", 0, 4)],
)
def test_resumed_run_equals_an_uninterrupted_run(
    tmp_path, adapter: str, restart_every: int, save_every: int, monkeypatch
) -> None:
    def config(run_dir: Path, **changes: object) -> Config:
        c = tiny(run_dir, **changes)
        env = replace(c.env, simulator=adapter, num_threads=0, restart_every=restart_every)
        if adapter == "envpool":
            return replace(c, env=env)
        if adapter == "mujoco":  # with the memory of mirrored episodes
            model = replace(c.model, recurrent="gru", recurrent_size=4)
            mirrored = replace(c.algorithm, symmetry="both", minibatch_unit="column")
            return replace(c, env=replace(env, id="Go1Joystick"), model=model, algorithm=mirrored)
        return replace(c, env=env, algorithm=replace(c.algorithm, rpo_alpha=0.2))

    runs.train(config(tmp_path / "uninterrupted"), quiet=True)

    # The first half ends in its seventh update, after the checkpoint of the fourth or sixth.
    update = PPO.update

    def stop_at_seventh(self: PPO, trajectory: object, *, update: int, _original=update) -> object:
        if update == 6:
            raise Stop
        return _original(self, trajectory, update=update)

    with monkeypatch.context() as m:
        m.setattr(PPO, "update", stop_at_seventh)
        with pytest.raises(Stop):
            runs.train(config(tmp_path / "halves", save_every=save_every), quiet=True)
    assert runs.train(config(tmp_path / "halves", resume="auto"), quiet=True)["updates"] == 8
    uninterrupted, halves = tmp_path / "uninterrupted", tmp_path / "halves"
    assert_same(contents(uninterrupted, 8), contents(halves, 8))
    assert rows(uninterrupted) == rows(halves)


@pytest.mark.slow
def test_complete_run_is_continued_where_it_has_more_updates(tmp_path, capfd) -> None:
    run_dir = tmp_path / "run"
    first = runs.train(tiny(run_dir, updates=4), quiet=True)
    files = {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()}
    other = tiny(run_dir, updates=4, resume="auto")
    with pytest.raises(ValueError, match=r"algorithm\.lr=0\.1"):
        runs.train(replace(other, algorithm=replace(other.algorithm, lr=0.1)))
    again = runs.train(other)
    assert again == json.loads(json.dumps(first)) and {p: p.read_bytes() for p in files} == files
    second = runs.train(tiny(run_dir, updates=8, resume="auto"))
    assert second["initial_return"] == first["initial_return"] is not None
    weights = run_dir / "checkpoints" / "step_000008" / checkpoint.POLICY
    weights.write_bytes(weights.read_bytes()[:-9])
    capfd.readouterr()
    runs.train(tiny(run_dir, updates=8, resume="auto"))
    assert "damaged_step_000008" in capfd.readouterr().err
    assert (run_dir / "checkpoints" / "damaged_step_000008").is_dir()


def test_schedules_that_cover_another_number_of_updates_are_reported(monkeypatch) -> None:
    a = AlgorithmConfig(entropy_schedule="linear", lr_schedule="cosine")
    trained = Config(updates=4, algorithm=a)
    monkeypatch.setattr(run_directory, "stored_config", lambda source: trained)
    device, said = torch.device("cpu"), list[str]()
    manifest = {"arithmetic": run_directory.arithmetic(trained, device)}
    del manifest["arithmetic"]["deterministic"]  # of an earlier version
    source: Any = SimpleNamespace(update=4, manifest=manifest)
    run_directory.check_resume(trained, source, 8, device, said.append)
    expected = "the run had 4 updates, now 8: lr_schedule=cosine, entropy_schedule=linear covers"
    assert [line.removeprefix("resume: ") for line in said] == [f"{expected} the new number"]


OVERRIDES = run_helpers.words("""experiment=cartpole env.num_envs=4 algorithm.horizon=8
    algorithm.global_batch_size=16 algorithm.update_epoch=1 evaluation.episodes=2
    evaluation.video_episodes=0 updates=100000 save_every=5""")


def start(run_dir: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "embodied_ppo.commands.main", "train", *OVERRIDES]
    command += [f"run_dir={run_dir}", *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_for(path: Path, process: subprocess.Popen, seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < limit, f"{path} did not appear"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signal_saves_and_exits_with_130(tmp_path, number: int) -> None:
    process = start(tmp_path / "run")
    wait_for(tmp_path / "run" / "checkpoints" / "latest", process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    newest = checkpoint.newest_valid(tmp_path / "run")
    assert newest is not None
    last_row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert newest.update == last_row["update"], "the last update is saved"
    assert f"resume={tmp_path / 'run'}" in err


@pytest.mark.slow
def test_second_signal_during_a_save_ends_the_run_at_once(tmp_path) -> None:
    """The checkpoint that is being written is not complete; the one before it stays valid."""
    run = tmp_path / "run"
    interrupted_save = f"""
import signal, sys
from pathlib import Path
from embodied_ppo.commands import main
from embodied_ppo.training import checkpoint
original = checkpoint._write
def write(path, data):
    original(path, data)
    if Path({str(run / "checkpoints" / "latest")!r}).exists():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        Path({str(tmp_path / "continued")!r}).touch()
checkpoint._write = write
sys.exit(main.main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", interrupted_save, "train", *OVERRIDES, f"run_dir={run}"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert process.returncode == 130, process.stderr
    assert "Traceback" not in process.stderr and not (tmp_path / "continued").exists()
    newest = checkpoint.newest_valid(run)
    assert newest is not None and newest.update == 5


def test_signal_ignored_by_nohup_stays_ignored() -> None:
    for handler in (signal.SIG_DFL, signal.SIG_IGN):
        before = signal.signal(signal.SIGHUP, handler)
        try:
            with progress.stop_signals(Timer()) as stop_requested:
                ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
                assert ignored == (handler is signal.SIG_IGN)
                assert ignored or signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
                os.kill(os.getpid(), signal.SIGHUP)
                assert stop_requested() != ignored
            assert signal.getsignal(signal.SIGHUP) is handler
        finally:
            signal.signal(signal.SIGHUP, before)


class InterruptedConversion:
    @staticmethod
    def from_param(number: int) -> int:
        signal.raise_signal(signal.SIGINT)
        return number


@pytest.mark.parametrize("signals", [1, 2])
def test_interrupt_in_a_conversion_of_ctypes_is_an_interrupt(signals: int) -> None:
    """ctypes raises an ArgumentError instead, as when a picture is drawn by EGL."""
    function = ctypes.CDLL(None).abs
    function.argtypes = [InterruptedConversion]
    context = progress.Interrupts() if signals == 1 else progress.stop_signals(Timer())
    with pytest.raises(KeyboardInterrupt), context:
        assert [function(1) for _ in range(signals)] == []
    with pytest.raises(ValueError, match="of the block"), progress.Interrupts():
        raise ValueError("of the block")


def test_lost_interrupt_ends_the_next_uninterrupted_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), progress.Interrupts() as interrupts:
        # CPython discards the exceptions of destructors and callbacks of the garbage collector.
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with interrupts.uninterrupted():
            done.append("saved")
        done.append("continued")
    assert done == ["saved"]


@pytest.mark.slow
def test_checkpoints_after_kill_9_can_be_loaded(tmp_path) -> None:
    run_dir, last_update = tmp_path / "run", 0
    for delay_s in (0.0, 0.013, 0.2):
        process = start(run_dir, "resume=auto", "save_every=1")
        wait_for(run_dir / "checkpoints" / f"step_{last_update + 3:06d}", process)
        time.sleep(delay_s)
        process.kill()
        process.communicate()
        for step in (run_dir / "checkpoints").glob("step_*"):
            source = checkpoint.open_checkpoint(step)
            source.policy(), source.training()
        newest = checkpoint.newest_valid(run_dir)
        assert newest is not None and newest.update >= last_update + 3
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()[:-1]
        updates = [json.loads(line)["update"] for line in lines]
        assert newest.update >= max(updates) - 1, "only updates since the last save are lost"
        assert updates == list(range(len(updates))), "every saved update has one row"
        last_update = newest.update


class Killed(BaseException):
    """Ends a run without error handlers, like kill -9."""


# Functions that save, evaluate and log an update; a test ends the run before each of them.
STEPS_OF_A_TRANSACTION = (
    *((checkpoint, name) for name in ("_write", "_point", "_prune", "set_score")),
    *((RunSystem, name) for name in ("save", "evaluate")),
    (Log, "metrics"),
    (FileWriter, "add_summary"),
)


def kill_at(moment: int, update: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Raise Killed before step ``moment`` (from 1) of an update's transaction; return the steps."""
    steps: list[str] = []
    current = [0]

    def step(name: str) -> None:
        if current[0] == update and steps[-1:] != [name]:  # files of one checkpoint are one step
            steps.append(name)
            if len(steps) == moment:
                raise Killed(name)

    def interruptible(owner: object, name: str) -> None:
        function = getattr(owner, name)

        def call(*args: object, **options: object) -> object:
            step(name)
            result = function(*args, **options)
            if name == "metrics":
                step("after the row")
            return result

        monkeypatch.setattr(owner, name, call)

    publish = LocalSystem.publish

    def count(self: LocalSystem, version: int) -> None:
        current[0] = version
        publish(self, version)

    monkeypatch.setattr(LocalSystem, "publish", count)
    for owner, name in STEPS_OF_A_TRANSACTION:
        interruptible(owner, name)
    return steps


def state_of(run_dir: Path) -> tuple[Any, ...]:
    """Return rows, scores, links and curves of a run."""
    folder = run_dir / "checkpoints"
    manifests = sorted(folder.glob("step_*/manifest.json"))
    scores = {path.parent.name: json.loads(path.read_text())["score"] for path in manifests}
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    points = [(e.step, e.value) for e in events.Scalars("eval/return")]
    links = [os.readlink(folder / name) for name in ("best", "latest")]
    return rows(run_dir), scores, *links, points


@pytest.mark.slow
def test_kill_between_saving_and_logging_loses_nothing(tmp_path, monkeypatch) -> None:
    """A run that is killed at any step has every row once, all evaluations, scores and ``best``."""
    # Memory estimates and reports each take a third of the time of these runs.
    monkeypatch.setattr(run_plan, "can_estimate", lambda *_, **__: False)
    monkeypatch.setattr(robot_evaluation, "write_report", lambda *_, **__: {})

    def train(name: str, **changes: object) -> None:
        saving = {"save_every": 1, "eval_every": 1, "keep_last": 9}
        c = tiny(tmp_path / name, updates=3, compile="never", **saving, **changes)
        algorithm = replace(c.algorithm, horizon=4, update_epoch=1, lr=0.01)
        evaluation = replace(c.evaluation, episodes=2, num_envs=2, video_episodes=0)
        env = replace(c.env, max_episode_steps=1000)
        c = replace(c, seed=5, algorithm=algorithm, evaluation=evaluation, env=env)
        runs.train(c, quiet=True)

    with monkeypatch.context() as patch:
        steps = kill_at(0, 2, patch)
        train("uninterrupted")
    expected = state_of(tmp_path / "uninterrupted")
    scores, best = expected[1:3]
    # The scores increase, so that every evaluation changes ``best``.
    assert list(scores.values()) == sorted(set(scores.values())) and best == "step_000003"
    assert [row["update"] for row in rows(tmp_path / "uninterrupted")] == [0, 1, 2, 3]
    assert {name for _, name in STEPS_OF_A_TRANSACTION} < set(steps)
    for moment in range(1, len(steps) + 1):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_at(moment, 2 + moment % 2, patch)
            train(f"killed {moment}")
        train(f"killed {moment}", resume="auto")
        assert state_of(tmp_path / f"killed {moment}") == expected, steps[moment - 1]


def test_damaged_newest_checkpoint_is_skipped(tmp_path, capfd) -> None:
    runs.train(tiny(tmp_path / "run"), quiet=True)
    (tmp_path / "run/checkpoints/step_000008/policy.pt").write_bytes(b"short")
    runs.train(tiny(tmp_path / "run", resume="auto"), quiet=False)
    assert "step_000008/policy.pt" in capfd.readouterr().err
    assert checkpoint.open_checkpoint(tmp_path / "run").update == 8
    # Checkpoints on another disk: the run continues itself and is no branch.
    (tmp_path / "run/checkpoints").rename(tmp_path / "disk")
    (tmp_path / "run/checkpoints").symlink_to("../disk")
    runs.train(tiny(tmp_path / "run", resume="auto", updates=9), quiet=True)
    assert not (tmp_path / "run/parent.json").exists()
    content = verification.verify(tmp_path / "run", updates=1, progress=False)
    assert content["verdict"] == "verified" and "../disk/step_000009/policy.pt" in content["files"]
    # A file of the run that cannot be opened for writing, like one of another user.
    (tmp_path / "run/log.txt").unlink()
    (tmp_path / "run/log.txt").mkdir()
    with pytest.raises(ConfigError, match=r"run: cannot be written \(Is a directory\)"):
        runs.train(tiny(tmp_path / "run", resume="auto", updates=10), quiet=True)


@pytest.mark.slow
def test_changed_options_are_logged_or_refused(tmp_path) -> None:
    runs.train(tiny(tmp_path / "run"), quiet=True)
    config = tiny(tmp_path / "run", resume="auto", updates=9)
    runs.train(replace(config, algorithm=replace(config.algorithm, gamma=0.5)), quiet=True)
    assert "algorithm.gamma was 0.99, is 0.5" in (tmp_path / "run/log.txt").read_text()
    with pytest.raises(ValueError, match=r"env.num_envs=16: the run to resume has 8"):
        runs.train(replace(config, env=replace(config.env, num_envs=16)), quiet=True)
    message = "initial_policy=RUN: model.activation=relu: the run to resume has tanh"
    with pytest.raises(ValueError, match=message):
        runs.train(replace(config, model=replace(config.model, activation="relu")), quiet=True)
    with pytest.raises(ValueError, match=r"model.distribution=squashed_gaussian: the run to res"):
        changed = replace(config.model, distribution="squashed_gaussian")
        runs.train(replace(config, model=changed), quiet=True)
    with pytest.raises(ValueError, match=r"updates=5: .* has completed 9"):
        runs.train(replace(config, updates=5), quiet=True)


@pytest.mark.slow
def test_earlier_checkpoint_starts_a_new_run(tmp_path, monkeypatch) -> None:
    runs.train(tiny(tmp_path / "run"), quiet=True)
    before = rows(tmp_path / "run")
    earlier = tmp_path / "run/checkpoints/step_000004"
    with pytest.raises(ValueError, match=r"run_dir=NEW.*continued to step_000008"):
        runs.train(replace(tiny(tmp_path), run_dir=None, resume=str(earlier)), quiet=True)
    save, losses = LocalSystem.save, [ProcessLost("lost before the branch has a checkpoint")]

    def lost(self: LocalSystem, *args: Any) -> Path:
        if losses:
            raise losses.pop()
        return save(self, *args)

    monkeypatch.setattr(LocalSystem, "save", lost)
    monkeypatch.setattr(validation, "check", lambda *_: None)  # which wants several processes
    restarts = ClusterConfig(max_restarts=1)
    runs.train(tiny(tmp_path / "branch", resume=str(earlier), cluster=restarts), quiet=True)
    assert rows(tmp_path / "run") == before
    assert rows(tmp_path / "branch")[0]["update"] == 5
    assert_same(contents(tmp_path / "run", 8), contents(tmp_path / "branch", 8))


@pytest.mark.parametrize("kind", [EnvError, PlacementError])
def test_failure_of_the_last_evaluation_keeps_the_checkpoint(kind, tmp_path, monkeypatch) -> None:
    evaluate = LocalSystem.evaluate

    def fail_at_last_update(self: LocalSystem, update: int) -> object:
        if update == 8:
            raise kind("the simulator failed")
        return evaluate(self, update)

    monkeypatch.setattr(LocalSystem, "evaluate", fail_at_last_update)
    with pytest.raises(TrainingError, match="the simulator failed"):
        runs.train(tiny(tmp_path / "run", save_every=0), quiet=True)
    assert checkpoint.open_checkpoint(tmp_path / "run").update == 8
    config = tiny(tmp_path / "run", save_every=0, resume="auto")
    runs.train(replace(config, evaluation=replace(config.evaluation, episodes=0)), quiet=True)
    assert rows(tmp_path / "run")[-1]["update"] == 8


def test_evaluation_with_changed_options_has_its_own_report(tmp_path) -> None:
    c = tiny(tmp_path / "run")
    runs.train(replace(c, env=replace(c.env, kwargs={"frame_skip": 4})), quiet=True)
    options = {"checkpoint": str(tmp_path / "run"), "episodes": 2, "video": False}
    plain = checkpoint_evaluation.evaluate(loader.load(EvaluateConfig, options), quiet=True)
    changed = {**options, "env": {"kwargs": {"reset_noise_scale": 0.001}, "max_episode_steps": 7}}
    other = checkpoint_evaluation.evaluate(loader.load(EvaluateConfig, changed), quiet=True)
    assert plain["report"] != other["report"]
    stored = json.loads(Path(other["report_json"]).read_text())["config"]["env"]
    assert stored["kwargs"] == {"frame_skip": 4, "reset_noise_scale": 0.001}
    assert stored["max_episode_steps"] == 7
    assert other["eval/length"] <= 7


def test_resumed_run_is_not_changed_by_a_new_run_dir(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"env.id": "CartPole-v1", "env.num_envs": 8, "compile": "never"}
    small |= {"algorithm.horizon": 8, "algorithm.global_batch_size": 32}
    small |= {"evaluation.episodes": 4, "evaluation.video_episodes": 0}
    runs.train(run_helpers.tiny_config({**small, "updates": 1, "run_dir": "first"}), quiet=True)
    files = {p: p.read_bytes() for p in Path("first").rglob("*") if p.is_file()}
    for updates, name in ((2, "second"), (1, "third")):  # the third run is complete already
        options = {**small, "updates": updates, "run_dir": name, "resume": "first"}
        runs.train(run_helpers.tiny_config(options), quiet=True)
        assert {p: p.read_bytes() for p in Path("first").rglob("*") if p.is_file()} == files
        assert (Path(name) / "checkpoints" / "step_000001").is_dir()
        assert (Path(name) / "summary.json").is_file()
    # A run that was killed before its first checkpoint has rows, which no branch continues.
    Path("killed").mkdir()
    Path("killed/metrics.jsonl").write_text('{"update": 1, "env_steps": 64}\n')
    with pytest.raises(ValueError, match="run_dir=killed: holds another run already"):
        runs.train(run_helpers.tiny_config({**options, "run_dir": "killed"}), quiet=True)


@pytest.mark.parametrize("moment", ["evaluate", "collect", "update"])
def test_interrupt_before_the_first_update_leaves_nothing(
    moment: str, tmp_path, monkeypatch
) -> None:
    """A signal while building or evaluating ends the run, a second one the first update."""
    original = getattr(LocalSystem, moment)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for _ in range(1 + (moment in ("collect", "update"))):
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(LocalSystem, moment, interrupted)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        runs.train(tiny(tmp_path / "runs" / "a"), quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_interrupt_keeps_files_of_others_and_complete_updates(tmp_path, monkeypatch) -> None:
    (tmp_path / "notes.txt").touch()
    evaluate = LocalSystem.evaluate

    def interrupted(self: LocalSystem, update: int) -> Any:
        signal.raise_signal(signal.SIGINT)
        return evaluate(self, update)

    with monkeypatch.context() as m, pytest.raises(SystemExit):
        m.setattr(LocalSystem, "evaluate", interrupted)
        runs.train(tiny(tmp_path), quiet=True)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["notes.txt"]
    with monkeypatch.context() as m, pytest.raises(SystemExit):
        update = LocalSystem.update
        m.setattr(
            LocalSystem,
            "update",
            lambda self, *a, **k: [update(self, *a, **k), signal.raise_signal(signal.SIGINT)][0],
        )
        runs.train(tiny(tmp_path), quiet=True)
    assert contents(tmp_path, 1)
