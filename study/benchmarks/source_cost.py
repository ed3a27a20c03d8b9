"""What verdicts on 20 sources of 8,000 tokens in all cost a model of a billion parameters.

    python -m study.benchmarks.source_cost

Token-forwards are counted by `estimate_cost` and do not depend on the model; parameters are those
of Llama 3.2 1B. Seconds are at 40% of the bf16 peak of an H100.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from olmo_sparsity import attribute, estimate_cost

SOURCES, LENGTH, STATEMENTS = 20, 8000, 5
USED = 0.4 * 989e12
"""FLOP/s."""


def llama(width: int, layers: int, heads: int, vocabulary: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    words = Tokenizer(WordLevel({"word": 0, "dot.": 1}, "word"))
    words.pre_tokenizer = WhitespaceSplit()
    given = {
        "sources": {f"source {i}": "word " * (LENGTH // SOURCES) for i in range(SOURCES)},
        "question": "word " * 20,
        "answer": ["word " * 19 + "dot."] * STATEMENTS,
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    with torch.device("meta"):
        parameters = sum(of.numel() for of in llama(2048, 16, 32, 128_256).parameters())
    for options in ({}, {"draws": 4}, {"orders": 3}):
        tiny = llama(32, 1, 4, 2)
        counted = estimate_cost(attribute, tiny, tokenizer, **given, **options)
        cost = replace(counted, num_parameters=parameters)
        print(
            f"{options or 'defaults'}: {cost.token_forwards:,} token-forwards of "
            f"{cost.num_parameters:,} parameters, {cost.flops:.2e} FLOPs, "
            f"{cost.flops / USED:.1f} s"
        )


if __name__ == "__main__":
    main()
