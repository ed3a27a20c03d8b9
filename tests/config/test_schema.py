"""Configuration: nothing unknown, nothing ignored, and what is written reads back the same."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from olmo_sparsity.base.errors import ConfigError
from olmo_sparsity.config.installed import CONFIGS, installed_configs, read_config
from olmo_sparsity.config.run import flatten, load_config, load_saved_config, save_config
from olmo_sparsity.config.yaml_files import read_given
from olmo_sparsity.experiment.file import read_experiment


def test_overrides_reach_their_key(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("data: {tokenizer: {train_vocab: 300}}\n")
    config = load_config(path, ["--training.length=32", "--model.d_model=96", "--seed=4"])
    assert (config.training.length, config.model.d_model, config.seed) == (32, 96, 4)
    with pytest.raises(ConfigError, match="--seed=VALUE"):
        load_config(path, ["--seed"])
    for deep in ("--seed=" + "[" * 50_000, "--" + "a." * 5000 + "a=1"):
        with pytest.raises(ConfigError, match="nested too deep"):
            load_config(path, [deep])


def test_numbers_dates_and_references_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("""
        run_folder: runs/${optimizer.learning_rate}
        seed: ${training.batch_size}
        optimizer: {learning_rate: 1e-3}
        training: {batch_size: 8}
        data: {folder: 2026-01-01, tokenizer: {train_vocab: 300}}
    """)
    config = load_config(path, ["--training.batch_size=4", "--optimizer.eps=1e-6"])
    assert (config.run_folder, config.seed, config.optimizer.eps) == ("runs/0.001", 4, 1e-6)
    assert config.data.folder == "2026-01-01"
    save_config(config, tmp_path / "saved.yaml")
    assert load_saved_config(tmp_path / "saved.yaml") == config
    for text, message in (
        ("seed: ${seed}", "'${seed}' must name another key"),
        ("seed: ${nothing.there}", "'${nothing.there}' must name another key"),
        ("seed: 1\nseed: 2", "it has seed twice (lines 1 and 2)"),
        ("data:\n  folder: a\n  folder: b", "it has folder twice (lines 2 and 3)"),
        ("run_folder: ' '", "run_folder=' ' is blank"),
        ("data: {folder: ''}", "data.folder='' is blank"),
        ("seed: 1\ntraining: {length: " + "9" * 5000 + "}", "line 2 has a number of 5,000 digits"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_config(path)


@pytest.mark.parametrize(
    ("written", "number"),
    [("010", 10), ("0100", 100), ("0o10", 8), ("0x1F", 31), ("+7", 7), ("08", 8)],
)
def test_a_number_is_read_by_the_rules_of_yaml_1_2(
    written: str, number: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"data: {{tokenizer: {{train_vocab: 300}}}}\nseed: {written}\n")
    assert load_config(path).seed == number
    path.write_text("data: {tokenizer: {train_vocab: 300}}\n")
    assert load_config(path, [f"--seed={written}"]).seed == number


@pytest.mark.parametrize("written", ["1:30", "1_000", "0b11", "1:30.5", "0o9"])
def test_what_is_a_number_in_yaml_1_1_alone_is_a_text(written: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("data: {tokenizer: {train_vocab: 300}}\n")
    with pytest.raises(ConfigError, match=f"seed must be a whole number, not '{written}'"):
        load_config(path, [f"--seed={written}"])
    config = load_config(path, [f"--run_folder={written}"])
    assert config.run_folder == written
    save_config(config, tmp_path / "saved.yaml")
    assert load_saved_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize("written", ["010", "0o10", "0x1F", "1e3", "1.5", ".5", "-.inf", "true"])
def test_a_text_that_looks_like_a_number_reads_back_as_text(written: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("data: {tokenizer: {train_vocab: 300}}\n")
    config = replace(load_config(path), run_folder=written)
    save_config(config, tmp_path / "saved.yaml")
    assert load_saved_config(tmp_path / "saved.yaml") == config


def test_a_model_of_a_grid_trains_the_seed_that_its_name_says(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("folder: runs/a\nconfigs: [quick.yaml]\ngrid: {seed: [010, 011]}\n")
    models = read_experiment(str(path)).models
    seeds = {model.name.rpartition("seed")[2]: model.settings.seed for model in models}
    assert seeds == {"10": 10, "11": 11}


@pytest.mark.parametrize("override", ["--seed=", "--seed= ", "--optimizer.learning_rate="])
def test_an_override_without_a_value_is_refused_by_its_name(override: str) -> None:
    key = override.strip("-= ")
    with pytest.raises(ConfigError, match=re.escape(f"--{key}=VALUE")):
        load_config("quick.yaml", [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--data.corpus.weight=2", r"only a list of sections has it \(data\.corpus\[0\]"),
        ("--base=quick.yaml", "read from the config file"),
        ("--run_folder=~/run", "run_folder=~/run: ~ is not replaced here"),
        ("--data.folder=~/text", "data.folder=~/text: ~ is not replaced here"),
    ],
)
def test_an_override_that_belongs_elsewhere_says_where(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("quick.yaml", [override])


@pytest.mark.parametrize("base", ["null", "''", "[quick.yaml]"])
def test_a_base_that_is_no_path_is_named(base: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"base: {base}")
    with pytest.raises(ConfigError, match=r"run\.yaml': base=.* must be the path of a config"):
        load_config(path)


DEEP = "a: " + "[" * 50_000 + "]" * 50_000
# Nine billion of the letter, when it is read.
BOMB = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghijk")
)


@pytest.mark.parametrize(
    "text",
    [
        *("a: [", "- 1\n- 2\n", "\x00", "base: nowhere.yaml", "a: &a [*a]", DEEP, "- " * 50_000),
        *(BOMB, "base: back.yaml"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    (tmp_path / "back.yaml").write_text("base: bad.yaml")
    with pytest.raises(ConfigError, match=r"bad\.yaml|nowhere\.yaml"):
        load_config(path)


@pytest.mark.parametrize("line", ["seed: ${oc.env:SECRET}", "base: /etc/hostname", "base: a.yaml"])
def test_what_a_run_saved_refers_to_nothing_else(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may come from anybody."""
    monkeypatch.setenv("SECRET", "731650894")
    (tmp_path / "a.yaml").write_text("seed: 1")
    (tmp_path / "config.yaml").write_text(line)
    said = "seed must be a whole number|unknown key 'base'"
    with pytest.raises(ConfigError, match=said) as caught:
        load_saved_config(tmp_path / "config.yaml")
    assert "731650894" not in str(caught.value)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_shipped_configs_are_found_by_name_from_any_folder(elsewhere: Path) -> None:
    shipped = load_config(CONFIGS / "figure2.yaml")
    assert load_config("figure2.yaml") == load_config("configs/figure2.yaml") == shipped
    models = read_experiment("experiments/quick.yaml").models
    assert all(Path(model.config).is_file() for model in models)
    assert read_experiment("sweeps/quick.yaml").models == models  # the folder's earlier name
    (elsewhere / "mine.yaml").write_text("base: figure2.yaml\nseed: 7\n")
    assert load_config("mine.yaml") == replace(shipped, seed=7)
    (elsewhere / "figure2.yaml").write_text((CONFIGS / "quick.yaml").read_text())
    assert load_config("figure2.yaml") == load_config("quick.yaml")  # a file that exists wins
    for name in ("experiments/c4_laddr.yaml", "configs/experiments/c4_laddr.yaml"):
        with pytest.raises(ConfigError, match=r"did you mean 'experiments/c4_ladder\.yaml'"):
            read_experiment(name)


