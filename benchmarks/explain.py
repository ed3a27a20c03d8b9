"""Compare what it costs to find the distant tokens an answer depends on, and how well scores
predict what the model does without them: ours and the packages that researchers use.

    pip install -c constraints.txt -e ".[bench]"
    OMP_NUM_THREADS=1 python -m benchmarks.explain [--model FOLDER] [--other-python PYTHON]

Every contestant (explainers.py) runs in a process of its own. What is not installed next to our
requirements can use another environment, named by --other-python. Seconds of
a noisy machine compare within one run only.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from olmo_sparsity.analysis.results.intervals import percentile_interval, rank_correlations
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.base.errors import ConfigError, UserError
from olmo_sparsity.models.huggingface.exchange import export
from olmo_sparsity.models.huggingface.model import HuggingFaceLM
from olmo_sparsity.models.load import load_model
from olmo_sparsity.text.inputs import open_documents
from olmo_sparsity.text.units import NO_INDICES
from olmo_sparsity.text.windows import Windows
from study.benchmarks import explainers
from study.benchmarks.explainers import CONTESTANTS, ELSEWHERE, Question

SHORT = 32
"""Tokens before the answer that every method leaves in view, and none of them scores."""

NUM_ANSWER = 3
VOCABULARY = 8192
TOPS = (1, 4, 16)
NUM_ABLATIONS = 200
MIN_GAP = 1.0
"""Nats that the distant tokens must give: else there is nothing to explain."""


# --- questions ------------------------------------------------------------------------------------


def word_tokenizer(size: int) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are words, so that methods that cut words out of the text and
    methods that mask tokens score the same things."""
    words = Tokenizer(WordLevel({"the_end": 0} | {f"w{i}": i for i in range(1, size)}, "the_end"))
    words.pre_tokenizer = WhitespaceSplit()
    special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "the_end")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


SHAPES: dict[str, dict[str, int]] = {
    "10m": {
        "vocab_size": VOCABULARY,
        "hidden_size": 320,
        "intermediate_size": 864,
        "num_hidden_layers": 6,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
    },
    "smollm2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
}


