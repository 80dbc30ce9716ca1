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
from run_helpers import run_command
from torch import Tensor

import embodied_ppo as ep
from embodied_ppo.analysis import recorded_files
from embodied_ppo.commands import main
from embodied_ppo.training import checkpoint, metrics_digest

TINY = {
    "env__num_envs": 8,
    "updates": 10,
    "save_every": 2,
    "keep_last": 9,
    "eval_every": 4,
    "model__hidden": [8],
    "algorithm__horizon": 16,
    "algorithm__global_batch_size": 64,
    "algorithm__lr_schedule": "linear",
    "evaluation__episodes": 2,
    "evaluation__video_episodes": 0,
    "compile": "never",
    "progress": False,
}
SEED_OF_LAST = 7
"""With this seed, ``updates=2`` selects updates 9 and 10 of the run."""

EXP_AVG = ("learner", "optimizer", "state", 0, "exp_avg")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of 10 updates with 5 checkpoints."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    ep.train("cartpole", seed=3, run_dir=run_dir, **TINY)
    return run_dir


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
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
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    (row,) = [row for row in rows if row["update"] == update]
    assert row.keys() >= values.keys()
    row.update(values)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


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
    assert all(e["tensors"] > 20 and e["rows"] == 2 for e in content["executions"])
    # the initial policy, updates 4, 8 and 10, and the report
    assert content["evaluations"] == 5
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
@pytest.mark.parametrize("file", ["policy.pt", "training.pt"])
def test_flipped_bit_without_corrected_digest(copy, file):
    """The digest finds the file; the interval before it is executed and names tensor and index."""
    target = step(copy, 6) / file
    data = bytearray(target.read_bytes())
    state = torch.load(target, weights_only=True)
    tensor = (
        state["trunk.layers.0.weight"]
        if file == "policy.pt"
        else state["learner"]["optimizer"]["state"][0]["exp_avg"]
    )
    place = data.index(tensor.numpy().tobytes())
    data[place + 4] ^= 1  # the lowest bit of element 1
    target.write_bytes(data)
    content = verify(copy, updates=2, seed=SEED_OF_LAST)
    assert content["verdict"] == "different"
    assert content["first_difference"].startswith(
        f"checkpoints/step_000006/{file}: content differs from the SHA-256 in its manifest: tensor "
    )
    assert f"content of checkpoints/step_000006/{file} differs: tensor " in content["cause"]
    assert ", index [0, 1]: stored " in content["cause"]
    assert "executed again" in content["cause"]


@pytest.mark.parametrize(
    ("file", "path", "name"),
    [
        ("policy.pt", ("trunk.layers.0.weight",), "trunk.layers.0.weight, index [0, 0]"),
        ("training.pt", EXP_AVG, "learner.optimizer.state.0.exp_avg, index [0, 0]"),
    ],
)
def test_flipped_bit_with_corrected_digest(copy, file, path, name):
    """Updates 9 and 10 are chosen and differ.

    The execution of 7 and 8 shows that the state of update 8 was changed.
    """
    flip_bit(copy, 8, file, path)
    content = verify(copy, updates=2, seed=SEED_OF_LAST)
    assert results(content)["checkpoints"] == "equal" != results(content)["execution"]
    assert [(e["start"], e["stop"]) for e in content["executions"]] == [(6, 8), (8, 10)]
    cause = f"content of checkpoints/step_000008/{file} differs: tensor {name}: stored "
    assert content["cause"].startswith(cause)


# ---------------------------------------------------------------------------------- changed options
def test_changed_option_of_the_run(copy):
    path = copy / "config.yaml"
    path.write_text(path.read_text().replace("gamma: 0.98", "gamma: 0.97"))
    content = verify(copy, updates=0)
    assert content["verdict"] == "different" and content["executed_updates"] == 0
    assert content["first_difference"] == (
        "config.yaml: option algorithm.gamma: stored 0.97, checkpoints/step_000010/config.yaml has"
        " 0.98"
    )
    assert content["cause"].startswith("option algorithm.gamma: stored 0.97")


@pytest.mark.parametrize("corrected", [False, True])
def test_changed_option_of_a_checkpoint(copy, corrected):
    """The digest of the file finds it, or with a corrected one that of the options."""
    path = step(copy, 4) / "config.yaml"
    path.write_text(path.read_text().replace("gamma: 0.98", "gamma: 0.97"))
    if corrected:
        correct_manifest(copy, 4)
    content = verify(copy, updates=2, seed=SEED_OF_LAST)
    (config_hash,) = {*content["config_hashes"].values()}
    expected = (
        f"checkpoints/step_000004/config.yaml: option algorithm.gamma (with it config_hash is"
        f" {config_hash}): stored 0.97, checkpoints/step_000002/config.yaml has 0.98"
    )
    assert expected in [d["text"] for d in content["differences"]]
    if corrected:
        assert content["first_difference"] == expected
        assert content["cause"].startswith("option algorithm.gamma ")


