"""What a beginning-of-text token changes, on a model that was trained with one.

python benchmarks/prefix.py RUN [--steps 150] [--out FOLDER]

RUN is exported and goes on learning through transformers, on the same text, with the end-of-text
token first in every sequence; its tokenizer then puts that token before every text. The same
text is measured with it in front of every window (`--prefix auto`) and without (`none`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from analysis.documents import Documents
from analysis.measurement import measure
from analysis.results import Results
from analysis.sources import open_documents
from analysis.windows import Windows
from olmo_sparsity.config_file import load_config
from olmo_sparsity.data.batches import TrainingBatches
from olmo_sparsity.data.shards import open_shards
from olmo_sparsity.model.exchange import export
from olmo_sparsity.model.load import load_model
from olmo_sparsity.progress import Progress

WINDOWS = Windows(96, 32, 32)

LOSSES = ("L_short", "L_long", "gap", "induction")
SHARES = ("recovery", "foreign", "excess", "placebo", "net")


def learn_prefix(run: str, out: Path, num_steps: int) -> None:
    """`run` after `num_steps` more, each sequence behind the end-of-text token."""
    export(Path(run), out)
    config = load_config(f"{run}/config.yaml")
    shards = open_shards(config.data, "train")
    batches = TrainingBatches(
        shards, config.positions, length=config.training.length, seed=config.seed + 1,
        batch_size=config.training.batch_size, repeated=config.data.repeated,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    with Progress("learning the prefix", num_steps, "steps") as progress:
        for step, batch in zip(range(1, num_steps + 1), batches.from_step(0), strict=False):
            batch.tokens_BL[:, 0] = shards.eos_id
            logits = model(batch.tokens_BL, position_ids=batch.positions_BL).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.labels_BL.flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.update(step)
    model.save_pretrained(out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    eos = tokenizer.id_to_token(shards.eos_id)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{eos} $A", special_tokens=[(eos, shards.eos_id)]
    )
    tokenizer.save(str(out / "tokenizer.json"))


def documents_of(run: str, model: object) -> Documents:
    return open_documents(str(load_config(f"{run}/config.yaml").data.folder), model, 60)


def format_row(name: str, found: Results) -> str:
    losses = found.reported
    row = found.summary.query("selector == 'add_one' and target_set == 'gap' and k == 1").iloc[0]
    numbers = [losses.loss_short.mean(), losses.loss_long.mean(), row.gap, found.meta.gate["drop"]]
    cells = [f"{number:.2f}" for number in (*numbers, *row[list(SHARES)])]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("results/prefix"))
    options = parser.parse_args()
    folder = options.out / "model"
    if not (folder / "learnt").exists():
        learn_prefix(options.run, folder, options.steps)
        (folder / "learnt").touch()
    model = load_model(str(folder))
    documents = documents_of(options.run, model)

    columns = (*LOSSES, *SHARES)
    print(f"| | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for name, prefix in (("with the prefix", "auto"), ("without", "none")):
        found = measure(
            model, documents, WINDOWS, prefix=prefix, selectors=["add_one"], ks=[1], sets=["gap"],
            out=options.out / prefix,
        )  # fmt: skip
        assert found is not None
        print(format_row(name, found))


if __name__ == "__main__":
    main()
