"""mode=reasoning on the command line: train, resume, evaluate, export, graders, refusals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
import yaml
from run_helpers import assert_refused, run_command
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from embodied_envs.base.errors import ConfigError
from embodied_ppo.cluster import run_plan
from embodied_ppo.cluster.memory_estimate import AllocationCounter, freed_gradients
from embodied_ppo.commands import main
from embodied_ppo.data import synthetic_tasks
from embodied_ppo.data.prompts import demonstrations
from embodied_ppo.imitation.supervised_finetuning import loss as finetuning_loss
from embodied_ppo.options import loader
from embodied_ppo.options.schema import Config
from embodied_ppo.policies import language_models
from embodied_ppo.rollout import language_inputs
from embodied_ppo.rollout.rewards import build as rewards_build
from embodied_ppo.training import checkpoint, progress
from tests.integration.test_resume import assert_same, contents, rows, wait_for
from tests.training.test_logging import LANGUAGE_ONLY

Capture = pytest.CaptureFixture[str]

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "intermediate_size": 32}
SMALL = run_helpers.words("""warm_start.steps=2 algorithm.rollout_batch_size=8
    algorithm.global_batch_size=4 evaluation.episodes=8 updates=2 eval_every=0 device=cpu""")
SMALL += [f"actor.model.architecture.{name}={size}" for name, size in SIZES.items()]
TINY = ["experiment=arithmetic", *SMALL]


@pytest.fixture(scope="module", autouse=True)
def few_problems() -> Iterator[None]:
    """Use few problems: integration/test_experiments.py reads all ten thousand of a task."""
    few = {k: replace(t, train=20, held_out=16) for k, t in synthetic_tasks.TASKS.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic_tasks, "TASKS", few)
        yield


pytestmark = pytest.mark.usefixtures("empty_folder")


def train(capsys: Capture, *options: object) -> dict[str, Any]:
    return run_command(capsys, "train", *TINY, "run_dir=run", *options)


def refusal(capsys: Capture, command: str, *options: object) -> str:
    """Run a command that is refused; return its one line, and check that no file was written."""
    before = sorted(Path.cwd().rglob("*"))
    line = assert_refused(capsys, [command, *options])
    assert sorted(Path.cwd().rglob("*")) == before
    return line


def log(run_dir: str = "run") -> str:
    return Path(run_dir, "log.txt").read_text()


def write_lines(name: str, items: list[dict[str, Any]]) -> Path:
    path = Path(name).resolve()
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


# -------------------------------------------------------------------------------------------- train
def test_run_writes_all_files(capsys) -> None:
    summary = train(capsys)
    assert summary == json.loads(Path("run/summary.json").read_text())
    assert summary["updates"] == 2 and "env_steps" not in summary
    assert 2 * 8 <= summary["tokens"] <= 2 * 8 * 4
    for name in ("tokens_per_s", "cpu_us_per_token"):
        assert summary[name] > 0
    phases = {"generate", "grade", "advantages", "update", "other"}
    assert set(summary["cpu_us_per_token_by_phase"]) == phases
    assert 0 <= summary["initial_success"] <= 1 and 0 <= summary["final_success"] <= 1
    stored = yaml.safe_load(Path("run/config.yaml").read_text())
    assert stored["actor"]["model"]["architecture"]["hidden_size"] == 16 and "env" not in stored
    metrics = rows(Path("run"))
    assert [row["update"] for row in metrics] == [0, 1, 2]
    assert all("tokens" in row and "env_steps" not in row for row in metrics)
    assert metrics[-1]["tokens"] == summary["tokens"]
    tags = {"rollout/return", "rollout/success", "policy/approx_kl", "value/loss"}
    assert tags <= metrics[1].keys()
    assert "eval/accuracy" in metrics[0] and "eval/accuracy" in metrics[2]
    events = EventAccumulator(summary["tensorboard"]).Reload()
    assert "eval/accuracy" in events.Tags()["scalars"]
    (tag,) = (tag for tag in events.Tags()["tensors"] if tag.startswith("samples"))
    table = events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
    assert "ground&#95;truth" in table and re.search(r"\d\d\+\d\d=", table)
    latest = Path("run/checkpoints/latest").resolve().name
    assert Path(summary["checkpoint"]).name == latest == "step_000002"
    report = Path(summary["report"])
    assert report.name == "report.html" and "tokens" in report.read_text()
    report = json.loads(Path(summary["report_json"]).read_text())
    assert list(report["tasks"]) == ["arithmetic"]


@pytest.mark.parametrize(("actor", "critic"), [("adaptive", "constant"), ("cosine", "cosine")])
def test_learning_rate_of_critic_is_not_adapted(actor: Any, critic: str) -> None:
    config = Config()
    algorithm = replace(config.algorithm, lr_schedule=actor)
    assert language_models.critic_config(algorithm, config.critic).lr_schedule == critic


STATEFUL_OPTIONS = run_helpers.words("""algorithm.adv_type=rloo algorithm.group_size=2
    algorithm.reward_norm=running algorithm.use_kl_in_reward=true
    algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.1 algorithm.kl_ctrl.horizon=50
    algorithm.entropy_bonus=0.01 algorithm.entropy_target=0.5 algorithm.lr_schedule=adaptive
    algorithm.lr=1e-3 data.shuffle=success""")


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], STATEFUL_OPTIONS], ids=["plain", "stateful"])
def test_resumed_run_equals_an_uninterrupted_one(options: list[str], capsys) -> None:
    """Train four updates on 8 of 20 prompts: the first epoch ends after resuming."""
    # A reward that differs between responses, so that the weights change.
    Path("even.py").write_text(
        "def compute_score(solution_str, **_):\n    even = sum(c in '02468' for c in solution_str)"
        "\n    return {'score': even, 'acc': even > 1}"
    )
    grader = f"reward.grader={Path('even.py').resolve()}:compute_score"
    options = [*options, "eval_every=2", "save_every=2", grader, "reward.workers=0"]
    train(capsys, *options, "updates=4", "run_dir=full")
    train(capsys, *options, "updates=2", "run_dir=halves")
    run_command(capsys, "train", "resume=halves", "updates=4")
    for a, b in zip(contents(Path("full"), 4), contents(Path("halves"), 4), strict=True):
        assert_same(a, b)
    metrics = rows(Path("full"))
    assert metrics == rows(Path("halves"))
    epochs = [row["rollout/epoch"] for row in metrics[1:]]
    assert epochs[:2] == [0.4, 0.8] and (epochs == [0.4, 0.8, 1.2, 1.6]) == (len(options) == 4)
    weights = [contents(Path("full"), update)[0] for update in (2, 4)]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    if options[0] in STATEFUL_OPTIONS:
        for tag in ("kl/coef", "policy/entropy_coef", "policy/lr"):
            assert metrics[-2][tag] != metrics[-1][tag], tag


@pytest.mark.slow
def test_interrupt_saves_a_checkpoint_that_resumes(capsys) -> None:
    flags = [*TINY, "run_dir=run", "updates=100000", "save_every=5", "reward.workers=0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "embodied_ppo.commands.main", "train", *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(Path("run/checkpoints/latest"), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (
        process.returncode == 130 and "continue with resume=run" in err and "Traceback" not in err
    ), err
    newest = checkpoint.newest_valid(Path("run"))
    assert newest is not None and newest.update == rows(Path("run"))[-1]["update"], (
        "the last update was saved"
    )
    with pytest.MonkeyPatch.context() as patch:  # the subprocess has all problems
        patch.setattr(synthetic_tasks, "TASKS", {t.name: t for t in synthetic_tasks._TASKS})
        updates = newest.update + 1
        result = run_command(capsys, "train", "resume=run", f"updates={updates}")
        assert result["updates"] == updates


# -------------------------------------------------------------------------------- files and weights
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def questions(part: str, count: int) -> list[dict[str, str]]:
    """Return rows in the layout of GSM8K; some questions are long."""
    rows = []
    for i in range(count):
        crates, days = i + {"train": 10, "test": 1000}[part], i % 7 + 2
        question = f"Ida packs {crates} crates a day.{' She likes it.' * (i % 40)} How many in"
        steps = f"{crates}*{days}=<<{crates}*{days}={crates * days}>>{crates * days:,}"
        answer = f"{steps}\n#### {crates * days:,}"
        rows.append({"question": f"{question} {days} days?", "answer": answer})
    return rows


def save_model(folder: Path, texts: list[str], seed: int = 0, **sizes: Any) -> Path:
    """Write a model like Qwen2.5: random weights, a byte-level tokenizer of ``texts``, ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=special[0], eos_token=special[2]
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    fields = {**SIZES, "max_position_embeddings": 512, "vocab_size": 416, "eos_token_id": 2}
    fields |= sizes
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen2ForCausalLM(Qwen2Config(**fields)).save_pretrained(folder)
    return folder.resolve()


