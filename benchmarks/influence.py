"""Compare what the influence of distant tokens costs here with what it costs elsewhere.

    pip install -c constraints.txt -e ".[bench]"
    python benchmarks/influence.py [--model runs/quick] [--rounds 5]

Claims:
  - the influence of distant tokens costs a fraction of what it costs one forward at a time, or
    through captum (`compare_one_target`, `compare_shared_windows`);
  - distant tokens that keep their context cost little more than those shown alone, and less than
    with a mask over the long window, which is the plain way (`compare_with_context`);
  - context losses are computed faster than by longppl's loop (`compare_longppl`);
  - what is left to gain is little (`compare_plain_forwards`).

All contestants take turns on the same held-out documents, in one thread, with one model: that of
configs/quick.yaml, trained if there is a run. Each round prints nothing; at the end a table has the
median time of each contestant, and the median over the rounds of the ratio *within* a round. On a
busy machine a process waits for its turn: CPU time is what its wall time would be on an idle one,
and both are printed.

Dimension key: B rows, L tokens of a row, F distant tokens, W targets of a block, T targets of a
document, D width, V vocabulary. S, N and W in titles are the lengths of text/windows.py: local
window, long window and targets of a block.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from captum.attr import FeatureAblation, LLMAttribution, TextTemplateInput, TextTokenInput
from longppl.longppl import find_key_token
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from olmo_sparsity.analysis.scoring.document_losses import context_losses
from olmo_sparsity.analysis.scoring.rows import Context
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.analysis.scoring.tensors import as_tensors
from olmo_sparsity.analysis.selectors.influence import Question, add_one_screened, influence_map
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.command.memory import keep_freed_memory
from olmo_sparsity.config.model import ModelConfig
from olmo_sparsity.config.run import load_config
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.models.build import build_model
from olmo_sparsity.models.huggingface.exchange import hugging_face_model
from olmo_sparsity.models.identity.use import in_use
from olmo_sparsity.models.load import load_model
from olmo_sparsity.models.olmo.model import PositionedOLMo
from olmo_sparsity.text.documents import Document
from olmo_sparsity.text.units import Units
from olmo_sparsity.text.windows import Block, Windows

T = TypeVar("T")

ROOT = Path(__file__).parents[1]

LONG = 256
"""Tokens of the long window."""

SHORT = 64
"""Tokens of the local window."""

PLACES_OF_BATCH = 2048
"""Tokens that a plain forward reads at once, in as many rows as that makes."""

LARGEST_ERROR = 2e-5
"""Nats by which two ways of computing the same influence may differ in fp32."""

CPU = torch.device("cpu")

scorer_of_tokens_alone = partial(Scorer, device=CPU, distant_states="isolated")
"""Returns a scorer of a model that shows each distant token without its context."""


def main() -> None:
    """Print a table for each claim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "runs/quick"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()  # as the commands do
    setting = prepare_setting(options.model, options.rounds)
    with in_use(setting.fp32, setting.bf16):  # once, as a measurement does
        for model in (setting.fp32, setting.bf16):  # the first call of a model takes longer
            influence_here(scorer_of_tokens_alone(model), setting.block(0))
        compare_one_target(setting)
        compare_shared_windows(setting)
        for windows in (Windows(128, 32, 1), Windows(96, 32, 32), Windows(LONG, SHORT, SHORT)):
            compare_with_context(setting, windows)
        print_token_forwards()
        compare_longppl(setting)
        compare_plain_forwards(setting)


# --- models and documents -------------------------------------------------------------------------


@dataclass
class Setting:
    """The models, documents and number of rounds with which each contestant is timed."""

    fp32: PositionedOLMo
    bf16: PositionedOLMo
    """The same model, rounded."""

    hugging_face: Any
    """The same model in fp32, as a model of transformers."""

    tokenizer: Any
    documents: list[np.ndarray]
    """Token IDs of held-out documents, each with room for a block."""

    num_rounds: int

    def block(self, round_index: int, stride: int = 1) -> Block:
        """Return a block of targets, in each round of another document and elsewhere in it."""
        document = self.documents[round_index % len(self.documents)]
        return first_block(document[round_index % 8 :], Windows(LONG, SHORT, stride))


