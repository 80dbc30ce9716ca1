"""``embodied-ppo verify``: an unchanged run passes, changed content is named."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import assert_refused, metric_rows, run_command
from torch import Tensor

import embodied_ppo as ep
from embodied_ppo.commands import main
from embodied_ppo.training import checkpoint, metrics_digest
from tests.tools.test_reexecution import TINY as SHORT

TINY = SHORT | {"updates": 10, "keep_last": 9, "eval_every": 4, "model__hidden": [8]}
# With this seed, ``updates=2`` selects updates 9 and 10 of the run.
SEED_OF_LAST = 7

EXP_AVG = ("learner", "optimizer", "state", 0, "exp_avg")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a run of 10 updates with 5 checkpoints."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    ep.train("cartpole", seed=3, run_dir=run_dir, **TINY)
    return run_dir


@pytest.fixture
def copy(trained: Path, tmp_path) -> Path:
    """Return a copy of the run, which a test changes."""
    shutil.copytree(trained, tmp_path / "moved", symlinks=True)
    return tmp_path / "moved"


def verify(run_dir: Path, **options: Any) -> dict[str, Any]:
    return ep.verify(run_dir, progress=False, **options)


def step(run_dir: Path, update: int) -> Path:
    return run_dir / "checkpoints" / f"step_{update:06d}"


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=1))


def flip_bit(run_dir: Path, update: int, file: str, path: tuple[Any, ...]) -> None:
    """Flip bit 16 of a tensor, write the file by torch.save and correct the manifest."""
    target = step(run_dir, update) / file
    state = torch.load(target, weights_only=True)
    tensor = state
    for name in path:
        tensor = tensor[name]
    assert isinstance(tensor, Tensor)
    tensor.view(torch.uint8).view(-1)[2] ^= 1
    torch.save(state, target)
    correct_manifest(run_dir, update)


def correct_manifest(run_dir: Path, update: int, **changes: Any) -> None:
    """Make sizes and checksums of a manifest those of the files."""
    folder = step(run_dir, update)

    def change(manifest: dict[str, Any]) -> None:
        for name in manifest["files"]:
            data = (folder / name).read_bytes()
            sha256 = hashlib.sha256(data).hexdigest()
            manifest["files"][name] = {"bytes": len(data), "sha256": sha256}
        manifest.update(changes)

    edit_json(folder / checkpoint.MANIFEST, change)


def edit_row(run_dir: Path, update: int, **values: float) -> None:
    """Change values in the row of an update."""
    rows = metric_rows(run_dir)
    (row,) = [row for row in rows if row["update"] == update]
    assert row.keys() >= values.keys()
    row.update(values)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def results(content: Mapping[str, Any]) -> dict[str, str]:
    return {check["check"]: check["result"] for check in content["checks"]}


# -------------------------------------------------------------------------------- an unchanged run
@pytest.mark.slow
def test_unchanged_run_is_verified(copy, tmp_path, capsys):
    content = run_command(capsys, "verify", copy, "--updates", "all", f"out={tmp_path / 'out'}")
    assert content["verdict"] == "verified" and content["first_difference"] is None
    assert {*results(content).values()} == {"equal"}
    assert content["executed_updates"] == 10
    assert [(e["start"], e["stop"]) for e in content["executions"]] == [
        (a, a + 2) for a in range(0, 10, 2)
    ]
    assert all(e["tensors"] > 20 and e["equal"] for e in content["executions"])
    assert content["evaluations"] == 1
    stored = json.loads((tmp_path / "out/certificate.json").read_text())
    assert stored == {k: v for k, v in content.items() if k != "certificate"}
    assert not (copy / "certificate.json").exists()
    policy = step(copy, 4) / "policy.pt"
    assert (
        stored["files"]["checkpoints/step_000004/policy.pt"]
        == hashlib.sha256(policy.read_bytes()).hexdigest()
    )


def test_seed_chooses_the_updates_and_any_folder_may_be_the_current_one(copy, monkeypatch, capsys):
    monkeypatch.chdir(copy.parent)
    arguments = ["verify", "moved", "--quiet", "--updates", "2", f"seed={SEED_OF_LAST}"]
    assert main.main(arguments) == 0
    output = capsys.readouterr().out
    assert "updates 9 to 10: " in output
    assert "verdict: verified (2 of 10 updates executed again" in output
    assert output.endswith("certificate: moved/certificate.json\n")
    certificate = json.loads(Path("moved/certificate.json").read_text())
    assert certificate["seed"] == SEED_OF_LAST


# ---------------------------------------------------------------------------------- changed content
@pytest.mark.parametrize(
    ("file", "path", "name"),
    [
        ("policy.pt", ("trunk.layers.0.weight",), "trunk.layers.0.weight"),
        ("training.pt", EXP_AVG, "learner.optimizer.state.0.exp_avg"),
    ],
)
def test_flipped_bit(copy, file, path, name):
    """The execution finds a bit whose checkpoint has correct digests, with tensor and index."""
    flip_bit(copy, 10, file, path)
    content = verify(copy, updates=2, seed=SEED_OF_LAST)
    assert content["verdict"] == "different" and results(content)["execution"] == "different"
    start = f"checkpoints/step_000010/{file}: {name}, index [0, 0]: stored "
    assert content["first_difference"].startswith(start)


def test_damaged_file_is_named(copy):
    """Its checkpoint is not used: the updates before and after are one interval."""
    file = step(copy, 8) / "policy.pt"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    content = verify(copy, updates=4)
    assert results(content)["checkpoints"] == "different"
    assert "step_000008/policy.pt is damaged" in content["first_difference"]
    assert content["number_of_differences"] == 1
    assert (8, 10) not in [(e["start"], e["stop"]) for e in content["executions"]]


# ---------------------------------------------------------------------------------- changed options
CHANGED = {
    "": "config.yaml: option algorithm.gamma: stored 0.97",
    "checkpoints/step_000004": "step_000004/config.yaml: its options were changed",
}


@pytest.mark.parametrize(("folder", "difference"), CHANGED.items())
def test_changed_option(folder, difference, copy):
    path = copy / folder / "config.yaml"
    path.write_text(path.read_text().replace("gamma: 0.98", "gamma: 0.97"))
    correct_manifest(copy, 4)
    content = verify(copy, updates=0)
    assert (content["verdict"], content["executed_updates"]) == ("different", 0)
    assert (found := content["first_difference"]).startswith(folder or difference)
    assert difference in found


# ---------------------------------------------------------------------------------- changed metrics
@pytest.mark.slow
def test_changed_metric_with_rewritten_digests(copy):
    """The records of checkpoints and the execution find it."""
    edit_row(copy, 9, **{"policy/entropy": 0.5})
    value, lines = "", []
    for line in (copy / "metrics.jsonl").read_bytes().splitlines():
        value = metrics_digest.chain(value, line)
        lines.append(f"{json.loads(line)['update']} {value}\n")
    (copy / metrics_digest.FILE).write_text("".join(lines))
    content = verify(copy, updates=2, seed=SEED_OF_LAST)
    assert content["first_difference"].startswith("metrics.sha256: the digest of update ")
    second = content["differences"][-1]["text"]
    assert second.startswith("metrics.jsonl: update 9: policy/entropy: stored 0.5, executed again")


@pytest.mark.parametrize("metric", ["time/update_s", "eval/return"])
def test_changed_metric_is_found_by_its_digest(copy, metric):
    edit_row(copy, 4, **{metric: 500.0})
    content = verify(copy, updates=0)
    assert content["first_difference"].startswith("metrics.jsonl: the row of update 4 does")


def test_changed_summary(copy):
    edit_json(copy / "summary.json", lambda summary: summary.update(final_return=500.0))
    content = verify(copy, updates=0)
    assert results(content)["summary"] == "different"
    assert content["first_difference"].startswith("summary.json: ")


def test_changed_report(copy):
    def change(content: dict[str, Any]) -> None:
        content["episodes"][1]["return"] += 1

    edit_json(copy / "reports/step_000010/report.json", change)
    content = verify(copy, updates=0)
    assert results(content)["reports"] == "different"
    text = content["first_difference"]
    assert text.startswith("reports/step_000010/report.json: episodes[1].return: stored ")
    assert "evaluated again" in text
    # ``evaluate`` would refuse the environment of this report.
    report = copy / "reports/step_000010/report.json"
    edit_json(report, lambda content: content["overall"].update(diverged=1))
    content = verify(copy, updates=0)
    assert "1 episode of it diverged" in content["notes"][-1] and not content["evaluations"]


# ------------------------------------------------------------------------- resumed and older runs
@pytest.mark.slow
@pytest.mark.parametrize("is_relative", [False, True])
def test_resumed_runs(is_relative, tmp_path, monkeypatch):
    """A run resumed with more updates, which change its learning rates, and with other options."""
    monkeypatch.chdir(tmp_path)
    run_dir = Path("run") if is_relative else tmp_path / "run"
    options = {**TINY, "updates": 2, "save_every": 1, "eval_every": 0}
    ep.train("cartpole", seed=3, run_dir=run_dir, **options)
    ep.train(resume=run_dir, updates=3, progress=False)
    ep.train(resume=run_dir, updates=4, algorithm__gamma=0.9, progress=False)
    manifest = json.loads((step(run_dir, 4) / "manifest.json").read_text())
    assert [s["start"] for s in manifest["sessions"]] == [0, 2, 3]
    content = verify(run_dir, updates="all")
    assert content["verdict"] == "verified", content["first_difference"]
    assert content["executed_updates"] == 4
    for update in (1, 2):
        shutil.rmtree(step(run_dir, update))
    content = verify(run_dir, updates="all")
    assert [(e["start"], e["stop"]) for e in content["executions"]] == [(3, 4)]
    assert content["verdict"] == "verified", content["first_difference"]
    assert content["notes"][0].startswith("updates 1 to 3 cannot be executed again: options")


def test_values_that_this_version_added_are_not_compared(copy):
    """The run has no such metric, and no such field of an episode."""
    rows = metric_rows(copy)
    for row in rows:
        row.pop("policy/entropy", None)
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def remove_fields(content: dict[str, Any]) -> None:
        for episode in content["episodes"]:
            del episode["length"]

    edit_json(copy / "reports/step_000010/report.json", remove_fields)
    content = verify(copy, updates=2, seed=SEED_OF_LAST)
    checks = results(content)
    assert (checks["execution"], checks["reports"]) == ("equal", "equal")


# ----------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "verify RUN"),
        (["{run}", "{run}"], "2 runs"),
        (["nowhere"], "nowhere"),
        (["{run}/checkpoints/step_000004"], "name its run"),
        (["{run}", "updates=5"], "updates=5"),
        (["{run}", "--updates", "some"], "some"),
        (["{run}", "seed=x"], "seed=x"),
        (["{run}", "sed=1"], "sed=1"),
        (["{run}", "out={run}/config.yaml"], "name a directory"),
        (["{run}", "out=/proc/x/y"], "out=/proc/x/y"),
    ],
)
def test_refusals(trained, arguments, named, capsys):
    arguments = [text.format(run=trained) for text in arguments]
    assert_refused(capsys, ["verify", "--quiet", *arguments], named)


def test_run_without_states(copy, tmp_path, capsys):
    """A branch whose own updates have no two checkpoints."""
    branch = tmp_path / "branch"
    options = {**TINY, "updates": 5, "keep_last": 1, "save_every": 0, "eval_every": 0}
    ep.train("cartpole", seed=3, resume=step(copy, 4), run_dir=branch, **options)
    shutil.rmtree(copy)
    message = "no update can be executed again from the checkpoints (update 5)"
    assert_refused(capsys, f"verify --quiet {branch}", message)


# ------------------------------------------------------------------------------------------ digests
def test_chain_of_digests(tmp_path):
    """d_i = SHA-256(d_(i-1) + row_i); rows that a resumed run repeats are dropped."""
    digests = metrics_digest.MetricsDigest(tmp_path, 0, is_logged=False)
    assert digests.record() is None
    for update, row in enumerate(("a", "b", "c")):
        digests.add(update, row)
    digests.close()
    a = hashlib.sha256(b"a").hexdigest()
    b = hashlib.sha256(a.encode() + b"b").hexdigest()
    assert metrics_digest.read(tmp_path / metrics_digest.FILE)[:2] == [(0, a), (1, b)]
    for is_logged, last in ((True, 1), (False, 0)):
        digests = metrics_digest.MetricsDigest(tmp_path, 1, is_logged=is_logged)
        record = {"first": 0, "last": last, "sha256": b if is_logged else a}
        assert digests.record() == record
        digests.close()
