"""Compare what it costs to find the distant tokens that an answer depends on, and how well scores
predict what the model does without them: our selectors, and the packages that researchers use.

    pip install -c constraints.txt -e ".[bench]"
    OMP_NUM_THREADS=1 python -m benchmarks.explain [--model FOLDER] [--other-python PYTHON]

A question is a text whose last tokens are the answer. A contestant scores each distant token:

    distant tokens             local tokens, always in view   answer
    w7 w3 w9 w9 w1 w4 …        w2 w8 w5 …                     w6 w1 w2
    0.1 0.0 0.3 0.0 0.0 1.2    not scored

    cost       seconds, token-forwards and memory, with random weights    `print_costs`
    quality    how well scores predict log-probabilities, by `Judge`      `print_qualities`

Every contestant (study/benchmarks/explainers.py) runs in a process of its own. What is not
installed next to our requirements can use another environment, named by --other-python. On a noisy
machine, seconds compare within one run only.

Dimension key: F distant tokens, Q questions, W tokens of the answer.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
import pandas as pd
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from olmo_sparsity.analysis.results.intervals import Interval, percentile_interval
from olmo_sparsity.analysis.results.rank_correlation import rank_correlations
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

NUM_LOCAL = 32
"""Tokens before the answer that every method leaves in view, and none of them scores."""

NUM_ANSWER = 3
"""Tokens of an answer."""

NUM_WORDS = 8192
"""Words of the vocabulary where cost is measured."""

TOP_COUNTS = (1, 4, 16)
"""How many of the best tokens are removed from the text."""

NUM_ADDED = 4
"""How many of the best tokens are added to the local ones alone."""

NUM_ABLATIONS = 200
"""Random halves of the distant tokens, whose log-probabilities scores must predict."""

MIN_GAP = 1.0
"""Nats that the distant tokens must give: else there is nothing to explain."""

NUM_BOOTSTRAPS = 2000

COST_COLUMNS = ("cpu_s", "wall_s", "token_forwards", "memory_mib")

SHAPES: dict[str, dict[str, int]] = {
    "10m": {
        "vocab_size": NUM_WORDS,
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
"""The models on which cost is measured, as Llama's configuration."""


class QuestionTokens(TypedDict):
    """The token IDs of a question, which are passed to a contestant's process as JSON."""

    distant: list[int]
    local: list[int]
    answer: list[int]


class Answers(NamedTuple):
    """The answers of one contestant."""

    rows: list[dict[str, Any]]
    """For each question that was answered: `scores`, and the columns of cost."""

    reason: str
    """Why the other questions have no answer; empty if all have one."""


class Contest(NamedTuple):
    """The contestants, and how long each may take."""

    names: list[str]
    """The contestants, by their names in `CONTESTANTS`."""

    cpu_limit_s: int
    """CPU seconds that a contestant may take for all questions."""

    other_python: str
    """The Python of an environment with the packages that ours cannot have; empty: none."""

    def ask(self, name: str, folder: Path, questions: list[QuestionTokens]) -> Answers:
        """Return the answers of a contestant, with the model in a folder."""
        package, _ = CONTESTANTS[name]
        python = self.other_python if package in ELSEWHERE else sys.executable
        if not python:
            reason = f"requires {ELSEWHERE[package]}: name its environment by --other-python"
            return Answers([], reason)
        words = [name, folder]
        return Answers(
            *explainers.ask(python, explainers.__name__, words, questions, self.cpu_limit_s)
        )


def main() -> None:
    """Print the tables that the command line asks for."""
    options = parse_options()
    parts = (options.only or "").split(",")
    names = [name for name in CONTESTANTS if any(part in name for part in parts)]
    print(f"{platform.processor() or platform.machine()}, 1 thread, torch {torch.__version__}")
    try:
        if options.part != "quality":
            contest = Contest(names, options.limit, options.other_python)
            for length in map(int, options.lengths.split(",")):
                costs = print_costs(contest, length, options.shape, options.repeats)
                if options.kept:
                    keep_costs(options.kept, length, names, costs)
        if options.part != "cost":
            contest = Contest(names, options.all_limit, options.other_python)
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(options.model)
                if not (folder / "config.json").is_file():  # a run of ours
                    folder = Path(scratch, "exported")
                    export(Path(options.model), folder)
                print_qualities(contest, folder, options.text, options.length, options.questions)
    except UserError as error:
        sys.exit(f"explain.py: {error}")


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--model",
        default="runs/induction",
        help="that copies: a run of ours, or a Hugging Face folder",
    )
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
    return parser.parse_args()


