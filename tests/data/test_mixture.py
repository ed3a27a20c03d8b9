"""Mixtures: each corpus has its share of every stretch, its own epochs and held-out documents."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from olmo_sparsity.config.run import config_from_dict
from olmo_sparsity.config.text import DataConfig, PositionsConfig
from olmo_sparsity.data import tokens
from olmo_sparsity.data.batches import TrainingBatches
from olmo_sparsity.data.mixture import Interleaving
from olmo_sparsity.data.shards import TokenShards, open_shards
from olmo_sparsity.data.tokens import prepare, refuse_other_settings
from olmo_sparsity.errors import ConfigError, DataError
from tests.conftest import mixed_section


def section(folder: Path) -> DataConfig:
    return config_from_dict({"data": mixed_section(folder)}).data


@pytest.fixture
def mixed(mixed_folder: Path) -> TokenShards:
    return open_shards(section(mixed_folder), "train")


# --- shares ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shares", [[1.0], [0.5, 0.5], [1 / 3] * 3, [0.999, 0.001], [0.7, 0.2, 0.1]]
)
@pytest.mark.parametrize("period", [1000, 10**5])
def test_every_stretch_has_its_shares(shares: list[float], period: int) -> None:
    interleaving = Interleaving(shares, period)
    corpora, numbers = interleaving.of(0, 2500)
    for corpus, share in enumerate(shares):
        own = corpora == corpus
        assert (numbers[own] == np.arange(own.sum())).all(), "none is left out or comes twice"
        lacking = own.cumsum() - share * np.arange(1, 2501)
        assert np.abs(lacking).max() < 3
    for first in (1, 7, period - 1, 2 * period + 3):
        later = interleaving.of(first, 40)
        whole = interleaving.of(0, first + 40)
        assert all((a == b[first:]).all() for a, b in zip(later, whole, strict=True))


def test_each_corpus_has_epochs_of_its_own(mixed: TokenShards) -> None:
    batches = TrainingBatches(mixed, PositionsConfig(), length=32, batch_size=4, seed=1)
    sizes = [len(corpus) for corpus in batches.corpora]
    seen: Counter[tuple] = Counter()
    steps = 2 * max(sizes[0] * 4 // 3, sizes[1] * 4) // 4 + 8
    for batch in islice(batches.from_step(0), steps):
        seen.update(map(tuple, batch.tokens_BL.tolist()))
    for corpus, size in zip(batches.corpora, sizes, strict=True):
        own = Counter(tuple(corpus[index].tolist()) for index in range(size))
        counts = {seen[row] / num for row, num in own.items()}
        assert max(counts) - min(counts) <= 1
        assert min(counts) >= 2
    for start in (1, 30):
        (later,) = islice(batches.from_step(start), 1)
        whole = list(islice(batches.from_step(0), start + 1))[-1]
        assert (later.tokens_BL == whole.tokens_BL).all()


# --- prepared -------------------------------------------------------------------------------------


def test_each_corpus_is_held_out_by_itself_with_one_tokenizer(
    mixed_folder: Path, mixed: TokenShards
) -> None:
    data = section(mixed_folder)
    heldout = open_shards(data, "heldout")
    assert [part.name for part in heldout.parts] == ["wikipedia", "letters"]
    assert [part.share for part in mixed.parts] == [0.75, 0.25]
    of_letters = heldout.parts[1].shards
    groups = [{of_letters.group(n) for n in range(len(of_letters))}]
    groups.append({mixed.parts[1].shards.group(n) for n in range(len(mixed.parts[1].shards))})
    assert not groups[0] & groups[1]
    assert len(groups[0]) + len(groups[1]) == 20
    assert len(groups[0]) > 4, "data.corpus[1].heldout_share"
    # All together they are one text, which a measurement reads.
    assert len(heldout) == sum(len(part.shards) for part in heldout.parts)
    first, last = heldout.parts[0].shards, of_letters
    assert heldout.document(0).tolist() == first.document(0).tolist()
    assert heldout.document(len(heldout) - 1).tolist() == last.document(len(last) - 1).tolist()
    assert heldout.group(len(first)) == last.group(0)


def test_a_mixture_that_is_prepared_again_is_left_as_it_is(
    mixed_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    data = section(mixed_folder)
    before = {path: path.read_bytes() for path in Path(data.folder).rglob("*") if path.is_file()}
    prepare(data)
    assert capsys.readouterr().err.count("is already prepared") == 2
    data.corpora[0].weight = 7.0  # which no file depends on
    prepare(data)
    refuse_other_settings(data)
    assert before == {
        path: path.read_bytes() for path in Path(data.folder).rglob("*") if path.is_file()
    }
    data.corpora[0].max_documents = 140
    with pytest.raises(ConfigError, match=r"corpora\.wikipedia\.max_documents=150 \(now 140\)"):
        prepare(data)
    with pytest.raises(ConfigError, match=r"corpus\.max_documents=150 \(now 140\)"):
        refuse_other_settings(data)


def test_a_mixture_that_was_killed_goes_on(
    mixed_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = section(mixed_folder)
    whole, data.folder = Path(data.folder), str(tmp_path / "again")
    write = tokens._write_shards

    def die(part: DataConfig, *given: object) -> None:
        if part.folder.endswith("letters"):
            raise KeyboardInterrupt
        write(part, *given)

    monkeypatch.setattr(tokens, "_write_shards", die)
    with pytest.raises(KeyboardInterrupt):
        prepare(data)
    with pytest.raises(DataError, match=r"again/letters is prepared in part"):
        open_shards(data, "train")
    monkeypatch.undo()
    prepare(data)
    for path in whole.rglob("*.uint*"):
        assert (tmp_path / "again" / path.relative_to(whole)).read_bytes() == path.read_bytes()
