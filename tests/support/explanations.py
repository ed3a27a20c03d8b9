"""A tiny model, its tokenizer and a text: what tests of explanations ask about."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from olmo_sparsity import explain
from olmo_sparsity.analysis.explain.explanation import Explanation
from tests.support.families import SUPPORTED, build, find

WORDS = [f"w{i}" for i in range(40)]
TEXT = " ".join(np.random.default_rng(0).choice(WORDS, 60).tolist()) + " w7 w8 w9"
UNRELATED = [" ".join(np.random.default_rng(i).choice(WORDS, 700).tolist()) for i in range(1, 4)]
SHORT = 8


def make_tokenizer(bos: bool = True) -> transformers.PreTrainedTokenizerFast:
    vocabulary = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", *WORDS, "Q:", "A:"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template = "{{ bos_token }} Q: {{ messages[0]['content'] }} A:"
    return made


def make_model() -> Any:
    return build(
        SUPPORTED[find("Llama 1, 2, 3")],
        vocab_size=45,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )


def asked(model: Any, **changed: Any) -> Explanation:
    given = {"text": TEXT, "at": "w7 w8", "short": SHORT, "k": 3, "unrelated": UNRELATED} | changed
    return explain(model, make_tokenizer(), **given)
