"""The settings of a theory experiment, from YAML and `--key.sub=value` overrides, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.build import Rules, enforce
from olmo_sparsity.config.schema import option
from olmo_sparsity.config.yaml_files import load
from study.theory.planted import (
    Planted,
    drifting_shapes,
    marker_background,
    order_tokens,
    parity_tokens,
    shapes_within,
    translated_shapes,
    uniform_subsets,
)


@dataclass
class LearningConfig:
    num_steps: int = option(300, least=1)
    batch_per_length: int = option(32, least=1)
    learning_rate: float = 0.15
    """Adam's rate for log keys and value logits; it decays linearly to zero."""


@dataclass
class CaseConfig:
    """One line of the table: a planted distribution and a hypothesis class."""

    setting: str = option(None, required=True)
    """A name in SETTINGS: local, nonlocal, coupled …"""

    num_places: int = option(None, required=True, least=1)
    """k of the data."""

    attention_places: int | None = option(None, least=1)
    """k of the attention class; None: the k of the data."""

    objective: Literal["mixture", "minimax"] = "mixture"
    """Eq. (3), or the largest risk over the training lengths."""

    marker_rate: float = 0.01
    """Rate of background places with a token that could have been planted."""

    train_length: int | None = option(None, least=1)
    """L of this case; None: the run's L."""


@dataclass
class TheoryConfig:
    output: str = "runs/theory"
    """Folder for settings.json, table.parquet and meta.json."""

    train_length: int = option(16, least=1, most=10**5)
    """L: training mixes all lengths from L/2 to L."""

    test_multiples: list[int] = option([1, 2, 4, 8], least=1, nonempty=True, distinct=True)
    """L̄ as multiples of L."""

    local_span: int = option(4, least=1)
    """L_local: the widest span of a planted set in the local settings, ends included."""

    coupled_window: int = option(1, least=1)
    """The widest span, in position IDs, of a key function in the coupled settings."""

    seeds: list[int] = option([0, 1, 2, 3, 4], least=0, nonempty=True, distinct=True)
    num_strings: int = option(2000, least=1, most=10**7)
    """Strings sampled per length and seed."""

    learning: LearningConfig = field(default_factory=LearningConfig)
    cases: list[CaseConfig] = option([], nonempty=True, required=True)


def load_theory_config(path: str | Path, overrides: list[str]) -> TheoryConfig:
    config = load(TheoryConfig, path, overrides)
    enforce(str(path), _rules(config))
    return config


def _rules(config: TheoryConfig) -> Rules:
    if not Path(config.output).name:
        yield f"output='{config.output}' must be a path with a name"
    for index, case in enumerate(config.cases):
        longest = case.train_length or config.train_length
        shortest = (longest + 1) // 2
        places = case.attention_places or case.num_places
        if max(case.num_places, places) > shortest:
            yield f"cases[{index}].num_places={case.num_places} must lie between 1 and {shortest}"


# --- the named settings ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Which assumptions of the theorems the data and the class satisfy."""

    places: Literal["local", "anywhere", "adjacent", "drifting"]
    coupled: bool = False
    task: Literal["parity", "order"] = "parity"
    keys: Literal["local", "trained", "everywhere", "coupled", "tokens"] = "local"
    """The key function. local: 0 beyond L_local; trained: 0 beyond L, the widest span in training;
    everywhere: also for wider spans, where the key stays as initialised; tokens: independent of
    places; coupled: 0 beyond coupled_window position IDs."""


SETTINGS = {
    # (a) and (d): all assumptions of Theorem 4.3.
    "local": Setting("local"),
    # (b) planted places anywhere, so keys must reach as far as training strings do.
    "nonlocal": Setting("anywhere", keys="trained"),
    # (c) the same data, position IDs coupled (Proposition 4.4).
    "coupled": Setting("anywhere", coupled=True, keys="coupled"),
    # One assumption broken at a time: local data but a non-local class; wide keys left as
    # initialised; keys independent of places.
    "local_wide_keys": Setting("local", keys="everywhere"),
    "nonlocal_wide_keys": Setting("anywhere", keys="everywhere"),
    "nonlocal_token_keys": Setting("anywhere", keys="tokens"),
    # (d) disagreeing lengths: the last training length plants another shape than the others.
    "drifting": Setting("drifting"),
    # With k = 1, relativity makes attention blind to order.
    "order": Setting("adjacent", task="order"),
}

_DRIFT_RARE = 0.05


def build_planted(config: TheoryConfig, case: CaseConfig) -> Planted:
    setting = setting_of(case)
    k = case.num_places
    if setting.places == "local":
        law = translated_shapes(shapes_within(k, config.local_span))
    elif setting.places == "adjacent":
        law = translated_shapes([tuple(range(k))])
    elif setting.places == "drifting":
        shapes = shapes_within(k, config.local_span)
        switch = case.train_length or config.train_length
        law = drifting_shapes([shapes[0], shapes[-1]], switch, _DRIFT_RARE)
    else:
        law = uniform_subsets(k)
    if setting.task == "order" and k != 2:
        raise ConfigError(f"setting order plants pairs: num_places={k} must be 2")
    vocabulary = order_tokens() if setting.task == "order" else parity_tokens(k)
    background = marker_background(case.marker_rate)
    return Planted(law, *vocabulary, background, coupled=setting.coupled)


def setting_of(case: CaseConfig) -> Setting:
    if case.setting not in SETTINGS:
        raise ConfigError(f"setting '{case.setting}' is not one of {', '.join(SETTINGS)}")
    return SETTINGS[case.setting]
