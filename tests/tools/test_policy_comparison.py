"""``embodied-ppo compare`` with trained runs: methods, equal runs, refusals, the page."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import run_helpers
from run_helpers import assert_refused, run_command

import embodied_ppo as ep
from embodied_envs.base.errors import ConfigError
from embodied_ppo.commands import main
from embodied_ppo.evaluation import checkpoint_evaluation, report
from embodied_ppo.evaluation.checkpoint_evaluation import report_dir
from embodied_ppo.options import loader
from embodied_ppo.options.schema import Config, EvaluateConfig
from embodied_ppo.tools import policy_comparison
from embodied_ppo.training import checkpoint
from embodied_ppo.training.run_directory import versions

TINY = run_helpers.options("""env__num_envs=8 env_steps=512 algorithm__horizon=16
    algorithm__global_batch_size=64 evaluation__episodes=4 evaluation__video_episodes=0
    compile=never progress=false""")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Return a folder of four runs: two learning rates, two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    for lr in (1e-3, 1e-4):
        for seed in (0, 1):
            run_dir = folder / f"lr={lr}" / str(seed)
            ep.train("cartpole", seed=seed, algorithm__lr=lr, run_dir=run_dir, **TINY)
    return folder


@pytest.mark.slow
def test_folder_of_runs_is_one_arm_per_method(runs, tmp_path, capsys):
    content = run_command(capsys, "compare", runs, "episodes=12", f"out={tmp_path / 'out'}")
    labels = [method["label"] for method in content["methods"]]
    assert labels == ["algorithm.lr=0.0001", "algorithm.lr=0.001"]
    assert [[r["seed"] for r in m["runs"]] for m in content["methods"]] == [[0, 1], [0, 1]]
    assert content["options"] == [{"option": "algorithm.lr", "values": ["0.0001", "0.001"]}]
    (difference,) = content["differences"]
    low, high = difference["ci95"]
    assert low < difference["mean"] < high and difference["decided"] == (low > 0 or high < 0)
    means = [method["mean"] for method in content["methods"]]
    assert difference["mean"] == pytest.approx(means[1] - means[0])
    assert content == json.loads((tmp_path / "out/comparison.json").read_text()) | {
        "page": content["page"],
        "json": content["json"],
    }
    page = Path(content["page"]).read_text()
    assert page.count('class="band k') >= 4, "two methods with intervals in two charts"
    assert difference["verdict"] in page.replace("&#39;", "'") and "<script" not in page


@pytest.mark.slow
def test_means_are_those_of_evaluate_and_reports_are_found_again(runs, tmp_path, capsys):
    a, b = runs / "lr=0.001/0", runs / "lr=0.0001/0"
    content = ep.compare(a, b, episodes=10, seed=3, out=tmp_path / "one", progress=False)
    report = ep.evaluate(a, episodes=10, seed=3, video=False, progress=False)
    assert content["methods"][0]["mean"] == report["eval/return"]
    assert content["methods"][0]["ci95"] == pytest.approx(report["ci95"]["eval/return"])
    assert "other training seeds may differ" in content["differences"][0]["verdict"]
    # An evaluation would write the report again.
    file = Path(report["report_json"])
    changed = json.loads(file.read_text())
    for episode in changed["episodes"]:
        episode["return"] += 1000
    file.write_text(json.dumps(changed))
    again = ep.compare(a, b, episodes=10, seed=3, out=tmp_path / "two", progress=False)
    assert again["methods"][0]["mean"] == content["methods"][0]["mean"] + 1000
    # A report of other versions, or of the files of another task, is not used.
    for entry, name in ("versions", "torch"), ("task_files", "hash"):
        file.write_text(json.dumps(changed | {entry: changed[entry] | {name: "1.0"}}))
        fresh = ep.compare(a, b, episodes=10, seed=3, out=tmp_path / name, progress=False)
        assert fresh["methods"] == content["methods"]


def test_equal_checkpoints_have_difference_0(runs, tmp_path, capsys):
    shutil.copytree(runs / "lr=0.001/0", tmp_path / "copy")
    content = run_command(
        capsys, "compare", runs / "lr=0.001/0", tmp_path / "copy", "episodes=5", f"out={tmp_path}/o"
    )
    (difference,) = content["differences"]
    assert difference["mean"] == 0 and difference["ci95"] == [0, 0] and not difference["decided"]
    assert "equal in every episode" in difference["verdict"] and content["options"] == []


def test_printed_tables(runs, tmp_path, capsys):
    paths = [str(runs / "lr=0.001"), str(runs / "lr=0.0001")]
    assert main.main(["compare", "--quiet", *paths, "episodes=5", f"out={tmp_path / 'out'}"]) == 0
    out = capsys.readouterr().out
    assert "lr=0.0001 - lr=0.001" in out and "interquartile mean" in out
    assert "algorithm.lr  0.001     0.0001" in out
    assert f"page: {tmp_path / 'out'}/comparison.html" in out


@pytest.mark.slow
def test_runs_of_several_tasks(runs, tmp_path, capsys):
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder)
    for lr in (1e-3, 1e-4):
        # Another number of environments does not make the runs of a task another method.
        options = TINY | {"env__id": "Acrobot-v1", "env__num_envs": 4}
        ep.train("cartpole", algorithm__lr=lr, run_dir=folder / f"lr={lr}" / "acrobot", **options)
    references = {"CartPole-v1": [0, 500], "Acrobot-v1": [-500, -100]}
    arguments = {"episodes": 5, "progress": False}
    content = ep.compare(folder, references=references, out=tmp_path / "out", **arguments)
    assert [part["task"] for part in content["tasks"]] == ["CartPole-v1", "Acrobot-v1"]
    for i, method in enumerate(content["methods"]):
        cartpole, acrobot = (part["methods"][i]["runs"] for part in content["tasks"])
        scores = [r["mean"] / 500 for r in cartpole] + [(r["mean"] + 500) / 400 for r in acrobot]
        assert len(scores) == len(method["runs"]) == 3
        assert method["mean"] == pytest.approx(sum(scores) / 3)
        # Of 3 values the middle half are .25, 1 and .25 of them.
        low, middle, high = sorted(scores)
        assert method["interquartile_mean"] == pytest.approx((low / 4 + middle + high / 4) / 1.5)
        shares = [share for _, share, _, _ in method["profile"]]
        assert len(shares) == 51 and shares == sorted(shares, reverse=True)
    (difference,) = content["differences"]
    means = [method["interquartile_mean"] for method in content["methods"]]
    assert difference["mean"] == pytest.approx(means[1] - means[0])
    page = Path(content["page"]).read_text()
    assert "Share of runs above" in page and page.count('class="band k') == 2
    # Without references each task has the range of its runs.
    command = ["compare", "--quiet", str(folder), "episodes=5", f"out={tmp_path / 'two'}"]
    assert main.main(command) == 0
    assert "Acrobot-v1" in capsys.readouterr().out
    del references["Acrobot-v1"]
    with pytest.raises(ConfigError, match="add Acrobot-v1"):
        ep.compare(folder, references=references, out=tmp_path / "three", **arguments)


def test_task_that_all_runs_solve_alike_is_compared() -> None:
    """CartPole: 500 in both runs; Hopper: 100 and 300, which have the scores 0 and 1."""

    def method(label: str, returns: dict[str, float]) -> policy_comparison.ComparedMethod:
        source: Any = SimpleNamespace(path=Path("step_1"), update=1)
        run = partial(policy_comparison.ComparedRun, Path(), source, Path(), Config())
        reports = [{"seeds": [0, 1], "episodes": [{"return": x}] * 2} for x in returns.values()]
        runs = [run({"env.id": task}) for task in returns]
        return policy_comparison.ComparedMethod(label, runs, reports)

    methods = [method("a", {"CartPole-v1": 500.0, "Hopper-v4": 100.0})]
    methods.append(method("b", {"CartPole-v1": 500.0, "Hopper-v4": 300.0}))
    content = policy_comparison._content_of_tasks(methods, "return", EvaluateConfig(), None)
    assert [row["mean"] for row in content["methods"]] == [0.0, 0.5]
    assert content["references"] == {"CartPole-v1": [500, 501], "Hopper-v4": [100, 300]}
    # In one task that is named, runs of different tasks can be compared.
    options = EvaluateConfig(env={"id": "CartPole-v0"})
    with pytest.raises(ConfigError, match=r"remove env\.id"):
        policy_comparison._check_same_tasks(methods, options)
    methods = [method(task, {task: 1.0}) for task in ("CartPole-v1", "Hopper-v4")]
    policy_comparison._check_same_tasks(methods, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, named",
    [
        ([], "compare RUN RUN"),
        (["{runs}/lr=0.001/0"], "one method"),
        (["{runs}/lr=0.001"], "one method"),
        (["{runs}", "missing"], "missing"),
        (["{runs}", "episodes=1"], "episodes=100"),
        (["{runs}", "checkpoint=x"], "checkpoint"),
        (["{runs}", "epsodes=3"], "did you mean"),
        (["{runs}", "--metric=success"], "metric=success"),
        (["{runs}", "out={file}"], "cannot be written"),
        (["{runs}", "{other}"], "env.id is Acrobot-v1"),
        (["{runs}", "{empty}"], "no checkpoint"),
    ],
)
def test_bad_input_is_refused(runs, tmp_path, capsys, arguments, named):
    (tmp_path / "empty").mkdir()
    other = tmp_path / "other"
    if "{other}" in arguments:
        ep.train("cartpole", env__id="Acrobot-v1", run_dir=other, **TINY | {"env_steps": 128})
    arguments = [
        x.format(runs=runs, other=other, empty=tmp_path / "empty", file=__file__) for x in arguments
    ]
    assert_refused(capsys, ["compare", "--quiet", *arguments], named)


@pytest.mark.slow
def test_different_environments_are_named(runs, tmp_path):
    short = tmp_path / "short"
    ep.train("cartpole", env__max_episode_steps=30, run_dir=short, **TINY | {"env_steps": 128})
    paths = (runs / "lr=0.001/0", short)
    content = ep.compare(*paths, episodes=4, out=tmp_path / "a", progress=False)
    assert {"option": "env.max_episode_steps", "values": ["null", "30"]} in content["options"]
    same = {"env": {"max_episode_steps": 20, "id": "CartPole-v0"}, "progress": False}
    content = ep.compare(*paths, episodes=4, out=tmp_path / "b", **same)
    assert max(a["mean"] for a in content["methods"]) <= 20 and content["task"] == "CartPole-v0"


def test_refusal_leaves_no_folder(runs, tmp_path, capsys):
    out = tmp_path / "a/b"
    assert main.main(["compare", str(runs), "--metric", "success", f"out={out}", "episodes=4"]) == 2
    assert "does not report success" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_links_to_runs_are_followed(runs, tmp_path):
    folder = tmp_path / "chosen"
    folder.mkdir()
    (folder / "a").symlink_to(runs / "lr=0.001/0")
    (folder / "b").symlink_to(runs / "lr=0.0001")
    (folder / "latest").symlink_to("a")  # the same run again
    content = ep.compare(folder, episodes=4, out=tmp_path / "out", progress=False)
    assert [len(method["runs"]) for method in content["methods"]] == [1, 2]


def test_scores_of_equal_episodes_are_paired(runs):
    methods = policy_comparison._methods([str(runs / f"lr={lr}/0") for lr in (0.001, 0.0001)])
    for method, n in zip(methods, (3, 2), strict=True):
        method.reports = [{"seeds": {}, "episodes": [{"return": 1.0}] * n}]
    with pytest.raises(ConfigError, match="has 3 episodes or prompts"):
        policy_comparison._set_scores(methods, "return")
    # A prompt each has no graded response: "c" of the first run, "a" of the second one.
    graded = {"a": 1.0, "b": 2.0, "d": 4.0}, {"b": 2.0, "c": 3.0, "d": 4.0}
    for method, scores in zip(methods, graded, strict=True):
        episodes = [{"initial_state": prompt, "return": x} for prompt, x in scores.items()]
        method.reports = [{"numbers": {"grader_failures": 1.0}, "episodes": episodes}]
    policy_comparison._set_scores(methods, "return")
    assert [method.scores.tolist() for method in methods] == [[[2, 4]], [[2, 4]]]
    methods[1].reports[0]["episodes"] = methods[1].reports[0]["episodes"][:1]
    with pytest.raises(ConfigError, match="has 1 episodes or prompts"):
        policy_comparison._set_scores(methods, "return")
    # Prompts in another order are paired by their text, and other prompts are refused.
    for method, prompts in zip(methods, ("abc", "cba"), strict=True):
        episodes = [{"initial_state": p, "return": float(ord(p))} for p in prompts]
        method.reports = [{"episodes": episodes}]
    policy_comparison._set_scores(methods, "return")
    assert methods[0].scores.tolist() == methods[1].scores.tolist()
    methods[1].reports[0]["episodes"][0]["initial_state"] = "z"
    with pytest.raises(ConfigError, match="same data of evaluation"):
        policy_comparison._set_scores(methods, "return")
    # Language runs of other names are other tasks.
    for i, method in enumerate(methods):
        (x,) = method.runs
        configs = [replace(x.config, name=f"{i}{k}") for k in "ab"]
        method.runs = [replace(x, options={}, config=config) for config in configs]
        method.reports = []
    with pytest.raises(ConfigError, match="same tasks"):
        policy_comparison._check_same_tasks(methods, EvaluateConfig())


@pytest.mark.parametrize("changed", ["grader.py", "data/b.jsonl"])
def test_report_is_older_than_the_grader_or_the_data(changed, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    for name in ("grader.py", "data/b.jsonl", checkpoint.MANIFEST):
        (tmp_path / name).touch()
    options = {"data": {"train": ["x"], "eval": [f"{tmp_path}/data"]}, "updates": 1}
    options |= {"reward": {"grader": f"{tmp_path}/grader.py:f"}, "mode": "reasoning"}
    config = loader.read(Config, [("", options)]).config
    source = checkpoint.Checkpoint(tmp_path, {"update": 0, "config_hash": ""})
    compared = policy_comparison.ComparedRun(tmp_path, source, tmp_path, config, {})
    facts = {"format": report.FORMAT, "versions": versions(), "config_hash": "", "update": 0}
    changing = EvaluateConfig(allow_changed_task=True)
    for evaluated in (changing, EvaluateConfig()):
        file = report_dir(evaluated, source, tmp_path) / "report.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(facts | {"overall": {}}))
    monkeypatch.setattr(checkpoint_evaluation, "evaluate", lambda *_, **__: 1 / 0)
    assert policy_comparison._report(compared, EvaluateConfig(), (), True)["update"] == 0
    with pytest.raises(ZeroDivisionError):  # the user's files may have changed
        policy_comparison._report(compared, changing, (), True)
    os.utime(tmp_path / changed, (file.stat().st_mtime + 10,) * 2)
    with pytest.raises(ZeroDivisionError):  # it is evaluated again
        policy_comparison._report(compared, EvaluateConfig(), (), True)