# --- cost -----------------------------------------------------------------------------------------


def print_costs(
    contest: Contest, length: int, shape: str, num_questions: int
) -> dict[str, dict[str, float]]:
    """Print what a question costs each contestant: medians over the questions. Return them for each
    contestant that has answered.

    Args:
        length: Tokens before the answer.
        shape: A key of `SHAPES`.
    """
    answers: dict[str, Answers] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_random_model(folder, length, shape)
        questions = draw_questions(num_questions, length)
        for name in contest.names:
            answers[name] = contest.ask(name, folder, questions)
            print(f"{name}: {describe_last(answers[name])}", file=sys.stderr, flush=True)

    costs = {}
    for name, (rows, _) in answers.items():
        if rows:
            costs[name] = {
                column: float(np.median([row[column] for row in rows])) for column in COST_COLUMNS
            }
    # The time of random scores is no measure of the others.
    seconds_of_methods = [cost["cpu_s"] for name, cost in costs.items() if name != "random"]
    least_s = min(seconds_of_methods, default=float("nan"))

    print(f"\n{length:,} tokens, an answer of {NUM_ANSWER}: what one question costs\n")
    print("| | version | CPU s | wall s | × the cheapest | token-forwards | MiB |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name, (rows, reason) in answers.items():
        if name not in costs:
            print(f"| {name} | {reason} | | | | | |")
            continue
        cost = costs[name]
        print(
            f"| {name} | {rows[0]['version']} | {cost['cpu_s']:.2f} | {cost['wall_s']:.2f} | "
            f"{cost['cpu_s'] / least_s:.1f} | {cost['token_forwards']:,.0f} | "
            f"{cost['memory_mib']:.0f} |",
            flush=True,
        )
    return costs


def write_random_model(folder: Path, length: int, shape: str) -> None:
    """Write a model with random weights, which do not change what a method costs."""
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
    word_tokenizer(NUM_WORDS).save_pretrained(folder)


def word_tokenizer(size: int) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are words, so that methods that cut words out of the text and
    methods that mask tokens score the same things."""
    words = Tokenizer(WordLevel({"the_end": 0} | {f"w{i}": i for i in range(1, size)}, "the_end"))
    words.pre_tokenizer = WhitespaceSplit()
    special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "the_end")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def draw_questions(num_questions: int, length: int) -> list[QuestionTokens]:
    """Return questions of random words, with `length` tokens before the answer."""
    shape = (num_questions, length + NUM_ANSWER)
    rows = np.random.default_rng(0).integers(1, NUM_WORDS, shape).tolist()
    return [cut_into_question(row) for row in rows]


def cut_into_question(ids: list[int]) -> QuestionTokens:
    """Return the question that ends with these tokens' last ones."""
    first_local = len(ids) - NUM_LOCAL - NUM_ANSWER
    first_answer = len(ids) - NUM_ANSWER
    return {
        "distant": ids[:first_local],
        "local": ids[first_local:first_answer],
        "answer": ids[first_answer:],
    }


def describe_last(answers: Answers) -> str:
    """Return what the last answered question has cost, or why none was answered."""
    if answers.reason:
        return answers.reason
    last = answers.rows[-1]
    return f"{last['cpu_s']:.1f} s, {last['token_forwards']:,} token-forwards"


def keep_costs(
    file: Path, length: int, names: list[str], costs: dict[str, dict[str, float]]
) -> None:
    """Replace the rows of these names at this length in a CSV file, also where a contestant has
    answered before and does not any more."""
    kept = pd.read_csv(file).to_dict("records") if file.exists() else []
    kept = [row for row in kept if row["length"] != length or row["name"] not in names]
    kept += [{"length": length, "name": name, **cost} for name, cost in costs.items()]
    # Without wall seconds, which say more of the machine's other work than of the method.
    table = pd.DataFrame(kept, columns=["length", "name", "cpu_s", "token_forwards", "memory_mib"])
    table.round(2).sort_values(["length", "name"], kind="stable").to_csv(file, index=False)


# --- quality --------------------------------------------------------------------------------------


def print_qualities(
    contest: Contest, folder: Path, text: str, length: int, num_questions: int
) -> None:
    """Print how well each contestant's scores predict what the model does, with intervals.

    Args:
        folder: A Hugging Face folder with a model that copies.
        text: Where the documents are from.
        length: Tokens before the answer, or as many as the model takes.
    """
    loaded = load_model(str(folder), device="cpu")
    assert isinstance(loaded.model, HuggingFaceLM)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    length = min(length, (loaded.max_positions or length) - NUM_ANSWER)
    questions = find_repeated_questions(loaded, tokenizer, text, length, num_questions)
    judges = [
        Judge(loaded.model, Question(**question, tokenizer=tokenizer)) for question in questions
    ]
    ablations = [judge.ablate(seed) for seed, judge in enumerate(judges)]
    gap = np.mean([judge.gap for judge in judges])
    print(
        f"\n{len(judges)} documents of {length} tokens, whose end repeats a passage of the distant "
        f"part up to an answer of {NUM_ANSWER}; a gap of {gap:.2f} nats\n"
    )
    columns = [
        "lds masked",
        *(f"−{k} masked" for k in TOP_COUNTS),
        f"+{NUM_ADDED} masked",
        "lds deleted",
        *(f"−{k} deleted" for k in TOP_COUNTS),
    ]
    print("| | " + " | ".join(columns) + " |")
    print("|---|" + "---:|" * len(columns))
    for name in contest.names:
        answers, reason = contest.ask(name, folder, questions)
        if len(answers) < len(judges):
            shortfall = f"answered {len(answers)} of {len(judges)}: {reason}"
            print(f"| {name}: {shortfall} |" + " |" * len(columns), flush=True)
            continue
        table = pd.DataFrame(
            [
                judge.rate(np.array(answer["scores"]), ablation)
                for judge, ablation, answer in zip(judges, ablations, answers, strict=True)
            ]
        )
        cells = []
        for column in columns:
            value, low, high = mean_interval(table[column].to_numpy())
            interval = f" [{low:.2f}, {high:.2f}]" if column.startswith("lds") else ""
            cells.append(f"{value:.2f}{interval}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def find_repeated_questions(
    loaded: Any, tokenizer: Any, text: str, length: int, num_questions: int
) -> list[QuestionTokens]:
    """Return texts in which a passage occurs once among passages of other documents, and once more
    at the end, up to the answer. Raise ConfigError if the model takes too few answers from there.

        … other texts … │ passage with the answer │ … other texts … │ passage, up to │ answer
    """
    documents = [d for d in open_documents(text, loaded) if len(d.tokens) > 2 * length]
    generator = np.random.default_rng(0)
    num_passage = NUM_LOCAL + 2 * NUM_ANSWER  # it goes on after the answer
    num_others = length - NUM_LOCAL - num_passage

    def draw_words(num_tokens: int) -> list[int]:
        """Return tokens of a random document, from the beginning of a word."""
        document = documents[generator.integers(len(documents))]
        last_start = len(document.tokens) - num_tokens
        starts = [
            index
            for index, token_text in enumerate(document.texts)
            if token_text[:1] == " " and index <= last_start
        ]
        start = starts[generator.integers(len(starts))]
        return document.tokens[start : start + num_tokens].tolist()

    questions: list[QuestionTokens] = []
    for _ in range(50 * num_questions):
        passage = draw_words(num_passage)
        num_before = int(generator.integers(1, num_others))
        ids = [
            *draw_words(num_before),
            *passage,
            *draw_words(num_others - num_before),
            *passage[: NUM_LOCAL + NUM_ANSWER],
        ]
        tokens = cut_into_question(ids)
        question = Question(**tokens, tokenizer=tokenizer)
        if question.is_read_back() and Judge(loaded.model, question).gap >= MIN_GAP:
            questions.append(tokens)
        if len(questions) == num_questions:
            return questions
    raise ConfigError(
        f"{len(questions)} of {num_questions} questions whose answer the model takes from its "
        "distant context were found; give a model that copies "
        "(study/configs/text/induction.yaml), more text, or fewer --questions"
    )


Way = Literal["masked", "deleted"]
"""How distant tokens are left out. masked: the others keep the states that they have in the whole
text. deleted: the text without them is read anew."""

LogP = Callable[[list[np.ndarray]], np.ndarray]
"""Returns the log-probability of the answer with each of several sets of distant tokens."""


class Ablations(NamedTuple):
    """Random halves of a question's distant tokens, and what the model does with each."""

    halves: list[np.ndarray]
    """The distant indices that are left in, in rising order."""

    log_p: dict[Way, np.ndarray]
    """The log-probability of the answer with each half, in nats."""


class Judge:
    """Computes the log-probability of a question's answer with some of its distant tokens."""

    def __init__(self, model: HuggingFaceLM, question: Question) -> None:
        self.model = model
        self.question = question
        self.distant_texts = np.array(question.distant_pieces)
        self.ways: dict[Way, LogP] = {"masked": self.log_p_masked, "deleted": self.log_p_deleted}
        self.scorer = Scorer(model)
        tokens = np.array(question.ids)
        first_answer = len(tokens) - len(question.answer)
        block = Windows("all", len(question.local)).block(tokens, first_answer, len(tokens))
        self.context = self.scorer.context(block)
        with_none, with_all = self.log_p_masked([NO_INDICES, np.arange(len(question.distant))])
        self.gap = with_all - with_none
        """Nats that all distant tokens give."""

    def log_p_masked(self, sets: list[np.ndarray]) -> np.ndarray:
        """Return the log-probability of the answer with each of these sets of distant tokens."""
        rows = [self.context.set_row(distant_indices) for distant_indices in sets]
        return -np.array([loss_W.sum() for loss_W in self.scorer.losses(rows)])

    @torch.no_grad()
    def log_p_deleted(self, sets: list[np.ndarray]) -> np.ndarray:
        """Return the log-probability of the answer after the text of each of these sets of distant
        tokens."""
        answer = torch.tensor(self.question.answer)
        log_probabilities = []
        for distant_indices in sets:
            text = "".join(self.distant_texts[distant_indices]) + self.question.local_text
            ids = self.question.tokenizer(text, add_special_tokens=False)["input_ids"]
            row = torch.tensor([[*ids, *self.question.answer[:-1]]])
            positions = torch.arange(row.shape[1])[None]
            hidden = self.model.hidden(row, positions, num_last=len(answer))
            log_p_WV = self.scorer.log_probabilities(hidden[0])
            log_probabilities.append(float(log_p_WV.gather(1, answer[:, None]).sum()))
        return np.array(log_probabilities)

    def ablate(self, seed: int) -> Ablations:
        """Draw random halves of the distant tokens, and compute the log-probabilities that scores
        must predict."""
        generator = np.random.default_rng(seed)
        num_distant = len(self.question.distant)
        halves = [
            np.sort(generator.permutation(num_distant)[: num_distant // 2])
            for _ in range(NUM_ABLATIONS)
        ]
        return Ablations(halves, {way: log_p_of(halves) for way, log_p_of in self.ways.items()})

    def rate(self, scores_F: np.ndarray, ablations: Ablations) -> dict[str, float]:
        """Return how well scores of the distant tokens predict what the model does without them, by
        the names of the table's columns:

            lds masked    rank correlation of summed scores with log-probabilities, over the halves
            −4 masked     nats lost without the 4 best tokens
            +4 masked     nats gained by the 4 best tokens next to the local ones alone
        """
        predicted = np.array([scores_F[half].sum() for half in ablations.halves])
        all_indices = np.arange(len(scores_F))
        best_first = np.argsort(-scores_F, kind="stable")
        without_best = [np.setdiff1d(all_indices, best_first[:k]) for k in TOP_COUNTS]

        ratings: dict[str, float] = {}
        for way, log_p_of in self.ways.items():
            truth = ablations.log_p[way]
            (lds,) = rank_correlations(predicted[None], truth[None], of_equal_values=0.0)
            ratings[f"lds {way}"] = float(lds)
            whole, *reduced = log_p_of([all_indices, *without_best])
            for k, log_p in zip(TOP_COUNTS, reduced, strict=True):
                ratings[f"−{k} {way}"] = whole - log_p
        best = np.sort(best_first[:NUM_ADDED])
        with_none, with_best = self.log_p_masked([NO_INDICES, best])
        ratings[f"+{NUM_ADDED} masked"] = with_best - with_none
        return ratings


def mean_interval(values_Q: np.ndarray) -> Interval:
    """Return the mean over questions, with its 95% interval by bootstrap."""
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(values_Q), size=(NUM_BOOTSTRAPS, len(values_Q)))
    means = values_Q[drawn].mean(1)
    return percentile_interval(means, float(values_Q.mean()))


if __name__ == "__main__":
    main()