@pytest.mark.slow
def test_changed_option_with_all_digests_is_found_by_execution(copy):
    for update in (2, 4, 6, 8, 10):
        path = step(copy, update) / "config.yaml"
        path.write_text(path.read_text().replace("gamma: 0.98", "gamma: 0.97"))
        manifest = json.loads((path.parent / "manifest.json").read_text())
        changed = recorded_files.options_hash(recorded_files.read_options(path)[0])
        manifest["sessions"][0]["config_hash"] = changed
        correct_manifest(copy, update, config_hash=changed, sessions=manifest["sessions"])
    content = verify(copy, updates=2, seed=SEED_OF_LAST)
    assert results(content)["execution"] == "different"
    assert [(e["start"], e["stop"]) for e in content["executions"]] == [(6, 8), (8, 10)]
    assert "config.yaml: option algorithm.gamma: stored 0.98" in content["first_difference"]


# ---------------------------------------------------------------------------------- changed metrics
@pytest.mark.slow
def test_changed_metric_outside_of_the_chosen_updates(copy):
    """The digest names the row; the execution of its interval names the metric."""
    edit_row(copy, 3, **{"policy/entropy": 0.5})
    content = verify(copy, updates=2, seed=SEED_OF_LAST)
    assert [(e["start"], e["stop"]) for e in content["executions"]] == [(2, 3), (8, 10)]
    line = "metrics.jsonl: line 4 (update 3) does not have its digest"
    assert content["first_difference"] == line
    place = (
        "content of metrics.jsonl differs: update 3, policy/entropy: stored 0.5, executed again "
    )
    assert content["cause"].startswith(place)
    content = verify(copy, updates=0)
    assert content["first_difference"] == line, "without execution"


@pytest.mark.slow
def test_changed_metric_with_its_digest(copy):
    """The digests of checkpoints name the interval, and its execution names the metric."""
    edit_row(copy, 3, **{"policy/entropy": 0.5})
    rewrite_digests(copy)
    content = verify(copy, updates=2, seed=SEED_OF_LAST)
    first = (
        "metrics.jsonl: a row of updates 2 to 3 does not have the digest that checkpoint 4 recorded"
    )
    assert content["first_difference"] == first
    place = (
        "content of metrics.jsonl differs: update 3, policy/entropy: stored 0.5, executed again "
    )
    assert content["cause"].startswith(place)


def rewrite_digests(run_dir: Path) -> None:
    """Compute metrics.sha256 again from metrics.jsonl."""
    value, lines = "", []
    for line in (run_dir / "metrics.jsonl").read_bytes().splitlines():
        value = metrics_digest.chain(value, line)
        lines.append(f"{json.loads(line)['update']} {value}\n")
    (run_dir / metrics_digest.FILE).write_text("".join(lines))


def test_changed_time_is_found_by_its_digest(copy):
    edit_row(copy, 5, **{"time/update_s": 1.0})
    content = verify(copy, updates=0)
    first = "metrics.jsonl: line 6 (update 5) does not have its digest"
    assert content["first_difference"] == first


def test_changed_evaluation_during_training(copy):
    edit_row(copy, 4, **{"eval/return": 500.0})
    content = verify(copy, updates=0)
    texts = [d["text"] for d in content["differences"]]
    manifest = "checkpoints/step_000004/manifest.json has"
    assert any(text.startswith("metrics.jsonl: update 4, eval/return: stored 500.0, " + manifest)
               for text in texts)  # fmt: skip


def test_changed_evaluation_of_the_initial_policy(copy):
    edit_row(copy, 0, **{"eval/return": 500.0})
    rewrite_digests(copy)
    content = verify(copy, updates=2, seed=SEED_OF_LAST)
    assert "metrics.jsonl: update 0, eval/return: stored 500.0, evaluated again" in [
        d["text"].rpartition(" ")[0] for d in content["differences"]
    ]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("final_return", 500.0, "final_return: stored 500.0, the last row of metrics.jsonl has"),
        ("wall_s", 0.1, "does not have its digest; one of these was changed: startup_s, wall_s"),
    ],
)
def test_changed_summary(copy, name, value, text):
    edit_json(copy / "summary.json", lambda summary: summary.update({name: value}))
    content = verify(copy, updates=0)
    assert results(content)["summary"] == "different"
    assert content["first_difference"].startswith(f"summary.json: {text}")