def prepare_setting(model_folder: str, num_rounds: int) -> Setting:
    """Load the model, or draw one with random weights if there is no run, and print which."""
    config = load_config(ROOT / "configs/quick.yaml", [])
    prepare(config.data)
    shards = open_shards(config.data, "heldout")
    documents = [shards.document(index) for index in range(len(shards))]
    documents = [document for document in documents if len(document) >= LONG + SHORT + 8]
    config.model.vocab_size = shards.tokenizer.get_vocab_size()
    try:
        model = load_model(model_folder, device="cpu").model
        description = model_folder
    except DataError:
        torch.manual_seed(0)
        model = build_model(config.model).eval()
        description = "random weights: time is the same"
    assert isinstance(model, PositionedOLMo)
    print(
        f"{platform.processor() or platform.machine()}, 1 thread, torch {torch.__version__}, "
        f"{description}, {len(documents)} documents, {num_rounds} rounds"
    )
    return Setting(
        fp32=model,
        bf16=copy.deepcopy(model).to(torch.bfloat16),
        hugging_face=hugging_face_model(model.config, model.state_dict(), "benchmark").eval(),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=shards.tokenizer),
        documents=documents,
        num_rounds=num_rounds,
    )


def first_block(document: np.ndarray, windows: Windows) -> Block:
    """Return the first block of targets of a document."""
    return next(iter(windows.blocks(document)))


def as_ids(tokens: np.ndarray) -> Tensor:
    """Return token IDs as PyTorch's embedding takes them."""
    return torch.from_numpy(tokens.astype(np.int64))


# --- taking turns ---------------------------------------------------------------------------------


@dataclass
class Contest:
    """The times of several contestants, which take turns: in each round each of them is timed."""

    title: str
    wall_ms: dict[str, list[float]] = field(default_factory=dict)
    """For each contestant, in every round: milliseconds for each unit of its work."""

    cpu_ms: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str, num_units: int, action: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a contestant's action, and note its times. `num_units`: how much
        work it does, in the unit of the title, such as targets."""
        started = time.perf_counter()
        started_cpu = time.process_time()
        result = action(*arguments)
        wall_s = time.perf_counter() - started
        cpu_s = time.process_time() - started_cpu
        self.wall_ms.setdefault(name, []).append(wall_s * 1000 / num_units)
        self.cpu_ms.setdefault(name, []).append(cpu_s * 1000 / num_units)
        return result

    def time_all(
        self, name: str, num_units: int, action: Callable[[Any], T], items: Iterable
    ) -> list[T]:
        """Return the results of an action for each of several items, timed together."""
        return self.time(name, num_units, lambda: [action(item) for item in items])

    def report(self, *baselines: str) -> None:
        """Print the table: how much faster each contestant is than these."""
        kinds = {"CPU": self.cpu_ms, "wall": self.wall_ms}
        ratio_columns = [f"faster than {base}: {kind}" for base in baselines for kind in kinds]
        print(f"\n{self.title}\n")
        print("| |", " | ".join(["CPU ms", "wall ms", *ratio_columns]), "|")
        print("|---|" + "---:|" * (2 + len(ratio_columns)))
        for name in self.cpu_ms:
            cells = [f"{statistics.median(times[name]):.3f}" for times in kinds.values()]
            for base in baselines:
                cells += [
                    self._describe_ratio(times[base], times[name]) for times in kinds.values()
                ]
            print(f"| {name} |", " | ".join(cells), "|", flush=True)

    @staticmethod
    def _describe_ratio(times_of_base: list[float], times: list[float]) -> str:
        """Return the median and the range of the ratios of two contestants' times in a round."""
        ratios = [base / other for base, other in zip(times_of_base, times, strict=True)]
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


# --- influence: this package, one at a time, captum -----------------------------------------------


