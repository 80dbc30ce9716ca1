"""The layers of the package: imports go from a higher layer to a lower one only.

The source is parsed, not imported.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"embodied_ppo": ROOT / "embodied_ppo", "embodied_envs": ROOT / "envs" / "embodied_envs"}
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["embodied_ppo"]
# Folders and files directly in the package, from the lowest layer to the highest.
LAYERS: list[str] = SETTINGS["layers"]
# Modules and folders that may import our own inside functions: `embodied-ppo --help` must not load
# torch.
LAZY = (*(f"embodied_ppo.{name}" for name in SETTINGS["lazy"]), "embodied_envs")
# Modules that any other may import inside a function: they load Ray, FSDP2 or MuJoCo, which most
# runs do not need.
SLOW = set(SETTINGS["slow"])
# Third-party package -> the modules or folders of embodied_ppo that may import it.
ONLY_IN: dict[str, list[str]] = SETTINGS["only_in"]
NUMERICS = ("ppo.advantages", "ppo.losses", "ppo.kl", "policies.distributions")
# Pure functions of tensors: they read no option and no device.
NUMERICS += ("core.running_stats",)


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file of every module; a package's name stands for its ``__init__``."""
    names = {}
    for package, folder in SOURCES.items():
        for file in sorted(folder.rglob("*.py")):
            parts = (package, *file.relative_to(folder).with_suffix("").parts)
            names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return names


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text())


def imports(name: str) -> Iterator[tuple[str, bool, bool]]:
    """(dotted name of what is imported, whether in a function, whether for type checking only)."""

    def walk(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[tuple[str, bool, bool]]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for_types = True
        if isinstance(node, ast.Import):
            yield from ((alias.name, in_function, for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name}: relative imports hide the layer"
            yield from (
                (f"{node.module}.{alias.name}", in_function, for_types) for alias in node.names
            )
        in_function = in_function or isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        )
        for child in ast.iter_child_nodes(node):
            yield from walk(child, in_function, for_types)

    yield from walk(tree(name), False, False)


def own_imports(name: str) -> list[tuple[str, bool, bool]]:
    """As ``imports``, of our own modules."""
    targets = []
    for dotted, in_function, for_types in imports(name):
        if dotted.split(".")[0] not in SOURCES:
            continue
        parts = dotted.split(".")
        while ".".join(parts) not in modules():
            parts.pop()  # a name defined in that module
        targets.append((".".join(parts), in_function, for_types))
    return targets


def third_party(name: str) -> set[str]:
    packages = {dotted.split(".")[0] for dotted, _, for_types in imports(name) if not for_types}
    return packages - set(sys.stdlib_module_names) - set(SOURCES) - {"__future__"}


def layer(name: str) -> int:
    """Position of a module of embodied_ppo in LAYERS; the package itself may import anything
    lazily.
    """
    parts = name.split(".")
    return LAYERS.index(parts[1]) if len(parts) > 1 else len(LAYERS)


OWN = [name for name in modules() if name.startswith("embodied_ppo.")]


def test_every_module_is_in_a_layer():
    assert {name.split(".")[1] for name in OWN} == set(LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_imports_go_to_the_same_or_a_lower_layer(name: str):
    for target, _, _ in own_imports(name):
        if target.startswith("embodied_ppo."):
            upward = name.removeprefix("embodied_ppo.") in SETTINGS["upward"]
            assert layer(target) <= layer(name) or upward, f"{name} imports {target}"


@pytest.mark.slow
def test_there_is_no_import_cycle():
    """Imports for type checking count, too: a cycle of types is a cycle of ideas."""
    graph = {
        name: {target for target, _, _ in own_imports(name)} - {"embodied_ppo"}
        for name in modules()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("name", OWN)
def test_own_modules_are_imported_at_the_top(name: str):
    if not any(name == lazy or name.startswith(lazy + ".") for lazy in LAZY):
        inside = [target for target, in_function, _ in own_imports(name) if in_function]
        assert set(inside) <= SLOW


@pytest.mark.parametrize(
    "name", [name for name, file in modules().items() if file.name == "__init__.py"]
)
def test_a_package_says_what_belongs_in_it(name: str):
    """``__init__`` holds a docstring; only the public entry points of embodied_envs and its tasks
    hold code.
    """
    docstring = ast.get_docstring(tree(name)) or ""
    assert docstring
    if name not in ("embodied_ppo", "embodied_envs", "embodied_envs.tasks"):
        assert len(tree(name).body) == 1
        assert "Belongs here:" in docstring and "Does not belong here:" in docstring


@pytest.mark.slow
def test_training_in_one_process_does_not_import_ray():
    code = "import sys, embodied_ppo.programs.runs; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_training_loop_imports_types_and_the_log_only():
    assert {target for target, _, _ in own_imports("embodied_ppo.training.loop")} <= {
        "embodied_envs.base.errors",
        "embodied_ppo.core.types",
        "embodied_ppo.training.logging",
    }
    assert not third_party("embodied_ppo.training.loop")


@pytest.mark.parametrize("name", OWN)
def test_third_party_packages_are_imported_where_they_belong(name: str):
    short = name.removeprefix("embodied_ppo.")
    for package in third_party(name) & set(ONLY_IN):
        homes = ONLY_IN[package]
        assert any(short == home or short.startswith(home + ".") for home in homes), (
            f"{name} imports {package}"
        )


@pytest.mark.parametrize("name", NUMERICS)
def test_numerics_read_no_option_and_no_device(name: str):
    name = f"embodied_ppo.{name}"
    assert not [
        target for target, _, _ in own_imports(name) if target.startswith("embodied_ppo.options")
    ]
    assert "cuda" not in {n.attr for n in ast.walk(tree(name)) if isinstance(n, ast.Attribute)}


@pytest.mark.parametrize("name", [name for name in modules() if name.startswith("embodied_envs")])
def test_simulators_do_not_know_the_trainer(name: str):
    """Neither imports nor texts name it."""
    assert "embodied_ppo." not in modules()[name].read_text()
    assert not [target for target, _, _ in own_imports(name) if target.startswith("embodied_ppo")]


@pytest.mark.parametrize("name", list(modules()))
def test_no_optional_attribute_of_a_simulator_is_read_by_getattr(name: str):
    """``VectorEnv`` has defaults for them."""
    attributes = {"task_names", "instructions", "gripper_closes", "step_s", "unstable", "send"}
    attributes |= {"terrain_level", "truncate_next", "history", "to_simulator", "mechanism"}
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            attribute = node.args[1]
            assert not isinstance(attribute, ast.Constant) or attribute.value not in attributes


@pytest.mark.parametrize("name", [x for x in OWN if x != "embodied_ppo.commands.main"])
def test_no_module_is_imported_by_a_computed_name(name: str):
    """Only the table of commands names modules of its own folder."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            assert function != "__import__" and not function.endswith("import_module")
