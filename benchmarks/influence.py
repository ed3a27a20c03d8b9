"""Claims: the influence of distant tokens costs a fraction of what it costs one forward at a time,
or through captum; distant tokens that keep their context cost little more than those shown alone,
where a mask over the long window is the plain way; context losses are ahead of longppl's loop; and
what is left to gain is little.

One model (that of configs/quick.yaml; trained if there is a run) and the same held-out documents
for every contestant, one thread, all taking turns; a ratio is the median over the rounds of the
ratio within a round. On a busy machine a process waits for its turn:
CPU time is what its wall time would be on an idle one, and both are printed.

    pip install -c constraints.txt -e ".[bench]"
    python benchmarks/influence.py [--model runs/quick] [--rounds 5]
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
from typing import Any, TypeVar

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
LONG, SHORT = 256, 64
CPU = torch.device("cpu")
shown_alone = partial(Scorer, device=CPU, distant_states="isolated")


# --- taking turns ---------------------------------------------------------------------------------


@dataclass
class Contest:
    """Milliseconds of each contestant, per whatever `work` counts, in every round."""

    title: str
    wall: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str, work: int, run: Callable[..., T], *given: Any) -> T:
        wall, cpu = time.perf_counter(), time.process_time()
        found = run(*given)
        self.wall.setdefault(name, []).append((time.perf_counter() - wall) * 1000 / work)
        self.cpu.setdefault(name, []).append((time.process_time() - cpu) * 1000 / work)
        return found

    def time_all(self, name: str, work: int, run: Callable[[Any], T], given: Iterable) -> list[T]:
        return self.time(name, work, lambda: [run(one) for one in given])

    def report(self, *baselines: str) -> None:
        def ratio(table: dict[str, list[float]], base: str, name: str) -> str:
            ratios = [a / b for a, b in zip(table[base], table[name], strict=True)]
            return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"

        print(f"\n{self.title}\n")
        times = [f"faster than {base}: {kind}" for base in baselines for kind in ("CPU", "wall")]
        print("| |", " | ".join(["CPU ms", "wall ms", *times]), "|")
        print("|---|" + "---:|" * (2 + len(times)))
        for name in self.cpu:
            cells = [f"{statistics.median(table[name]):.3f}" for table in (self.cpu, self.wall)]
            for base in baselines:
                cells += [ratio(table, base, name) for table in (self.cpu, self.wall)]
            print(f"| {name} |", " | ".join(cells), "|", flush=True)


# --- contestants ----------------------------------------------------------------------------------


@torch.no_grad()
def one_at_a_time(model: Any, block: Block, distant: list[int], target: int) -> np.ndarray:
    """Return influence_F as one would write it with transformers: a forward per distant token,
    batch 1, all logits. (With gaps in the position IDs a mask of ones must say that this is one
    sequence.)"""
    found = []
    for chosen in [[], *([j] for j in distant)]:
        places = np.concatenate(
            [
                block.positions_of_distant(np.array(chosen, dtype=np.int64)),
                block.positions_of_local(target + 1),
            ]
        )
        tokens_1L = torch.from_numpy(block.tokens[places].astype(np.int64))[None]
        logits = model(
            input_ids=tokens_1L,
            position_ids=torch.from_numpy(places)[None],
            attention_mask=torch.ones_like(tokens_1L),
            use_cache=False,
        ).logits
        found.append(-float(logits[0, -1].log_softmax(-1)[int(block.targets_W[target])]))
    return found[0] - np.array(found[1:])


def captum_inputs(tokenizer: Any, block: Block) -> dict[str, Any]:
    """Return captum's inputs in two ways. `replaced`, as in its tutorial: every token of the long
    window is replaced in turn. `added`, the nearest it comes to our question: each distant token is
    put before the local window (as text, so IDs are contiguous and words may be cut anew)."""
    words = [tokenizer.decode([token]) for token in block.distant_F.tolist()]
    near = tokenizer.decode(block.tokens[LONG - SHORT : LONG].tolist())
    return {
        "replaced": TextTokenInput(tokenizer.decode(block.tokens[:LONG].tolist()), tokenizer),
        "added": TextTemplateInput(
            lambda *distant: "".join(distant) + near, values=[""] * len(words), baselines=words
        ),
    }


class Ids:
    """The interface of a tokenizer for longppl, for a text of token IDs."""

    def __call__(self, text: Tensor, **_: Any) -> dict[str, Tensor]:
        places = torch.arange(text.shape[-1])
        return {"input_ids": text, "offset_mapping": torch.stack((places, places + 1), -1)[None]}


@torch.no_grad()
def longppl_loop(model: Any, document: np.ndarray, windows: Windows) -> np.ndarray:
    """Return gap_T by longppl's loop, with each step's long window as long as ours instead of the
    whole document."""
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    found: list[list[Tensor]] = [[], []]
    for block in windows.blocks(document):
        ids_1L = torch.from_numpy(block.tokens.astype(np.int64))[None]
        for parts, seen in zip(found, (windows.long, windows.short), strict=True):
            row_1L = ids_1L[:, windows.long - seen :]
            logits = model(row_1L).logits
            parts.append(loss(logits[0, seen - 1 : -1], row_1L[0, seen:]))
    long, short = (torch.cat(parts).numpy() for parts in found)
    return short - long


def losses_in_whole_documents(
    scorer: Scorer, document: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return L_long and L_short as longppl interprets them: the long context is all preceding
    text."""
    whole = Windows(SHORT, 1, len(document) - SHORT).blocks(document)
    near = Windows(SHORT, 1, SHORT).blocks(document)
    long, *_ = scorer.losses([Context(block).long_row() for block in whole])
    return long, np.concatenate(scorer.losses([Context(block).long_row() for block in near]))


