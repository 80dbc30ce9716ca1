"""Hooks of MkDocs (``make docs``) that generate pages and curves from the code and the results.

overview.md is README.md, changelog.md CHANGELOG.md, options.md is generated from
``embodied_ppo.options.schema``. A heading of recipes.md that names an experiment gets its
description, its command and its learning curve.
``<!-- folders -->`` becomes a table of the modules in each folder. Links to files outside docs/ are
replaced by their paths.
"""

from __future__ import annotations

import ast
import html
import io
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify_unicode
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from embodied_envs.base.errors import show
from embodied_ppo.commands.experiments import experiments
from embodied_ppo.options.describe import Option, alias_paths, describe
from embodied_ppo.options.loader import flat, plain_yaml
from embodied_ppo.options.readers import readers
from embodied_ppo.options.schema import OWN_OPTIONS, Config

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Keep letters that are not ASCII in anchors, as GitHub does: #π0."""
    config.mdx_configs["toc"]["slugify"] = slugify_unicode
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and curves."""
    pages: dict[str, Callable[[], str]] = {"overview.md": overview, "options.md": options}
    pages |= {"changelog.md": partial(overview, "CHANGELOG.md")}
    pages |= {f"curves/{name}.svg": partial(curve, *args) for name, args in curves().items()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == "recipes.md":
        markdown = recipes(markdown)
    markdown = markdown.replace("<!-- folders -->", folders())
    return links(markdown, DOCS / page.file.src_uri)


# -------------------------------------------------------------------------------------------- links
def overview(file: str = "README.md") -> str:
    """Return a file of the repository with links that are relative to docs/."""

    def moved(match: re.Match[str]) -> str:
        target = match[1]
        return (
            f"]({target.removeprefix('docs/') if target.startswith('docs/') else '../' + target})"
        )

    return re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", moved, (ROOT / file).read_text(encoding="utf-8"))


def links(markdown: str, file: Path) -> str:
    """Replace links to files outside docs/: to the overview page or the file's path.

    Raises:
        PluginError: The file does not exist.
    """

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        outside = (file.parent / target).resolve()
        if outside.is_relative_to(DOCS):
            return match[0]
        if not outside.exists():
            raise PluginError(
                f"{file.relative_to(ROOT)}: links to {target}, and there is no such file"
            )
        if outside == ROOT / "README.md":
            return f"[{text}]({'../' * (len(file.relative_to(DOCS).parts) - 1)}overview.md{anchor})"
        path = outside.relative_to(ROOT).as_posix()
        return f"`{path}`" if Path(text).name == outside.name else f"{text} (`{path}`)"

    return re.sub(r"(?<!!)\[([^\]\n]*)\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)", replaced, markdown)


# ------------------------------------------------------------------------------------------ options
def options() -> str:
    """Return a page with every option of the schema, in its order and by section."""
    lines = ["# Options", ""]
    lines += [
        "This page is generated from `embodied_ppo/options/schema.py`. On the command line, write"
        " `section.name=value`. `embodied-ppo config experiment=NAME` prints them with their values"
        " and the file that sets each; `--only WORD` selects.",
        "",
    ]
    lines += _section("train", Config, "", "## train", "Top level: `name=value`.")
    for section in dict.fromkeys(path.rpartition(".")[0] for path in describe(Config)):
        if section:
            lines += _section(section, Config, section, f"## {section}", "")
    for command, cls in OWN_OPTIONS.items():
        known = [path for path in describe(cls) if not path.startswith("env.")]
        description = f"Options of `embodied-ppo {command}`."
        lines += ["", f"## embodied-ppo {command} {{#{command}}}", "", description, ""]
        lines += [line for path in known for line in _entry(cls, path, f"{command}-")]
    return "\n".join(lines) + "\n"


def _section(anchor: str, cls: type, section: str, title: str, text: str) -> list[str]:
    known = [path for path in describe(cls) if path.rpartition(".")[0] == section]
    lines = ["", f"{title} {{#{anchor}}}", "", text, ""]
    return lines + [line for path in known for line in _entry(cls, path, "")]


def _entry(cls: type, path: str, prefix: str) -> list[str]:
    option = describe(cls)[path]
    facts = [html.escape(option.allowed), f"default {_code(show(_plain(option)))}"]
    also = [alias for alias, targets in alias_paths(cls).items() if path in targets]
    if also:
        facts.append("aliases: " + ", ".join(map(_code, also)))
    reader = readers(cls)[path]
    if reader.mode:
        facts.append(f"mode={reader.mode} only")
    if reader.conditions:
        facts.append(f"read with {_code(reader.conditions[0].text)}")
    return [
        f"#### {path} {{#{prefix}{path}}}",
        "",
        (
            f'<div class="option"><p>{_prose(option.meaning)}</p><p'
            f' class="facts">{" · ".join(facts)}</p></div>'
        ),
        "",
    ]


def _plain(option: Option) -> Any:
    return list(option.default) if isinstance(option.default, tuple) else option.default


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def _prose(text: str) -> str:
    """Return a docstring as HTML; only backticks are markup."""
    return re.sub(
        r"`+([^`]+)`+", r"<code>\1</code>", html.escape(" ".join(text.split()), quote=False)
    )


# ----------------------------------------------------------------------------------------- concepts
def folders() -> str:
    """Return a section for each layer, the lowest first: what belongs there, and its modules."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = [ROOT / "embodied_ppo" / name for name in settings["tool"]["embodied_ppo"]["layers"]]
    lines: list[str] = []
    for folder in [ROOT / "envs" / "embodied_envs", *layers]:
        files = sorted(folder.rglob("*.py")) or [folder.with_suffix(".py")]
        summaries = {file: docstring(file) for file in files}
        own = summaries.pop(folder / "__init__.py", None)
        lines += ["", f"### {folder.name}", "", *([own, ""] if own else [])]
        lines += ["| module | |", "|---|---|"]
        for file, summary in summaries.items():
            if file.name != "__init__.py":
                lines.append(f"| `{file.relative_to(folder.parent).as_posix()}` | {summary} |")
    return "\n".join(lines)