def write_random_model(folder: Path, length: int, shape: str) -> None:
    """Write a model with random weights: they do not change what a method costs."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=2 * length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    word_tokenizer(VOCABULARY).save_pretrained(folder)


def random_questions(count: int, length: int) -> list[dict[str, list[int]]]:
    ids = np.random.default_rng(0).integers(1, VOCABULARY, (count, length + NUM_ANSWER)).tolist()
    return [_question(row) for row in ids]


def _question(ids: list[int]) -> dict[str, list[int]]:
    return {
        "far": ids[: -SHORT - NUM_ANSWER],
        "near": ids[-SHORT - NUM_ANSWER : -NUM_ANSWER],
        "answer": ids[-NUM_ANSWER:],
    }


def repeated_questions(
    loaded: Any, tokenizer: Any, text: str, length: int, count: int
) -> list[dict[str, list[int]]]:
    """Return documents in which a passage occurs once among passages of other texts, and once more
    at the end, up to the answer."""
    documents = [d for d in open_documents(text, loaded) if len(d.tokens) > 2 * length]
    generator = np.random.default_rng(0)
    found: list[dict[str, list[int]]] = []
    num_passage = SHORT + 2 * NUM_ANSWER

    def words(num_tokens: int) -> list[int]:
        """Return tokens of a random document, from the beginning of a word."""
        document = documents[generator.integers(len(documents))]
        begins = [i for i, piece in enumerate(document.texts) if piece[:1] == " "]
        begins = [i for i in begins if i + num_tokens <= len(document.tokens)]
        first = begins[generator.integers(len(begins))]
        return document.tokens[first : first + num_tokens].tolist()

    for _ in range(50 * count):
        passage = words(num_passage)
        num_others = length - SHORT - num_passage
        before = int(generator.integers(1, num_others))
        shown = passage[: SHORT + NUM_ANSWER]
        row = _question([*words(before), *passage, *words(num_others - before), *shown])
        question = Question(**row, tokenizer=tokenizer)
        if question.is_read_back() and Judge(loaded.model, question).gap >= MIN_GAP:
            found.append(row)
        if len(found) == count:
            return found
    raise ConfigError(
        f"{len(found)} of {count} questions whose answer the model takes from its distant context "
        "were found; give a model that copies (study/configs/text/induction.yaml), more text, or "
        "fewer --questions"
    )


# --- running --------------------------------------------------------------------------------------


def ask(
    name: str, folder: Path, questions: list[dict[str, list[int]]], limit: int, other_python: str
) -> tuple[list[dict[str, Any]], str]:
    """Return the answers of a contestant, and the reason why the other questions have none."""
    package, _ = CONTESTANTS[name]
    python = other_python if package in ELSEWHERE else sys.executable
    if not python:
        return [], f"requires {ELSEWHERE[package]}: name its environment by --other-python"
    return explainers.ask(python, explainers.__name__, [name, folder], questions, limit)


# --- judging --------------------------------------------------------------------------------------


class Judge:
    """Computes the log-probability of a question's answer with some of its distant tokens, in two
    ways: masked, where those that are left keep the states that they have in the whole text;
    deleted, where the text without them is read anew."""

    def __init__(self, model: HuggingFaceLM, question: Question) -> None:
        self.model, self.question = model, question
        self.pieces = np.array(question.distant_pieces)
        tokens = np.array(question.ids)
        first = len(tokens) - len(question.answer)
        self.scorer = Scorer(model)
        block = Windows("all", len(question.near)).block(tokens, first, len(tokens))
        self.context = self.scorer.context(block)
        none, every = self.masked([NO_INDICES, np.arange(len(question.distant))])
        self.gap = every - none

    def masked(self, sets: list[np.ndarray]) -> np.ndarray:
        """Return log p of the answer with each of these sets of distant tokens."""
        rows = [self.context.set_row(distant) for distant in sets]
        return -np.array([loss_W.sum() for loss_W in self.scorer.losses(rows)])

    @torch.no_grad()
    def deleted(self, sets: list[np.ndarray]) -> np.ndarray:
        """Return log p of the answer after the text of each of these sets of distant tokens."""
        found, answer = [], torch.tensor(self.question.answer)
        for distant in sets:
            text = "".join(self.pieces[distant]) + self.question.near_text
            ids = self.question.tokenizer(text, add_special_tokens=False)["input_ids"]
            row = torch.tensor([[*ids, *self.question.answer[:-1]]])
            hidden = self.model.hidden(row, torch.arange(row.shape[1])[None], num_last=len(answer))
            log_p = self.scorer.log_probabilities(hidden[0])
            found.append(float(log_p.gather(1, answer[:, None]).sum()))
        return np.array(found)

    def prepare(self, seed: int) -> None:
        """Compute the answer's log-probability with random halves of the distant tokens, which
        scores must predict."""
        generator, num_distant = np.random.default_rng(seed), len(self.question.distant)
        self.halves = [
            np.sort(generator.permutation(num_distant)[: num_distant // 2])
            for _ in range(NUM_ABLATIONS)
        ]
        self.truth = {"masked": self.masked(self.halves), "deleted": self.deleted(self.halves)}

    def judge(self, scores_F: np.ndarray) -> dict[str, float]:
        """Return how well scores of the distant tokens predict what the model does without them:
        rank correlations over the halves (LDS), and nats lost without the best k."""
        predicted = np.array([scores_F[half].sum() for half in self.halves])
        every = np.arange(len(scores_F))
        best = np.argsort(-scores_F, kind="stable")
        without = [np.setdiff1d(every, best[:k]) for k in TOPS]
        found = {}
        for way, log_p in (("masked", self.masked), ("deleted", self.deleted)):
            truth = np.array(self.truth[way])
            (lds,) = rank_correlations(predicted[None], truth[None], of_equal_values=0.0)
            found[f"lds {way}"] = float(lds)
            whole, *less = log_p([every, *without])
            found |= {f"−{k} {way}": whole - some for k, some in zip(TOPS, less, strict=True)}
        none, four = self.masked([NO_INDICES, np.sort(best[:4])])
        return found | {"+4 masked": four - none}


def mean_interval(values_Q: np.ndarray) -> tuple[float, float, float]:
    """Return the mean and its 95% interval over questions."""
    generator = np.random.default_rng(0)
    draws = values_Q[generator.integers(len(values_Q), size=(2000, len(values_Q)))].mean(1)
    return percentile_interval(draws, float(values_Q.mean()))


# --- tables ---------------------------------------------------------------------------------------


def cost_table(
    names: list[str], length: int, shape: str, limit: int, num_questions: int, other_python: str
) -> dict[str, dict[str, float]]:
    """Print medians over the questions, and return them for each contestant that answered."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_random_model(folder, length, shape)
        questions = random_questions(num_questions, length)
        found = {}
        for name in names:
            found[name] = ask(name, folder, questions, limit, other_python)
            rows, reason = found[name]
            said = (
                reason
                or f"{rows[-1]['cpu_s']:.1f} s, {rows[-1]['token_forwards']:,} token-forwards"
            )
            print(f"{name}: {said}", file=sys.stderr, flush=True)
    median = {
        name: {
            column: float(np.median([row[column] for row in rows]))
            for column in ("cpu_s", "wall_s", "token_forwards", "memory_mib")
        }
        for name, (rows, _) in found.items()
        if rows
    }
    told = [one["cpu_s"] for name, one in median.items() if name != "random"]
    cheapest = min(told, default=float("nan"))
    print(f"\n{length:,} tokens, an answer of {NUM_ANSWER}: what one question costs\n")
    print("| | version | CPU s | wall s | × the cheapest | token-forwards | MiB |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name, (rows, reason) in found.items():
        if name not in median:
            print(f"| {name} | {reason} | | | | | |")
            continue
        one = median[name]
        print(
            f"| {name} | {rows[0]['version']} | {one['cpu_s']:.2f} | {one['wall_s']:.2f} | "
            f"{one['cpu_s'] / cheapest:.1f} | {one['token_forwards']:,.0f} | "
            f"{one['memory_mib']:.0f} |",
            flush=True,
        )
    return median


def keep_costs(
    file: Path, length: int, names: list[str], rows: dict[str, dict[str, float]]
) -> None:
    """Replace the rows of these names at this length, also where one no longer answers."""
    kept = pd.read_csv(file).to_dict("records") if file.exists() else []
    kept = [row for row in kept if row["length"] != length or row["name"] not in names]
    kept += [{"length": length, "name": name, **row} for name, row in rows.items()]
    table = pd.DataFrame(kept, columns=["length", "name", "cpu_s", "token_forwards", "memory_mib"])
    table.round(2).sort_values(["length", "name"], kind="stable").to_csv(file, index=False)


def quality_table(names: list[str], folder: Path, options: argparse.Namespace) -> None:
    """Print how well each contestant's scores predict what the model does, with intervals."""
    loaded = load_model(str(folder), device="cpu")
    assert isinstance(loaded.model, HuggingFaceLM)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    length = min(options.length, (loaded.max_positions or options.length) - NUM_ANSWER)
    rows = repeated_questions(loaded, tokenizer, options.text, length, options.questions)
    judges = [Judge(loaded.model, Question(**row, tokenizer=tokenizer)) for row in rows]
    for seed, judge in enumerate(judges):
        judge.prepare(seed)
    gap = np.mean([judge.gap for judge in judges])
    print(
        f"\n{len(judges)} documents of {length} tokens, whose end repeats a passage of the distant "
        f"part up to an answer of {NUM_ANSWER}; a gap of {gap:.2f} nats\n"
    )
    columns = [
        "lds masked",
        *(f"−{k} masked" for k in TOPS),
        "+4 masked",
        "lds deleted",
        *(f"−{k} deleted" for k in TOPS),
    ]
    print("| | " + " | ".join(columns) + " |")
    print("|---|" + "---:|" * len(columns))
    for name in names:
        answers, reason = ask(name, folder, rows, options.all_limit, options.other_python)
        if len(answers) < len(judges):
            said = f"answered {len(answers)} of {len(judges)}: {reason}"
            print(f"| {name}: {said} |" + " |" * len(columns), flush=True)
            continue
        table = pd.DataFrame(
            [j.judge(np.array(a["scores"])) for j, a in zip(judges, answers, strict=True)]
        )
        cells = []
        for column in columns:
            value, low, high = mean_interval(table[column].to_numpy())
            more = f" [{low:.2f}, {high:.2f}]" if column.startswith("lds") else ""
            cells.append(f"{value:.2f}{more}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    said = "that copies: a run of ours, or a Hugging Face folder"
    parser.add_argument("--model", default="runs/induction", help=said)
    parser.add_argument("--text", default="data/quick", help="of its documents")
    parser.add_argument("--length", type=int, default=500, help="tokens, where quality is judged")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument(
        "--repeats", type=int, default=3, help="number of questions to measure cost on"
    )
    parser.add_argument("--limit", type=int, default=300, help="CPU seconds of a row of costs")
    parser.add_argument("--all-limit", type=int, default=3000, help="… of a row of qualities")
    parser.add_argument(
        "--other-python", default="", help="of an environment with lxt and flashtrace"
    )
    parser.add_argument("--only", help="names with one of these in them, comma-separated")
    parser.add_argument("--lengths", default="2000", help="tokens, where cost is taken")
    parser.add_argument("--shape", choices=SHAPES, default="10m", help="model, where cost is taken")
    parser.add_argument("--kept", type=Path, help="add costs to this CSV file")
    parser.add_argument("--part", choices=["cost", "quality"])
    options = parser.parse_args()
    parts = (options.only or "").split(",")
    names = [name for name in CONTESTANTS if any(part in name for part in parts)]
    print(f"{platform.processor() or platform.machine()}, 1 thread, torch {torch.__version__}")
    try:
        if options.part != "quality":
            for length in map(int, options.lengths.split(",")):
                asked = (options.shape, options.limit, options.repeats, options.other_python)
                rows = cost_table(names, length, *asked)
                if options.kept:
                    keep_costs(options.kept, length, names, rows)
        if options.part != "cost":
            with tempfile.TemporaryDirectory() as place:
                folder = Path(options.model)
                if not (folder / "config.json").is_file():
                    folder = Path(place, "exported")
                    export(Path(options.model), folder)
                quality_table(names, folder, options)
    except UserError as error:
        sys.exit(f"explain.py: {error}")


if __name__ == "__main__":
    main()
