"""The site of ``make docs`` builds without warnings, is complete and loads no foreign resources."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest
import yaml
from headless_browser import Browser
from mkdocs.exceptions import PluginError

from embodied_ppo.options.loader import describe
from embodied_ppo.options.schema import Config, EvaluateConfig
from tests.test_layers import LAYERS

ROOT = Path(__file__).resolve().parents[2]
# Tags that load a resource, with the attribute that holds its address.
LOADS = {
    "link": "href",
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "use": "href",
    "image": "href",
}


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    # Without --quiet: with it, --strict does not count warnings.
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        str(config),
        "-d",
        str(site),
    ]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    process = build(ROOT / "mkdocs.yml", folder)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "WARNING" not in process.stderr
    return folder


class Tags(HTMLParser):
    """All tags of a page with their attributes."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    @property
    def ids(self) -> set[str]:
        return {str(attrs["id"]) for _, attrs in self.tags if attrs.get("id")}


def script(name: str) -> ModuleType:
    """Import a file of scripts/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    # Dataclasses look their module up in sys.modules.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("link", ["no_such.md", "index.md#nowhere"])
def test_a_broken_link_fails_the_build(link: str, tmp_path) -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    for name in ("hooks", "nav"):
        del settings[name]
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n[page]({link})\n")
    process = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert process.returncode == 1 and link.partition("#")[2] in process.stderr


def test_links_to_files_outside_docs() -> None:
    links, page = script("docs_site").links, ROOT / "docs" / "architecture.md"
    assert links("[Start](../README.md#speed)", page) == "[Start](overview.md#speed)"
    assert links("[types.py](../embodied_ppo/core/types.py), [it](../LICENSE)", page) == (
        "`embodied_ppo/core/types.py`, it (`LICENSE`)"
    )
    assert links("[metrics](metrics.md#policy)", page) == "[metrics](metrics.md#policy)"
    with pytest.raises(PluginError, match=r"docs/architecture.md: links to ../no_such.py"):
        links("[x](../no_such.py)", page)


@pytest.mark.slow
def test_options_page_has_every_option(site: Path) -> None:
    page = site / "options.html"
    ids, text = Tags(page).ids, page.read_text(encoding="utf-8")
    assert set(describe(Config)) <= ids
    assert {f"evaluate-{path}" for path in describe(EvaluateConfig)} <= ids
    # gamma
    assert "a finite number &gt;= 0 and &lt;= 1" in text and "default <code>0.99</code>" in text
    assert "aliases: <code>algorithm.lam</code>" in text


def test_recipes_page_has_every_experiment(site: Path) -> None:
    shipped = {file.stem for file in (ROOT / "configs" / "experiment").glob("*.yaml")}
    page = site / "recipes.html"
    assert shipped <= Tags(page).ids
    text = page.read_text(encoding="utf-8")
    for name in shipped:
        assert f"embodied-ppo train experiment={name}" in text
    drawn = set(re.findall(r'src="curves/(\w+)\.svg"', text))
    assert drawn == {file.stem for file in (site / "curves").glob("*.svg")}
    assert {"halfcheetah", "tabletop_token_push", "arithmetic"} <= drawn


def test_every_layer_is_on_the_architecture_page(site: Path) -> None:
    assert {*LAYERS, "embodied_envs"} <= Tags(site / "architecture.html").ids


def test_pages_load_no_foreign_resources(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        for tag, attrs in Tags(page).tags:
            target = attrs.get(LOADS[tag]) if tag in LOADS else None
            if target and not (tag == "link" and attrs.get("rel") in ("canonical", "next", "prev")):
                assert not re.match(r"(https?:)?//", target), f"{page.name}: <{tag}> {target}"
    for file in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        fetched = re.findall(
            r"(?:url\(|@import )['\"]?((?:https?:)?//[^'\")\s]+)", file.read_text(encoding="utf-8")
        )
        assert not fetched, file


@pytest.mark.slow
def test_a_browser_requests_only_this_site_and_the_search_finds_an_option(
    site: Path, tmp_path
) -> None:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        browser = Browser(tmp_path)
        try:
            for page in ("recipes", "placement", "options"):
                browser.open(f"{home}{page}.html", width=390, height=844)
                assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), page
            browser.open(f"{home}index.html?q=gae_lambda")
            browser.wait(
                "document.querySelector('.md-search-result a[href$=\"#algorithm.gae_lambda\"]')"
            )
        finally:
            browser.close()
            server.shutdown()
    assert browser.problems == []
    assert {x for x in browser.requests if not x.startswith((home, "data:", "blob:"))} == set()
