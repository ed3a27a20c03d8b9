"""Options: declared once, the same for functions and on the command line."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields, replace
from typing import Any

import numpy as np
import pytest

from olmo_sparsity import explain, measure
from olmo_sparsity.analysis.explain.request import ExplainRequest
from olmo_sparsity.analysis.measurement import measurement
from olmo_sparsity.analysis.measurement.fitting import say_defaults_of_length
from olmo_sparsity.analysis.measurement.request import MeasureRequest
from olmo_sparsity.analysis.options import (
    ExplainSettings,
    LossSettings,
    ModelOptions,
    Settings,
    TextOptions,
    parse_share,
)
from olmo_sparsity.analysis.report.curves import SHARED_WINDOWS
from olmo_sparsity.analysis.request import build_group
from olmo_sparsity.analysis.results.compare import COMPARED_WINDOWS
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.command.arguments import build_parser
from olmo_sparsity.command.cli import main
from olmo_sparsity.config.command_line import given_options
from olmo_sparsity.text.documents import Documents
from tests.support.measurements import SETTINGS, VOCAB, loaded, untrained

CHANGE_WHAT_A_NUMBER_MEANS = {
    *("long", "short", "stride", "prefix_ids", "distant_states", "control", "seed"),
}
"""Settings of `measure` in which two measurements to compare should agree."""

CHANGE_WHICH_NUMBERS_THERE_ARE = {
    *("sample", "blocks", "units", "selectors", "ks", "replacements", "draws", "halves"),
    *("share", "min_gap", "sets", "max_targets"),
}
"""Those that say which targets and units are evaluated, and how exactly: pairs of rows agree in
them, or there is no pair."""


class Everything(dict):
    """A function for any command."""

    def __getitem__(self, name: str) -> Any:
        return name


def parsed(*words: str) -> dict[str, Any]:
    options = build_parser(Everything()).parse_args(words)
    schemas = {"explain": (ExplainSettings, ModelOptions), "losses": (LossSettings,)}
    found = schemas.get(words[0], (Settings, TextOptions, ModelOptions))
    return given_options(options, {item.name for schema in found for item in fields(schema)})


REQUESTS = {explain: ExplainRequest, measure: MeasureRequest}
INSIDE = {"shard", "command", "typed", "prefix_ids"}
"""Fields that a function does not take."""


@pytest.mark.parametrize("function", REQUESTS, ids=lambda function: function.__name__)
def test_a_function_takes_what_its_request_holds(function: Any) -> None:
    shown, request = inspect.signature(function).parameters, REQUESTS[function]
    assert set(shown) == request.accepted_keywords() - INSIDE
    declared = [
        item for kind in (request, *request.group_classes().values()) for item in fields(kind)
    ]
    for item in declared:
        if item.name in shown:
            expected = item.default if item.default is not MISSING else inspect.Parameter.empty
            assert shown[item.name].default == expected
            assert item.name in function.__doc__
    assert all(p.annotation is not p.empty for p in shown.values())
    with pytest.raises(TypeError, match="unit"):
        request.of(model="demo", unit="words")


def test_what_is_typed_is_what_a_function_takes() -> None:
    words = ("--ks=1,4", "--units", "tokens,span:4", "--share=top5%", "--max-targets=2", "--seed=3")
    words += ("--sets=gap", "--distant-states=isolated", "--device-map=auto", "--control-tokens")
    given = parsed("measure", "M", "--out=o", *words)
    settings = build_group(Settings, given)
    expected = Settings(
        ks=(1, 4),
        units=("tokens", "span:4"),
        share=0.05,
        max_targets=2,
        seed=3,
        sets=("gap",),
        distant_states="isolated",
    )
    assert settings == expected
    assert build_group(TextOptions, given) == TextOptions(control_tokens=True)
    assert build_group(ModelOptions, given) == ModelOptions(device_map="auto")
    assert build_group(
        ExplainSettings, parsed("explain", "M", "--text=t", "--long=30", "-k", "2")
    ) == (ExplainSettings(long=30, k=2))
    read = parsed("losses", "M", "N", "--text=t", "--length=64", "--documents=9")
    assert build_group(LossSettings, read) == LossSettings(length=64, documents=9)
    assert parsed("measure", "M", "--out=o") == {}  # so that defaults stand in one place


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["measure", "M", "--out=o", "--ks=1,x"], "ks[1] must be a whole number, not 'x'"),
        (["measure", "M", "--out=o", "--share=ten"], "share=ten must be all, or a share"),
        (
            ["explain", "M", "--text=README.md", "--long=some"],
            "long must be a whole number or all, not 'some'",
        ),
        (
            ["losses", "M", "--text=README.md", "--documents=5"],
            "documents=5 must be at least 8",
        ),
        *(
            (
                ["measure", "M", "--out=o", f"--{name}=r", "--blocks=2", "--max-targets=2"],
                f"blocks, max_targets cannot be combined with {name.replace('-', '_')}",
            )
            for name in ("targets", "choices", "at", "target-field")
        ),
    ],
)
def test_what_no_option_takes_is_refused_before_a_model_is_read(
    words: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    try:
        code: Any = main(words)
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_one_value_stands_for_a_list_and_unknown_names_are_refused() -> None:
    assert build_group(Settings, {"ks": 4, "selectors": "add_one"}) == Settings(
        ks=(4,), selectors=("add_one",)
    )
    with pytest.raises(ConfigError, match="control must be one of unrelated, matched, shuffled"):
        build_group(Settings, {"control": "some"})
    with pytest.raises(ConfigError, match="chat must be true or false, not 'yes'"):
        build_group(ExplainSettings, {"chat": "yes"})
    assert [parse_share(text) for text in ("all", "top10%", "0.1", "1")] == [1.0, 0.1, 0.1, 1.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (replace(SETTINGS, selectors=("guess",)), "'guess' is not a selector; pass one of add_one"),
        (replace(SETTINGS, ks=(11,)), "11 is more than the 10 distant units"),
        (replace(SETTINGS, ks=(9,)), r"9 is more than the 8 distant units \(span:3\)"),
        (replace(SETTINGS, units=("span:1",)), "units=span:1 is none of"),
        (replace(SETTINGS, ks=(1, 1)), "ks=1,1 holds one value twice"),
        (replace(SETTINGS, min_gap=float("nan")), "min_gap=nan"),
        (replace(SETTINGS, share=10.0), "share=10.0 must be at most 1"),
        (replace(SETTINGS, draws=7), "8 documents can replace each other"),
        (replace(SETTINGS, long=16, short=16, stride=1), "short=16 must be below"),
        (replace(SETTINGS, long=60, short=6, stride=1), "longer than 60 tokens"),
        (replace(SETTINGS, units=("words",)), "no tokenizer"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: Settings, message: str) -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(10, 40, 12)
    documents = Documents.of([generator.integers(0, VOCAB, length) for length in lengths])
    request = MeasureRequest(model=loaded(untrained()), documents=documents, settings=settings)
    with pytest.raises((ConfigError, DataError), match=message):
        measurement.measure(request.checked())


def test_a_measurement_of_whole_documents_is_small_by_default() -> None:
    whole, equal = Settings(), Settings(long=96)
    chosen = [(one.sets, one.max_targets, one.draws, one.halves) for one in (whole, equal)]
    assert chosen == [(("gap",), 4, 1, 0), (("gap",), "all", 3, 16)]
    assert Settings(sets=("every",), draws=2, halves=8).changed_options == {
        "sets": ("every",), "draws": 2, "halves": 8
    }  # fmt: skip


@pytest.mark.parametrize("long", ["all", 96, 192, 4096])
def test_the_default_selectors_do_not_depend_on_the_window(long: Any) -> None:
    assert Settings(long=long).selectors == ("add_one_screened", "random")
    assert Settings(long=long, distant_states="replaced").selectors == ("halving",)


def test_an_unknown_interpretation_is_refused_when_settings_are_made() -> None:
    with pytest.raises(ConfigError, match=r"distant_states=both .* contextual, isolated, replaced"):
        replace(SETTINGS, distant_states="both")


def test_a_window_of_fixed_length_says_which_defaults_it_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say_defaults_of_length(Settings(long=1024, halves=0, stride=64, selectors=("add_one",)))
    said = capsys.readouterr().err
    assert "long=1024 has other defaults than long=all: max_targets=all (4); draws=3 (1)" in said
    say_defaults_of_length(Settings())
    given: dict[str, Any] = {"max_targets": 4, "halves": 0, "draws": 1, "stride": 64}
    say_defaults_of_length(Settings(long=64, selectors=("random",), **given))
    assert "defaults" not in capsys.readouterr().err


def test_each_setting_of_measure_is_one_to_compare_or_not() -> None:
    """A new setting belongs to one of the two sets, and if it changes what a number means, to
    `COMPARED_WINDOWS` or `_conditions` of compare.py, and perhaps to `SHARED_WINDOWS` of curves."""
    every_setting = {item.name for item in fields(Settings)}
    assert every_setting == CHANGE_WHAT_A_NUMBER_MEANS | CHANGE_WHICH_NUMBERS_THERE_ARE
    in_windows = CHANGE_WHAT_A_NUMBER_MEANS - {"control", "seed", "prefix_ids"}
    assert {*COMPARED_WINDOWS} == in_windows | {"prefix"}
    assert {*SHARED_WINDOWS} == in_windows - {"long"}