@torch.no_grad()
def dense(model: PositionedOLMo, tokens_BL: Tensor, positions_BL: Tensor, labels_B: Tensor) -> None:
    """A plain forward of rows that are ready, unembedding the last place of each."""
    size = 2048 // tokens_BL.shape[1]
    parts = (part.split(size) for part in (tokens_BL, positions_BL, labels_B))
    for tokens, positions, labels in zip(*parts, strict=True):
        hidden_BD = model.hidden(tokens, positions)[:, -1]
        F.cross_entropy(model.unembed(hidden_BD), labels, reduction="none")


@torch.no_grad()
def under_a_mask(model: PositionedOLMo, block: Block) -> np.ndarray:
    """Return influence_FW of distant tokens with their context, the plain way: the long window for
    each, in batches, with a mask that hides the other distant tokens from the local window."""
    places = np.arange(len(block.tokens) - 1)
    tokens_1L = torch.from_numpy(block.tokens[places].astype(np.int64))[None]
    targets_W = torch.from_numpy(block.targets_W.astype(np.int64))
    num_distant, length, num_targets = block.num_distant, len(places), block.num_targets
    found = []
    for chosen in torch.arange(-1, num_distant).split(2048 // length):  # the first sees none
        visible = torch.ones(length, length, dtype=torch.bool).tril().repeat(len(chosen), 1, 1)
        visible[:, num_distant:, :num_distant] = (torch.arange(num_distant) == chosen[:, None])[
            :, None
        ]
        bias = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))[:, None]
        tokens_BL = tokens_1L.expand(len(chosen), -1)
        hidden_BWD = model.hidden(
            tokens_BL, torch.from_numpy(places)[None], bias, num_last=num_targets
        )
        log_p_BWV = model.unembed(hidden_BWD).log_softmax(-1)
        found.append(-log_p_BWV[:, torch.arange(num_targets), targets_W])
    losses = torch.cat(found).numpy()
    return losses[0] - losses[1:]


def ours(scorer: Scorer, block: Block) -> np.ndarray:
    """Return influence_FW by this package, with the distant text read anew."""
    return influence_map(scorer, anew(scorer, block), Units.of_tokens(block.num_distant))


