"""What is written about the project is true of it: the file tree, the numbers, the commands."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.ladder import rank_correlation
from analysis.summary import FAR_STATES, INDUCTION_NATS
from olmo_sparsity.cli import build_parser, main
from olmo_sparsity.config import RunConfig
from olmo_sparsity.config_file import load_config
from olmo_sparsity.sweep import expand
from olmo_sparsity.tasks.experiment import fixed_settings, list_trials
from olmo_sparsity.tasks.results import format_table, read_results
from olmo_sparsity.tasks.settings import load_settings
from olmo_sparsity.theory.settings import load_theory_config
from olmo_sparsity.training.loop import train

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_file_tree_names_what_exists() -> None:
    tree = README[README.index("## File tree") :]
    for path in [*ROOT.glob("olmo_sparsity/**/*.py"), *ROOT.glob("analysis/**/*.py")]:
        if path.name != "__init__.py":
            assert path.name in tree, f"README's file tree lacks {path.relative_to(ROOT)}"
    for name in re.findall(r"\b[\w/]+\.py\b", tree):
        found = [ROOT.glob(f"{part}/**/{name}") for part in ("olmo_sparsity", "analysis")]
        assert any(map(any, found)), f"README's file tree names {name}"


def test_readme_quotes_pose_pays_as_measured() -> None:
    for row in json.loads((ROOT / "docs/results/pose_pays.json").read_text())["ranges"]:
        first, last = row["positions"]
        gap = row["rope_minus_pose"]
        line = (
            f"| {first}–{last - 1} | {row['rope']:.3f} | {row['pose']:.3f} | "
            f"{gap['mean']:+.3f} [{gap['low']:+.3f}, {gap['high']:+.3f}] |"
        )
        assert line in README, line


STORED_TASKS = sorted((ROOT / "docs/results/tasks").glob("*/accuracy.parquet"))


@pytest.mark.parametrize("path", STORED_TASKS, ids=lambda path: path.parent.name)
def test_results_quote_task_experiments_as_measured(path: Path) -> None:
    rows, meta = read_results(path.parent)
    text = (ROOT / "docs/results.md").read_text()
    assert format_table(rows) in text
    # How many at a time changes nothing in what comes out.
    assert f"{re.sub(r' --num_workers=[0-9]+', '', meta['command'])}\n" in text
    assert len({row.seed for row in rows}) >= 3
    assert all(row.seed > 0 for row in rows), "settings were chosen on seed 0"


@pytest.mark.parametrize("path", STORED_TASKS, ids=lambda path: path.parent.name)
def test_the_command_of_a_stored_result_still_asks_for_it(path: Path) -> None:
    rows, meta = read_results(path.parent)
    program, command, config, *overrides = shlex.split(meta["command"])
    settings = load_settings(config, overrides)
    assert (program, command) == ("olmo-sparsity", "task")
    assert json.loads(json.dumps(fixed_settings(settings))) == meta["settings"]
    found = {(row.scheme, row.train_k, row.seed) for row in rows}
    assert found == {(t.scheme, t.train_k, t.seed) for t in list_trials(settings)}


@pytest.mark.parametrize(
    ("name", "scheme", "k", "length", "said"),
    [
        ("scratchpad_parity_quick", "ppc", None, 200, "| 1.000 | 1.000 | 1.000 |"),
        ("scratchpad_parity_quick", "coupled", None, 200, "| 1.000 | 1.000 | {} |"),
        ("needle_quick", "pose", None, 200, "{} with PoSE at 200 tokens"),
        ("needle_quick", "pose", None, 500, "and {} at 500"),
        ("needle_quick", "rope", None, 200, "against {} and"),
        ("needle_quick", "rope", None, 500, "and {} with RoPE\nalone"),
        ("sparse_parity_quick", "pose", 2, 200, "k = 2 {} against"),
        ("sparse_parity_quick", "rope", 2, 200, "against {}, k = 4"),
        ("sparse_parity_quick", "pose", 4, 200, "k = 4 {} against"),
        ("sparse_parity_quick", "rope", 4, 200, "against {} (six seeds"),
        ("sparse_parity_2000", "pose", 4, 200, "growing k, {} against"),
        ("sparse_parity_2000", "rope", 4, 200, "against {} after a shorter\ntraining"),
        ("variable_assignment_quick", "ppc", 50, 50, "{} of chains of fifty"),
        ("variable_assignment_quick", "pose", 50, 50, "{} with RoPE + PoSE"),
        ("scratchpad_parity_solved", "rope", None, 10, "RoPE alone has {} of 10\nbits"),
        ("scratchpad_parity_solved", "rope", None, 20, "bits, {} of 20"),
        ("scratchpad_parity_solved", "rope", None, 40, "and {} of 40"),
        ("addition_quick", "coupled", None, 100, "{} of sums of 100 digits"),
    ],
)
def test_readme_quotes_tasks_as_measured(
    name: str, scheme: str, k: int | None, length: int, said: str
) -> None:
    rows, _ = read_results(ROOT / "docs/results/tasks" / name)
    mean = [
        row.exact_match
        for row in rows
        if (row.scheme, row.test_k, row.length) == (scheme, k, length)
    ]
    number = f"{sum(mean) / len(mean):.3f}"
    line = said.format(number if said.startswith("|") else number.removeprefix("0"))
    assert line in README, line


@pytest.mark.parametrize(
    ("name", "taken_back"),
    [
        ("sparse_parity_2000", "nothing"),
        ("sparse_parity_2_chunks", "four chunks: the published two"),
        ("sparse_parity_unscaled", "scaled queries"),
        ("sparse_parity_any_cuts", "aligned cuts"),
        ("sparse_parity_all_k_at_once", "growing k"),
        ("sparse_parity_1_chunk", "growing k, and all chunks but one: a random start only"),
        ("sparse_parity_4_layers", "growing k; four layers instead of two"),
    ],
)
def test_ablations_are_quoted_as_measured(name: str, taken_back: str) -> None:
    rows, _ = read_results(ROOT / "docs/results/tasks" / name)
    right = {(r.seed, r.test_k, r.length): r.exact_match for r in rows if r.scheme == "pose"}
    cells = [taken_back]
    for k in (2, 4):
        learnt = [seed for seed in range(31, 37) if right[seed, k, 50] >= 0.9]
        cells.append(str(len(learnt)))
        for length in (200, 500):
            found = [right[seed, k, length] for seed in learnt]
            cells.append(f"{min(found):.2f}–{max(found):.2f}")
    assert f"| {' | '.join(cells)} |" in (ROOT / "docs/results.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "configs/tasks").glob("*.yaml")), ids=str)
def test_task_presets_are_whole(path: Path) -> None:
    load_settings(path, [])


def test_readme_quotes_planted_as_measured() -> None:
    summary = pd.read_csv(ROOT / "docs/results/measurements/planted/summary.csv")
    own = summary[summary.control == "own"].set_index(["target_set", "selector", "k"])
    for selector in own.loc["planted"].index.unique(0):
        here, gone = own.loc["planted", selector, 2], own.loc["planted_removed", selector, 2]
        line = (
            f"| `{selector}` | {here.hit_rate:.2f} [{here.hit_low:.2f}, {here.hit_high:.2f}] "
            f"| {here.excess:+.2f} [{here.excess_low:+.2f}, {here.excess_high:+.2f}] "
            f"| {gone.excess:+.3f} [{gone.excess_low:+.3f}, {gone.excess_high:+.3f}] |"
        )
        assert line in README, line


@pytest.mark.parametrize(
    "measurement", ["quick_exact_128", "induction_contextual", "induction_isolated"]
)
def test_natural_language_tables_are_as_measured(measurement: str) -> None:
    text = (ROOT / "docs/natural_language.md").read_text()
    folder = ROOT / "docs/results/measurements" / measurement
    summary = pd.read_csv(folder / "summary.csv")
    summary = summary[summary.target_set == "gap"]
    for (selector, control), rows in summary.groupby(["selector", "control"]):
        name = f"| `{selector}` | recovery" if control == "own" else "| | foreign"
        cells = [f"{row.recovery:.2f} [{row.low:.2f}, {row.high:.2f}]" for row in rows.itertuples()]
        assert f"{name} | {' | '.join(cells)} |" in text
        if control == "own":
            cells = [
                f"{row.excess:+.2f} [{row.excess_low:+.2f}, {row.excess_high:+.2f}]"
                for row in rows.itertuples()
            ]
            assert f"| | **excess** | {' | '.join(cells)} |" in text
    kinds = pd.read_csv(folder / "dependencies.csv")
    for row in kinds[(kinds.target_set == "gap") & (kinds.selector == "add_one")].itertuples():
        cells = f"{row.share:.1%} | {row.base_share:.1%} | {row.enrichment:.2f} [{row.low:.2f}, "
        first = "" if pd.isna(row.excess_recovery) else shown_kind(row)
        assert f"| {cells}{row.high:.2f}] | {first} | {row.num_targets} |" in text
    drop = json.loads((folder / "meta.json").read_text())["gate"]["drop"]
    assert f"a drop of {drop:.2f} nats".replace("-", "−") in text


@pytest.mark.parametrize(("model", "name"), [("pose", "RoPE + PoSE"), ("rope", "RoPE alone")])
@pytest.mark.parametrize("size", [128, 256])
def test_with_and_without_pose_is_quoted_as_measured(size: int, model: str, name: str) -> None:
    folder = ROOT / f"docs/results/measurements/quick_{model}_{size}"
    meta = json.loads((folder / "meta.json").read_text())
    given = "given" in meta["targets"]
    assert given == (model != "pose" or size != 256), "one of the four chose for all"
    rows = pd.read_csv(folder / "summary.csv")
    rows = rows[(rows.target_set == "gap") & (rows.k == 8)].set_index(["selector", "control"])
    add_one = rows.loc["add_one", "own"]
    cells = [f"{meta['windows']['long']} to {meta['windows']['long'] + 31}", name]
    cells += [f"{math.log(meta['longppl']['ppl']):.3f}", f"{add_one.gap:+.3f}"]
    cells.append(shown(add_one, "recovery", ".2f"))
    cells.append(f"{rows.loc['add_one', 'foreign'].recovery:.2f}")
    cells += [shown(rows.loc[s, "own"], "excess", "+.2f") for s in ("add_one", "divergence")]
    cells += [shown(rows.loc[s, "own"], "excess", "+.2f") for s in ("random", "nearest")]
    line = f"| {' | '.join(cells)} |"
    text = (ROOT / "docs/natural_language.md").read_text()
    assert line in text, line
    nats = {"pose": {128: 0.05, 256: 0.08}, "rope": {128: 0.03, 256: 0.08}}  # said below the table
    assert round(add_one.excess * add_one.gap, 2) == nats[model][size]


COPIES = {"induction": "copies", "no_induction": "does not"}


@pytest.mark.parametrize("far", FAR_STATES)
@pytest.mark.parametrize("name", COPIES)
def test_a_model_that_copies_and_one_that_does_not_are_quoted_as_measured(
    name: str, far: str
) -> None:
    folder = ROOT / f"docs/results/measurements/{name}_{far}"
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["windows"]["far_states"] == far
    losses = pd.read_csv(folder / "losses.csv", index_col=0).loc["mean"]
    rows = pd.read_csv(folder / "summary.csv")
    rows = rows[rows.target_set == "gap"].set_index(["selector", "control", "k"])
    add_one = rows.loc["add_one", "own", 8]
    drop = f"{meta['gate']['drop']:+.2f}"
    recovery, excess = shown(add_one, "recovery", ".2f"), shown(add_one, "excess", "+.2f")
    foreign = f"{rows.loc['add_one', 'foreign', 8].recovery:.2f}"
    others = [shown(rows.loc[s, "own", 8], "excess", "+.2f") for s in ("random", "nearest")]
    in_nats = [add_one.gap * add_one[c] for c in ("excess", "excess_low", "excess_high")]
    nats = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*in_nats)
    first = [COPIES[name], FAR_STATES[far], drop]
    whole = [*first, f"{losses.loss_long:.3f}", f"{add_one.gap:+.3f}", recovery, foreign, excess]
    line = f"| {' | '.join([*whole, *others, nats])} |"
    assert line in (ROOT / "docs/natural_language.md").read_text(), line
    line = f"| {' | '.join([*first, f'{add_one.gap:+.3f}', recovery, foreign, excess, nats])} |"
    assert line in README, line


def test_the_claim_is_quoted_as_measured() -> None:
    folder = ROOT / "docs/results/measurements"
    with_context, alone = (
        pd.read_csv(folder / f"induction_{far}/summary.csv") for far in ("contextual", "isolated")
    )
    by = ["target_set", "selector", "control", "k"]
    with_context, alone = with_context.set_index(by).sort_index(), alone.set_index(by).sort_index()
    own = with_context.loc["gap", "add_one", "own"]
    foreign = with_context.loc["gap", "add_one", "foreign"].recovery
    assert f"gives\nback {own.recovery[1]:.2f} of what they all give, four as much" in README
    assert 0.95 <= own.recovery[4] <= 1.1
    assert f"of another text, the best one gives {foreign[1]:.2f}." in README
    without = alone.loc["gap", "add_one", "own", 1].recovery
    assert f"without its context\ngives back {without:.2f} (" in README
    price = [
        pd.read_csv(folder / f"{name}_contextual/losses.csv", index_col=0).loss_long["mean"]
        for name in COPIES
    ]
    assert (
        f"price**: {price[0]:.2f} nats a token with the long window, against\n{price[1]:.2f} of"
        in README
    )
    kinds = pd.read_csv(folder / "induction_contextual/dependencies.csv")
    kinds = kinds[(kinds.target_set == "gap") & (kinds.selector == "add_one")].set_index("kind")
    words = kinds.num_targets[["equal", "same_family"]].sum()
    text = (ROOT / "docs/natural_language.md").read_text()
    assert f"on {words} of the {own.num_targets[1]} targets the first choice is" in text
    paper_map = (ROOT / "docs/paper_map.md").read_text()
    for selector, k in (("add_one", 1), ("add_one", 8), ("divergence", 1), ("random", 8)):
        row = with_context.loc["gap", selector, "own", k]
        assert shown(row, "excess", "+.2f") in paper_map, (selector, k)
    for measured in (with_context, alone):
        assert shown(measured.loc["gap", "add_one", "own", 8], "excess", "+.2f") in paper_map


def test_the_claim_made_again_is_quoted_as_measured() -> None:
    folder, said = ROOT / "docs/results/measurements", []
    for far in ("contextual", "isolated"):
        rows = pd.read_csv(folder / f"induction_again_{far}/summary.csv")
        rows = rows[(rows.target_set == "gap") & (rows.selector == "add_one")]
        rows = rows.set_index(["control", "k"])
        said.append(shown(rows.loc["own", 8], "excess", "+.2f"))
        if far == "contextual":
            first = [f"{rows.loc[control, 1].recovery:.2f}" for control in ("own", "foreign")]
            num_targets = rows.num_targets.iloc[0]
    meta = json.loads((folder / "induction_again_contextual/meta.json").read_text())
    text = (ROOT / "docs/natural_language.md").read_text()
    assert f"a drop of {meta['gate']['drop']:.2f} nats, {num_targets} targets" in text
    assert f"gives back\n{first[0]}, an unrelated text's {first[1]}; excess at k = 8 " in text
    assert f"{said[0]} with context, {said[1]} alone" in text


def over_seeds(rows: pd.DataFrame) -> str:
    """Mean over seeds, and from the lowest to the highest where it matters."""

    def span(name: str) -> str:
        return f"{rows[name].mean():+.2f} [{rows[name].min():+.2f}, {rows[name].max():+.2f}]"

    means = rows[["gap", "recovery", "foreign"]].mean()
    cells = [span("drop"), f"{rows.loss_long.mean():.2f}", *(f"{mean:.2f}" for mean in means)]
    return " | ".join([*cells, span("excess")])


def test_stages_of_learning_to_copy_are_quoted_as_measured() -> None:
    table = pd.read_csv(ROOT / "docs/figures/stages_contextual.csv")
    rows = table[(table.selector == "add_one") & (table.k == 1)]
    stages = rows.groupby(rows.model.str.extract(r"induction_(\d+)_seed")[0])
    assert len(stages) == 7
    for steps, some in stages:
        assert len(some) == 3
        line = f"| {steps} | {over_seeds(some)} |"
        assert line in (ROOT / "docs/natural_language.md").read_text(), line
    value, low, high = rank_correlation(rows["drop"], rows.excess)
    assert f"{value:+.2f} [{low:+.2f}, {high:+.2f}]" in (ROOT / "docs/paper_map.md").read_text()
    passes = rows["drop"] >= INDUCTION_NATS
    assert (sum(~passes), sum(passes)) == (10, 11)  # said in words
    said = f"at most {rows.excess[~passes].max():.2f}, the eleven that pass it "
    assert f"{said}{rows.excess[passes].min():.2f} and more" in README


@pytest.mark.parametrize(("far", "k"), [("isolated", 8), ("contextual", 1)])
def test_the_ladder_is_quoted_as_measured(far: str, k: int) -> None:
    table = pd.read_csv(ROOT / f"docs/figures/ladder_{far}.csv")
    rows = table[(table.selector == "add_one") & (table.k == k)]
    names = {"pose": "RoPE + PoSE", "contiguous": "RoPE"}
    for (size, positions), some in rows.groupby(["num_parameters", "positions"]):
        line = f"| {size / 1e6:.1f}M | {names[positions]} | {over_seeds(some)} |"
        assert line in (ROOT / "docs/natural_language.md").read_text(), line
    value, low, high = rank_correlation(rows["drop"], rows.excess)
    assert f"{value:+.2f} [{low:+.2f}, {high:+.2f}]" in (ROOT / "docs/paper_map.md").read_text()
    if far == "contextual":
        tiny, small, middle, large = (
            f"{mean:.2f}".lstrip("0") for mean in rows.groupby("num_parameters").excess.mean()
        )
        said = f"{tiny} at 0.4M parameters, {small} at 1.2M, {middle} at 2.7M and\n{large} at 6.6M"
        assert said in README


def test_beyond_the_training_length_is_quoted_as_measured() -> None:
    table = pd.read_csv(ROOT / "docs/figures/beyond_contextual.csv")
    rows = table[(table.selector == "add_one") & (table.k == 1)]
    said: dict[tuple[int, str], str] = {}
    for _, row in rows.iterrows():
        in_nats = [row.gap * row[c] for c in ("excess", "excess_low", "excess_high")]
        said[row.seed, row.positions] = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*in_nats)
        cells = [f"{row['drop']:+.2f}", *(f"{row[c]:.2f}" for c in ("loss_long", "gap"))]
        cells += [f"{row.recovery:.2f}", f"{row.foreign:.2f}", shown(row, "excess", "+.2f")]
        name = {"pose": "RoPE + PoSE", "contiguous": "RoPE alone"}[row.positions]
        line = f"| {row.seed} | {name} | {' | '.join(cells)} | {said[row.seed, row.positions]} |"
        assert line in (ROOT / "docs/natural_language.md").read_text(), line
    for seed in (1, 2, 3):
        pair = f"{said[seed, 'pose']} against {said[seed, 'contiguous']}"
        assert pair in (ROOT / "docs/paper_map.md").read_text(), pair
    means = rows.groupby("positions")[["recovery", "loss_long"]].mean().loc["pose"]
    assert f"one far token of 192 gives back {means.recovery:.2f} of\nthe gap" in README
    assert f"nats a token instead of {means.loss_long:.2f}." in README


def test_both_readings_of_one_size_are_quoted_as_measured() -> None:
    said = []
    for far in ("contextual", "isolated"):
        rows = pd.read_csv(ROOT / f"docs/figures/ladder_{far}.csv")
        rows = rows[(rows.selector == "add_one") & (rows.k == 8) & (rows.positions == "pose")]
        rows = rows[rows.model.str.contains("2.7M", regex=False)].sort_values("seed")
        said.append([shown(row, "excess", "+.2f") for _, row in rows.iterrows()])
    pairs = ", ".join(f"{here} and {alone}" for here, alone in zip(*said, strict=True))
    assert len(said[0]) == 3
    assert pairs in (ROOT / "docs/paper_map.md").read_text(), pairs


def test_the_gap_over_all_targets_is_quoted_as_measured() -> None:
    text = (ROOT / "docs/natural_language.md").read_text().replace("−", "-")
    for model, line in (("rope", "a mean gap of {:+.3f}\n"), ("pose", "PoSE {:+.3f})")):
        folder = ROOT / f"docs/results/measurements/quick_{model}_256"
        losses = pd.read_csv(folder / "losses.csv", index_col=0)
        gap = losses.loss_short["mean"] - losses.loss_long["mean"]
        assert line.format(gap) in text, line.format(gap)
        assert f"over all {losses.loss_long['count']:,.0f} targets" in text


def shown(row: Any, column: str, form: str) -> str:
    low, high = ("low", "high") if column == "recovery" else (f"{column}_low", f"{column}_high")
    return f"{row[column]:{form}} [{row[low]:{form}}, {row[high]:{form}}]"


def shown_kind(row: Any) -> str:
    return f"{row.excess_recovery:+.2f} [{row.excess_low:+.2f}, {row.excess_high:+.2f}]"


def commands_in(text: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    whole = [block.replace("\\\n", " ") for block in blocks]
    lines = [line.split(" #")[0].strip() for block in whole for line in block.splitlines()]
    return [line for line in lines if line.startswith("olmo-sparsity ")]


GUIDES = ["README.md", "slurm/README.md"]
GUIDES += [f"docs/{name}.md" for name in ("tutorial", "natural_language", "results", "theory")]
COMMANDS = [command for name in GUIDES for command in commands_in((ROOT / name).read_text())]


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_commands_parse_and_name_files_that_exist(command: str) -> None:
    words = shlex.split(command)[1:]
    options, rest = build_parser().parse_known_args(words)
    assert all(word.startswith("--") and "=" in word for word in rest)
    if options.run.__name__ == "theory":
        load_theory_config(ROOT / options.config, rest)
    elif options.run.__name__ == "task":
        load_settings(ROOT / options.config, rest)
    elif options.run.__name__ == "sweep":
        assert expand(str(ROOT / options.config), rest)
    elif hasattr(options, "config"):
        load_config(ROOT / options.config, rest)


def python_in(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def test_the_tutorial_runs_from_top_to_bottom(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    train(config)
    monkeypatch.chdir(ROOT)
    results = tmp_path / "results"
    windows = ["--long=48", "--short=16", "--stride=8", "--min-gap=0", "--ks=1,2"]
    measuring = ["measure", config.run_folder, "--quick", "--out", str(results), *windows]
    assert main([*measuring, "--max-documents=12"]) == 0
    names: dict[str, Any] = {}
    for code in python_in("docs/tutorial.md"):
        code = code.replace("runs/induction", config.run_folder)
        exec(code.replace("results/tutorial", str(results)), names)
    assert {"target", "far", "loss_set"} <= set(names["table"].columns)
    assert len(names["foreign"]) == len(names["helped"])
    assert set(names["first"].selector) == {"add_one_screened", "random"}


def test_readme_python_runs(
    make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    train(config)
    monkeypatch.chdir(ROOT)
    (code,) = python_in("README.md")
    names: dict[str, Any] = {}
    exec(code.replace("runs/induction", config.run_folder), names)
    assert names["influence_FW"].shape == (32, 8)
    assert list(names["table"].columns[:2]) == ["target", "k"]
    assert len(names["losses"].gap) == len(names["document"]) - 48
