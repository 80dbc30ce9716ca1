"""Imports go down only (DESIGN, section 4): the source is parsed, nothing is imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "embodied_ppo"

FLOORS: dict[str, int] = {
    **dict.fromkeys(("errors", "types", "tree", "config", "names", "noise", "health"), 0),  # words
    **dict.fromkeys(("advantages", "losses", "kl", "distributions", "moments", "ranks", "shards"), 1),  # maths
    **dict.fromkeys(("models.backbone", "models.actor_critic", "models.language", "models.vla"), 2),
    **dict.fromkeys(("models.vla_token", "models.vla_gaussian", "models.vla_flow"), 2),
    **dict.fromkeys(("models.openvla", "models.openvla_checkpoint", "models.vlm", "models.vla_checkpoint"), 2),
    **dict.fromkeys(("models.pi0", "models.pi0_checkpoint", "models.lora", "models.directory"), 2),
    **dict.fromkeys(
        (
            "rollout",
            "objective",
            "compiled",
            "descent",
            "learner",
            "split_learner",
            "evaluate",
            "checkpoint",
            "log",
            "loop",
            "film",
        ),
        3,
    ),  # algorithm
    **dict.fromkeys(
        (
            "data",
            "answers",
            "grading",
            "grading_pool",
            "reasoning",
            "exam",
            "reward_model",
            "synthetic",
            "warm_start",
            "report",
            "demonstrations",
            "recording",
            "cloning",
        ),
        3,
    ),
    **dict.fromkeys(("generation.sampling", "generation.graphs", "generation.engine", "generation.vllm"), 3),
    **dict.fromkeys(
        (
            "placement.local",
            "placement.system",
            "placement.plan",
            "placement.tune",
            "placement.tune_language",
            "placement.memory",
            "placement.residency",
            "placement.lines",
            "placement.simulators",
            "placement.services",
            "placement.weights",
            "placement.part",
            "placement.process",
            "placement.cluster",
        ),
        4,
    ),
    **dict.fromkeys(
        (
            "cli",
            "compose",
            "build",
            "robot",
            "spread",
            "spread_language",
            "probes",
            "probes_language",
            "tuning",
            "terminal",
            "imitation",
            "reasoner",
            "assembly",
            "rundir",
            "strict",
            "rules",
            "explain",
            "migrate",
            "peers.rule",
            "peers.rlinf",
            "peers.verl",
            "peers.roll",
            "peers.trl",
            "watch",
            "new_task",
            "batches",
            "fitting",
            "doctor",
        ),
        5,
    ),  # edge
}
"""Every module of the package, without the empty ``__init__``s."""

LAZY = {"cli", "compose", "explain"}
"""May import our own modules inside functions: `embodied-ppo --help` answers before torch is loaded."""

SLOW = {"placement.cluster", "shards"}
"""Are imported where a run asks for them: Ray takes a second to load, FSDP2 half of one, and most runs need neither."""

ONLY_IN = {"hydra": {"compose"}, "omegaconf": {"compose"}, "ray": {"placement.process", "placement.cluster", "doctor"}}
ONLY_IN |= {
    "transformers": {
        "models.language",
        "models.openvla",
        "models.openvla_checkpoint",
        "models.pi0",
        "models.pi0_checkpoint",
        "models.vla_checkpoint",
        "models.vlm",
        "data",
        "reward_model",
        "synthetic",
    }
}
ONLY_IN |= {"vllm": {"generation.vllm"}, "peft": {"models.lora"}}
"""Third-party module -> where it may be imported."""

WORDS_ONLY = {"torch", "safetensors"}
"""What floors 0 to 2 may import besides the standard library."""


def modules() -> dict[str, Path]:
    """Dotted name without the package -> file; ``__init__`` of the package itself is ""."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()
TREES = {name: ast.parse(file.read_text()) for name, file in MODULES.items()}


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """(dotted name of what is imported, inside a function) of every import statement, but for TYPE_CHECKING blocks."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "relative imports hide the floor"
            yield from ((f"{node.module}.{alias.name}", inside) for alias in node.names)
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(tree, False)


def own(name: str) -> list[tuple[str, bool]]:
    """(module, inside a function) of our own package that module ``name`` imports."""
    found = []
    for dotted, inside in imports(TREES[name]):
        if dotted.split(".")[0] != "embodied_ppo":
            continue
        rest = dotted.split(".")[1:]
        while rest and ".".join(rest) not in MODULES:
            rest.pop()  # a name of that module
        found.append((".".join(rest), inside))
    return found


def third_party(tree: ast.AST) -> set[str]:
    tops = {dotted.split(".")[0] for dotted, _ in imports(tree)}
    return tops - set(sys.stdlib_module_names) - {"embodied_ppo", "__future__"}


def test_every_module_has_a_floor():
    packages = {name for name, file in MODULES.items() if file.name == "__init__.py"}
    assert set(MODULES) - packages == set(FLOORS)
    for name in packages - {""}:
        assert not MODULES[name].read_text().strip(), f"{name}/__init__.py is empty: a package holds no code of its own"


@pytest.mark.parametrize("name", FLOORS)
def test_imports_go_down_only(name):
    for target, _ in own(name):
        assert FLOORS.get(target, 0) <= FLOORS[name], f"{name} (floor {FLOORS[name]}) imports {target}"


def test_there_are_no_cycles():
    graph = {name: {target for target, _ in own(name) if target} for name in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("name", FLOORS)
def test_own_modules_are_imported_at_the_top(name):
    if name not in LAZY:
        assert not [target for target, inside in own(name) if inside and target not in SLOW]


def test_training_in_one_process_does_not_import_ray():
    code = "import sys, embodied_ppo.build; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_loop_sees_words_and_the_log():
    assert {target for target, _ in own("loop")} <= {"log"} | {name for name, floor in FLOORS.items() if floor == 0}
    assert not third_party(TREES["loop"])


@pytest.mark.parametrize("name", MODULES)
def test_third_party_modules_stay_where_they_belong(name):
    found = third_party(TREES[name])
    for module, homes in ONLY_IN.items():
        assert module not in found or name in homes, f"{name} imports {module}"
    if FLOORS.get(name, 0) <= 2:
        found -= {"transformers", "tokenizers", "peft"}  # by ONLY_IN
        assert found <= WORDS_ONLY, f"{name} imports {found - WORDS_ONLY}"
    assert "embodied_envs" not in found, f"{name} imports embodied_envs; robot loads it by name"


def test_maths_knows_no_device_config_or_log():
    for name in (n for n, floor in FLOORS.items() if floor == 1):
        targets = {target for target, _ in own(name)}
        assert not targets & {"config"}, name
        assert "cuda" not in {n.attr for n in ast.walk(TREES[name]) if isinstance(n, ast.Attribute)}, name


def test_simulators_know_words_only():
    files = sorted((ROOT / "envs" / "embodied_envs").rglob("*.py"))
    assert files
    words = {name for name, floor in FLOORS.items() if floor == 0}
    for file in files:
        for dotted, _ in imports(ast.parse(file.read_text())):
            top, *rest = dotted.split(".")
            if top == "embodied_ppo":
                assert rest and rest[0] in words, f"{file.name} imports {dotted}"


def test_no_file_hides_an_import():
    """Nothing is loaded by a computed name but the simulators, by robot and imitation (graders, and what doctor
    tries: by resolve_name)."""
    for name, tree in TREES.items():
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
        for call in calls:
            words = ast.unparse(call.func)
            assert words != "__import__", name
            if words.endswith("import_module"):
                assert name in ("robot", "imitation") and ast.unparse(call.args[0]) == "'embodied_envs'", name