def gsm8k() -> tuple[list[str], Path]:
    """Return options that train a tiny model on GSM8K, and the model's directory."""
    train_rows, test_rows = questions("train", 60), questions("test", 12)
    model = save_model(
        Path("model"), [row[key] for row in train_rows for key in ("question", "answer")]
    )
    options = run_helpers.words("""experiment=gsm8k_qwen2_5_0_5b actor.model.dtype=float32
        algorithm.rollout_batch_size=8 algorithm.global_batch_size=4 algorithm.prompt_length=200
        algorithm.response_length=12 algorithm.micro_batch_tokens=1000 evaluation.episodes=6
        updates=1 device=cpu run_dir=run""")
    train, test = write_lines("train.jsonl", train_rows), write_lines("test.jsonl", test_rows)
    options += [f"actor.model.path={model}", f"data.train=[{train}]", f"data.eval=[{test}]"]
    return options, model


@pytest.mark.slow
def test_gsm8k_trains_evaluates_and_exports(capsys) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options, model = gsm8k()
    summary = run_command(capsys, "train", *options)
    assert summary["updates"] == 1 and summary["final_success"] is not None
    counts = re.search(
        r"data: (\d+) prompts of data.train=\S+; (\d+) longer than algorithm.prompt_length=200 were"
        r" left",
        log(),
    )
    assert counts and int(counts[1]) + int(counts[2]) == 60 and int(counts[1]) > 0 < int(counts[2])
    row = rows(Path("run"))[-1]
    assert row["rollout/grader_failures"] == 0
    assert row["kl/to_reference"] == pytest.approx(0, abs=1e-4)
    assert [*json.loads(Path(summary["report_json"]).read_text())["tasks"]] == ["openai/gsm8k"]

    result = run_command(capsys, "evaluate", "checkpoint=run", "episodes=6", "out=report")
    assert result["eval/accuracy"] == summary["final_success"] and result["eval/length"] <= 12

    result = run_command(capsys, "export", "checkpoint=run", "out=exported")
    assert result["logit_difference"] == 0
    Path("new").touch()
    assert {file.stat().st_mode for file in Path("exported").iterdir()} == {
        Path("new").stat().st_mode
    }, "permissions follow the umask"
    exported = AutoModelForCausalLM.from_pretrained("exported", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = loader.load(Config, yaml.safe_load(Path("run/config.yaml").read_text()))
    policy = language_models.make_policy(
        config, language_inputs.make_tokenizer(config), torch.device("cpu")
    )
    policy.load_state_dict(contents(Path("run"), 1)[0])
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, policy.model(ids).logits)
        assert not torch.equal(exported(ids).logits, before(ids).logits), "training changes it"
    written, original = (AutoTokenizer.from_pretrained(folder) for folder in ("exported", model))
    assert written.chat_template == CHAT
    assert written("Ida packs 12")["input_ids"] == original("Ida packs 12")["input_ids"]
    assert "out=" in refusal(capsys, "export", "checkpoint=run", "out=exported")