def screened(scorer: Scorer, block: Block) -> np.ndarray:
    """Return the 4 distant tokens that matter most to the first target."""
    units = Units.of_tokens(block.num_distant)
    question = Question(anew(scorer, block), units, [(0, 1)], 4, np.random.default_rng(0))
    return add_one_screened(scorer, question).unit_TK


def anew(scorer: Scorer, block: Block) -> Context:
    """Return the context of a block without reusing states: the scorer keeps those of the text that
    was read last, but here each question pays for its own."""
    scorer._known_text = None
    return scorer.context(block)


# --- the claims -----------------------------------------------------------------------------------


@dataclass
class Setting:
    """The models, documents and number of rounds with which each contestant is timed."""

    config: ModelConfig
    fp32: PositionedOLMo
    bf16: PositionedOLMo
    hugging_face: Any
    tokenizer: Any
    documents: list[np.ndarray]
    rounds: int

    def question(self, number: int, stride: int = 1) -> Block:
        """Return a stretch that begins elsewhere in another document each time."""
        document = self.documents[number % len(self.documents)]
        return next(iter(Windows(LONG, SHORT, stride).blocks(document[number % 8 :])))


def one_target(setting: Setting) -> None:
    """Time the influence on one target: one forward at a time, captum, ours."""
    contest = Contest(f"One target, S={SHORT}, N={LONG}: ms per (target, distant token)")
    exact, rounded = shown_alone(setting.fp32), shown_alone(setting.bf16)
    ablation = LLMAttribution(FeatureAblation(setting.hugging_face), setting.tokenizer)
    distant = list(range(3, LONG - SHORT, 6))
    errors, bf16_errors = [], []
    for number in range(setting.rounds):
        block = setting.question(number)
        num_distant = block.num_distant
        asked = (setting.hugging_face, block, distant, 0)
        alone = contest.time("(i) one at a time", len(distant) + 1, one_at_a_time, *asked)
        target = torch.from_numpy(block.targets_W[:1].astype(np.int64))
        for name, text in captum_inputs(setting.tokenizer, block).items():
            # Its wrapper takes batches of one only; without its cache it is faster for one target.
            attribute = partial(ablation.attribute, target=target, use_cached_outputs=False)
            contest.time(f"(ii) captum, {name}", text.n_itp_features + 1, attribute, text)
        fp32 = contest.time("(iii) ours, W=1", num_distant, ours, exact, block)
        bf16 = contest.time("(iii) ours, W=1, bf16", num_distant, ours, rounded, block)
        contest.time("(v) add_one_screened", num_distant, screened, exact, block)
        contest.time("(v) add_one_screened, bf16", num_distant, screened, rounded, block)
        errors.append(np.abs(fp32[distant, 0] - alone).max())
        bf16_errors.append(np.abs(bf16 - fp32))
    contest.report("(i) one at a time", "(ii) captum, replaced", "(ii) captum, added")
    mean, largest = np.mean(bf16_errors), np.max(bf16_errors)
    print(
        f"\n(iii) and (i) differ by at most {max(errors):.1e} nats in fp32; bf16 from fp32 "
        f"by {mean:.4f} nats in the mean, {largest:.3f} at most"
    )


def shared_windows(setting: Setting) -> None:
    """Time the influence on targets that share windows."""
    contest = Contest(
        f"Targets sharing windows, S=W={SHORT}, N={LONG}: ms per (target, distant token)"
    )
    exact, rounded = shown_alone(setting.fp32), shown_alone(setting.bf16)
    distant, targets = list(range(11, LONG - SHORT, 24)), list(range(4, SHORT, 8))
    for number in range(setting.rounds):
        block = setting.question(number, stride=SHORT)
        work = block.num_targets * block.num_distant
        each = partial(one_at_a_time, setting.hugging_face, block, distant)
        num_rows = len(targets) * (len(distant) + 1)
        name = "(i) one at a time, equal windows"
        alone = contest.time_all(name, num_rows, each, targets)
        fp32 = contest.time("(iv) ours, W=S", work, ours, exact, block)
        contest.time("(iv) ours, W=S, bf16", work, ours, rounded, block)
        worst = np.abs(fp32[np.ix_(distant, targets)].T - np.stack(alone)).max()
        assert worst < 2e-5, worst
    contest.report("(i) one at a time, equal windows")


