"""Define the named settings that the experiments compare, and build their planted distributions.

Place in the flow: settings → **planted distributions** → experiment.py and bridge.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from olmo_sparsity.errors import ConfigError
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
from study.theory.settings import CaseConfig, TheoryConfig


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