@pytest.mark.slow
def test_every_tag_is_documented(capsys) -> None:
    """docs/metrics.md has a row for each tag of this mode.

    training/test_logging.py checks the opposite direction for robots.
    """
    options = ["algorithm.use_kl_in_reward=true", "algorithm.use_kl_loss=true"]
    options += ["algorithm.entropy_target=0.5", "algorithm.positive_nll_weight=0.1"]
    options += ["algorithm.off_policy_correction=token", "evaluation.n=4"]
    train(capsys, *options, "evaluation.deterministic=false", "algorithm.entropy_bonus=0.01")
    board = EventAccumulator("run/tensorboard").Reload()
    written = set(board.Tags()["scalars"]) | {"samples"}
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    documented = re.findall(r"^\| `([^`]+)`", text, re.M)
    patterns = [re.sub("<[kn]>", r"\\d+", re.escape(tag)) for tag in documented]
    patterns = [pattern.replace("<name>", ".+") for pattern in patterns]
    assert not {tag for tag in written if not any(re.fullmatch(p, tag) for p in patterns)}
    assert not {tag for tag in LANGUAGE_ONLY if "<" not in tag} - written


@pytest.mark.slow
def test_missing_files_and_directories_are_refused(capsys) -> None:
    options, _ = gsm8k()
    for change, named in (
        ("data.train=[trian.jsonl]", r"data\.train.*trian\.jsonl.*train\.jsonl"),
        ("actor.tokenizer=nowhere", r"actor\.tokenizer.*nowhere"),
        (f"critic.model.path={Path.cwd()}", r"critic\.model\.path.*config\.json"),
        ("algorithm.response_length=500", "response_length.*500.*512"),
    ):
        assert re.search(named, refusal(capsys, "train", *options, change)), change