def docstring(file: Path) -> str:
    """Return the summary of a module as one line of Markdown."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    summary = " ".join(text.partition("\n\n")[0].split())
    return html.escape(summary, quote=False).replace("|", "\\|")


# ------------------------------------------------------------------------------------------ recipes
@cache
def shipped() -> dict[str, dict[str, str]]:
    """Return the experiments of this repository by name."""
    entries = experiments(str(ROOT / "configs"))
    return {one["name"]: one for one in entries if Path(one["file"]).is_relative_to(ROOT)}


def recipes(markdown: str) -> str:
    """Add description, command and learning curve to each heading of an experiment."""
    known, plots = shipped(), curves()

    def extended(match: re.Match[str]) -> str:
        name = match[1]
        if name not in known:
            raise PluginError(f"docs/recipes.md: {name} is no experiment of configs/experiment")
        file = plain_yaml(Path(known[name]["file"]).read_text(encoding="utf-8"))
        required = [f" {path}=.." for path, value in flat(file).items() if value == "???"]
        lines = [
            f"### {name} {{#{name}}}",
            "",
            html.escape(known[name]["description"], quote=False),
            "",
            "```",
        ]
        lines += [f"embodied-ppo train experiment={name}{''.join(required)}", "```", ""]
        if name in plots:
            lines += [
                (
                    f"![{plots[name][0]} of {name} during training](curves/{name}.svg){{"
                    " loading=lazy }"
                ),
                "",
            ]
        return "\n".join(lines)

    return re.sub(r"^### (\w+)$", extended, markdown, flags=re.MULTILINE)


@cache
def curves() -> dict[str, tuple[str, str, dict[str, list[tuple[float, float]]]]]:
    """Return the labels of both axes and the points of each seed, by experiment."""
    found: list[tuple[str, str, str, int, list[tuple[float, float]]]] = []
    steps = "environment steps (millions)"
    for file, label in (("learning", "Return of training episodes"), ("vla", "Success")):
        for run in _results(file):
            points = [(at / 1e6, value) for at, value in run["curve"]]
            found.append((run["experiment"], label, steps, run["seed"], points))
    for run in _results("language"):
        if run["variant"] in shipped():
            points = [(float(update), value) for update, value in run["accuracy"].items()]
            found.append((run["variant"], "Held-out accuracy", "updates", run["seed"], points))
    entries: dict[str, tuple[str, str, dict[str, list[tuple[float, float]]]]] = {}
    for name, ylabel, xlabel, seed, points in found:
        entries.setdefault(name, (ylabel, xlabel, {}))[2][f"seed {seed}"] = points
    return entries


def _results(name: str) -> list[Mapping[str, Any]]:
    return json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))


def curve(ylabel: str, xlabel: str, runs: Mapping[str, list[tuple[float, float]]]) -> str:
    """Return a plot as SVG with selectable text."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "embodied_ppo",
        "font.family": "sans-serif",
        "font.size": 9,
    }
    with matplotlib.rc_context(style):
        figure, axis = plt.subplots(figsize=(5.6, 2.6), layout="constrained")
        for name, points in runs.items():
            axis.plot(*zip(*points, strict=True), lw=1.3, label=name)
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        plt.close(figure)
    return text.getvalue()