def test_copies_of_shipped_configs_work_where_they_lie(elsewhere: Path) -> None:
    for name, path in installed_configs().items():
        copy = elsewhere / "a" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(read_config(name))
        assert {**read_given(copy), "models": 0} == {**read_given(path), "models": 0}  # paths
    runs, copied = (
        read_experiment(name).models
        for name in ("experiments/quick.yaml", "a/experiments/quick.yaml")
    )
    assert [run.name for run in runs] == [run.name for run in copied]
    own = elsewhere / "python.yaml"  # the name of its base, too
    own.write_text(read_config("figure2_code.yaml"))
    assert load_config("python.yaml") == load_config("figure2_code.yaml")
    with pytest.raises(ConfigError, match="no config 'nothing' is installed"):
        read_config("nothing")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_are_valid_and_read_back_the_same(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    save_config(config, tmp_path / "saved.yaml")
    assert flatten(load_config(tmp_path / "saved.yaml")) == flatten(config)


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    """A config with a list of stages in place of one length, over a base."""
    (tmp_path / "base.yaml").write_text("data: {corpus: {source: python}}\nseed: 4")
    path = tmp_path / "mixed.yaml"
    path.write_text(
        "base: base.yaml\n"
        "data:\n  tokenizer: {name: allenai_dolma2.json}\n"
        "training:\n  length: [{tokens: 8, until: 10}, {tokens: 32}]"
    )
    return path


def test_a_list_of_sections_takes_the_place_of_a_number(staged: Path) -> None:
    config = load_config(staged)
    assert (config.seed, config.data.corpus.source) == (4, "python")
    assert (config.training.length, config.training.shortest_length) == (32, 8)
    assert [config.training.length_at(step) for step in (1, 10, 11)] == [8, 8, 32]


def test_a_list_of_sections_is_saved_under_the_key_of_the_number(
    staged: Path, tmp_path: Path
) -> None:
    config = load_config(staged)
    save_config(config, tmp_path / "saved.yaml")
    assert load_saved_config(tmp_path / "saved.yaml") == config
    keys = flatten(config)
    assert keys["training.length[0].until"] == 10
    assert not {"training.length", "training.lengths"} & keys.keys()


def test_a_key_of_one_section_does_not_change_a_list_of_them(staged: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="length is a list there; give all of it"):
        load_config(staged, ["--training.length.tokens=3"])
    (tmp_path / "over.yaml").write_text("base: mixed.yaml\ntraining: {length: {tokens: 3}}")
    with pytest.raises(ConfigError, match=r"over\.yaml' over .*mixed\.yaml': length is a list"):
        load_config(tmp_path / "over.yaml")


def test_a_number_replaces_a_list_of_sections(staged: Path) -> None:
    assert load_config(staged, ["--training.length=64"]).training.lengths == []


def test_rope_and_pose_configs_differ_in_positions_alone() -> None:
    for rope_path in CONFIGS.glob("c4_*_rope.yaml"):
        rope = flatten(load_config(rope_path))
        pose = flatten(load_config(str(rope_path).replace("_rope", "_pose")))
        different = {key for key in {*rope, *pose} if rope.get(key) != pose.get(key)}
        ours = {"scheme", "target_length", "num_chunks"}
        assert different == {"run_folder", *(f"positions.{name}" for name in ours)}


@pytest.mark.parametrize(
    "name", [name for name in installed_configs() if not name.startswith("experiments")]
)
def test_no_shipped_config_leaves_more_than_ten_minutes_to_a_crash(name: str) -> None:
    assert load_config(name).checkpoint.interval_steps == 0, "auto"
