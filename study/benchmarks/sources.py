"""How often verdicts on sources are right, where what a statement rests on is known; and rivals.

    python -m study.benchmarks.sources runs/sources [--num 400] [--seed 1] [--draws 8]
        [--keep TABLE.json] [--swapped] [--any-decoys]
    OMP_NUM_THREADS=1 python -m study.benchmarks.sources runs/sources --rivals
        [--other-python PYTHON] [--keep TABLE.csv]

Exercises of the laboratory (laboratory.py), held out from training. Counted are statements whose
things the model itself writes: each is its most likely token. Names and verbs stand in the
question. Decoys are sources of other exercises without a name of the answer, which a text of one's
own can hardly have by chance; with `--any-decoys` they may have one, of 32, and so contradict the
answer. `--swapped`: the sources of another exercise, likewise without these names, stand in place
of an exercise's own, so that statements rest on none of them; those known by heart are left out.

Rivals (source_explainers.py; pip install captum context-cite inseq at2, here or in the environment
of PYTHON) give each source a score. Asked of each: is the best source of a statement on one source
that one; do scores predict the loss with some sources (LDS) and its rise without the best; does the
score tell statements that rest on a source from those on none (AUROC); do the largest scores
tell one, either, both and none apart. Scores come without a rule for the last: it is learnt from
statements of the other half of the exercises, whose kinds are known, by as many neighbours as tell
most of these. Ours are verdicts, whose rules were set on answers to other exercises. For AUROC ours
has its smallest chance of a source in place of a score.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import redirect_stderr
from dataclasses import replace
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from olmo_sparsity import attribute, load_model
from olmo_sparsity.analysis.attribution.segments import draw_decoys, read_decoys
from olmo_sparsity.analysis.attribution.statements import Attribution
from olmo_sparsity.analysis.models.load import LoadedModel, find_folder
from olmo_sparsity.analysis.results.statistics import rank_correlations
from olmo_sparsity.analysis.settings import MIN_GAP
from olmo_sparsity.config.run import load_saved_config
from olmo_sparsity.config.sections import ModelConfig
from olmo_sparsity.model.exchange import export, hugging_face_model
from olmo_sparsity.model.families import FAMILIES, to_hugging_face
from study.benchmarks import explainers, source_explainers
from study.benchmarks.explainers import OURS
from study.benchmarks.laboratory import (
    BOTH,
    EITHER,
    NONE,
    ONE,
    THINGS,
    WORDS,
    Exercise,
    exercises,
    names_in,
)
from study.benchmarks.source_explainers import CONTESTANTS, SourceQuestion, read_model

MOST_DECOYS = 60
"""Sources of the first so many exercises are decoys."""

MOST_SUBSETS = 32
"""All subsets of up to five sources; of more sources, so many random ones."""

NEIGHBOURS = (1, 3, 5, 9, 15)


@torch.no_grad()
def writes(model: LoadedModel, found: Attribution) -> list[tuple[bool, bool]]:
    """Whether all of each statement is what the model writes, given what stands before it, and
    whether its things are."""
    block = found.layout.block
    tokens_1L = torch.from_numpy(block.tokens[None]).to(model.device)
    positions_1L = torch.arange(tokens_1L.shape[1], device=model.device)[None]
    hidden_1LD = model.model.hidden(tokens_1L, positions_1L)
    best = model.model.unembed(hidden_1LD)[0].argmax(-1)[block.num_before - 1 : -1].cpu().numpy()
    right_W = best == block.targets_W
    things = [model.tokenizer.token_to_id(thing) for thing in THINGS]
    things_W = right_W | ~np.isin(block.targets_W, things)
    spans = [slice(*span) for span in found.layout.statements]
    return [(bool(right_W[span].all()), bool(things_W[span].all())) for span in spans]


# --- tables ---------------------------------------------------------------------------------------


def decoys_of(one: Exercise, drawn: list[Exercise], any_names: bool = False) -> list[str]:
    others = [other for other in drawn[:MOST_DECOYS] if other is not one]
    texts = [text for other in others for text in other.sources.values()]
    return [text for text in texts if any_names or not names_in(text) & names_in(one.answer)]


def asked(
    model: LoadedModel, one: Exercise, decoys: list[str], draws: int, seed: int
) -> Attribution:
    with redirect_stderr(StringIO()):
        return attribute(
            model,
            sources=one.sources,
            question=one.question,
            answer=one.statements,
            decoys=decoys,
            draws=draws,
            seed=seed,
        )


def beside_others(one: Exercise, number: int, drawn: list[Exercise]) -> Exercise:
    """The exercise with the sources of another, which are not its decoys."""
    others = drawn[MOST_DECOYS:]
    for other in others[number % len(others) :] + others:
        said = names_in(" ".join(other.sources.values()))
        if other is not one and not said & names_in(one.answer):
            return replace(one, sources=other.sources, needs=[[] for _ in one.needs])
    raise ValueError("all others have a name of the answer")


def measure(
    model: LoadedModel,
    drawn: list[Exercise],
    draws: int = 8,
    swapped: bool = False,
    any_decoys: bool = False,
) -> pd.DataFrame:
    """A row for each statement: what it rests on, what the verdict says, whether it is counted,
    whether the model writes all of it, and how many sources are named and how many wrongly."""
    rows = []
    if unknown := {word for word in WORDS if model.tokenizer.token_to_id(word) is None}:
        raise SystemExit(f"the model is of an earlier laboratory, without {', '.join(unknown)}")
    for number, own in enumerate(drawn):
        one = beside_others(own, number, drawn) if swapped else own
        found = asked(model, one, decoys_of(own, drawn, any_decoys), draws, seed=number)
        written = writes(model, found)
        for t, said in enumerate(found.statements.itertuples()):
            same = sorted(said.sources) == one.needs[t]
            named = len(said.sources), len({*said.sources} - {*one.needs[t]})
            rows.append((number, one.kinds[t], said.kind, same, *written[t], said.nats, *named))
    columns = ["exercise", "kind", "said", "right", "whole", "counted", "nats", "named", "wrong"]
    return pd.DataFrame(rows, columns=columns)


def summary(rows: pd.DataFrame) -> dict[str, float]:
    """Of statements that are counted; `all_…` are of all. `none_below`: nearly nothing to tell, and
    so not tested."""
    counted, is_told = rows[rows.counted], rows.kind == rows.said
    told, of_all = is_told[rows.counted].groupby(counted.kind).mean(), is_told.groupby(rows.kind)
    one, none = counted[counted.kind == ONE], counted[counted.kind == NONE]
    several = counted[~counted.kind.isin([ONE, NONE])]
    return {
        "statements": len(rows),
        "counted": float(rows.counted.mean()),
        "whole": float(rows.whole.mean()),
        "right_source": float((one.right & (one.said == ONE)).mean()),
        **{f"told_{kind}": float(told.get(kind, np.nan)) for kind in ("either", "both", "none")},
        "right_sources_of_either_and_both": float(several.right.mean()),
        "false_rests_on": float((none.said != NONE).mean()),
        "wrong_of_named": _share_of_wrong(counted),
        "none_below": float((none.nats < MIN_GAP).mean()),
        **{f"counted_{kind}": of for kind, of in rows.groupby("kind").counted.mean().items()},
        **{f"all_{kind}": of for kind, of in of_all.mean().items()},
    }


def _share_of_wrong(rows: pd.DataFrame) -> float:
    """Of the sources named in an exercise, on average over exercises."""
    of_exercises = rows.groupby("exercise")[["named", "wrong"]].sum()
    return float((of_exercises.wrong / of_exercises.named.clip(lower=1)).mean())


def summary_of_swapped(rows: pd.DataFrame) -> dict[str, float]:
    """Of statements that rested on a source, and of all exercises, whose error rate is held."""
    of_exercises = (rows.said != NONE).groupby(rows.exercise).any()
    rows = rows[rows.kind != NONE]
    return {
        "swapped": len(rows),
        "swapped_rests_on": float((rows.said != NONE).mean()),
        "swapped_exercises": float(of_exercises.mean()),
        "swapped_below": float((rows.nats < MIN_GAP).mean()),
    }


# --- rivals: the model as transformers has it -----------------------------------------------------


def write_model(run: str, folder: Path) -> None:
    """What source_explainers.read_model reads."""
    config = load_saved_config(find_folder(run) / "config.yaml").model
    if not config.include_bias:
        export(Path(run), folder)
        return
    loaded = load_model(run, dtype="fp32")
    weights = {name: of.float() for name, of in loaded.model.state_dict().items()}
    plain = ModelConfig(**vars(config) | {"include_bias": False})
    model = hugging_face_model(plain, weights, run)
    model.save_pretrained(folder)
    end = loaded.tokenizer.id_to_token(config.eos_token_id)
    special = dict.fromkeys(("eos_token", "pad_token"), end)
    PreTrainedTokenizerFast(tokenizer_object=loaded.tokenizer, **special).save_pretrained(folder)
    # A bias has the rows of its matrix, so the same names and parts.
    rows = {name.removesuffix(".weight"): len(of) for name, of in weights.items()}
    biases = {
        f"{name}.weight": weights.get(f"{name}.bias", torch.zeros(count))
        for name, count in rows.items()
    }
    theirs = to_hugging_face(biases, FAMILIES[model.config.model_type], plain)
    named = {name.removesuffix("weight") + "bias": of for name, of in theirs.items()}
    kept = {name: of.clone() for name, of in named.items() if "embed_tokens" not in name}
    save_file(kept, folder / "biases.safetensors")


@torch.no_grad()
def check_model(model: LoadedModel, folder: Path, tokens: np.ndarray) -> None:
    """That rivals are given the model that we ask."""
    theirs, _ = read_model(folder)
    ids = torch.from_numpy(tokens)[None]
    hidden = model.model.hidden(ids, torch.arange(ids.shape[1])[None])
    ours, logits = model.model.unembed(hidden).float(), theirs(ids).logits
    torch.testing.assert_close(ours[..., : logits.shape[-1]], logits, atol=1e-3, rtol=1e-3)


# --- rivals: what is judged -----------------------------------------------------------------------


class Judge:
    """The losses of the statements of an exercise with some of its sources, in two ways. Deleted:
    the text closes up where sources are missing. Replaced: decoys take their place, of other
    exercises than ours."""

    def __init__(
        self, model: LoadedModel, one: Exercise, decoys: list[str], others: list[str], seed: int
    ) -> None:
        self.model, self.exercise = model, one
        self.found = asked(model, one, decoys, 4, seed)
        self.counted = [things for _, things in writes(model, self.found)]
        prompt, self.generator = self.found.prompt, np.random.default_rng(seed)
        texts = read_decoys(model, prompt, others)
        self.others = [rows[0] for rows in draw_decoys(prompt, texts, 4, seed)]
        sources = range(len(prompt.names))
        if 2 ** len(sources) <= MOST_SUBSETS:
            numbers = np.arange(2 ** len(sources))
            self.shown_AS = (numbers[:, None] >> np.array(sources)) % 2 == 1
        else:
            self.shown_AS = self.generator.random((MOST_SUBSETS, len(sources))) < 0.5

    @torch.no_grad()
    def losses(self, way: str, shown_S: np.ndarray) -> np.ndarray:
        """losses_T."""
        layout = self.found.layout
        block, far = layout.block, layout.block.far_F.copy()
        if way == "deleted":
            far = far[layout.shown(*np.flatnonzero(shown_S).tolist())]
        else:
            for source in np.flatnonzero(~shown_S):
                first, decoy = layout.units.first[source], self.others[source]
                far[first : first + len(decoy)] = decoy
        prefix, near = np.split(block.tokens, [block.num_prefix, block.num_prefix + block.num_far])[
            ::2
        ]
        tokens_L = torch.from_numpy(np.concatenate([prefix, far, near])).to(self.model.device)
        positions_1L = torch.arange(len(tokens_L) - 1, device=tokens_L.device)[None]
        hidden_1LD = self.model.model.hidden(tokens_L[None, :-1], positions_1L)
        last_WD = hidden_1LD[0, -block.num_targets :]
        log_p_WV = self.model.model.unembed(last_WD).float().log_softmax(-1).cpu()
        nll_W = -log_p_WV[range(block.num_targets), block.targets_W].numpy()
        return np.array([nll_W[a:b].sum() for a, b in layout.statements])

    @cached_property
    def truth(self) -> dict[str, np.ndarray]:
        """losses_AT."""
        return {
            way: np.stack([self.losses(way, shown_S) for shown_S in self.shown_AS])
            for way in ("deleted", "replaced")
        }

    def judge(self, name: str, row: dict[str, Any]) -> list[dict[str, Any]]:
        """A row for each statement. `row`: what a contestant told."""
        score_TS, one, rows = np.array(row["scores"]), self.exercise, []
        some_T = row.get("some", score_TS.max(1))
        for t, score_S in enumerate(score_TS):
            best = np.argsort(-score_S, kind="stable")
            told = {
                "rival": name,
                "kind": one.kinds[t],
                "counted": self.counted[t],
                "right": self.found.names[best[0]] in one.needs[t],
                "some": some_T[t],
                "said": row.get("kinds", [None] * len(one.kinds))[t],
                # Of the largest scores, which tell one, either, both and none apart.
                "top": np.pad(np.sort(score_S)[::-1], (0, 3))[:3].tolist(),
                "cpu_s": row["cpu_s"],
                "token_forwards": row["token_forwards"],
            }
            for way, losses_AT in self.truth.items():
                predicted_A = self.shown_AS @ score_S
                (told[f"lds {way}"],) = rank_correlations(
                    predicted_A[None], -losses_AT[None, :, t], of_equal_values=0.0
                )
                every_S = np.ones(len(score_S), dtype=bool)
                without_S = every_S.copy()
                without_S[best[0]] = False
                told[f"−1 {way}"] = self.losses(way, without_S)[t] - self.losses(way, every_S)[t]
            rows.append(told)
        return rows


def learnt_kinds(rows: pd.DataFrame) -> np.ndarray:
    """Of each statement, the usual kind of those of the other half of the exercises whose largest
    scores are nearest; of as many as tell that half best, each by its others."""
    scores, kinds = np.stack(rows.top.tolist()), rows.kind.to_numpy()
    scores = scores / scores.std(0).clip(1e-12)
    distances = ((scores[:, None] - scores[None]) ** 2).sum(-1)
    np.fill_diagonal(distances, np.inf)
    is_odd, found = rows.exercise.to_numpy() % 2 == 1, kinds.copy()
    for is_asked in (is_odd, ~is_odd):

        def told(is_told: np.ndarray, by: int, known: np.ndarray = ~is_asked) -> np.ndarray:
            order = np.argsort(distances[np.ix_(is_told, known)], axis=1, kind="stable")[:, :by]
            return np.array([pd.Series(near).mode()[0] for near in kinds[known][order]])

        by = max(NEIGHBOURS, key=lambda by: (told(~is_asked, by) == kinds[~is_asked]).mean())
        found[is_asked] = told(is_asked, by)
    return found


def auroc(positive: np.ndarray, negative: np.ndarray) -> float:
    above = positive[:, None] > negative[None]
    return float((above + 0.5 * (positive[:, None] == negative[None])).mean())


def compare(judged: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """A row for each contestant, and its confusion of kinds. Statements are counted as in
    `summary`; LDS and the rise in loss are of those that rest on a source."""
    kinds, table, confused = (ONE, EITHER, BOTH, NONE), {}, {}
    for name, rows in judged[judged.counted].groupby("rival", sort=False):
        is_none = rows.kind == NONE
        said = learnt_kinds(rows) if rows.said.isna().any() else rows.said.to_numpy()
        confused[str(name)] = pd.crosstab(rows.kind, pd.Series(said, rows.index, name="said"))
        told = pd.Series(said == rows.kind, rows.index).groupby(rows.kind).mean()
        of_some = rows[~is_none]
        table[name] = {
            "top-1": rows[rows.kind == ONE].right.mean(),
            **{way: of_some[way].mean() for way in rows if way.startswith(("lds", "−1"))},
            "some or none (AUROC)": auroc(of_some.some.to_numpy(), rows[is_none].some.to_numpy()),
            **{f"told {kind}": told.get(kind, np.nan) for kind in kinds},
            "CPU s": rows.cpu_s.mean(),
            "token-forwards": rows.token_forwards.mean(),
        }
    return pd.DataFrame(table).T, confused


def rivals(run: str, model: LoadedModel, options: argparse.Namespace) -> pd.DataFrame:
    """Every contestant in a process of its own; a row for each statement of each."""
    drawn = list(exercises(options.num, options.seed))
    others = list(exercises(options.fit_on, options.seed + 10**6))
    apart = list(exercises(MOST_DECOYS, options.seed + 2 * 10**6))
    judges = [
        Judge(model, one, decoys_of(one, drawn), decoys_of(one, apart), number)
        for number, one in enumerate(drawn)
    ]
    questions = {
        part: [
            {
                "sources": [*one.sources.values()],
                "question": one.question,
                "statements": one.statements,
                "decoys": decoys_of(one, drawn),
            }
            for one in of_part
        ]
        for part, of_part in (("asked", drawn), ("fit_on", others))
    }
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "model")
        write_model(run, folder)
        check_model(model, folder, judges[0].found.layout.block.tokens)
        _, tokenizer = read_model(folder)
        assert all(
            SourceQuestion(**q, tokenizer=tokenizer).is_read_back() for q in questions["asked"]
        )
        for name, (package, _) in CONTESTANTS.items():
            if not any(part in name for part in options.only.split(",")):
                continue
            python = sys.executable if package == OURS else options.other_python or sys.executable
            words = [name, folder]
            told, reason = explainers.ask(
                python, source_explainers.__name__, words, questions, options.limit
            )
            said = reason or f"{package} {told[0]['version']}, {told[0]['fitting']:,} to fit"
            print(f"asked {name}: {said}", file=sys.stderr, flush=True)
            if len(told) == len(judges):
                for number, (judge, row) in enumerate(zip(judges, told, strict=True)):
                    rows += [{"exercise": number, **of} for of in judge.judge(name, row)]
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--num", type=int, default=400, help="exercises")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument(
        "--keep", type=Path, help="gets the shares of this run (JSON), or the rivals (CSV)"
    )
    parser.add_argument("--swapped", action="store_true")
    parser.add_argument("--any-decoys", action="store_true")
    parser.add_argument("--rivals", action="store_true")
    parser.add_argument("--other-python", default="", help="of an environment with the rivals")
    parser.add_argument("--only", default="", help="contestants with one of these in their names")
    parser.add_argument("--fit-on", type=int, default=400, help="other exercises, for AT2")
    parser.add_argument("--limit", type=int, default=3000, help="CPU seconds of a contestant")
    options = parser.parse_args()
    if options.rivals and (options.swapped or options.any_decoys or options.draws != 8):
        parser.error("--rivals goes without --swapped, --any-decoys and --draws")
    model = load_model(options.model, dtype="fp32")
    if options.rivals:
        table, confused = compare(rivals(options.model, model, options))
        print(table.round(3).to_string())
        for name, counts in confused.items():
            print(f"\n{name}\n{counts}")
        if options.keep:
            table.round(4).to_csv(options.keep, index_label="rival")
        return
    drawn = list(exercises(options.num, options.seed))
    rows = measure(model, drawn, options.draws, options.swapped, options.any_decoys)
    counted = rows if options.swapped else rows[rows.counted]
    print(pd.crosstab(counted.kind, counted.said))
    shares = summary_of_swapped(rows) if options.swapped else summary(rows)
    start = "any_" if options.any_decoys else ""
    shares = {f"{start}{name}": round(value, 4) for name, value in shares.items()}
    print(json.dumps(shares, indent=1))
    if options.keep:
        kept = json.loads(options.keep.read_text()) if options.keep.exists() else {}
        name = Path(options.model).name
        kept[name] = kept.get(name, {}) | shares
        options.keep.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
