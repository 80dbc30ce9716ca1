"""Checkpoints continue bit for bit, survive kill -9, and an interrupt saves and leaves with 130."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from embodied_ppo import run
from embodied_ppo.config import loader
from embodied_ppo.config.schema import Config
from embodied_ppo.modes.embodied import components as embodied
from embodied_ppo.modes.embodied.mode import EmbodiedMode
from embodied_ppo.training import checkpoint, progress, run_directory
from embodied_ppo.training.local_system import LocalSystem
from embodied_ppo.training.logging import Log, Timer
from embodied_ppo.training.system import RunSystem

TINY = {
    "name": "tiny",
    "updates": 8,
    "save_every": 4,
    "seed": 3,
    "env": {"id": "InvertedPendulum-v4", "num_envs": 8, "num_threads": 1, "max_episode_steps": 20},
    "model": {"hidden": [16]},
    "algorithm": {
        "horizon": 16,
        "global_batch_size": 32,
        "update_epoch": 2,
        "lr_schedule": "linear",
        "reward_norm": "running",
        "use_kl_in_reward": True,
        "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "horizon": 50.0},
        "entropy_bonus": 0.01,
        "entropy_target": 0.5,
    },
    "evaluation": {"episodes": 4, "num_envs": 4},
}


def tiny(run_dir: Path, **changes: object) -> Config:
    return replace(loader.load(Config, TINY), run_dir=str(run_dir), **changes)


def contents(run_dir: Path, update: int) -> tuple[dict, dict]:
    source = checkpoint.open_checkpoint(run_dir / "checkpoints" / f"step_{update:06d}")
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
    """metrics.jsonl without what a clock measured."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "speed/", "memory/"))}
        for row in found
    ]


class Stop(Exception):
    pass


@pytest.mark.parametrize("adapter", ["envpool", "gymnasium"])
@pytest.mark.parametrize(("restart_every", "save_every"), [(0, 4), (48, 3)])
def test_two_halves_equal_the_whole(
    tmp_path: Path,
    adapter: str,
    restart_every: int,
    save_every: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the whole run saved, and whether or not episodes began anew in between."""

    def config(run_dir: Path, **changes: object) -> Config:
        c = tiny(run_dir, **changes)
        return replace(
            c, env=replace(c.env, simulator=adapter, num_threads=0, restart_every=restart_every)
        )

    run.train(config(tmp_path / "whole"), quiet=True)

    # the first half dies in its seventh update, after the checkpoint of the fourth or sixth
    update = embodied.Learner.update

    def dies(
        self: embodied.Learner, trajectory: object, *, update: int, _original=update
    ) -> object:
        if update == 6:
            raise Stop
        return _original(self, trajectory, update=update)

    with monkeypatch.context() as m:
        m.setattr(embodied.Learner, "update", dies)
        with pytest.raises(Stop):
            run.train(config(tmp_path / "halves", save_every=save_every), quiet=True)
    summary = run.train(config(tmp_path / "halves", resume="auto"), quiet=True)
    assert summary["updates"] == 8
    for a, b in zip(contents(tmp_path / "whole", 8), contents(tmp_path / "halves", 8), strict=True):
        assert_same(a, b)
    assert rows(tmp_path / "whole") == rows(tmp_path / "halves")


def test_what_a_resumed_run_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A schedule that spans another length now; nothing left to train; a checkpoint that does not
    verify.
    """
    run_dir = tmp_path / "run"
    first = run.train(tiny(run_dir, updates=4), quiet=True)
    files = {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()}
    other = tiny(run_dir, updates=4, resume="auto")
    again = run.train(replace(other, algorithm=replace(other.algorithm, lr=0.1)))
    assert "nothing left to train and nothing changed" in capfd.readouterr().err
    assert again == json.loads(json.dumps(first)) and {p: p.read_bytes() for p in files} == files
    second = run.train(tiny(run_dir, updates=8, resume="auto"))
    assert second["initial_return"] == first["initial_return"] is not None
    told = capfd.readouterr().err
    assert "resume: the run had 4 updates, now 8: lr_schedule=linear covers the new number" in told
    assert "rounding" not in told
    step = run_dir / "checkpoints" / "step_000008"
    other = tiny(
        run_dir, updates=9, resume="auto", threads=2, matmul_precision="high", compile="never"
    )
    changes = "matmul_precision was highest, is high, compile was auto, is never"
    ending = ": results differ by rounding from those of an uninterrupted run"
    manifest = json.loads((step / checkpoint.MANIFEST).read_text())
    for later in (False, True):
        if later:  # as a version wrote it that recorded less, with another torch
            del manifest["arithmetic"]
            manifest["versions"]["torch"] = "1.0"
            (step / checkpoint.MANIFEST).write_text(json.dumps(manifest))
        lines: list[str] = []
        device = torch.device("cpu")
        run_directory.check_resume(other, checkpoint.open_checkpoint(step), 9, device, lines.append)
        assert (
            lines[0].startswith("resume: ")
            and lines[0].endswith(ending)
            and "device" not in lines[0]
        )
        found = lines[0].removeprefix("resume: ").removesuffix(ending).split(", ")
        torch_changes = (
            ["torch was 1.0", f"is {run_directory.versions()['torch']}"] if later else []
        )
        assert sorted(found) == sorted(
            ["threads was 1", "is 2", *changes.split(", "), *torch_changes]
        )
    weights = step / checkpoint.POLICY
    weights.write_bytes(weights.read_bytes()[:-9])
    run.train(tiny(run_dir, updates=8, resume="auto"))
    assert (
        "resume: step_000008 does not verify; it is kept as damaged_step_000008"
        in capfd.readouterr().err
    )
    assert (run_dir / "checkpoints" / "damaged_step_000008").is_dir()


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "embodied_ppo.commands.main", "train", *words]


