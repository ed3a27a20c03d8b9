"""What is passed in place of the right thing: an error of ours names the argument and what it may
be. Without it, each of these ends in a traceback from deep inside, or runs on in silence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import olmo_sparsity as tool
from olmo_sparsity.analysis.report.figures import draw_figure2
from olmo_sparsity.base.errors import ConfigError, UserError

TEXT = "The bridge was opened by Ada in June. It was Ada who opened it. "
SOURCES = {"a": "The bridge was opened by Ada in June.", "b": "The ferry runs daily at noon."}
QUESTION = {"sources": SOURCES, "question": "Who?", "answer": ["It was Ada."], "expect": "a"}
SMALL: dict[str, Any] = {"short": 8, "long": 16, "units": "words", "ks": 1, "draws": 1}


@pytest.fixture(scope="module")
def model() -> Any:
    return tool.load_model("demo")


@pytest.fixture(scope="module")
def documents(model: Any) -> Any:
    return tool.open_documents([TEXT * 3 + str(number) for number in range(4)], model)


@pytest.fixture(scope="module")
def results(model: Any, documents: Any) -> Any:
    return tool.measure(model, documents, halves=0, selectors="random", **SMALL)


@pytest.fixture(scope="module")
def answer(model: Any) -> Any:
    return tool.attribute(model, sources=SOURCES, question="Who?", answer=["It was Ada."], draws=2)


def refused(named: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calls the function, which must raise an error of ours, in one line, that names this."""
    with pytest.raises(UserError, match=named) as caught:
        function(*args, **kwargs)
    shown = str(caught.value)
    assert "\n" not in shown
    assert len(shown) < 400


@pytest.mark.parametrize("value", [None, 3, b"results", [], {}], ids=repr)
def test_results_are_results_or_their_folder(value: Any, results: Any, tmp_path: Path) -> None:
    refused("first=", tool.compare, value, results)
    refused("second=", tool.compare, results, value)
    refused("first=", tool.transfer, value, results)
    refused("folder=", tool.read_results, value)
    refused("results=", draw_figure2, [value], tmp_path / "a.png")
    refused("losses=", tool.summarize, value, value, value)


TOO_LONG = "a" * 300
"""The name of no file or folder: disks store 255 bytes."""


@pytest.mark.parametrize("value", [None, 3, b"a.png", [], f"{TOO_LONG}.html"], ids=repr)
def test_a_file_to_write_is_a_path(value: Any, results: Any, answer: Any) -> None:
    refused("path=", results.plot, value)
    refused("path=", answer.to_html, value)
    refused("out=", draw_figure2, [results], value)


@pytest.mark.parametrize("value", [3, b"out", [], " ", TOO_LONG], ids=repr)
def test_a_folder_to_write_is_a_path(value: Any, model: Any, documents: Any) -> None:
    refused("out=", tool.measure, model, documents, out=value, **SMALL)
    refused("out=", tool.check, model, [QUESTION], value)
    refused("out=", tool.losses_by_place, "demo", text=[TEXT], out=value)


@pytest.mark.parametrize("value", [b"bytes", [b"bytes"], bytearray(b"bytes")], ids=repr)
def test_bytes_are_not_read_as_text(value: Any, model: Any) -> None:
    remedy = "is bytes, and a text is read; decode it"
    refused(remedy, tool.measure, model, value, **SMALL)
    refused(remedy, tool.open_documents, value, model)
    refused(remedy, tool.losses_by_place, model, text=value)
    keywords = {"sources": SOURCES, "question": "Who?", "answer": "Ada"}
    for name in ("sources", "question", "answer", "reasoning", "candidates", "decoys"):
        refused(name, tool.attribute, model, **keywords | {name: value})
    refused("messages", tool.attribute, model, messages=value)
    for name in ("text", "at"):
        refused(f"{name}=", tool.explain, model, **{"text": TEXT, name: value})


def test_a_mapping_of_texts_is_told_from_a_data_set_of_splits(model: Any) -> None:
    refused(r"list\(texts.values", tool.open_documents, {"a": TEXT}, model)


