"""Fill a template: one HTML file that loads nothing from the network.

Everything from a document, model or meta.json is untrusted: Python writes it through `escape`, a
script shows it as textContent, and the Content-Security-Policy allows only script and style of the
hashes it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from olmo_sparsity.analysis.results.view import DIRECTIONS
from olmo_sparsity.base.files import check_suffix, write_atomically

_FOLDER = Path(__file__).parent
_HEAD = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{policy}}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{title}}</title>
<link rel="icon" href="data:,">
"""
_PART = re.compile(r"<!-- (\w+) -->\n(.*?)<!-- end -->\n", re.DOTALL)
"""An optional part of a template, with its name."""


def write_html(
    path: Path,
    template: str,
    slots: Mapping[str, str],
    *,
    parts: Collection[str] = (),
    style: str = "",
    script: str = "",
) -> None:
    """Write `template`, a file of this folder, with its `{{slots}}` filled and only those of its
    optional parts that `parts` names. `style` follows the template's own; `script` is a file."""
    check_suffix("path", path, ".html")
    code = _read(script) if script else ""
    head, own_style, body = re.split(r"(?<=<style>)|(?=</style>)", _HEAD + _read(template))
    style = _read("page.css") + own_style + style
    policy = f"default-src 'none'; style-src {_hash(style)}; img-src data:; base-uri 'none'; "
    policy += "form-action 'none'"
    if code:
        policy += f"; script-src {_hash(code)}"
    text = _PART.sub(lambda part: part[2] if part[1] in parts else "", head + style + body)
    # One pass, so that text in a slot is not searched for slots.
    filled = {**slots, "policy": policy, "script": code}
    text = re.sub(r"\{\{(\w+)\}\}", lambda slot: filled[slot[1]], text)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def json_for_html(value: Any) -> str:
    """Return JSON that is safe inside a script element, for HTML parsers and old script parsers."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.translate(DIRECTIONS)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(source: str) -> str:
    """Return what a Content-Security-Policy calls a script or style."""
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