# ----------------------------------------------------------------------------------------- evaluate
@pytest.mark.slow
def test_evaluate_options(capsys, monkeypatch) -> None:
    train(capsys)

    def measure(*options: object) -> dict[str, Any]:
        result = run_command(capsys, "evaluate", "checkpoint=run", "episodes=8", *options)
        return {tag: x for tag, x in result.items() if tag.startswith("eval/")}

    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    options = ["checkpoint=run", "episodes=8", "n=2", "deterministic=false"]
    assert main.main(["evaluate", *options]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "left" in line]
    assert lines[0].startswith("responses 0/16  ") and lines[-1] == "responses 16/16  0 s left"
    first = measure("out=first")
    assert first == measure("out=second") == measure("seed=7") and "eval/pass@2" not in first
    assert json.loads(Path("first/report.json").read_text())["deterministic"]
    many = measure("n=4", "deterministic=false")
    assert {"eval/pass@2", "eval/pass@4", "eval/maj@4"} <= many.keys()
    assert many != measure("n=4", "deterministic=false", "seed=1")
    assert measure("response_length=2")["eval/length"] <= 2
    problems = [
        {"prompt": f"{i}+{i}=", "answer": f"{2 * i:03d}"[::-1], "data_source": "arithmetic"}
        for i in (10, 11)
    ]
    other = write_lines("other.jsonl", problems)
    measure(f"data=[{other}]", "out=other")
    assert json.loads(Path("other/report.json").read_text())["tasks"]["arithmetic"]["episodes"] == 2
    assert "num_envs = 3" in refusal(capsys, "evaluate", "checkpoint=run", "num_envs=3")
    assert "nowhere" in refusal(capsys, "evaluate", "checkpoint=run", "data=[nowhere.jsonl]")
    assert "deterministic=false" in refusal(capsys, "evaluate", "checkpoint=run", "n=4")


PARITY_GRADER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    parity = sum(map(ord, solution_str)) % 2
    return {"score": float(parity), "pred": str(parity)}
