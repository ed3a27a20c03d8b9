"""Sources, question and answer as tokens (prompt/pieces.py, answer_tokens.py, layout.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from olmo_sparsity import Answer, Segment, attribute, explain
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.models.load import wrap_model
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.sources.attribution import Attribution
from olmo_sparsity.sources.prompt.layout import Layout
from olmo_sparsity.sources.verdicts.decoys import draw_decoys, read_decoys
from tests.support.explanations import make_tokenizer
from tests.support.families import SUPPORTED, build, find
from tests.support.sources import FAMILIES, GIVEN, SOURCES, asked, model_of


def test_what_is_no_candidate_stays_in_view() -> None:
    """So the rest does not change if it is written out of the list of sources."""
    named = asked(candidates=["b", "c"], decoys=GIVEN["decoys"])
    plain = asked(sources=[SOURCES["a"], Segment("b", SOURCES["b"]), Segment("c", SOURCES["c"])])
    np.testing.assert_allclose(named.matrix, plain.matrix, atol=1e-6)
    assert named.names == ["b", "c"]
    middle = asked(candidates=["a", "c"]).layout  # between two sources, too
    assert in_view(middle) == SOURCES["b"].split()


def in_view(layout: Layout) -> list[str]:
    """Return the texts before the last source that belong to none."""
    source_places = layout.units.distant_indices(*range(len(layout.units))).tolist()
    other_places = set(range(layout.num_distant)) - set(source_places)
    return [layout.document.texts[place].strip() for place in sorted(other_places)]


def tokenizer_with(replaced: dict[str, str]) -> PreTrainedTokenizerFast:
    """Return the tests' tokenizer with other spellings of some words."""
    written = make_tokenizer().backend_tokenizer.to_str()
    for word, spelling in replaced.items():
        written = written.replace(f'"{word}"', f'"{spelling}"')
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(written))


THREE_SENTENCES = GIVEN | {"question": "w1 w2", "answer": "w1 w39. w3 w4 w39. w5"}


def test_a_text_is_split_into_sentences() -> None:
    found = attribute(model_of(), tokenizer_with({"w39": "w39."}), **THREE_SENTENCES)
    assert [text.strip() for text in found.texts] == ["w1 w39.", "w3 w4 w39.", "w5"]
    assert "".join(found.texts) == "".join(found.layout.document.texts[found.layout.block.start :])


def test_a_list_of_statements_stays_as_it_is() -> None:
    assert [text.strip() for text in asked().texts] == GIVEN["answer"]


def test_code_that_a_source_leaves_open_does_not_reach_into_the_answer() -> None:
    tokenizer = tokenizer_with({"w39": "w39.", "w38": "```"})
    found = attribute(model_of(), tokenizer, **THREE_SENTENCES | {"sources": {"a": "``` w1 w2"}})
    assert len(found.texts) == 3


NOTES = {"a": "Käthe Weiß opened the ﬁrst Café Ⅳ.", "b": "The  Mill has FOUR wheels."}
ANSWER = "It was Käthe Weiß.  The ﬁrst Café Ⅳ was hers! FOUR wheels."


def bytes_behind(normalizer: Any) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.normalizer, tokenizer.decoder = normalizer, decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def sentencepiece(by_normalizer: bool) -> Tokenizer:
    """A space before each text, as Llama 2 (by a normalizer) and Gemma's or T5's kind put it."""
    bytes_as_tokens = [f"<0x{i:02X}>" for i in range(256)]
    letters = sorted({*"".join(NOTES.values())})
    vocabulary = ["▁", *bytes_as_tokens, *letters]
    ids = {name: i for i, name in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(ids, [], byte_fallback=True))
    if by_normalizer:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def model_with(tokenizer: Tokenizer) -> LoadedModel:
    """Return a tiny model with the vocabulary of this tokenizer."""
    options: dict[str, Any] = {"vocab_size": tokenizer.get_vocab_size(), "bos_token_id": None}
    family = SUPPORTED[find(FAMILIES[0])]
    return wrap_model(build(family, max_position_embeddings=256, **options), tokenizer)


ACCENTS = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])


DECOYS = ["A ferry leaves the quay at noon, and returns before dusk."[i:] for i in range(4)]


class Reading(NamedTuple):
    """A model whose tokenizer changes texts, and what it makes of a text."""

    model: LoadedModel
    read: Callable[[str], str]

    def attribute(self, answer: Any) -> Attribution:
        """Return the attribution of an answer to `NOTES`."""
        return attribute(
            self.model, sources=NOTES, question="Who?", answer=answer, decoys=DECOYS, draws=2
        )


@pytest.fixture(
    params=[normalizers.Lowercase(), normalizers.NFKC(), ACCENTS, True, False],
    ids=["lower case", "NFKC", "no accents", "space by a normalizer", "space by a pre-tokenizer"],
)
def reading(request: pytest.FixtureRequest) -> Reading:
    kind = request.param
    if isinstance(kind, bool):
        return Reading(model_with(sentencepiece(kind)), str)
    return Reading(model_with(bytes_behind(kind)), kind.normalize_str)


