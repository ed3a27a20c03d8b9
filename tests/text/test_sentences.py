"""Where sentences begin: marks that end none, other scripts, Markdown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olmo_sparsity.text.sentences import sentence_starts

CASES = {
    "titles": "Dr. Smith met Mrs. Jones. ¦They saw St. Clair do one rep. ¦Then he left.",
    "e.g.": "Use a colour, e.g. Red or blue. ¦Then i.e. Rarely, stop.",
    "initials": "J. K. Rowling wrote it. ¦George W. Bush did not. ¦Plan B. ¦It works.",
    "U.S.": "The U.S. Senate voted. ¦He moved to the U.S. ¦He was ten.",
    "decimals": "It is 3.5 miles, v2.0 said. ¦$1,000.50 is enough.",
    "numbered things": "See No. 5 and Fig. 3 on p. 7. ¦See Vol. II. ¦He said no. ¦I left.",
    "times": "It began at 5 p.m. and ended at 6 a.m. on Monday. ¦Nobody slept.",
    "[1] behind": "It opened in 1921. [1] ¦It closed in 1930.[2] ¦The end.[3][4]",
    "[1] before": "It opened in 1921 [1]. ¦It closed [2, 3]. ¦The end (Smith, 2020). ¦“So.” (Ada).",
    "quotations": "“Really?” ¦She asked: “Why (and how)?” ¦“Stop!” he cried. ¦Then she left.",
    "parentheses": "It rained. ¦(It often does.) ¦We left.",
    "ellipses": "Nobody knew … until then. ¦Well... maybe. ¦He wondered… ¦She . . . came. ¦So.",
    "bullets": "We need:\n¦- bread\n¦- two eggs\n¦* milk\n¦• oil",
    "numbers": "Steps:\n¦1. Open the door.\n¦2. Go in. ¦Sit down.\n¦3) Eat\n¦4) Drink. ¦5. Sleep.",
    "headings": "# 1. The bridge\n¦It opened in 1921.\n\n¦## Later\n¦It closed.\n¦**Now**\n¦It is.",
    "plain headings": "Introduction\n\n¦The bridge opened. ¦It closed.\n\n¦Title\n===\n¦Text.",
    "tables": "| a | b |\n|---|---|\n¦| 1. X | 2. Y |\n¦| 3 | 4 |\n",
    "bold": "**It opened in 1921.** ¦It closed. ¦**Note:** it is gone.",
    "fenced code": "Run this:\n¦```python\nx = a.b()\n\n# Done. Yes.\ny = 1.\n```\n¦It works.",
    "inline code": "Call `os.path. Join` or `a.b()`. ¦Then stop.",
    "addresses": "See https://example.com/a.b?c=1. ¦Mail a.b@c.org! ¦Done.",
    "end.Next": "This is the end.¦Next comes this.¦But a.py, U.S.A. and Node.js stay.",
    "lines": "It opened in\n1921. ¦It closed\nin 1930.\n¦the next line.",
    "quoted lines": "He wrote:\n¦> It opened in\n> 1921. ¦It closed.",
    "Chinese": "他来了。¦她走了！¦真的吗？¦“是的。”他说。¦“走吧。”¦我们去看《走吧！你》好吗？",
    "Japanese": "今日は晴れです。¦「本当？」と彼は言った。¦３．５％です。¦はい！",
    "Hindi": "वह आया। ¦वह गया। ¦क्या यह सच है? ¦हाँ।",
    "Arabic": "وصل الرجل. ¦هل هذا صحيح؟ ¦نعم.",
    "Urdu": "وہ آیا۔ ¦کیا یہ سچ ہے؟ ¦ہاں۔",
    "Armenian, Amharic": "Նա եկավ։ ¦Նա գնաց։ ¦እሱ መጣ። ¦እሷ ሄደች።",
    "emoji": "It works 🎉 ¦Next we go! 😀 ¦Then stop. 👍🏽",
    "companies": "It was made by Apple Inc. ¦It grew. ¦Pitt & Co. of Leeds made another.",
    "etc.": "Apples, pears, etc. are fruit. ¦We eat bread, cheese, etc. ¦Then we sleep.",
    "et al.": "Smith et al. (2020) say so. ¦Cf. Jones et al. 2021 vs. Lee.",
    "degrees": "She has a Ph.D. in physics. ¦He has none.",
    "marks in a row": "Yahoo! is a company. ¦Really?! ¦Yes!!! ¦Stop!¦No way.",
    "German": "Das ist z. B. ein Satz. ¦Am 3. Oktober war frei. ¦„Nein.“ ¦Über Nacht regnete es.",
    "French": "M. Dupont est venu. ¦Il a dit « Non ! » et partit. ¦Fin.",
    "Spanish": "¿Qué? ¦¡No! ¦El Sr. García vino.",
    "Russian": "Он пришёл. ¦Она ушла в 1921 г. в Москву.",
    "no capitals": "it opened in 1921. ¦it was e.g. red. ¦then it closed.",
}


@pytest.mark.parametrize("kind", CASES)
def test_sentences_begin_where_a_reader_begins_them(kind: str) -> None:
    parts = CASES[kind].split("¦")
    text, starts = "".join(parts), sentence_starts("".join(parts))
    assert [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)] == parts


PIECES = [*"aZ1 \n.!?…。[]()*`|-#>:“”😀他ع", "```", "e.g.", "Dr.", "1. ", "[1]", "|---|"]


@given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join))
def test_starts_are_in_order_and_at_no_space(text: str) -> None:
    starts = sentence_starts(text)
    assert starts == sorted(set(starts))
    assert not any(text[start].isspace() for start in starts)


@pytest.mark.parametrize("piece", [*".`😀¹。(*", " [1]", "-|", "e.g. ", "> "])
def test_a_long_text_of_one_piece_takes_linear_time(piece: str) -> None:
    """A quadratic or exponential rule would not end before the time limit of tests."""
    sentence_starts(f"It is. {piece * 100_000}x It was.")