"""


@pytest.mark.slow
def test_directory_of_a_model_is_measured_and_compared(capsys) -> None:
    """Greedy accuracy is that of transformers' generate; two models are compared in pairs."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    Path("grader.py").write_text(PARITY_GRADER)
    content = [{"role": "user", "content": row["question"]} for row in questions("test", 12)]
    verl = {"data_source": "own", "reward_model": {"style": "rule", "ground_truth": "1"}}
    rows_of_data = [{**verl, "prompt": [message]} for message in content]
    texts = [message["content"] for message in content]
    models = [save_model(Path(x), texts, i, initializer_range=1.0) for i, x in enumerate("ab")]
    data = [f"data=[{write_lines('data.jsonl', rows_of_data)}]", "response_length=10"]
    options = [*data, "grader=grader.py"]
    expected = []
    for folder in models:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        coder = PreTrainedTokenizerFast.from_pretrained(folder)
        right = 0
        for message in content:
            chat = coder.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
            ids = coder(chat, add_special_tokens=False, return_tensors="pt")["input_ids"]
            new = model.generate(ids, do_sample=False, max_new_tokens=10)[0, ids.shape[1] :]
            ids = [i for i in new.tolist() if i != coder.eos_token_id]
            text = coder.decode(ids, clean_up_tokenization_spaces=False)
            right += sum(map(ord, text)) % 2
        expected.append(right / len(content))
    a = run_command(capsys, "evaluate", f"model={models[0]}", *options)
    assert a["eval/accuracy"] == pytest.approx(expected[0]) and 0 < expected[0] < 1
    low, high = a["ci95"]["eval/accuracy"]
    assert low < expected[0] < high
    assert Path(a["report"]).parts[0] == "evaluations"
    sampled = ["n=4", "deterministic=false", "temperature=2"]
    many = run_command(capsys, "evaluate", f"model={models[0]}", *options, *sampled)
    assert many["eval/accuracy"] < many["eval/pass@2"] <= many["eval/pass@4"] and many["eval/maj@4"]
    compared = run_command(capsys, "compare", *models, *options)
    assert [m["mean"] for m in compared["methods"]] == pytest.approx(expected)
    assert compared["differences"][0]["mean"] == pytest.approx(expected[1] - expected[0])
    before = sorted(Path("a").iterdir())
    for change, named in (
        ([f"model={models[0]}"], "data="),
        (["model=grader.py", *data], "config.json"),
        ([f"model={models[0]}", "checkpoint=x", *data], "checkpoint"),
        ([f"model={models[0]}", *data, "grader=gsm9k"], "gsm8k"),
        ([f"model={models[0]}", *data], "'own' has no grader"),
        ([f"model={models[0]}", *options, "response_length=9999"], "lower response_length = 9999"),
    ):
        assert named in refusal(capsys, "evaluate", *change), change
    assert sorted(Path("a").iterdir()) == before, "nothing is written beside the model"
    Path("a", "model.safetensors").write_bytes(b"")
    assert "none.jsonl" in refusal(capsys, "evaluate", "model=a", *options, "data=[none.jsonl]")


