"""The texts that take the place of sources."""

from __future__ import annotations

import pytest

from olmo_sparsity import Segment
from olmo_sparsity.analysis.explain.unrelated import SAME_TEXT
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.sources.verdicts.decoys import draw_decoys, read_decoys
from tests.support.explanations import WORDS
from tests.support.sources import GIVEN, SOURCES, asked


def test_decoys_are_as_long_as_the_source_and_say_something_else() -> None:
    prompt = asked().prompt
    texts = read_decoys(prompt.model, prompt, [*SOURCES.values(), *GIVEN["decoys"]])
    assert len(texts) == len(GIVEN["decoys"])
    drawn = draw_decoys(prompt, texts, 8, 0)
    assert [rows.shape for rows in drawn] == [(8, 4), (8, 3), (8, 5)]
    for rows in drawn:
        assert len({tuple(row) for row in rows.tolist()}) == 8
        for row in rows:  # begins as a text does and ends as one does
            head, tail = row[: (len(row) + 1) // 2], row[(len(row) + 1) // 2 :]
            assert any((text[: len(head)] == head[: len(text)]).all() for text in texts)
            assert any((text[-len(tail) :] == tail[-len(text) :]).all() for text in texts)


def test_texts_that_share_a_passage_with_a_source_are_no_decoys() -> None:
    prompt = asked().prompt
    with pytest.raises(DataError, match="give more texts"):
        read_decoys(prompt.model, prompt, ["w1 w9", "w2"])
    # A text that holds a short source or the longest one; a text that is there twice.
    for name in "bc":
        texts = [f"w30 {SOURCES[name]} w31", "w30 w31 w32 w33 w34"] * 2
        assert len(read_decoys(prompt.model, prompt, texts)) == 1
    # A short text in view (a turn's mark) may stand in a decoy.
    marked = asked(sources=["w30", *(Segment(*item) for item in SOURCES.items())]).prompt
    assert len(read_decoys(prompt.model, marked, ["w30 w31 w32 w33 w34"])) == 1
    # What stays in view needs no decoys.
    short = asked(sources=[SOURCES["c"], Segment("b", SOURCES["b"])]).prompt
    assert len(read_decoys(short.model, short, ["w30 w31 w32"])) == 1


def test_a_text_in_view_is_not_repeated_by_a_decoy_from_32_tokens_on() -> None:
    """`SAME_TEXT` tokens are enough to call two texts the same; fewer may be the mark of a turn."""
    in_view = [*WORDS[13:33], *WORDS[1:13]]
    assert len(in_view) == SAME_TEXT
    other = "w34 w35 w36 w37 w38"
    for num_words, num_decoys in ((SAME_TEXT, 1), (SAME_TEXT - 1, 2)):
        text = " ".join(in_view[:num_words])
        sources = {"a": "w39 w39 w39", "b": "w38 w38 w38"}
        prompt = asked(sources=[text, *(Segment(*item) for item in sources.items())]).prompt
        assert len(read_decoys(prompt.model, prompt, [f"w0 {text} w0", other])) == num_decoys


def test_decoys_differ_from_each_other_and_from_the_source() -> None:
    """A single text is begun at several places."""
    prompt = asked().prompt
    (text,) = read_decoys(prompt.model, prompt, [" ".join(WORDS[13:35])])
    for rows in draw_decoys(prompt, [text], 8, 0):
        assert len({tuple(row) for row in rows.tolist()}) == 8
    with pytest.raises(DataError, match="only 1 different"):
        draw_decoys(prompt, [text[[0, 0, 0, 0, 0]]], 8, 0)
