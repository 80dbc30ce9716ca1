"""Strict loading: accepted values are converted, refusals name path, value, limit and hint."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from operator import attrgetter
from typing import Any

import pytest
from run_helpers import nested, tables

from embodied_envs.base.errors import LONGEST_LINE, ConfigError, fit_message, join_names, show
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options import loader, validation
from embodied_ppo.options.aliases import ALIASES, REFUSED, SIMILAR, VALUE_ALIASES
from embodied_ppo.options.removed import REMOVED
from embodied_ppo.options.schema import Config, EnvConfig, EvaluateConfig

TABLES = tables(__file__)
STORED_RUN = f"{loader.STORED}, run/config.yaml"
LANGUAGE: dict[str, Any] = {"mode": "reasoning", "updates": 1, "algorithm.loss_type": "actor"}
# The options that mode=reasoning requires.
LANGUAGE |= {"data.task": "arithmetic", "actor.model.architecture": {"model_type": "qwen2"}}


def get(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def refused(
    cls: type, flat: dict[str, Any], error: type[ValueError] = ConfigError, source: str = "my.yaml"
) -> str:
    """Return the line of a refusal."""
    with pytest.raises(error) as caught:
        loader.load(cls, nested(flat), source=source)
    line = str(caught.value)
    assert "\n" not in line
    return line


# -------------------------------------------------------------------------------------- description
@pytest.mark.parametrize("cls", [Config, EvaluateConfig])
def test_option_has_meaning_type_and_valid_default(cls: type) -> None:
    options = loader.describe(cls)
    for path, option in options.items():
        assert option.meaning.strip(), f"{path}: write its meaning under the field in schema.py"
        assert option.path == path and option.type
        assert loader.read(cls, [("", nested({path: option.default}))]).config == cls(), path
    assert len(options) > 10


def test_describe_gives_type_limit_and_default() -> None:
    gamma = loader.describe(Config)["algorithm.gamma"]
    assert (gamma.meaning, gamma.type) == ("Discount per primitive step.", "a finite number")
    assert (gamma.limit, gamma.default) == (">= 0 and <= 1", 0.99)
    allowed = loader.describe(Config)["algorithm.micro_batch_size"].allowed
    assert allowed == "a whole number >= 1 and <= 1,000,000,000 or null"
    assert loader.describe(Config)["env.action_mapping"].allowed == "one of rescale, clip, none"


CHANGED = {"model.hidden": [32, 16], "env.kwargs": {"a": {"b": [1]}}, "algorithm.lr": 1e-3}


@pytest.mark.parametrize(("cls", "flat"), [(Config, {}), (EnvConfig, {}), (Config, CHANGED)])
def test_load_inverts_dump(cls: type, flat: dict[str, Any]) -> None:
    config = loader.load(cls, nested(flat))
    plain = loader.dump(config)
    assert type(plain) is dict and loader.load(cls, plain) == config
    assert plain["model"]["hidden"] == [32, 16] if flat else config == cls()


def test_configs_are_frozen_copies_and_an_empty_section_sets_nothing() -> None:
    kwargs = {"a": [1]}
    config = loader.load(Config, {"env": {"kwargs": kwargs}})
    kwargs["a"].append(2)
    assert config.env.kwargs == {"a": [1]}
    with pytest.raises(FrozenInstanceError):
        config.seed = 1
    sections = {"algorithm": None, "env": {}, "model": {"hidden": [8]}}
    assert loader.load(Config, sections).model.hidden == (8,)


# ----------------------------------------------------------------------------------------- accepted
CONVERTED = [
    *TABLES["converted"],
    ("model.hidden", [256, 128], (256, 128)),
    ("model.hidden", [], ()),
]


@pytest.mark.parametrize(("path", "written", "value"), CONVERTED)
def test_value_is_converted(path: str, written: object, value: object) -> None:
    read = get(loader.read(Config, [("", nested({path: written}))]).config, path)
    assert read == value and type(read) is type(value)


# ----------------------------------------------------------------------------------- refused values
TOO_LARGE = ("algorithm.lr", 10**400, ["finite"])


@pytest.mark.parametrize(("path", "value", "parts"), [*TABLES["refused"], TOO_LARGE])
def test_value_is_refused(path: str, value: object, parts: list[str]) -> None:
    line = refused(Config, {path: value}, PlacementError if path == "placement" else ConfigError)
    assert path in line
    for part in parts:
        assert part in line, line


def test_refusal_names_the_layer() -> None:
    assert "(my.yaml)" in refused(Config, {"algorithm.gamma": 2})
    assert "()" not in refused(Config, {"algorithm.gamma": 2}, source="")
    with pytest.raises(ConfigError, match=r"^3 = 4"):  # a name that is no text
        loader.load(Config, {3: 4})
    line = refused(Config, {"cluster.num_nodes": 2}, PlacementError)
    assert line.startswith("remove cluster.num_nodes")


def test_placement_and_component_placement_exclude_each_other() -> None:
    devices = {"env,rollout,actor": "0-3"}
    loaded = loader.load(Config, {"cluster": {"component_placement": devices}})
    assert loaded.cluster.component_placement == devices
    line = refused(
        Config, {"placement": "fused", "cluster": {"component_placement": devices}}, PlacementError
    )
    assert "remove placement = fused, or cluster.component_placement" in line
    line = refused(Config, {"cluster": {"max_lag": 2}}, PlacementError)
    for part in ("remove cluster.max_lag", "placement=local", "choose a placement (fused,"):
        assert part in line


def test_long_message_keeps_beginning_and_end() -> None:
    assert fit_message("x" * 300) == "x" * 300
    line = fit_message("env.id = " + "x" * 5000 + " must be short; write env.id=a")
    assert len(line) == LONGEST_LINE
    assert line.startswith("env.id = xxx") and line.endswith("write env.id=a")
    assert join_names(["a", "b"]) == "a, b" and join_names([]) == "none"
    assert join_names(["aaaa", "bbbb", "cccc"], limit=9) == "aaaa and 2 more"
    assert len(join_names(["x" * 500, "y"], limit=50)) < 70


# ------------------------------------------------------------------------------------- unknown keys
@pytest.mark.parametrize(("path", "suggestion"), TABLES["unknown"].items())
def test_unknown_key(path: str, suggestion: str) -> None:
    line = refused(Config, {path: 0.5})
    assert line.startswith(f"{path} = 0.5 (my.yaml): no such option; ")
    assert suggestion in line, line


@pytest.mark.parametrize(
    "path", [p for p in loader.describe(Config) if len(p.rpartition(".")[2]) > 3]
)
def test_missing_letter_suggests_the_option(path: str) -> None:
    section, dot, leaf = path.rpartition(".")
    line = refused(Config, {f"{section}{dot}{leaf[:1]}{leaf[2:]}": 1})
    assert f"{path}?" in line or f"(= {path})" in line or f"belongs to {path}" in line, line


def test_removed_options_of_a_stored_run() -> None:
    assert not REMOVED.keys() & {*loader.describe(Config), *loader.alias_paths(Config)}
    for path, option in REMOVED.items():
        for value in option.accepted or ():
            assert loader.load(Config, nested({path: value}), source=STORED_RUN) == Config(), path
        assert refused(Config, {path: 8}).startswith(f"{option.hint}: {path} = 8 (my.yaml)")
    same = {"critic.weight_decay": 0.1, "algorithm.weight_decay": 0.1}
    assert loader.read(Config, [(STORED_RUN, nested(same))]).config.critic == Config().critic
    file = {"reward.path": "/g.py", "reward.name": "score"}
    assert loader.read(Config, [(STORED_RUN, nested(file))]).config.reward.grader == "/g.py:score"


BETAS = {"algorithm.adam_beta1": 0.8, "algorithm.adam_beta2": 0.95}
TWO_NUMBERS = [
    ({"model.obs_eps": 1e-8, "model.obs_std_eps": 0.01}, "model.obs_eps", (1e-8, 0.01)),
    (BETAS, "algorithm.adam_betas", (0.8, 0.95)),
]


@pytest.mark.parametrize(("stored", "path", "value"), [*TABLES["stored"], *TWO_NUMBERS])
def test_two_options_of_a_stored_run_become_one(
    stored: dict[str, Any], path: str, value: Any
) -> None:
    assert attrgetter(path)(loader.load(Config, nested(stored), source=STORED_RUN)) == value


@pytest.mark.parametrize(
    ("path", "value"), [("critic.lr_schedule", "cosine"), ("model.heads", 8), ("rollout.slots", 8)]
)
def test_removed_option_with_another_value_is_refused(path: str, value: Any) -> None:
    line = refused(Config, {path: value}, source=STORED_RUN)
    for part in (path, show(value), "run/config.yaml", REMOVED[path].hint):
        assert part in line


@pytest.mark.parametrize("path", sorted(REFUSED))
def test_refused_option_has_a_reason(path: str) -> None:
    assert refused(Config, {path: 8}) == f"{path} = 8 (my.yaml) is refused: {REFUSED[path]}"


def test_option_of_the_other_mode_is_refused() -> None:
    for mode, other, flat in (
        ("embodied", "reasoning", {"critic.update_epoch": 3}),
        ("embodied", "reasoning", {"algorithm.response_length": 3}),
        ("embodied", "reasoning", {"evaluation.n": 3}),
        ("reasoning", "embodied", {"env.num_envs": 3}),
        ("reasoning", "embodied", {"algorithm.horizon": 3}),
        ("reasoning", "embodied", {"evaluation.video_episodes": 3}),
    ):
        ((path, value),) = flat.items()
        line = refused(Config, {**(LANGUAGE if mode == "reasoning" else {}), **flat})
        assert line == f"remove {path}, or set mode={other}: mode={mode} ignores {path} = {value}"


@pytest.mark.parametrize("mode", ["embodied", "reasoning"])
def test_relevant_omits_options_of_the_other_mode(mode: str) -> None:
    config = loader.load(Config, nested(LANGUAGE if mode == "reasoning" else {}))
    kept = loader.relevant(config)
    assert loader.load(Config, kept) == config
    assert ("env" in kept) == (mode == "embodied") == ("horizon" in kept["algorithm"])
    assert ("critic" in kept) == (mode == "reasoning") == ("n" in kept["evaluation"])


@pytest.mark.parametrize(("placement", "message"), TABLES["placed"])
def test_component_placement(placement: dict[str, Any], message: str | None) -> None:
    for name in ("component_placement", "cluster"):
        layer = {name: placement if name != "cluster" else {"component_placement": placement}}
        if message is None:
            loaded = loader.read(Config, [("a.yaml", nested(LANGUAGE)), ("b.yaml", layer)]).config
            validation.check(loaded)
            assert loaded.cluster.component_placement == placement
        else:
            line = refused(Config, {**LANGUAGE, **layer}, PlacementError)
            assert message in line and "placement = {" in line


# ------------------------------------------------------------------------------------------ aliases
# Every alias of OPTIONS.md -> a value that is not the default, and what it sets.
OPTIONS_MD: dict[str, tuple[Any, list[str]]] = TABLES["options_md"]


@pytest.mark.parametrize("alias", OPTIONS_MD)
def test_alias_of_options_md(alias: str) -> None:
    value, names = OPTIONS_MD[alias]
    loaded = loader.read(Config, [("file", nested({alias: value}))])
    paths = [f"algorithm.{name}" for name in names]
    assert [get(loaded.config, p) for p in paths] == [value] * len(paths)
    assert loaded.aliases == ((alias, ", ".join(paths)),)
    assert loaded.origin == dict.fromkeys(paths, "file")
    # The same value twice is accepted, a different value is refused.
    loader.read(Config, [("file", nested({alias: value, paths[0]: value}))])
    other = loader.describe(Config)[paths[0]].default
    line = refused(Config, {alias: value, paths[0]: other}, source="file")
    for word in (alias, paths[0], show(value), show(other), "(file)", "keep one"):
        assert word in line


def test_aliases_name_existing_options() -> None:
    known = {k: x for k, x in loader.alias_paths(Config).items() if k != loader.DUAL_CLIP}
    assert {f"{s}.{a}".lstrip(".") for s, table in ALIASES.items() for a in table} == set(known)
    assert all(t in loader.describe(Config) for ts in known.values() for t in ts)
    assert not set(known) & set(loader.describe(Config))


def test_names_of_other_trainers_are_answered_with_the_option() -> None:
    for name, option in SIMILAR.items():
        assert f"did you mean {option}" in refused(Config, {name: 3})


@pytest.mark.parametrize(
    ("path", "word"), [(p, w) for p, words in VALUE_ALIASES.items() for w in words]
)
def test_alias_of_a_value(path: str, word: str) -> None:
    loaded = loader.read(Config, [("", nested({path: word}))])
    assert get(loaded.config, path) == VALUE_ALIASES[path][word]
    assert loaded.aliases == ((f"{path}={word}", f"{path}={VALUE_ALIASES[path][word]}"),)


def test_dual_clip_is_one_plus_two_clip_ratios() -> None:
    def c(**algorithm: Any) -> float | None:
        return loader.load(Config, {"algorithm": algorithm}).algorithm.clip_ratio_c

    assert c(dual_clip_loss=True) == pytest.approx(1.4)  # 1 + 2 x 0.2
    assert c(dual_clip_loss=True, clip_ratio_high=0.3) == pytest.approx(1.6)
    assert c(dual_clip_loss=True, clip_ratio=0.1) == pytest.approx(1.2)
    assert c(dual_clip_loss=False) is None
    file, flag = {"algorithm": {"clip_ratio_c": 3.0}}, {"algorithm": {"dual_clip_loss": False}}
    loaded = loader.read(Config, [("file", file), ("flag", flag)])
    assert loaded.config.algorithm.clip_ratio_c is None
    assert "true or false" in refused(Config, {"algorithm.dual_clip_loss": 3})
    assert "keep one" in refused(
        Config, {"algorithm.dual_clip_loss": True, "algorithm.clip_ratio_c": 3.0}
    )
    assert "number" in refused(Config, {"algorithm.clip_ratio_c": True})


# ------------------------------------------------------------------------------------------- layers
def test_later_layer_wins_under_any_alias() -> None:
    low = {
        "algorithm": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "vf_coef": 0.5},
        "env": {"kwargs": {"a": 1}},
    }
    high = {"algorithm": {"clip_ratio": 0.3}, "env": {"kwargs": {"b": 2}}}
    loaded = loader.read(Config, [("low", low), ("high", high)])
    a = loaded.config.algorithm
    assert (a.clip_ratio_low, a.clip_ratio_high, a.value_loss_coef) == (0.3, 0.3, 0.5)
    assert loaded.config.env.kwargs == {"a": 1, "b": 2}
    assert loaded.origin["algorithm.clip_ratio_low"] == "high"
    assert loaded.origin["algorithm.value_loss_coef"] == "low"
    # an alias below, one of its names above
    a = loader.read(
        Config, [("high", high), ("flag", {"algorithm": {"clip_ratio_high": 0.28}})]
    ).config.algorithm
    assert (a.clip_ratio_low, a.clip_ratio_high) == (0.3, 0.28)


def test_deliberate_options_differ_or_are_flags() -> None:
    loaded = loader.read(
        Config, [("file", {"seed": 0, "updates": 3}), ("flag", {"save_every": 50})]
    )
    assert loaded.deliberate() == {"updates"}
    assert loaded.deliberate({"flag"}) == {"updates", "save_every"}


# ----------------------------------------------------------------------------------------- evaluate
def test_options_of_evaluate() -> None:
    assert "checkpoint=runs/" in refused(EvaluateConfig, {})
    assert loader.load(EvaluateConfig, {"checkpoint": "runs/x"}).episodes == 100
    line = refused(EvaluateConfig, {"checkpoint": "x", "video": False, "video_episodes": 3})
    assert "video_episodes = 3" in line
    assert "video=true" in line
    assert loader.load(EvaluateConfig, {"checkpoint": "x", "video_episodes": 0}).video


def test_env_options_of_evaluate_are_typed() -> None:
    config = loader.load(
        EvaluateConfig, nested({"checkpoint": "x", "env.id": "A-v1", "env.max_episode_steps": 5})
    )
    assert config.env == {"id": "A-v1", "max_episode_steps": 5}
    assert "env.max_episode_steps = 0" in refused(
        EvaluateConfig, {"checkpoint": "x", "env.max_episode_steps": 0}
    )
    assert "env.max_episode_steps" in refused(
        EvaluateConfig, {"checkpoint": "x", "env.max_episode_step": 5}
    )
    assert "set num_envs" in refused(EvaluateConfig, {"checkpoint": "x", "env.num_envs": 4})
    assert "belongs to env.id" not in refused(EvaluateConfig, {"checkpoint": "x", "episods": 4})