def with_context(setting: Setting, long: int, short: int, stride: int) -> None:
    """Time the influence of distant tokens that keep their context, against a mask."""
    contest = Contest(
        f"Distant tokens with their context, S={short}, N={long}, W={stride}: ms for all of a block"
    )
    for number in range(setting.rounds):
        document = setting.documents[number % len(setting.documents)]
        block = next(iter(Windows(long, short, stride).blocks(document)))
        masked = contest.time("the long window under a mask", 1, under_a_mask, setting.fp32, block)
        found = contest.time("ours", 1, ours, Scorer(setting.fp32, CPU), block)
        contest.time("ours, shown alone", 1, ours, shown_alone(setting.fp32), block)
        worst = np.abs(found - masked).max()
        assert worst < 2e-5, worst
    contest.report("the long window under a mask")


def token_forwards() -> None:
    """Print token-forwards, counted while a tiny model runs. A last layer that computes little
    still counts in full."""
    print("\nToken-forwards per (target, distant token), a backward counted as two forwards\n")
    print("| | S=64, N=256 | S=256, N=2048 |\n|---|---:|---:|")
    rows: dict[str, list[float]] = {}
    shape = {"d_model": 8, "n_heads": 1, "n_layers": 1, "vocab_size": 16}
    for short, long in ((64, 256), (256, 2048)):
        model = build_model(ModelConfig(**shape, max_sequence_length=long + short)).eval()
        document, num_distant = np.random.default_rng(0).integers(0, 16, long + short), long - short
        rows.setdefault("(i) one at a time", []).append(short + 1)
        rows.setdefault("(ii) captum, replaced", []).append(long + 1)
        rows.setdefault("(ii) captum, added", []).append(short + 2)
        for name, stride in (("(iii) ours, W=1", 1), ("(iv) ours, W=S", short)):
            scorer = shown_alone(model)
            block = next(iter(Windows(long, short, stride).blocks(document)))
            ours(scorer, block)
            rows.setdefault(name, []).append(scorer.token_forwards / num_distant / stride)
        scorer = shown_alone(model)
        block = next(iter(Windows(long, short).blocks(document)))
        screened(scorer, block)
        rows.setdefault("(v) add_one_screened, k=4", []).append(scorer.token_forwards / num_distant)
    mean = [short + 1 + (short - 1) / 2 for short in (64, 256)]
    rows["(i) one at a time, windows of (iv)"] = mean
    for name, counts in rows.items():
        print(f"| {name} |", " | ".join(f"{count:.2f}" for count in counts), "|")