def test_sources_are_where_a_tokenizer_that_normalizes_reads_them(reading: Reading) -> None:
    """The text is that of the normalizer, and two texts are joined by nothing."""
    layout = reading.attribute(ANSWER).layout
    texts = layout.document.texts
    (first_a, end_a), (first_b, end_b) = zip(layout.units.first, layout.text_ends, strict=True)
    assert "".join(texts[first_a:end_a]).lstrip() == reading.read(NOTES["a"])
    assert "".join(texts[end_a:first_b]) == "\n\n"
    assert "".join(texts[first_b:end_b]).lstrip() == reading.read(NOTES["b"])
    assert "".join(texts[end_b:]) == f"\n\n{reading.read('Who?')}\n{reading.read(ANSWER)}"


def test_statements_are_spans_of_the_answer_as_it_is_read(reading: Reading) -> None:
    written = json.loads(reading.attribute(ANSWER).to_json())
    assert written["answer"] == reading.read(ANSWER)
    begins = [ANSWER, ANSWER[ANSWER.index("The") :]]
    for row, text in zip(written["statements"], begins, strict=False):
        assert reading.read(text).startswith(row["text"])
        assert written["answer"][row["first"] : row["end"]] == row["text"]


def test_a_list_of_statements_is_joined_by_spaces(reading: Reading) -> None:
    found = reading.attribute(["It was Käthe Weiß.", "FOUR wheels."])
    answer = json.loads(found.to_json())["answer"]
    assert answer == reading.read("It was Käthe Weiß. FOUR wheels.")


def test_words_to_explain_are_found_as_they_are_read(reading: Reading) -> None:
    text = f"{NOTES['b']} {ANSWER}"
    found = explain(reading.model, text=text, at="Käthe Weiß", k=1, unrelated=DECOYS)
    assert [text.strip() for text in found.targets.text] == [reading.read("Käthe Weiß")]


def test_a_prompt_and_its_target_are_read_as_one_text(reading: Reading) -> None:
    found = explain(reading.model, prompt=NOTES["b"], target=" Café", k=1, unrelated=DECOYS)
    (ids,) = reading.model.encode([f"{NOTES['b']} Café"])
    assert found.document.tokens.tolist() == ids


def test_control_tokens_of_a_source_are_its_letters_unless_wanted() -> None:
    spelled = "The <|im_end|>\nMill"
    tokenizer = bytes_behind(normalizers.NFC())
    tokenizer.add_special_tokens(["<|im_end|>"])
    model = model_with(tokenizer)
    given: dict[str, Any] = {"question": "Who?", "decoys": [*NOTES.values()], "draws": 2}
    for wanted in (False, True):
        sources = {"a": spelled, "b": "A ferry leaves."}
        found = attribute(model, sources=sources, answer="I.", control_tokens=wanted, **given)
        is_control_token = found.layout.document.tokens == tokenizer.token_to_id("<|im_end|>")
        assert is_control_token.sum() == wanted
        assert spelled in "".join(found.layout.document.texts)


def test_control_tokens_of_a_decoy_are_its_letters() -> None:
    tokenizer = bytes_behind(normalizers.NFC())
    tokenizer.add_special_tokens(["<|im_end|>"])
    model = model_with(tokenizer)
    found = attribute(model, sources=NOTES, question="Who?", answer="I.", decoys=DECOYS, draws=2)
    (ids,) = read_decoys(model, found.prompt, [f"The <|im_end|>\nMill. {DECOYS[0]}"])
    assert tokenizer.token_to_id("<|im_end|>") not in ids


@pytest.mark.parametrize("answer", [" \n", "\ufeff"])
def test_an_answer_without_a_letter_is_refused(answer: Any) -> None:
    with pytest.raises(DataError, match="the answer is empty"):
        asked(answer=answer)


@pytest.mark.parametrize("answer", [["w1 w2", " "], ("w1 w2", " ")])
def test_an_empty_statement_is_named(answer: Any) -> None:
    """In a tuple it got a verdict."""
    with pytest.raises(DataError, match="statement 1 of the answer is empty"):
        asked(answer=answer)


def test_an_answer_that_is_no_list_is_refused() -> None:
    """The truth value of a Series is an error of pandas."""
    with pytest.raises(ConfigError, match="must be a text, a list of texts"):
        asked(answer=pd.Series(["w1 w2", "w3"]))


def test_spans_of_an_answer_are_its_statements() -> None:
    """The rest of the answer stays in view, as in an answer whose statements are all given."""
    whole = asked(answer=["w1 w2", "w3", "w8 w9", "w30"])
    text = "w1 w2 w3  w8 w9 w30"
    found = asked(answer=Answer(text, [(9, 15), (0, 5)]))
    assert [text.strip() for text in found.texts] == ["w1 w2", "w8 w9"]
    assert [(text.strip(), number) for text, number in found.answer_texts] == [
        ("w1 w2", 0), ("w3", None), ("w8 w9", 1), ("w30", None),
    ]  # fmt: skip
    assert found.layout.block.targets_W.tolist() == whole.layout.block.targets_W.tolist()
    first_draw = found.losses.without_TSD[..., 0]  # others are evaluated as statements need them
    np.testing.assert_allclose(first_draw, whole.losses.without_TSD[[0, 2], :, 0], atol=1e-5)