OVERRIDES = [
    "experiment=cartpole",
    "env.num_envs=4",
    "algorithm.horizon=8",
    "algorithm.global_batch_size=16",
    "algorithm.update_epoch=1",
    "evaluation.episodes=2",
    "evaluation.video_episodes=0",
    "updates=100000",
    "save_every=5",
]


def start(run_dir: Path, *more: str) -> subprocess.Popen:
    return subprocess.Popen(
        command(*OVERRIDES, f"run_dir={run_dir}", *more),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path, process: subprocess.Popen, seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < limit, f"{path} did not appear"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_saves_and_leaves_with_130(tmp_path: Path, number: int) -> None:
    process = start(tmp_path / "run")
    wait_for(tmp_path / "run" / "checkpoints" / "latest", process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    newest = checkpoint.newest_valid(tmp_path / "run")
    assert newest is not None
    last_row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert newest.update == last_row["update"], "everything learned was saved"
    assert f"resume={tmp_path / 'run'}" in err


def test_what_nohup_ignores_stays_ignored() -> None:
    for handler in (signal.SIG_DFL, signal.SIG_IGN):
        before = signal.signal(signal.SIGHUP, handler)
        try:
            with progress.stop_signals(Timer()) as asked:
                ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
                assert ignored == (handler is signal.SIG_IGN)
                assert ignored or signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
                os.kill(os.getpid(), signal.SIGHUP)
                assert asked() != ignored
            assert signal.getsignal(signal.SIGHUP) is handler
        finally:
            signal.signal(signal.SIGHUP, before)


def test_kill_9_at_any_moment_leaves_only_checkpoints_that_load(tmp_path: Path) -> None:
    run_dir, reached = tmp_path / "run", 0
    for moment in (0.0, 0.013, 0.2):
        process = start(run_dir, "resume=auto", "save_every=1")
        wait_for(run_dir / "checkpoints" / f"step_{reached + 3:06d}", process)
        time.sleep(moment)
        process.kill()
        process.communicate()
        for step in (run_dir / "checkpoints").glob("step_*"):
            source = checkpoint.open_checkpoint(step)
            source.policy(), source.training()
        newest = checkpoint.newest_valid(run_dir)
        assert newest is not None and newest.update >= reached + 3
        done = [
            json.loads(line)["update"]
            for line in (run_dir / "metrics.jsonl").read_text().splitlines()[:-1]
        ]
        assert newest.update >= max(done) - 1, "at most the updates since the last save are lost"
        assert done == list(range(len(done))), "the row of every saved update is there, once"
        reached = newest.update


class Killed(BaseException):
    """Ends a run without any handler of errors, as kill -9 does."""


STEPS_OF_A_TRANSACTION = (
    *((checkpoint, name) for name in ("_write", "_point", "_prune", "set_score")),
    *((RunSystem, name) for name in ("save", "evaluate")),
    *((Log, name) for name in ("metrics", "_write")),
)
"""Functions that save, evaluate and log an update: a test ends the run before any of them, and
after the last.
"""


def kill_at(moment: int, update: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Raise Killed before the ``moment``-th step (from 1) of an update's transaction; return the
    steps taken.
    """
    taken: list[str] = []
    current = [0]

    def step(name: str) -> None:
        if current[0] == update and taken[-1:] != [name]:  # files of one checkpoint are one step
            taken.append(name)
            if len(taken) == moment:
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
    return taken


def state_of(run_dir: Path) -> tuple[Any, ...]:
    """Rows, scores, links and curves of a run."""
    folder = run_dir / "checkpoints"
    manifests = {
        p.parent.name: json.loads(p.read_text())
        for p in sorted(folder.glob("step_*/manifest.json"))
    }
    scores = {name: manifest["score"] for name, manifest in manifests.items()}
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    points = [(e.step, e.value) for e in events.Scalars("eval/return")]
    return (
        rows(run_dir),
        scores,
        os.readlink(folder / "best"),
        os.readlink(folder / "latest"),
        points,
    )


def test_a_kill_between_saving_and_logging_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at any point of an update, a run has every row once, each evaluation, each score and
    the same ``best``.
    """
    # Memory estimates and reports take a third each of the time of these runs.
    monkeypatch.setattr(EmbodiedMode, "can_estimate", lambda *_, **__: False)
    monkeypatch.setattr(embodied, "write_report", lambda *_, **__: {})

    def train(name: str, **changes: object) -> None:
        c = tiny(
            tmp_path / name,
            updates=3,
            save_every=1,
            eval_every=1,
            keep_last=9,
            compile="never",
            **changes,
        )
        algorithm = replace(c.algorithm, horizon=4, update_epoch=1, lr=0.01)
        evaluation = replace(c.evaluation, episodes=2, num_envs=2, video_episodes=0)
        env = replace(c.env, max_episode_steps=1000)
        run.train(
            replace(c, seed=5, algorithm=algorithm, evaluation=evaluation, env=env), quiet=True
        )

    with monkeypatch.context() as patch:
        steps = kill_at(0, 2, patch)
        train("whole")
    expected = state_of(tmp_path / "whole")
    scores, best = expected[1:3]
    assert list(scores.values()) == sorted(set(scores.values())) and best == "step_000003", (
        "each claims best"
    )
    assert [row["update"] for row in rows(tmp_path / "whole")] == [0, 1, 2, 3]
    assert {name for _, name in STEPS_OF_A_TRANSACTION} < set(steps)
    for moment in range(1, len(steps) + 1):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_at(moment, 2 + moment % 2, patch)
            train(f"killed {moment}")
        train(f"killed {moment}", resume="auto")
        assert state_of(tmp_path / f"killed {moment}") == expected, steps[moment - 1]


def test_a_damaged_newest_checkpoint_is_skipped_with_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    run.train(tiny(tmp_path / "run"), quiet=True)
    (tmp_path / "run/checkpoints/step_000008/policy.pt").write_bytes(b"short")
    run.train(tiny(tmp_path / "run", resume="auto"), quiet=False)
    assert "step_000008/policy.pt: has 5 bytes" in capfd.readouterr().err
    assert checkpoint.open_checkpoint(tmp_path / "run").update == 8


def test_changed_options_are_told_and_impossible_ones_refused(tmp_path: Path) -> None:
    run.train(tiny(tmp_path / "run"), quiet=True)
    config = tiny(tmp_path / "run", resume="auto", updates=9)
    run.train(replace(config, algorithm=replace(config.algorithm, gamma=0.5)), quiet=True)
    assert "algorithm.gamma was 0.99, is 0.5" in (tmp_path / "run/log.txt").read_text()
    with pytest.raises(ValueError, match=r"env.num_envs=16: the run to resume has 8"):
        run.train(replace(config, env=replace(config.env, num_envs=16)), quiet=True)
    with pytest.raises(
        ValueError, match=r"model.activation=relu: the run to resume has tanh, which its weights"
    ):
        run.train(replace(config, model=replace(config.model, activation="relu")), quiet=True)
    with pytest.raises(ValueError, match=r"updates=5: .* has completed 9"):
        run.train(replace(config, updates=5), quiet=True)


def test_nothing_older_is_lost_when_the_disk_refuses(tmp_path: Path) -> None:
    run.train(tiny(tmp_path / "run"), quiet=True)
    folder = tmp_path / "run" / "checkpoints"
    before = sorted(os.listdir(folder))
    (tmp_path / "file").write_text("")
    with pytest.raises(checkpoint.CheckpointError, match="cannot be written"):
        checkpoint.save(
            tmp_path / "file",
            update=9,
            policy={},
            training={},
            config_text="",
            info={},
            keep_last=1,
        )
    assert sorted(os.listdir(folder)) == before


def test_an_earlier_checkpoint_branches_off_into_a_new_run(tmp_path: Path) -> None:
    run.train(tiny(tmp_path / "run"), quiet=True)
    before = rows(tmp_path / "run")
    earlier = tmp_path / "run/checkpoints/step_000004"
    with pytest.raises(ValueError, match=r"gone on to step_000008.*run_dir=NEW"):
        run.train(replace(tiny(tmp_path), run_dir=None, resume=str(earlier)), quiet=True)
    run.train(tiny(tmp_path / "branch", resume=str(earlier)), quiet=True)
    assert rows(tmp_path / "run") == before
    for a, b in zip(contents(tmp_path / "run", 8), contents(tmp_path / "branch", 8), strict=True):
        assert_same(a, b)


def test_a_failing_last_evaluation_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = LocalSystem.evaluate

    def dies(self: LocalSystem, update: int) -> object:
        if update == 8:
            raise run.EnvError("the simulator died")
        return evaluate(self, update)

    monkeypatch.setattr(LocalSystem, "evaluate", dies)
    with pytest.raises(run.TrainingError, match="the simulator died"):
        run.train(tiny(tmp_path / "run", save_every=0), quiet=True)
    assert checkpoint.open_checkpoint(tmp_path / "run").update == 8


def test_evaluation_with_changed_options_keeps_the_others_and_has_a_report_of_its_own(
    tmp_path: Path,
) -> None:
    c = tiny(tmp_path / "run")
    run.train(replace(c, env=replace(c.env, kwargs={"frame_skip": 4})), quiet=True)
    options = {"checkpoint": str(tmp_path / "run"), "episodes": 2, "video": False}
    plain = run.evaluate(loader.load(run.EvaluateConfig, options), quiet=True)
    changed = {**options, "env": {"kwargs": {"reset_noise_scale": 0.001}, "max_episode_steps": 7}}
    other = run.evaluate(loader.load(run.EvaluateConfig, changed), quiet=True)
    assert plain["report"] != other["report"]
    stored = json.loads(Path(other["report_json"]).read_text())["config"]["env"]
    assert (
        stored["kwargs"] == {"frame_skip": 4, "reset_noise_scale": 0.001}
        and stored["max_episode_steps"] == 7
    )
    assert other["eval/length"] <= 7


def test_a_run_that_goes_on_from_another_leaves_that_one_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {
        "env.id": "CartPole-v1",
        "algorithm.horizon": 8,
        "algorithm.global_batch_size": 32,
        "env.num_envs": 8,
    }
    small |= {"evaluation.episodes": 4, "evaluation.video_episodes": 0, "compile": "never"}
    run.train(run_helpers.tiny_config({**small, "updates": 1, "run_dir": "first"}), quiet=True)
    files = {p: p.read_bytes() for p in Path("first").rglob("*") if p.is_file()}
    for updates, name in ((2, "second"), (1, "third")):  # the third has nothing left to train
        run.train(
            run_helpers.tiny_config(
                {**small, "updates": updates, "run_dir": name, "resume": "first"}
            ),
            quiet=True,
        )
        assert {p: p.read_bytes() for p in Path("first").rglob("*") if p.is_file()} == files
        assert (Path(name) / "checkpoints" / "step_000001").is_dir()
        assert (Path(name) / "summary.json").is_file()
