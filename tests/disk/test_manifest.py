"""A manifest vouches for every byte of its folder."""

from __future__ import annotations

import json
from pathlib import Path

from olmo_sparsity.disk.manifest import verify_manifest
from tests.support.models import steps


def test_a_manifest_vouches_for_every_byte_and_leads_nowhere_else(tmp_path: Path) -> None:
    (folder,) = steps(tmp_path, 1)
    assert verify_manifest(folder) is None
    state = folder / "engine" / "optimizer.bin"
    for damage, problem in (
        (b"momentz", "engine/optimizer.bin does not have the SHA-256"),
        (b"moment", "engine/optimizer.bin has 6 bytes, manifest.json says 7"),
        (None, "engine/optimizer.bin is missing"),
    ):
        state.unlink() if damage is None else state.write_bytes(damage)
        assert str(verify_manifest(folder)).startswith(problem)
        assert verify_manifest(folder, {"config.yaml", "model.safetensors"}) is None
    assert verify_manifest(folder, {"other"}) == "manifest.json does not list other"
    content = json.loads((folder / "manifest.json").read_text())
    content["files"]["../../outside"] = content["files"]["config.yaml"]
    (tmp_path / "outside").write_bytes((folder / "config.yaml").read_bytes())
    for text, problem in (
        ("{", "not a readable list"),
        ("[]", "not a readable list"),
        ('{"files": {"config.yaml": 3}}', "not a readable list"),
        (json.dumps(content), "'../../outside', which is outside of the folder"),
    ):
        (folder / "manifest.json").write_text(text)
        assert problem in str(verify_manifest(folder))