@pytest.mark.parametrize("spans", [[(0, 5), (4, 8)], [(3, 3)], [(8, 9)], [(0, 99)], []])
def test_spans_that_are_no_statements_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError, match=r"^answer: "):
        asked(answer=Answer("w1 w2 w3  w8 w9 w30", spans))


def test_parts_of_sources_are_judged_as_sources_of_their_own() -> None:
    parts_of_b = {"b §1": "w5", "b §2": "w6", "b §3": "w7"}
    found = asked(units="words", candidates=["b"], draws=4)
    as_sources = [SOURCES["a"], *(Segment(*item) for item in parts_of_b.items()), SOURCES["c"]]
    assert found.names == list(parts_of_b)
    tokens = asked(sources=as_sources, draws=4).layout.block.tokens
    np.testing.assert_array_equal(found.layout.block.tokens, tokens)
    assert asked(units="sources").statements.equals(asked().statements)
    assert asked(units="span:2").names == ["a §1", "a §2", "b §1", "b §2", "c §1", "c §2", "c §3"]


def test_the_decoy_of_a_part_is_a_part_of_the_decoy_of_its_source() -> None:
    whole_prompt = asked().prompt
    divided_prompt = asked(units="span:2").prompt
    texts = read_decoys(whole_prompt.model, whole_prompt, GIVEN["decoys"])
    decoys_of_sources = draw_decoys(whole_prompt, texts, 4, 0)
    decoys_of_parts = draw_decoys(divided_prompt, texts, 4, 0)
    for source, parts in enumerate([(0, 1), (2, 3), (4, 5, 6)]):
        joined = np.concatenate([decoys_of_parts[part] for part in parts], axis=1)
        np.testing.assert_array_equal(joined, decoys_of_sources[source])


def test_a_text_is_no_decoy_of_its_own_parts() -> None:
    with pytest.raises(DataError, match="share no passage"):
        asked(units="words", decoys=list(SOURCES.values()))


def test_turns_go_through_the_chat_template() -> None:
    """What the template writes stays in view, wherever it stands."""
    read = make_tokenizer()
    read.chat_template = (
        "{{ bos_token }}{% for m in messages %} {{ 'Q:' if m.role == 'user' else 'A:' }}"
        " {{ m.content | trim }}{% endfor %} A:"
    )
    named = [Segment(*item) for item in SOURCES.items()]
    turns = [
        {"role": "system", "content": "w30"},
        {"role": "user", "content": [named[0], "w31", named[1]]},
        {"role": "assistant", "content": "w32 w33"},
        {"role": "user", "content": [named[2]]},
    ]
    found = attribute(model_of(), read, **GIVEN | {"sources": turns})
    block, layout = found.layout.block, found.layout
    before = "<s> A: w30 Q: w1 w2 w3 w4 w31 w5 w6 w7 A: w32 w33 Q: w8 w9 w10 w11 w12 w20 w21 A:"
    ids = make_tokenizer(bos=False)(before).input_ids
    assert block.tokens[: block.num_before].tolist() == ids
    texts = layout.document.texts
    assert in_view(layout) == ["<s>", "A:", "w30", "Q:", "w31", "A:", "w32", "w33", "Q:"]
    for name, first, end in zip("abc", layout.units.first, layout.units.end, strict=True):
        assert "".join(texts[first:end]).strip() == SOURCES[name]


def test_a_template_that_changes_messages_is_refused() -> None:
    read = make_tokenizer()
    read.chat_template = "{{ messages[0]['content'] | upper }}"
    with pytest.raises(DataError, match="drops, repeats, moves or changes messages"):
        attribute(model_of(), read, **GIVEN | {"chat": True})


@pytest.mark.parametrize(
    ("num_words", "answer"), [(260, None), (260, "w1 w2"), (100, " ".join(["w1"] * 200))]
)
def test_a_prompt_that_is_too_long_is_refused_before_decoys_are_asked_for(
    num_words: int, answer: str | None
) -> None:
    sources = {"a": " ".join(["w1"] * num_words)}
    with pytest.raises(ConfigError, match=r"positions are more than .*: 256 .*fewer sources"):
        asked(sources=sources, answer=answer, decoys=["w5"])


def test_a_limit_of_an_answer_that_is_too_long_is_refused_before_it_is_generated() -> None:
    with pytest.raises(ConfigError, match=r"lower max_new_tokens=300, or give fewer sources"):
        asked(answer=None, max_new_tokens=300, decoys=["w5"])


def test_a_generated_answer_fits_the_model_unless_the_user_limits_it() -> None:
    long = {"a": " ".join(["w1", "w2"] * 120)}  # 256 positions, of which 243 precede the answer
    decoys = [" ".join([f"w{i}"] * 300) for i in range(10, 20)]
    found = asked(sources=long, answer=None, decoys=decoys, draws=2)
    assert len(found.layout.document.tokens) <= 1 + 256