def test_changed_report(copy):
    def change(content: dict[str, Any]) -> None:
        content["episodes"][1]["return"] += 1

    edit_json(copy / "reports/step_000010/report.json", change)
    content = verify(copy, updates=0)
    assert results(content)["reports"] == "different"
    text = content["first_difference"]
    assert text.startswith("reports/step_000010/report.json: episodes[1].return: stored ")
    assert "evaluated again" in text


def test_reports_of_the_command_evaluate_are_repeated(copy, capsys):
    """With their own options, which report.json has recorded."""
    options = ["episodes=4", "seed=7", "video=false", "env.max_episode_steps=30"]
    run_command(capsys, "evaluate", "--quiet", f"checkpoint={copy}", *options)
    content = verify(copy, updates=0)
    assert content["verdict"] == "verified" and content["evaluations"] == 2


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


@pytest.mark.slow
def test_edited_row_keeps_its_digest_when_the_run_is_resumed(tmp_path):
    run_dir = tmp_path / "run"
    ep.train("cartpole", seed=3, run_dir=run_dir, **{**TINY, "updates": 4})
    edit_row(run_dir, 3, **{"policy/entropy": 0.5})
    ep.train(resume=run_dir, updates=6, progress=False)
    first = "metrics.jsonl: line 4 (update 3) does not have its digest"
    assert verify(run_dir, updates=0)["first_difference"] == first
    (run_dir / metrics_digest.FILE).unlink()
    first = (
        "metrics.jsonl: a row of updates 2 to 3 does not have the digest that checkpoint 4 recorded"
    )
    assert verify(run_dir, updates=0)["first_difference"] == first


def test_run_of_an_earlier_version(copy):
    """What it did not record is not checked, and reported as such."""
    (copy / metrics_digest.FILE).unlink()
    for update in (2, 4, 6, 8, 10):
        edit_json(
            step(copy, update) / "manifest.json",
            lambda manifest: [manifest.pop(key) for key in ("sessions", "metrics_digest")],
        )
    for name, keys in (
        ("summary.json", ("digest", "metrics_digest")),
        ("reports/step_000010/report.json", ("evaluation",)),
    ):
        edit_json(copy / name, lambda content, keys=keys: [content.pop(key) for key in keys])
    content = verify(copy, updates=2, seed=SEED_OF_LAST)
    assert content["verdict"] == "verified" and content["evaluations"] == 2
    assert content["notes"] == [
        "11 of 11 rows of metrics.jsonl have no digest, because an earlier version wrote them; only"
        " re-executed ones are verified",
        "summary.json has no digest, because an earlier version wrote it",
    ]


def test_deleted_checkpoints(copy, capsys):
    """The shortest interval is executed, and a line says how to have shorter ones."""
    for update in (2, 4, 6, 8):
        shutil.rmtree(step(copy, update))
    assert main.main(["verify", str(copy), "--updates", "1"]) == 0
    captured = capsys.readouterr()
    assert "updates 1 to 10 are the shortest interval between two checkpoints" in captured.err
    assert "updates 1 to 10: " in captured.out


# ----------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no run; write embodied-ppo verify RUN"),
        (["{run}", "{run}"], "2 runs; write embodied-ppo verify RUN"),
        (["nowhere"], "nowhere: does not exist"),
        (["{run}/checkpoints/step_000004"], "is a checkpoint; name its run"),
        (["{run}", "updates=5"], "updates=5: write --updates 5"),
        (["{run}", "--updates", "some"], "some is not an integer >= 0, nor all"),
        (["{run}", "seed=x"], "seed=x: is not an integer >= 0"),
        (["{run}", "sed=1"], "sed: no such option; did you mean seed?"),
        (["{run}", "out={run}/config.yaml"], "is a file; name a directory"),
        (["{run}", "out=/proc/x/y"], "out=/proc/x/y: cannot be written"),
    ],
)
def test_refusals(trained, arguments, message, capsys):
    arguments = [text.format(run=trained) for text in arguments]
    assert main.main(["verify", "--quiet", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_run_without_states(copy, tmp_path, capsys):
    """A branch whose own updates have no two checkpoints."""
    branch = tmp_path / "branch"
    options = {**TINY, "updates": 5, "keep_last": 1, "save_every": 0, "eval_every": 0}
    ep.train("cartpole", seed=3, resume=step(copy, 4), run_dir=branch, **options)
    shutil.rmtree(copy)
    assert main.main(["verify", "--quiet", str(branch)]) == 2
    assert (
        "no update can be executed again from the checkpoints (update 5)" in capsys.readouterr().err
    )


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
