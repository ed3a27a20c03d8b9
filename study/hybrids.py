"""A transformer (OLMo 3) and a hybrid (Olmo Hybrid: three Gated DeltaNet layers, then attention) of
the same width and depth on the same text: which loses less on copies, and which on other tokens?

python -m study.hybrids train {transformer,hybrid} --tokens FOLDER --seed N --out FOLDER
python -m study.hybrids compare TEXT OUT.csv MODEL… [--local]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from olmo_sparsity.base.streams import stream
from olmo_sparsity.config.text import DataConfig
from olmo_sparsity.data.sequences import Sequences
from olmo_sparsity.data.shards import open_shards
from study.benchmarks.evidence import read_texts
from study.command import run_command

KINDS = {"transformer": "olmo3", "hybrid": "olmo_hybrid"}
LENGTH, BATCH, STEPS, WARMUP, RATE = 512, 8, 2440, 200, 6e-3
NEAR, LONGEST, DRAWS = 64, 8, 2000
KEY = ["document", "target", "copied", "back"]
GROUPS = {
    "copies": range(2, LONGEST + 1),
    "copies of five and more": range(4, LONGEST + 1),
    "once before": [1],
    "new": [-1, 0],
    "all": range(-1, LONGEST + 1),
}
"""Groups of tokens, by how many of the tokens before one preceded it at an earlier place, too; -1:
it has no earlier place."""


def build(kind: str, vocab_size: int, eos_id: int) -> PreTrainedModel:
    layers = {"transformer": ["full_attention"] * 4}
    layers["hybrid"] = ["linear_attention"] * 3 + ["full_attention"]
    config = AutoConfig.for_model(
        KINDS[kind],
        vocab_size=vocab_size,
        hidden_size=160,
        intermediate_size=432,
        num_hidden_layers=4,
        num_attention_heads=5,
        layer_types=layers[kind],
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attention_bias=True,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=eos_id,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def train(kind: str, tokens: Path, seed: int, out: Path) -> None:
    """AdamW in bf16, a linear rise and fall of the rate; both kinds see the same batches."""
    shards = open_shards(DataConfig(folder=str(tokens)), "train")
    sequences = Sequences(shards, LENGTH)
    order = stream(seed, "order").permutation(len(sequences))[: STEPS * BATCH].reshape(-1, BATCH)
    torch.manual_seed(seed)
    model = build(kind, shards.vocab_size, shards.eos_id)
    groups = [[p for p in model.parameters() if (p.ndim > 1) == decays] for decays in (True, False)]
    decays = [{"params": group, "weight_decay": 0.1 * (i == 0)} for i, group in enumerate(groups)]
    optimizer = torch.optim.AdamW(decays, lr=RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, (STEPS - step) / (STEPS - WARMUP))
    )
    compiled = torch.compile(model)
    for step, indices in enumerate(order):
        ids_BL = torch.stack([torch.from_numpy(sequences[int(index)]) for index in indices])
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(ids_BL, labels=ids_BL).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"{kind} {seed} step {step} loss {loss.item():.4f}", flush=True)
    model.save_pretrained(out)
    shards.tokenizer.save(str(out / "tokenizer.json"))


def copied(tokens: list[int]) -> tuple[list[int], list[int]]:
    """Of each token, how many of the tokens before it preceded it at an earlier place, too (-1: it
    has no earlier place), and how far back the last such place is (then 0)."""
    last: dict[tuple[int, ...], int] = {}
    found, back = [], []
    for at in range(len(tokens)):
        grams = [tuple(tokens[at - n : at + 1]) for n in range(min(LONGEST, at) + 1)]
        before = [last[gram] for gram in grams if gram in last]
        found.append(len(before) - 1)
        back.append(at - before[-1] if before else 0)
        last.update(dict.fromkeys(grams, at))
    return found, back


def losses_of(texts: list[str], folder: str, local: bool = False) -> pd.DataFrame:
    """The losses of a model on tokens 64 to 511 of each text, read once from its beginning.
    `local`: blocks of 64, each with the 64 tokens before it alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    kind = next(kind for kind, name in KINDS.items() if name == model.config.model_type)
    tables = []
    for document, text in enumerate(texts):
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:LENGTH]
        windows_BL = torch.tensor(ids).unfold(0, 2 * NEAR if local else LENGTH, NEAR)
        with torch.no_grad():
            logits_BVT = model(windows_BL).logits[:, NEAR - 1 : -1].float().mT
        loss_BT = cross_entropy(logits_BVT, windows_BL[:, NEAR:], reduction="none")
        found, back = (numbers[NEAR:] for numbers in copied(ids))
        of = {"document": document, "target": range(NEAR, LENGTH), "copied": found, "back": back}
        tables.append(pd.DataFrame({**of, f"{kind} {folder}": loss_BT.flatten()}))
    return pd.concat(tables).set_index(KEY)


