"""Fill a template to an HTML page: one file that loads nothing from the network.

    write_html(path, "report_page.html", {"title": …}, parts={"numbers"}, script="report_page.js")

A template has slots, {{title}}, and optional parts, <!-- numbers --> … <!-- end -->. Everything
from a document, model or meta.json is untrusted: Python writes it through `escape`, a script shows
it as textContent, and the Content-Security-Policy allows only script and style of the hashes it
names.
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
from olmo_sparsity.base.files import write_atomically
from olmo_sparsity.base.path_options import check_suffix

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
"""An optional part of a template: its name, and its text."""


def write_html(
    path: Path,
    template: str,
    slots: Mapping[str, str],
    *,
    parts: Collection[str] = (),
    style: str = "",
    script: str = "",
) -> None:
    """Write a page from a template.

    Args:
        path: The file to write.
        template: A file of this folder.
        slots: Name of a slot → HTML that fills it, already escaped.
        parts: Names of the optional parts to keep; the others are left out.
        style: CSS after that of page.css and of the template.
        script: A file of this folder with JavaScript, for the slot `script`.
    """
    check_suffix("path", path, ".html")
    code = _read(script) if script else ""
    # The template is cut at its style, to which more is added.
    head, template_style, body = re.split(r"(?<=<style>)|(?=</style>)", _HEAD + _read(template))
    style = _read("page.css") + template_style + style

    # A browser runs no script and applies no style but those with these hashes, whatever text of a
    # document may smuggle in.
    policy = f"default-src 'none'; style-src {_hash(style)}; img-src data:; base-uri 'none'; "
    policy += "form-action 'none'"
    if code:
        policy += f"; script-src {_hash(code)}"

    text = _PART.sub(lambda part: part[2] if part[1] in parts else "", head + style + body)
    # One pass, so that text in a slot is not searched for slots.
    filled_slots = {**slots, "policy": policy, "script": code}
    text = re.sub(r"\{\{(\w+)\}\}", lambda slot: filled_slots[slot[1]], text)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def _read(name: str) -> str:
    """Return the text of a file of this folder."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def json_for_html(value: Any) -> str:
    """Return a value as JSON that cannot end the script element it is written into. Marks of
    writing direction become their numbers, as they do in `escape`."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.translate(DIRECTIONS)
    # "</script>" would end the element, and old parsers of scripts take U+2028 and U+2029 for line
    # ends.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(source: str) -> str:
    """Return the hash by which a Content-Security-Policy names a script or style."""
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