@pytest.mark.slow
def test_clone_learns_the_responses_of_a_file(capsys) -> None:
    """The mask is checked against transformers' labels; PPO continues from the clone."""
    from transformers import AutoModelForCausalLM

    texts = [row["question"] for row in questions("train", 12)]
    model = save_model(Path("model"), texts)
    chats = [
        {"messages": [{"role": "user", "content": x}, {"role": "assistant", "content": "It is 4."}]}
        for x in texts
    ]
    data = write_lines("chats.jsonl", chats)
    options: list[object] = ["mode=reasoning", f"actor.model.path={model}", "reward.grader=exact"]
    options += [f"data.train={{{data}: 2}}", f"data.eval=[{data}]", "algorithm.response_length=16"]
    options += ["evaluation.episodes=12", "device=cpu", "algorithm.micro_batch_tokens=1000"]
    steps = ["cloning.steps=40", "cloning.batch_size=4", "cloning.lr=1e-2"]
    dump = "rollout.dump=all"
    summary = run_command(capsys, "clone", *options, *steps, dump, "run_dir=cloned")
    assert len(Path("cloned/generations/eval_000000.jsonl").read_text().splitlines()) == 12
    assert summary["final_success"] == 1, log("cloned")
    assert "cloning: 40 steps on 12 responses" in log("cloned") and "6.7 passes" in log("cloned")
    # Cloning needs no critic; PPO creates one.
    assert contents(Path("cloned"), 0)[1]["learner"]["critic_weights"] is None
    sizes = ["algorithm.rollout_batch_size=4", "algorithm.global_batch_size=4", "updates=1"]
    start = ["initial_policy=cloned", "run_dir=ppo"]
    assert run_command(capsys, "train", *options, *sizes, *start)["initial_success"] == 1
    assert contents(Path("ppo"), 1)[1]["learner"]["critic_weights"] is not None
    assert "initial_policy" in refusal(capsys, "train", "resume=cloned", "updates=1")

    # Only the response and its end are learned.
    config = loader.load(Config, yaml.safe_load(Path("cloned/config.yaml").read_text()))
    tokenizer = language_inputs.make_tokenizer(config)
    policy = language_models.make_policy(config, tokenizer, torch.device("cpu"))
    prompts = language_inputs.read_files(config, config.data.train, tokenizer, print, "data")
    (example, *_), weights = demonstrations(prompts, tokenizer, [2], response_length=16)
    assert tokenizer.decode(example[1]) == "It is 4.<|im_end|>" and weights == [2] * 12
    assert tokenizer.decode(example[0]).endswith("<|im_start|>assistant\n")
    ids = torch.tensor([[*example[0], *example[1]]])
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < len(example[0]), -100)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = reference(ids, labels=labels).loss.item()
    assert finetuning_loss(policy, [example]).item() == pytest.approx(expected, rel=1e-5)

    # The memory of a batch is predicted, and limited by micro-batches.
    algorithm = replace(config.algorithm, micro_batch_tokens=None, global_batch_size=4)
    large = replace(config, algorithm=algorithm, cloning=replace(config.cloning, batch_size=64))
    estimator = run_plan.memory_estimator(large)
    plan = run_plan.plan_on_one_device(large, torch.device("cpu"))
    (needs,), (limited,) = (estimator.estimate_memory(plan, x).values() for x in (None, 2))
    longest = max(p.ids for p in prompts if len(p.ids) + 16 == estimator.longest)
    tensors = [*policy.parameters(), *policy.buffers()]
    with freed_gradients(policy), AllocationCounter(tensors) as counter:
        # The first tokens differ: rows without a common prefix.
        finetuning_loss(policy, [((i, *longest[1:]), longest[:16]) for i in range(64)]).backward()
    assert needs["activations"] == pytest.approx(counter.peak, rel=0.1)
    assert limited["activations"] < counter.peak / 10

    verl = {"prompt": "1+1=", "reward_model": {"ground_truth": "2"}, "data_source": "own"}
    answers = write_lines("verl.jsonl", [verl])
    for change, named in (
        (["cloning.steps=0"], "cloning.steps"),
        (["cloning.steps=5"], "cloning.lr=1e-5"),
        ([*steps, f"data.train={{{answers}: 1}}"], "answer_key"),
        ([*steps, "algorithm.response_length=2"], "response_length"),
        ([*steps, "cloning.episodes=3"], "cloning.episodes"),
    ):
        assert named in refusal(capsys, "clone", *options, *change, "run_dir=refused"), change


def test_prompt_options_are_refused_for_robot_policies(capsys) -> None:
    sizes = ["env.num_envs=2", "algorithm.horizon=4", "algorithm.global_batch_size=8"]
    sizes += ["evaluation.episodes=1"]
    sizes += ["updates=1", "run_dir=robot", "evaluation.video_episodes=0"]
    run_command(capsys, "train", "experiment=cartpole", *sizes)
    for option in ("data=[x.jsonl]", "n=2", "temperature=0.5"):
        line = refusal(capsys, "evaluate", "checkpoint=robot", "deterministic=false", option)
        assert f"{option.partition('=')[0]} = " in line


