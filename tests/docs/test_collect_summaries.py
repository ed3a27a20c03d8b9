"""One table of several measurements."""

from pathlib import Path

import pytest

from docs.collect_summaries import collect
from olmo_sparsity import read_results
from tests.support.fake_results import write_fake_results


def test_rows_of_every_measurement(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("later", "former")]
    for folder in folders:
        write_fake_results(folder)
    found = collect(folders).set_index("measurement")
    assert list(found.index.unique()) == ["former", "later"]
    results = read_results(folders[0])
    assert found.loc["later"].recovery.tolist() == pytest.approx(
        results.summary.recovery.tolist(), abs=1e-4
    )
    check = results.meta.induction
    assert found.induction_share.iloc[0] == pytest.approx(
        check["drop"] / check["loss_first"], abs=1e-4
    )