def summary_of(losses: pd.DataFrame) -> pd.DataFrame:
    """The mean loss of both kinds on each group of tokens, and hybrid minus transformer, with an
    interval over documents and the smallest and largest of all pairs of models."""
    document, _, copied, back = (losses.index.get_level_values(name) for name in KEY)
    groups = {name: np.isin(copied, of) for name, of in GROUPS.items()}
    groups["copies from 128 and more tokens back"] = groups["copies"] & (back >= 128)
    num = document.nunique()
    drawn = np.random.default_rng(0).multinomial(num, np.full(num, 1 / num), size=DRAWS)
    drawn = np.vstack([np.ones(num), drawn])  # the first is what was found
    means = {}
    for name, of in groups.items():
        sums = losses.assign(num=1)[of].groupby("document").sum()
        sums = drawn @ sums.reindex(document.unique(), fill_value=0).to_numpy()
        means[name] = sums[:, :-1] / sums[:, -1:]
    means["copies beyond new"] = means["copies"] - means["new"]
    is_hybrid = losses.columns.str.startswith("hybrid")
    rows = []
    for name, of_draws in means.items():
        hybrids, transformers = of_draws[:, is_hybrid], of_draws[:, ~is_hybrid]
        differences = hybrids.mean(1) - transformers.mean(1)
        low, high = np.quantile(differences[1:], [0.025, 0.975])
        pairs = hybrids[0][:, None] - transformers[0]
        row = {"group": name, "tokens": int(groups[name].sum()) if name in groups else 0}
        row |= {"transformer": transformers[0].mean(), "hybrid": hybrids[0].mean()}
        row |= {"difference": differences[0], "low": low, "high": high}
        rows.append(row | {"pairs_low": pairs.min(), "pairs_high": pairs.max()})
    return pd.DataFrame(rows).round(4)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("study.hybrids", description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    training = steps.add_parser("train")
    training.add_argument("kind", choices=KINDS)
    training.add_argument("--tokens", type=Path, required=True, help="a prepared folder")
    training.add_argument("--seed", type=int, required=True)
    training.add_argument("--out", type=Path, required=True)
    comparing = steps.add_parser("compare")
    comparing.add_argument("text", type=Path)
    comparing.add_argument("out", type=Path)
    comparing.add_argument("models", nargs="+")
    comparing.add_argument("--local", action="store_true", help="read near text alone")

    def run(options: argparse.Namespace, _: list[str]) -> None:
        if options.step == "train":
            train(options.kind, options.tokens, options.seed, options.out)
            return
        texts = read_texts([options.text])
        losses = pd.concat(
            [losses_of(texts, model, options.local) for model in options.models], axis=1
        )
        summary = summary_of(losses)
        summary.to_csv(options.out, index=False)
        print(summary.to_string())

    return run_command(parser, run, words)


if __name__ == "__main__":
    raise SystemExit(main())
