"""Fill a template to an HTML page: one file that loads nothing from the network.

    template   <h1>{{title}}</h1>
               <!-- numbers -->
               <p>{{count}} targets</p>
               <!-- end -->

    write_html(path, "report_page.html", {"title": "Ours"})
               <h1>Ours</h1>
    write_html(path, "report_page.html", {"title": "Ours", "count": "7"}, sections={"numbers"})
               <h1>Ours</h1>
               <p>7 targets</p>

Slots are names in braces; sections are optional, and stand between two comments.

Everything from a document, model or meta.json is untrusted. Python writes it through `escape`, and
a script shows it as textContent. As a second protection, the Content-Security-Policy lets a browser
apply only the script and the style whose hashes it names.
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
_SECTION = re.compile(r"<!-- (\w+) -->\n(.*?)<!-- end -->\n", re.DOTALL)
"""An optional section of a template: its name, and its text."""

_SLOT = re.compile(r"\{\{(\w+)\}\}")


def write_html(
    path: Path,
    template: str,
    slots: Mapping[str, str],
    *,
    sections: Collection[str] = (),
    style: str = "",
    script: str = "",
) -> None:
    """Write a page from a template.

    Args:
        path: The file to write.
        template: A file of this folder.
        slots: Name of a slot → HTML that fills it, already escaped.
        sections: Names of the optional sections to keep; the others are left out.
        style: CSS after that of page.css and of the template.
        script: A file of this folder with JavaScript, for the slot `script`. Default: none.
    """
    check_suffix("path", path, ".html")
    # The template is cut before and after the content of its style element, to which more is added.
    head, template_style, body = re.split(r"(?<=<style>)|(?=</style>)", _HEAD + _read(template))
    whole_style = _read("page.css") + template_style + style
    code = _read(script) if script else ""

    html = _SECTION.sub(
        lambda section: section[2] if section[1] in sections else "", head + whole_style + body
    )
    filled_slots = {**slots, "policy": _security_policy(whole_style, code), "script": code}
    # One pass, so that text in a slot is not searched for slots.
    html = _SLOT.sub(lambda slot: filled_slots[slot[1]], html)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, html)


def _read(name: str) -> str:
    """Return the text of a file of this folder."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def _security_policy(style: str, code: str) -> str:
    """Return the Content-Security-Policy of a page. With it a browser runs no other script and
    applies no other style, whatever text of a document may smuggle in.

    Args:
        style: The CSS of the page.
        code: Its JavaScript; empty if it has none.
    """
    policy = f"default-src 'none'; style-src {_hash(style)}; img-src data:; base-uri 'none'; "
    policy += "form-action 'none'"
    if code:
        policy += f"; script-src {_hash(code)}"
    return policy


def _hash(source: str) -> str:
    """Return the hash by which a Content-Security-Policy names a script or style."""
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


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