def compare_one_target(setting: Setting) -> None:
    """Time the influence on one target: one forward at a time, captum, this package."""
    contest = Contest(f"One target, S={SHORT}, N={LONG}: ms per (target, distant token)")
    scorer = scorer_of_tokens_alone(setting.fp32)
    scorer_bf16 = scorer_of_tokens_alone(setting.bf16)
    ablation = LLMAttribution(FeatureAblation(setting.hugging_face), setting.tokenizer)
    # Every sixth distant token is enough to time one forward each.
    sampled = list(range(3, LONG - SHORT, 6))
    errors = []
    errors_bf16 = []
    for round_index in range(setting.num_rounds):
        block = setting.block(round_index)
        num_distant = block.num_distant
        expected_F = contest.time(
            "(i) one at a time",
            len(sampled) + 1,
            influence_one_at_a_time,
            *(setting.hugging_face, block, sampled, 0),
        )
        for name, captum_input in captum_inputs(setting.tokenizer, block).items():
            # Its wrapper takes batches of one only; without its cache it is faster for one target.
            attribute = partial(
                ablation.attribute, target=as_ids(block.targets_W[:1]), use_cached_outputs=False
            )
            num_forwards = captum_input.n_itp_features + 1
            contest.time(f"(ii) captum, {name}", num_forwards, attribute, captum_input)
        found = contest.time("(iii) ours, W=1", num_distant, influence_here, scorer, block)
        found_bf16 = contest.time(
            "(iii) ours, W=1, bf16", num_distant, influence_here, scorer_bf16, block
        )
        contest.time("(v) add_one_screened", num_distant, choose_screened, scorer, block)
        contest.time("(v) add_one_screened, bf16", num_distant, choose_screened, scorer_bf16, block)
        errors.append(np.abs(found[sampled, 0] - expected_F).max())
        errors_bf16.append(np.abs(found_bf16 - found))
    contest.report("(i) one at a time", "(ii) captum, replaced", "(ii) captum, added")
    print(
        f"\n(iii) and (i) differ by at most {max(errors):.1e} nats in fp32; bf16 from fp32 "
        f"by {np.mean(errors_bf16):.4f} nats in the mean, {np.max(errors_bf16):.3f} at most"
    )


def compare_shared_windows(setting: Setting) -> None:
    """Time the influence on targets that share windows."""
    contest = Contest(
        f"Targets sharing windows, S=W={SHORT}, N={LONG}: ms per (target, distant token)"
    )
    scorer = scorer_of_tokens_alone(setting.fp32)
    scorer_bf16 = scorer_of_tokens_alone(setting.bf16)
    # A sample is enough to time one forward each.
    sampled = list(range(11, LONG - SHORT, 24))
    sampled_targets = list(range(4, SHORT, 8))
    name = "(i) one at a time, equal windows"
    for round_index in range(setting.num_rounds):
        block = setting.block(round_index, stride=SHORT)
        num_pairs = block.num_targets * block.num_distant
        num_forwards = len(sampled_targets) * (len(sampled) + 1)
        one_target = partial(influence_one_at_a_time, setting.hugging_face, block, sampled)
        expected = contest.time_all(name, num_forwards, one_target, sampled_targets)
        found_FW = contest.time("(iv) ours, W=S", num_pairs, influence_here, scorer, block)
        contest.time("(iv) ours, W=S, bf16", num_pairs, influence_here, scorer_bf16, block)
        found = found_FW[np.ix_(sampled, sampled_targets)].T
        error = np.abs(found - np.stack(expected)).max()
        assert error < LARGEST_ERROR, error
    contest.report(name)


def influence_here(scorer: Scorer, block: Block) -> np.ndarray:
    """Return influence_FW by this package, with the distant text read anew."""
    units = Units.of_tokens(block.num_distant)
    return influence_map(scorer, context_read_anew(scorer, block), units)


def choose_screened(scorer: Scorer, block: Block) -> np.ndarray:
    """Return the 4 distant tokens that matter most to the first target."""
    units = Units.of_tokens(block.num_distant)
    context = context_read_anew(scorer, block)
    question = Question(context, units, [(0, 1)], 4, np.random.default_rng(0))
    return add_one_screened(scorer, question).unit_TK


def context_read_anew(scorer: Scorer, block: Block) -> Context:
    """Return the context of a block without reusing states: the scorer keeps those of the text that
    was read last, but here each question pays for its own."""
    scorer._known_text = None
    return scorer.context(block)


@torch.no_grad()
def influence_one_at_a_time(
    model: Any, block: Block, distant_indices: list[int], target: int
) -> np.ndarray:
    """Return influence_F of some distant tokens on one target, as one would write it with
    transformers: a forward for each, batch 1, all logits."""
    losses = []
    for added in ([], *([index] for index in distant_indices)):
        positions = np.concatenate(
            [
                block.positions_of_distant(np.array(added, dtype=np.int64)),
                block.positions_of_local(target + 1),
            ]
        )
        tokens_1L = as_ids(block.tokens[positions])[None]
        logits = model(
            input_ids=tokens_1L,
            position_ids=torch.from_numpy(positions)[None],
            # Otherwise transformers takes gaps in the position IDs for several sequences.
            attention_mask=torch.ones_like(tokens_1L),
            use_cache=False,
        ).logits
        log_p_V = logits[0, -1].log_softmax(-1)
        losses.append(-float(log_p_V[int(block.targets_W[target])]))
    loss_without = losses[0]
    return loss_without - np.array(losses[1:])