@pytest.mark.parametrize("value", [None, 3, b"demo", [], {"name": "demo"}], ids=repr)
def test_a_model_is_a_name_or_a_model(value: Any, documents: Any) -> None:
    refused("model=", tool.measure, value, documents, **SMALL)
    refused("model=", tool.explain, value, text=TEXT)
    refused("scorer=", tool.recover, value, documents[0], None)
    refused("scorer=", tool.context_losses, value, documents[0], None)
    refused("scorer=", tool.influence_map, value, None, None)


@pytest.mark.parametrize("value", ["foo", "cuda:x", 3.5, ["auto"]], ids=repr)
def test_a_device_map_is_a_way_or_a_device(value: Any) -> None:
    refused("device_map=.*balanced", tool.load_model, "demo", device_map=value)


@pytest.mark.parametrize(
    ("named", "function", "args"),
    [
        ("items=3 ", tool.Documents, ("x", 3)),
        (r"items=\[3\] ", tool.Documents, ("x", [3])),
        ("tokens=", tool.Document, (np.zeros((2, 2), int),)),
        ("tokens=None", tool.Document, (None,)),
        ("long=None", tool.Windows, (None, 8)),
        ("short='8'", tool.Windows, (16, "8")),
        ("stride=True", tool.Windows, (16, 8, True)),
        ("spans=None", tool.Answer("Ada", None).pieces, ()),  # type: ignore[arg-type]
        (r"spans=\[3\]", tool.Answer("Ada", [3]).pieces, ()),  # type: ignore[list-item]
        ("text=None", tool.Answer(None, [(0, 1)]).pieces, ()),  # type: ignore[arg-type]
        (r"model=\[\] names no model", tool.losses_by_place, ([],)),
    ],
)
def test_an_object_is_made_of_the_right_things(
    named: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    refused(named, function, *args)


@pytest.mark.parametrize("value", ["x", b"x", [], {}, None], ids=repr)
def test_options_of_the_gate_have_types(value: Any, model: Any, tmp_path: Path) -> None:
    for name in ("margin", "must_pass", "new_need_source", "allow_other_model"):
        refused(f"{name}=", tool.check, model, [QUESTION], tmp_path / "out", **{name: value})


def test_questions_are_a_file_or_objects(model: Any, tmp_path: Path) -> None:
    for value in (None, 3, b"q.jsonl", ["q.jsonl"], [3]):
        refused("questions=", tool.check, model, value, tmp_path / "out")
    for value in (3, b"x", " "):
        refused("baseline=", tool.check, model, [QUESTION], tmp_path / "out", baseline=value)


def test_methods_of_an_attribution_name_their_arguments(answer: Any) -> None:
    for value in (b"1", 3, []):
        refused("citations=", answer.text, value)
    for value in ("0", 1.5, [0], True):
        refused("statement=", answer.relies_on, "a", statement=value)


def test_blank_words_are_not_a_target(model: Any) -> None:
    refused("at=' ' is blank", tool.explain, model, text=TEXT, at=" ")


def test_a_limit_is_a_number(model: Any) -> None:
    for value in ("4", [4], b"4"):
        refused("limit=", tool.open_documents, [TEXT] * 4, model, value)
    refused("quick='yes'", tool.measure, model, [TEXT] * 4, quick="yes")


def test_what_was_received_is_shown_shortly() -> None:
    with pytest.raises(ConfigError, match=re.escape("…")) as caught:
        tool.Windows("1" * 5000, 8)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


OLD_OLMO_CORE = """
import olmo_sparsity
from olmo_sparsity import *
from olmo_sparsity.base.errors import ConfigError

assert measure is olmo_sparsity.measure
assert "OLMoCoreLosses" in dir(olmo_sparsity)
try:
    olmo_sparsity.OLMoCoreLosses
except ConfigError as error:
    print(error)
"""


@pytest.mark.accept
def test_all_is_imported_beside_an_olmo_core_without_a_trainer(tmp_path: Path) -> None:
    (tmp_path / "olmo_core/distributed").mkdir(parents=True)
    for name in ("__init__.py", "distributed/__init__.py", "distributed/utils.py"):
        (tmp_path / "olmo_core" / name).touch()
    path = os.pathsep.join([str(tmp_path), str(Path(tool.__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", OLD_OLMO_CORE]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("OLMoCoreLosses requires OLMo-core 3.0 or later")