# ------------------------------------------------------------------------ graders and reward models
GRADERS = """
import asyncio, time

def sync(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str)

async def asynchronous(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return {"score": len(solution_str), "acc": True}

def crashes(data_source, solution_str, ground_truth, extra_info=None):
    if int(ground_truth[0]) % 2:
        raise RuntimeError("it is odd")
    return 1.0

def hangs(data_source, solution_str, ground_truth, extra_info=None):
    if int(ground_truth[0]) % 2:
        time.sleep(60)
    return 1.0
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sync", "asynchronous"])
def test_user_defined_grader(name: str, capsys, monkeypatch) -> None:
    Path("graders.py").write_text(GRADERS)
    summary = train(capsys, f"reward.grader=graders.py:{name}", "updates=1")
    last = rows(Path("run"))[-1]
    assert last["rollout/grader_failures"] == 0
    assert last["rollout/return"] >= last["rollout/length"] - 1
    assert summary["final_return"] == last["eval/return"] > 1
    assert ("rollout/success" in last) == (name == "asynchronous")
    assert (last["eval/accuracy"] == 1) >= (name == "asynchronous")
    Path("graders.py").write_text(f"{GRADERS}#")
    assert "changed since the checkpoint" in refusal(capsys, "train", "resume=run", "updates=2")
    limit = "reward.timeout_s=99"
    train(capsys, "resume=run", "updates=2", "allow_changed_task=true", limit)

    def make_reward(inputs: Any, *_: Any) -> None:
        raise ConfigError(f"timeout_s is {inputs.config.reward.timeout_s:g}")

    # Another grader of an evaluation has the time limit of the run.
    monkeypatch.setattr(rewards_build, "make_reward", make_reward)
    assert "timeout_s is 99" in refusal(capsys, "evaluate", "checkpoint=run", "grader=exact")


@pytest.mark.slow
def test_terms_of_the_reward(capsys) -> None:
    """A single term trains as its grader; two terms are groups, metrics and columns."""
    Path("graders.py").write_text(GRADERS)
    length = f"{Path('graders.py').resolve()}:sync"
    terms = f"reward.terms={{size: {{grader: '{length}'}}}}"
    for run_dir, option in (("grader", f"reward.grader={length}"), ("term", terms)):
        run_command(capsys, "train", *TINY, option, f"run_dir={run_dir}", "algorithm.lr=1e-2")
    policies = [contents(Path(run_dir), 2)[0] for run_dir in ("grader", "term")]
    assert all(torch.equal(x, policies[1][name]) for name, x in policies[0].items())
    for one, other in zip(rows(Path("grader")), rows(Path("term")), strict=True):
        assert one.get("rollout/return") == other.get("rollout/return")
    assert other["eval/reward/size"] == one["eval/return"] == other["eval/return"]
    both = f"reward.terms={{correct: {{grader: auto}}, size: {{grader: '{length}', weight: -0.1}}}}"
    groups = "{correct: {terms: [correct], normalize: true}, size: {terms: [size]}}"
    train(
        capsys,
        both,
        f"algorithm.reward_groups={groups}",
        "algorithm.adv_type=grpo",
        "algorithm.group_size=2",
    )
    last = rows(Path("run"))[-1]
    assert last["rollout/success"] == last["reward/correct"] and last["reward/size"] < 0
    total = last["reward/correct"] + last["reward/size"]
    assert last["rollout/return"] == pytest.approx(total, abs=1e-5)
    assert last["advantage/share/size"] > 0
    report = json.loads(next(Path("run/reports").glob("*/report.json")).read_text())
    assert all(s["score"] == s["reward/correct"] + s["reward/size"] for s in report["samples"])
    stored = yaml.safe_load(Path("run/config.yaml").read_text())["reward"]["terms"]
    assert stored["size"]["grader"] == length and "grader" not in stored
    line = refusal(capsys, "train", *TINY, "reward.terms={a: {grader: nowhere.py}}")
    assert "reward.terms.a.grader = nowhere.py" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cause"),
    [("crashes", "RuntimeError: it is odd"), ("hangs", "took longer than timeout_s = 0.2")],
)
def test_failing_grader_affects_only_its_samples(name: str, cause: str, capsys) -> None:
    Path("graders.py").write_text(GRADERS)
    options = ["evaluation.episodes=1"]
    if name == "hangs":
        options += ["reward.workers=1", "reward.timeout_s=0.2", "algorithm.rollout_batch_size=4"]
    train(capsys, f"reward.grader={Path('graders.py').resolve()}:{name}", *options)
    metrics = rows(Path("run"))[1:]
    size = 4 if name == "hangs" else 8
    for row in metrics:
        assert 0 < row["rollout/grader_failures"] < size
        assert row["rollout/return"] == 1, "the mean of the graded ones"
    assert len(metrics) == 2
    assert log().count("reward: a response could not be graded") == 1 and cause in log()


@pytest.mark.slow
def test_reward_model_and_penalty_by_the_reference(capsys) -> None:
    """The reward model gives every response the score 3."""
    experiment = yaml.safe_load((ROOT / "configs/experiment/arithmetic.yaml").read_text())
    fields = {**experiment["actor"]["model"]["architecture"], **SIZES, "num_labels": 1}
    import transformers

    config = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():  # layers that add nothing to an embedding of ones
        for p in model.parameters():
            p.zero_()
        model.model.embed_tokens.weight.fill_(1)
        model.model.norm.weight.fill_(1)
        model.score.weight.fill_(3 / config.hidden_size)
    model.save_pretrained("reward_model")
    synthetic_tasks.tokenizer().save_pretrained("reward_model")
    options = [f"reward.model.path={Path('reward_model').resolve()}"]
    summary = train(capsys, *options, "algorithm.use_kl_in_reward=true")
    assert summary["initial_return"] == summary["final_return"] == pytest.approx(3.0)
    row = rows(Path("run"))[-1]
    assert "kl/to_reference" in row and row["eval/accuracy"] == summary["final_success"] < 1
    training = contents(Path("run"), 2)[1]["learner"]
    assert training["reference"] is not None and training["critic_weights"] is not None
    result = run_command(capsys, "evaluate", "checkpoint=run", "episodes=8")
    assert result["eval/return"] == pytest.approx(3.0)
    assert result["eval/accuracy"] == summary["final_success"]


# ------------------------------------------------------------------------------------------- critic
def test_critic_warmup_does_not_change_the_actor(capsys) -> None:
    cold = [x for x in TINY if not x.startswith("warm_start.")] + ["warm_start.steps=0"]
    run_command(
        capsys,
        "train",
        *cold,
        "run_dir=run",
        "algorithm.critic_warmup=1",
        "save_every=1",
        "algorithm.weight_decay=0.1",
    )
    config = loader.load(Config, yaml.safe_load(Path("run/config.yaml").read_text()))
    fresh = language_models.make_policy(
        config, synthetic_tasks.tokenizer(), torch.device("cpu")
    ).state_dict()
    (first, training), (second, _) = (contents(Path("run"), update) for update in (1, 2))
    assert first.keys() == fresh.keys()
    assert all(torch.equal(first[name], fresh[name]) for name in fresh)
    assert any(not torch.equal(second[name], fresh[name]) for name in fresh)
    critic = training["learner"]["critic_weights"]
    trunk = "decoder.base.embed_tokens.weight"
    assert not torch.equal(critic[trunk], fresh["model.model.embed_tokens.weight"])


def test_value_pretraining_starts_other_runs(capsys) -> None:
    run_command(
        capsys,
        "train",
        *TINY,
        "run_dir=pretrained",
        "algorithm.missing_eos_penalty=1",  # a score to learn
        "algorithm.critic_warmup=1",
        "algorithm.critic_warmup_variance=0.9",
    )
    # Saved at the end of the warm-up, although save_every is not due.
    source = Path("pretrained/checkpoints/step_000001")
    start = [f"initial_policy={source}", "evaluation.episodes=0"]
    fixed = ["algorithm.lr=0", "critic.lr=0", "warm_start.steps=0", "seed=1"]
    run_command(capsys, "train", *TINY, *start, *fixed, "updates=1", "run_dir=next")
    policy, training = contents(Path("pretrained"), 1)
    own, own_training = contents(Path("next"), 1)
    for name, weight in policy.items():
        assert torch.equal(weight, own[name])
    before, after = (x["learner"]["critic_weights"] for x in (training, own_training))
    for name, weight in before.items():
        assert torch.equal(weight, after[name])
    assert before["value_head.weight"].abs().sum() > 0
    assert "and critic" in Path("next/log.txt").read_text()
    for options, message in (
        ([], "write warm_start.steps=0: initial_policy = pretrained"),
        (["warm_start.steps=0", "actor.model.architecture.hidden_size=32"], "this model needs"),
        (["algorithm.gae_lambda_value=0.9"], "write algorithm.gae_lambda_value=1"),
    ):
        options = [*start, "run_dir=refused", *options]
        if "gae_lambda_value" in options[-1]:
            options += ["algorithm.critic_warmup=1", "algorithm.critic_warmup_variance=0.9"]
        assert message in refusal(capsys, "train", *TINY, *options)
