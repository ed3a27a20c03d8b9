"""Small tokenizers that spell unknown letters as bytes."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers


def llama_like_tokenizer() -> Tokenizer:
    """Letters, and bytes for everything else; its decoder drops the first space."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    return tokenizer
