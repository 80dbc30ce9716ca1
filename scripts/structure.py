"""Print the numbers that describe the structure of this repository.

    python scripts/structure.py [--no-run] [--json]

The source is parsed, and a short training run of CartPole is profiled (``--no-run`` leaves it out).
``[tool.embodied_ppo.limits]`` in pyproject.toml holds the limit of each number, which the table
shows and tests/scripts/test_structure.py checks. Lines of code are lines without docstrings,
comments and blank lines.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, SIMULATORS = ROOT / "embodied_ppo", ROOT / "envs" / "embodied_envs"
SCHEMA = PACKAGE / "options" / "schema.py"
SCRIPTS, TESTS = ROOT / "scripts", ROOT / "tests"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["embodied_ppo"]
# The folders whose comments are counted.
TRAINING = ("ppo", "rollout", "training", "programs", "cluster")
MEANINGS = {
    "rooms": "folders and modules directly in the package, embodied_envs and scripts",
    "floors": "rooms on the longest chain of imports",
    "arrows": "pairs of rooms of which the first imports the second",
    "upward_arrows": "arrows against the order of the layers",
    "package_lines": "lines of code of embodied_ppo",
    "simulator_lines": "lines of code of embodied_envs",
    "script_lines": "lines of code of scripts",
    "test_lines": "lines of code of tests",
    "largest_module": "lines of code of the largest module, apart from the list of options",
    "longest_function": "lines of code of the longest function",
    "options": "options of training",
    "lines_per_comment": f"lines of code for each comment in {', '.join(TRAINING)}",
    "duplicate_classes": "class names that the package defines more than once",
    "duplicate_files": "file names that the package has more than once",
    "test_functions": "test functions",
    "words": "words of README, CONTRIBUTING and docs, without generated pages",
    "functions_per_update": "own functions that one update of CartPole executes",
    "functions_per_iteration": "the same, with collecting the trajectory and logging",
    "frames_to_loss": "own frames from main to clipped_surrogate, without the supervisor",
}
# Updates before those that are profiled.
WARM_UP = 2


# --------------------------------------------------------------------------------------- code lines
@cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def statements(path: Path) -> tuple[ast.AST, ...]:
    """Return the module and all its statements, nested ones included, but no expressions."""
    nodes: list[ast.AST] = [ast.parse(source(path))]
    for node in nodes:  # the list grows
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            children = getattr(node, field, ())
            nodes += children if isinstance(children, list) else ()
    return tuple(nodes)


@cache
def tokens(path: Path) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(source(path)).readline))


@cache
def code_lines(path: Path) -> frozenset[int]:
    """Return the numbers of the lines that hold code."""
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokens(path):
        if token.type not in ignored | {tokenize.ENDMARKER}:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in statements(path):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            lines -= set(range(body[0].lineno, body[0].end_lineno + 1))
    return frozenset(lines)


def _is_text(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def count_lines(folder: Path) -> int:
    return sum(len(code_lines(path)) for path in folder.rglob("*.py"))


def functions(folder: Path) -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in folder.rglob("*.py"):
        for node in statements(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def function_length(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return len(code_lines(path) & set(range(node.lineno, node.end_lineno + 1)))


def count_comments(path: Path) -> int:
    """Return the number of comments. Adjacent lines are one comment; rules and instructions to
    tools are none.
    """
    count, previous = 0, -1
    for token in tokens(path):
        if token.type != tokenize.COMMENT:
            continue
        text, line = token.string.lstrip("# "), token.start[0]
        alone = token.line.lstrip().startswith("#")
        if text.startswith(("---", "type:", "pyright:", "noqa", "pragma")):
            continue
        count += not (alone and previous == line - 1)
        previous = line if alone else -1
    return count


# ------------------------------------------------------------------------------------------ imports
def room(path: Path) -> str:
    if path.is_relative_to(PACKAGE):
        return path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "embodied_envs" if path.is_relative_to(SIMULATORS) else "scripts"


def imported_rooms(path: Path) -> Iterator[str]:
    """Yield the room of each import of our own, those inside functions included."""
    for node in statements(path):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, inner = name.partition(".")
            target = inner.partition(".")[0]
            if package == "embodied_envs":
                yield package
            elif package == "embodied_ppo" and target in SETTINGS["layers"]:
                yield target
            elif package == "embodied_ppo":  # import embodied_ppo; a name of its __init__
                yield "api"


def arrows() -> set[tuple[str, str]]:
    modules = [
        path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem[0] != "_"
    ]
    files = [*modules, *SIMULATORS.rglob("*.py"), *SCRIPTS.glob("*.py")]
    pairs = {(room(path), target) for path in files for target in imported_rooms(path)}
    return {(source, target) for source, target in pairs if source != target}


def floors(order: list[str], pairs: set[tuple[str, str]]) -> int:
    """Return the number of rooms on the longest chain of imports, each to a lower room."""
    height: dict[str, int] = {}
    for name in order:
        height[name] = 1 + max((height.get(to, 0) for at, to in pairs if at == name), default=0)
    return max(height.values())


# ------------------------------------------------------------------------------------------ numbers
def count_words() -> int:
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return sum(len(source(path).split()) for path in files)


def count_duplicates(names: Iterator[str]) -> int:
    return sum(count > 1 for count in Counter(names).values())


def static_numbers() -> dict[str, float]:
    """Return what the source alone determines."""
    from embodied_ppo.options.loader import describe
    from embodied_ppo.options.schema import Config

    order = ["embodied_envs", *SETTINGS["layers"], "scripts"]
    pairs = arrows()
    packages = [*PACKAGE.rglob("*.py"), *SIMULATORS.rglob("*.py")]
    defined = [*functions(PACKAGE), *functions(SIMULATORS)]
    trains = [path for folder in TRAINING for path in (PACKAGE / folder).rglob("*.py")]
    classes = (
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in statements(path)
        if isinstance(node, ast.ClassDef)
    )
    files = (path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    lines = sum(len(code_lines(path)) for path in trains)
    return {
        "rooms": len(order),
        "floors": floors(order, pairs),
        "arrows": len(pairs),
        "upward_arrows": sum(order.index(at) < order.index(to) for at, to in pairs),
        "package_lines": count_lines(PACKAGE),
        "simulator_lines": count_lines(SIMULATORS),
        "script_lines": count_lines(SCRIPTS),
        "test_lines": count_lines(TESTS),
        "largest_module": max(len(code_lines(path)) for path in packages if path != SCHEMA),
        "longest_function": max(function_length(path, node) for path, node in defined),
        "options": len(describe(Config)),
        "lines_per_comment": round(lines / max(1, sum(map(count_comments, trains))), 1),
        "duplicate_classes": count_duplicates(classes),
        "duplicate_files": count_duplicates(files),
        "test_functions": sum(node.name.startswith("test_") for _, node in functions(TESTS)),
        "words": count_words(),
    }


# -------------------------------------------------------------------------------------------- a run
def profile_run() -> dict[str, float]:
    """Return what a run shows.

    An update is the outermost call of a function of ppo/ during which ``clipped_surrogate`` is
    called, here once. An iteration is everything between two of these calls: it also collects the
    trajectory and logs.
    """
    from embodied_ppo.commands.main import main

    prefixes = (f"{PACKAGE}{os.sep}", f"{SIMULATORS}{os.sep}")
    updates: list[set[Any]] = []
    iterations: list[set[Any]] = []
    frames = 0
    outermost: FrameType | None = None
    called: set[Any] = set()

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal frames, outermost, called
        code = frame.f_code
        if event == "return" and frame is outermost:
            if any(function.co_name == "clipped_surrogate" for function in called):
                updates.append(called)
            outermost, called = None, set()
        if event != "call" or not code.co_filename.startswith(prefixes):
            return
        if outermost is None and code.co_filename.startswith(f"{PACKAGE / 'ppo'}{os.sep}"):
            outermost = frame
        if code.co_name == "clipped_surrogate":
            iterations.append(set())
            frames = frames or count_frames(frame)
        if code.co_name[0] == "<":  # a comprehension or lambda
            return
        if outermost is not None:
            called.add(code)
        if iterations:
            iterations[-1].add(code)

    def count_frames(frame: FrameType | None) -> int:
        count = 0
        while frame is not None and frame.f_code.co_filename != __file__:
            name = frame.f_code.co_filename
            count += name.startswith(prefixes) and not name.endswith("supervisor.py")
            frame = frame.f_back
        return count

    with tempfile.TemporaryDirectory() as folder:
        options = f"experiment=cartpole run_dir={folder}/run env.num_threads=1 compile=never"
        options += " algorithm.update_epoch=1 algorithm.global_batch_size=1024 save_every=1000"
        options += " evaluation.episodes=0 env_steps=6144"
        sys.settrace(lambda *_: None)  # the supervisor runs traced commands in this process
        sys.setprofile(on_event)
        try:
            code = main(["train", "--quiet", *options.split()])
        finally:
            sys.setprofile(None)
            sys.settrace(None)
    assert code == 0
    return {
        "functions_per_update": max(map(len, updates[WARM_UP:])),
        "functions_per_iteration": max(map(len, iterations[WARM_UP:-1])),
        "frames_to_loss": frames,
    }


def run_numbers() -> dict[str, float]:
    """As ``profile_run``, in a process of its own: it must import everything itself."""
    command = [sys.executable, __file__, "--profile"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}"}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-run", action="store_true", help="leave the profiled run out")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.profile:
        print(json.dumps(profile_run()))
        return
    parts: list[Callable[[], dict[str, float]]] = [static_numbers]
    parts += [] if args.no_run else [run_numbers]
    numbers = {name: value for part in parts for name, value in part().items()}
    if args.json:
        print(json.dumps(numbers))
        return
    for name, value in numbers.items():
        print(f"{value:8g}  (limit {SETTINGS['limits'][name]:6g})  {name}: {MEANINGS[name]}")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "envs")]
    main()
