"""Read the model and the text of a measurement, and leave out text that the model cannot take.

make_plan (planning.py) calls these functions in order:

    load             "runs/mine" → a model with 1,024 positions
    open_text        "text.txt" → 2 documents of 900 and 2,500 tokens of the model
    prefix_of        "auto" → (50256,), the tokens before every window
    split_to_limit   with --split-long: 4 parts of 900, 1,023, 1,020 and 457 tokens
    within_limit     without it: documents of 900 and 1,023 tokens, whose ends are left out
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from olmo_sparsity.analysis.options import ModelOptions, TextOptions
from olmo_sparsity.base.errors import ConfigError, DataError, check_unset
from olmo_sparsity.base.progress import say
from olmo_sparsity.models.load import load_model, wrap_model
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.inputs import open_documents
from olmo_sparsity.text.split import split_long_documents


def load(
    model: Any,
    tokenizer: Any,
    options: ModelOptions,
    *,
    encodes_text: bool = False,
    **more_options: Any,
) -> LoadedModel:
    """Load a model by its name, or wrap one in memory.

    Args:
        model: The name of a model, or a model in memory.
        tokenizer: The tokenizer of a model in memory.
        options: How a model is loaded. For a model in memory none of them may be set.
        encodes_text: Whether the model will encode text, so that it must have a tokenizer.
        more_options: More arguments of `load_model`. `whole_prompts` is required.
    """
    if isinstance(model, str | Path):
        loaded = load_model(model, tokenizer=tokenizer, **more_options, **options.loading)
    else:
        options.check_unset_for_loaded()
        # These are of a server, which only `load_model` opens.
        waiting = {name: more_options.get(name) for name in ("timeout", "patience")}
        check_unset("load_model takes it, and this model is loaded", **waiting)
        loaded = wrap_model(model, tokenizer, whole_prompts=more_options["whole_prompts"])
    if loaded.prompt_model is not None:
        reason = f"'{loaded.name}' forms batches by itself"
        check_unset(reason, batch_tokens=options.batch_tokens)
    if encodes_text and loaded.tokenizer is None:
        raise DataError(f"'{loaded.name}' has no tokenizer; pass it as the second argument")
    return loaded


def open_text(documents: Any, model: LoadedModel, options: TextOptions) -> Documents:
    """Return documents in the model's tokens.

    Args:
        documents: Text in any form that `open_documents` reads, or `Documents`, which are returned
            as they are.
    """
    if isinstance(documents, Documents):
        return documents
    keywords = dict(vars(options))
    max_documents = keywords.pop("max_documents")
    # The length of parts depends on the prefix, which depends on the text.
    del keywords["split_long"]
    return open_documents(documents, model, max_documents, **keywords)


def prefix_of(documents: Documents, model: LoadedModel, prefix: str) -> tuple[int, ...]:
    """Return the token IDs of the prefix that the option `prefix` means for this model and text."""
    # What a tokenizer puts before a text may depend on how the text begins.
    beginning = documents[0].tokens[:200].tolist()
    text = "" if model.tokenizer is None else model.tokenizer.decode(beginning, False)
    return tuple(model.prefix_ids(prefix, text))


def split_to_limit(documents: Documents, model: LoadedModel, prefix: str) -> Documents:
    """Split documents into parts that the model takes after its prefix, where they are longer."""
    if model.max_positions is None:
        raise ConfigError(f"split_long: '{model.name}' has no limit of length; omit it")
    num_prefix = len(prefix_of(documents, model, prefix))
    return split_long_documents(documents, model.max_positions - num_prefix, model.name)


def within_limit(documents: Documents, model: LoadedModel, num_prefix: int) -> Documents:
    """Return documents without the tokens beyond the model's last position. With long="all" a
    forward reads a whole document, so it must end there."""
    if model.max_positions is None:
        return documents
    max_tokens = model.max_positions - num_prefix
    too_long = [document for document in documents if len(document.tokens) > max_tokens]
    if not too_long:
        return documents
    num_left_out = sum(len(document.tokens) - max_tokens for document in too_long)
    say(
        f"{len(too_long):,} of {len(documents):,} documents are longer than the {max_tokens:,} "
        f"tokens that {model.name} takes: their last {num_left_out:,} tokens are left out; "
        "pass --split-long to read them in parts"
    )
    items = [replace(document, tokens=document.tokens[:max_tokens]) for document in documents.items]
    return replace(documents, items=items)