def captum_inputs(tokenizer: Any, block: Block) -> dict[str, Any]:
    """Return captum's inputs in two ways.

    replaced: As in its tutorial, every token of the long window is replaced in turn.
    added: The nearest it comes to our question. Each distant token is put before the local window,
        as text, so position IDs are contiguous, and words may be cut into other tokens.
    """
    distant_texts = [tokenizer.decode([token]) for token in block.distant_F.tolist()]
    local_text = tokenizer.decode(block.tokens[LONG - SHORT : LONG].tolist())
    return {
        "replaced": TextTokenInput(tokenizer.decode(block.tokens[:LONG].tolist()), tokenizer),
        "added": TextTemplateInput(
            lambda *shown: "".join(shown) + local_text,
            values=[""] * len(distant_texts),
            baselines=distant_texts,
        ),
    }


# --- influence with context: this package, and a mask ---------------------------------------------


def compare_with_context(setting: Setting, windows: Windows) -> None:
    """Time the influence of distant tokens that keep their context, against a mask."""
    contest = Contest(
        f"Distant tokens with their context, S={windows.short}, N={windows.long}, "
        f"W={windows.stride}: ms for all of a block"
    )
    scorer_alone = scorer_of_tokens_alone(setting.fp32)
    for round_index in range(setting.num_rounds):
        document = setting.documents[round_index % len(setting.documents)]
        block = first_block(document, windows)
        expected_FW = contest.time(
            "the long window under a mask", 1, influence_under_mask, setting.fp32, block
        )
        found_FW = contest.time("ours", 1, influence_here, Scorer(setting.fp32, CPU), block)
        contest.time("ours, shown alone", 1, influence_here, scorer_alone, block)
        error = np.abs(found_FW - expected_FW).max()
        assert error < LARGEST_ERROR, error
    contest.report("the long window under a mask")


