"""Results: read back, compared, or refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from olmo_sparsity.analysis.measurement.parts import Parts
from olmo_sparsity.analysis.results.results import FILES, Meta, compare, read_results
from olmo_sparsity.analysis.results.statistics import summarize
from olmo_sparsity.errors import DataError
from olmo_sparsity.io import write_manifest
from tests.support.measurements import losses_table, recovery_rows
from tests.support.parts import IDENTITY, flip_a_byte, truncate, write


def test_two_models_are_compared_on_the_same_resamples_of_documents() -> None:
    """The second model recovers a quarter of every gap less, so each resample has a difference of
    0.25, while the net excess of either varies with the documents."""
    generator = np.random.default_rng(0)
    keys = [(document, target) for document in range(1, 41, 2) for target in (20, 21)]
    gap = generator.uniform(0.5, 4.0, len(keys))
    document, target = zip(*keys, strict=True)
    losses = losses_table(
        document=document,
        target=target,
        loss_short=5.0,
        loss_long=5.0 - gap,
        placebo_loss_long=5.0 - gap,
    )
    targets = pd.DataFrame({"document": document, "target": target, "target_set": "gap"})
    targets = pd.concat([targets.assign(far_part=part) for part in ("document", "placebo")])
    share = generator.uniform(0.3, 1.0, len(keys))
    measured = []
    for level in (share, share - 0.25):
        rows = recovery_rows(keys, "own", 5.0 - level * gap)
        rows += recovery_rows(keys, "foreign", 5.0 - 0.1 * gap)
        for control in ("own", "foreign"):
            rows += recovery_rows(keys, control, 5.0 - 0.1 * gap, far_part="placebo")
        measured.append(
            SimpleNamespace(
                meta=Meta(data={"fingerprint": "a"}),
                losses=losses,
                targets=targets,
                recovery=pd.DataFrame(rows),
            )
        )
    (row,) = compare(*measured).to_dict("records")
    assert [row["net"], row["net_low"], row["net_high"]] == pytest.approx([0.25] * 3)
    assert row["net_nats"] == pytest.approx(0.25 * gap.mean())
    assert row["net_nats_low"] < row["net_nats"] < row["net_nats_high"]
    (alone,) = summarize(losses, targets, measured[0].recovery).to_dict("records")
    assert alone["net_high"] - alone["net_low"] > 0.1
    other = SimpleNamespace(**vars(measured[1]))
    other.recovery = other.recovery.assign(k=2)
    with pytest.raises(DataError, match="share no"):
        compare(measured[0], other)
    measured[1].meta = Meta(data={"fingerprint": "b"})
    with pytest.raises(DataError, match="other texts"):
        compare(*measured)


ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [truncate, flip_a_byte, Path.unlink])
def test_a_damaged_file_is_named(
    results_folder: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    folder = shutil.copytree(results_folder, tmp_path / "copy")
    damage(folder / name)
    with pytest.raises(DataError, match=rf"^[^\n]*{name}[^\n]* makes it again[^\n]*$"):
        read_results(folder)


def test_unfinished_and_unreadable_folders_are_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no measurement"):
        read_results(tmp_path)
    parts = Parts(tmp_path, IDENTITY)
    write(parts, 0)
    parts.flush()
    with pytest.raises(DataError, match=r"not finished .*; run the same"):
        read_results(tmp_path)
    parts.finish({}, Meta())
    read_results(tmp_path)
    for text in ("{", "[]", '{"windows": 3}', '{"ks": null}'):
        (tmp_path / "meta.json").write_text(text)
        with pytest.raises(DataError, match=r"meta\.json"):
            read_results(tmp_path)
        write_manifest(tmp_path, FILES)  # by somebody who changed it on purpose
        with pytest.raises(DataError, match=r"meta\.json: "):
            read_results(tmp_path)
