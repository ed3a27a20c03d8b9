from study.word_parts import parts_of_words


def test_what_part_of_a_word_a_token_is() -> None:
    pieces = [
        *("Sta", "tion", " Sta", "tion", "s,"),
        *(" 19", "98", ".", "\n", "New", "’", "t"),
        *(" of", " (The", " tree"),
    ]
    assert parts_of_words(pieces).tolist() == [
        *("first_piece", "later_piece", "first_piece", "later_piece", "later_piece"),
        *("first_piece", "later_piece", "no_word", "no_word", "word", "no_word", "word"),
        *("function_word", "function_word", "word"),
    ]
    assert parts_of_words(["a", "", "b"]).tolist() == ["first_piece", "later_piece", "later_piece"]