@torch.no_grad()
def influence_under_mask(model: PositionedOLMo, block: Block) -> np.ndarray:
    """Return influence_FW of distant tokens with their context, the plain way: the long window for
    each, in batches, with a mask that hides the other distant tokens from the local window."""
    num_distant = block.num_distant
    num_targets = block.num_targets
    length = len(block.tokens) - 1  # the last target is no input
    tokens_1L = as_ids(block.tokens[:length])[None]
    positions_1L = torch.arange(length)[None]
    targets_W = as_ids(block.targets_W)

    losses = []
    # −1: the first row sees no distant token.
    for shown_B in torch.arange(-1, num_distant).split(PLACES_OF_BATCH // length):
        is_shown_BF = torch.arange(num_distant) == shown_B[:, None]
        visible_BLL = torch.ones(length, length, dtype=torch.bool).tril().repeat(len(shown_B), 1, 1)
        visible_BLL[:, num_distant:, :num_distant] = is_shown_BF[:, None]
        bias = torch.zeros(visible_BLL.shape).masked_fill(~visible_BLL, float("-inf"))[:, None]
        tokens_BL = tokens_1L.expand(len(shown_B), -1)
        hidden_BWD = model.hidden(tokens_BL, positions_1L, bias, num_last=num_targets)
        log_p_BWV = model.unembed(hidden_BWD).log_softmax(-1)
        losses.append(-log_p_BWV[:, torch.arange(num_targets), targets_W])
    all_losses = torch.cat(losses).numpy()
    loss_without_W = all_losses[0]
    return loss_without_W - all_losses[1:]


# --- token-forwards -------------------------------------------------------------------------------


def print_token_forwards() -> None:
    """Print token-forwards, counted while a tiny model runs. A last layer that computes little
    still counts in full."""
    print("\nToken-forwards per (target, distant token), a backward counted as two forwards\n")
    print("| | S=64, N=256 | S=256, N=2048 |\n|---|---:|---:|")
    counts_by_name: dict[str, list[float]] = {}

    def add(name: str, count: float) -> None:
        counts_by_name.setdefault(name, []).append(count)

    sizes = {"d_model": 8, "n_heads": 1, "n_layers": 1, "vocab_size": 16}
    lengths = ((64, 256), (256, 2048))
    for short, long in lengths:
        model = build_model(ModelConfig(**sizes, max_sequence_length=long + short)).eval()
        document = np.random.default_rng(0).integers(0, 16, long + short)
        num_distant = long - short
        # Rows of the others: the local window and one token; the long window and the target; and
        # what captum's template adds.
        add("(i) one at a time", short + 1)
        add("(ii) captum, replaced", long + 1)
        add("(ii) captum, added", short + 2)
        for name, stride in (("(iii) ours, W=1", 1), ("(iv) ours, W=S", short)):
            scorer = scorer_of_tokens_alone(model)
            influence_here(scorer, first_block(document, Windows(long, short, stride)))
            add(name, scorer.token_forwards / num_distant / stride)
        scorer = scorer_of_tokens_alone(model)
        choose_screened(scorer, first_block(document, Windows(long, short)))
        add("(v) add_one_screened, k=4", scorer.token_forwards / num_distant)
    for short, _ in lengths:
        # The local windows of a block grow by a token from target to target.
        add("(i) one at a time, windows of (iv)", short + 1 + (short - 1) / 2)
    for name, counts in counts_by_name.items():
        print(f"| {name} |", " | ".join(f"{count:.2f}" for count in counts), "|")


# --- context losses: this package, and longppl ----------------------------------------------------

KEY_GAP = 0.1
"""longppl's `alpha`: a key token has a larger gap. The model of this benchmark has some at 0.1."""

DOCUMENTS_OF_ROUND = 5
"""Several documents a round: how much the last, shorter block of each costs is chance."""


def compare_longppl(setting: Setting) -> None:
    """Time context losses against longppl's loop, and compare both."""
    windows = Windows(LONG, SHORT, SHORT)
    in_windows = Contest(f"Context losses, S=W={SHORT}, N={LONG}: ms per target")
    in_documents = Contest(f"The same, the long context being the whole document, S=W={SHORT}")
    scorer = scorer_of_tokens_alone(setting.fp32)
    for round_index in range(setting.num_rounds):
        first = DOCUMENTS_OF_ROUND * round_index
        documents = [
            setting.documents[(first + index) % len(setting.documents)]
            for index in range(DOCUMENTS_OF_ROUND)
        ]
        _compare_in_windows(in_windows, setting, scorer, windows, documents)
        _compare_in_documents(in_documents, setting, scorer, documents)
    in_windows.report("longppl's loop, our windows")
    in_documents.report("longppl.find_key_token")


def _compare_in_windows(
    contest: Contest,
    setting: Setting,
    scorer: Scorer,
    windows: Windows,
    documents: list[np.ndarray],
) -> None:
    """Time both with long windows of one length, and check that all gaps are equal."""
    num_targets = sum(len(document) - LONG for document in documents)
    loop = partial(longppl_loop, setting.hugging_face, windows=windows)
    name = "longppl's loop, our windows"
    expected_gaps = contest.time_all(name, num_targets, loop, documents)
    losses_of = partial(context_losses, scorer, windows=windows)
    found = contest.time_all(
        "ours", num_targets, losses_of, [Document(document) for document in documents]
    )
    for losses, expected_gap_T in zip(found, expected_gaps, strict=True):
        gap_T = losses.loss_short - losses.loss_long
        assert np.abs(gap_T - expected_gap_T).max() < 5e-5


def _compare_in_documents(
    contest: Contest, setting: Setting, scorer: Scorer, documents: list[np.ndarray]
) -> None:
    """Time both with all preceding text as the long context, and check that key tokens are
    equal."""
    num_targets = sum(len(document) - SHORT for document in documents)

    def find_keys(ids_1L: Tensor) -> Any:
        """Return the spans of key tokens that longppl finds."""
        return find_key_token(
            ids_1L, setting.hugging_face, IdTokenizer(), SHORT, SHORT, alpha=KEY_GAP, beta=-100
        )

    all_ids = [as_ids(document)[None] for document in documents]
    all_spans = contest.time_all("longppl.find_key_token", num_targets, find_keys, all_ids)
    losses_of = partial(losses_in_whole_document, scorer)
    all_losses = contest.time_all("ours, per token", num_targets, losses_of, documents)
    for spans, losses in zip(all_spans, all_losses, strict=True):
        gap_T = losses.short_T - losses.long_T
        places_T = np.arange(SHORT, SHORT + len(gap_T))
        key_places = [place for start, end in spans.tolist() for place in range(start, end)]
        is_key_T = np.isin(places_T, key_places)
        # Where the gap is next to the threshold, rounding decides.
        is_doubtful_T = np.abs(gap_T - KEY_GAP) < 1e-4
        differs_T = (gap_T > KEY_GAP) != is_key_T
        assert not (differs_T & ~is_doubtful_T).any()


class IdTokenizer:
    """The interface of a tokenizer for longppl, for a text of token IDs."""

    def __call__(self, text: Tensor, **_: Any) -> dict[str, Tensor]:
        starts = torch.arange(text.shape[-1])
        offsets = torch.stack((starts, starts + 1), -1)
        return {"input_ids": text, "offset_mapping": offsets[None]}


@torch.no_grad()
def longppl_loop(model: Any, document: np.ndarray, windows: Windows) -> np.ndarray:
    """Return gap_T by longppl's loop, with each step's long window as long as ours instead of the
    whole document."""
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    assert windows.long != "all"
    losses: dict[int, list[Tensor]] = {windows.long: [], windows.short: []}
    for block in windows.blocks(document):
        ids_1L = as_ids(block.tokens)[None]
        for num_before, losses_of_window in losses.items():
            row_1L = ids_1L[:, windows.long - num_before :]
            logits = model(row_1L).logits
            losses_of_window.append(loss(logits[0, num_before - 1 : -1], row_1L[0, num_before:]))
    loss_long_T = torch.cat(losses[windows.long]).numpy()
    loss_short_T = torch.cat(losses[windows.short]).numpy()
    return loss_short_T - loss_long_T


class DocumentLosses(NamedTuple):
    """The losses of a document's targets, in nats."""

    long_T: np.ndarray
    short_T: np.ndarray


def losses_in_whole_document(scorer: Scorer, document: np.ndarray) -> DocumentLosses:
    """Return L_long and L_short as longppl interprets them: the long context is all preceding
    text."""
    # All targets are one block, whose first has a window of `SHORT` tokens.
    (whole,) = Windows(SHORT, 1, len(document) - SHORT).blocks(document)
    (long_T,) = scorer.losses([Context(whole).long_row()])
    blocks = Windows(SHORT, 1, SHORT).blocks(document)
    short = scorer.losses([Context(block).long_row() for block in blocks])
    return DocumentLosses(long_T, np.concatenate(short))


# --- plain forwards -------------------------------------------------------------------------------


def compare_plain_forwards(setting: Setting) -> None:
    """Time influence against plain forwards of rows that are ready: what is left to gain."""
    contest = Contest(
        "W=1 against plain forwards of ready rows, as many places unembedded: ms a row"
    )
    for round_index in range(setting.num_rounds):
        block = setting.block(round_index)
        for name, model in (("fp32", setting.fp32), ("bf16", setting.bf16)):
            scorer = scorer_of_tokens_alone(model)
            context = scorer.context(block)
            rows = [context.set_row(np.array([index])) for index in range(block.num_distant)]
            tokens_BL, positions_BL = as_tensors(rows, CPU)
            labels_B = as_ids(block.targets_W).expand(len(rows))
            contest.time(
                f"plain forward, {name}",
                len(rows),
                forward_plainly,
                *(model, tokens_BL, positions_BL, labels_B),
            )
            # One row more: the loss without distant tokens.
            contest.time(f"ours, {name}", len(rows) + 1, influence_here, scorer, block)
    contest.report("plain forward, fp32", "plain forward, bf16")


@torch.no_grad()
def forward_plainly(
    model: PositionedOLMo, tokens_BL: Tensor, positions_BL: Tensor, labels_B: Tensor
) -> None:
    """Compute the loss of the last place of each row."""
    num_rows = PLACES_OF_BATCH // tokens_BL.shape[1]
    batches = (part.split(num_rows) for part in (tokens_BL, positions_BL, labels_B))
    for tokens, positions, labels in zip(*batches, strict=True):
        hidden_BD = model.hidden(tokens, positions)[:, -1]
        F.cross_entropy(model.unembed(hidden_BD), labels, reduction="none")


if __name__ == "__main__":
    main()