def against_longppl(setting: Setting) -> None:
    """Time context losses against longppl's loop, and compare both."""
    windows = Windows(LONG, SHORT, SHORT)
    bounded = Contest(f"Context losses, S=W={SHORT}, N={LONG}: ms per target")
    whole = Contest(f"The same, the long context being the whole document, S=W={SHORT}")
    scorer = shown_alone(setting.fp32)

    def key_tokens(ids_1L: Tensor) -> Any:
        """At thresholds at which the model of this benchmark has some."""
        model = setting.hugging_face
        return find_key_token(ids_1L, model, Ids(), SHORT, SHORT, alpha=0.1, beta=-100)

    for number in range(setting.rounds):
        # Several documents a round: how much the last, shorter block of each costs is chance.
        part = [setting.documents[(5 * number + i) % len(setting.documents)] for i in range(5)]
        num_targets = sum(len(document) - LONG for document in part)
        theirs = partial(longppl_loop, setting.hugging_face, windows=windows)
        their_gaps = bounded.time_all("longppl's loop, our windows", num_targets, theirs, part)
        asked = [Document(document) for document in part]
        losses_of = partial(context_losses, scorer, windows=windows)
        our_losses = bounded.time_all("ours", num_targets, losses_of, asked)
        for losses, gap_T in zip(our_losses, their_gaps, strict=True):
            assert np.abs(losses.loss_short - losses.loss_long - gap_T).max() < 5e-5

        num_targets = sum(len(document) - SHORT for document in part)
        all_ids = [torch.from_numpy(document.astype(np.int64))[None] for document in part]
        all_spans = whole.time_all("longppl.find_key_token", num_targets, key_tokens, all_ids)
        in_whole = partial(losses_in_whole_documents, scorer)
        all_losses = whole.time_all("ours, per token", num_targets, in_whole, part)
        for spans, (long, short) in zip(all_spans, all_losses, strict=True):
            key = {place for start, end in spans.tolist() for place in range(start, end)}
            doubtful = np.abs(short - long - 0.1) < 1e-4
            found = np.isin(np.arange(SHORT, SHORT + len(long)), list(key))
            assert not (((short - long > 0.1) != found) & ~doubtful).any()
    bounded.report("longppl's loop, our windows")
    whole.report("longppl.find_key_token")


def against_dense(setting: Setting) -> None:
    """Time our forwards against plain ones of ready rows: what is left to gain."""
    contest = Contest(
        "W=1 against plain forwards of ready rows, as many places unembedded: ms a row"
    )
    for number in range(setting.rounds):
        block = setting.question(number)
        for name, model in (("fp32", setting.fp32), ("bf16", setting.bf16)):
            scorer = shown_alone(model)
            context = scorer.context(block)
            rows = [context.set_row(np.array([j])) for j in range(block.num_distant)]
            tensors = (*as_tensors(rows, CPU), torch.from_numpy(block.targets_W.astype(np.int64)))
            labels_B = tensors[2].expand(len(rows))
            contest.time(f"plain forward, {name}", len(rows), dense, model, *tensors[:2], labels_B)
            contest.time(f"ours, {name}", len(rows) + 1, ours, scorer, block)
    contest.report("plain forward, fp32", "plain forward, bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "runs/quick"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()  # as the commands do
    config = load_config(ROOT / "configs/quick.yaml", [])
    prepare(config.data)
    shards = open_shards(config.data, "heldout")
    documents = [shards.document(index) for index in range(len(shards))]
    documents = [document for document in documents if len(document) >= LONG + SHORT + 8]
    config.model.vocab_size = shards.tokenizer.get_vocab_size()
    try:
        loaded, about = load_model(options.model, device="cpu").model, options.model
    except DataError:
        torch.manual_seed(0)
        loaded, about = build_model(config.model).eval(), "random weights: time is the same"
    assert isinstance(loaded, PositionedOLMo)
    setting = Setting(
        config.model,
        loaded,
        copy.deepcopy(loaded).to(torch.bfloat16),
        hugging_face_model(loaded.config, loaded.state_dict(), "benchmark").eval(),
        PreTrainedTokenizerFast(tokenizer_object=shards.tokenizer),
        documents,
        options.rounds,
    )
    print(
        f"{platform.processor() or platform.machine()}, 1 thread, torch {torch.__version__}, "
        f"{about}, {len(documents)} documents, {options.rounds} rounds"
    )
    with in_use(setting.fp32, setting.bf16):  # once, as a measurement does
        for warm_up in (setting.fp32, setting.bf16):
            ours(shown_alone(warm_up), setting.question(0))
        one_target(setting)
        shared_windows(setting)
        for windows in ((128, 32, 1), (96, 32, 32), (LONG, SHORT, SHORT)):
            with_context(setting, *windows)
        token_forwards()
        against_longppl(setting)
        against_dense(setting)


if __name__ == "__main__":
    main()
