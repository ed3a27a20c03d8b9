"""The package without extras, from its wheel, beside files of a user that have common names.

`make test-base` runs this in a virtual environment of its own, from an empty folder.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import olmo_sparsity
from olmo_sparsity.base.manifest import write_manifest

COMMAND = str(Path(sys.executable).with_name("olmo-sparsity"))
TEXTS = [
    " ".join(f"the {number * place % 97} comes after {place}," for place in range(50))
    for number in range(1, 25)
]

SCRIPT = """
import sys
from pathlib import Path
from transformers import AutoTokenizer, LlamaForCausalLM
from olmo_sparsity import explain

model, tokenizer = (t.from_pretrained("llama") for t in (LlamaForCausalLM, AutoTokenizer))
text = Path("texts/3.txt").read_text()
e = explain(model, tokenizer, text=text, at=150, k=2, unrelated="texts")
if sys.argv[1:] == ["check"]:
    assert e.check(draws=2).draws == 2
    e.to_html("page.html")
print(e.top(2).to_json())
extras = {"accelerate", "datasets", "deepspeed", "olmo", "scipy", "sklearn"}
assert not extras & sys.modules.keys(), extras & sys.modules.keys()
"""


def run(*words: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer, and the texts in several formats."""
    folder = tmp_path_factory.mktemp("made")
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=300, max_position_embeddings=1024, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained(folder / "llama")
    (folder / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"texts/{number}.txt").write_text(text)
    table = pd.DataFrame({"text": TEXTS})
    table.to_json(folder / "texts.jsonl", orient="records", lines=True)
    table.to_parquet(folder / "texts.parquet")
    with pa.output_stream(str(folder / "texts.jsonl.zst"), compression="zstd") as stream:
        stream.write((folder / "texts.jsonl").read_bytes())
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.fixture(params=["{}.py", "{}/__init__.py"])
def work(folder: Path, request: pytest.FixtureRequest) -> Path:
    """A user's folder, whose own modules must not be imported in place of others."""
    for name in ("analysis", "datasets", "config", "tokens", "configs", "model", "data"):
        path = folder / request.param.format(name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"raise RuntimeError('the module {name} of the user is imported')")
    return folder


def test_the_wheel_is_installed_without_extras() -> None:
    assert "site-packages" in olmo_sparsity.__file__
    assert importlib.metadata.version("olmo-sparsity") == olmo_sparsity.__version__
    assert np.lib.NumpyVersion(np.__version__) >= "2.0.0"
    for name in ("olmo", "datasets", "accelerate", "deepspeed"):
        assert importlib.util.find_spec(name) is None, name


def test_explain_in_memory_and_from_a_shell(work: Path) -> None:
    (work / "script.py").write_text(SCRIPT)
    in_memory = json.loads(run(sys.executable, "script.py", "check", cwd=work).stdout)
    words = (
        "--text",
        "texts/3.txt",
        "--at",
        "150:151",
        "-k",
        "2",
        "--check",
        "--unrelated",
        "texts",
    )
    done = run(COMMAND, "explain", "llama", *words, "--json", "--html", "again.html", cwd=work)
    found = json.loads(done.stdout)
    assert [unit["text"] for unit in found["far"]] == list(in_memory["text"].values())
    assert found["check"]["draws"] == 8
    for page in ("page.html", "again.html"):
        assert "<script" in (work / page).read_text()


def measure(folder: Path, text: str, out: str, *more: str) -> None:
    words = ("--quick", "--sets", "gap", "--max-targets", "1", "--min-gap", "0", "--out", out)
    windows = ("--long", "48", "--short", "16", "--stride", "16")
    run(COMMAND, "measure", "llama", "--text", text, *windows, *words, *more, cwd=folder)


def test_measure_report_figure(folder: Path) -> None:
    measure(folder, "texts", "results")
    measure(folder, "texts", "spans", "--units", "span:2", "--losses", "results")
    about = json.loads((folder / "spans/meta.json").read_text())
    assert "results" in about["data"]["losses_from"]["command"]
    run(COMMAND, "report", "results", "--out", "report.html", cwd=folder)
    run(COMMAND, "figure", "results", "--out", "figure.png", cwd=folder)
    assert (folder / "figure.png").stat().st_size > 1000
    assert "<script" in (folder / "report.html").read_text()
    assert np.isfinite(pd.read_parquet(folder / "results/summary.parquet")["recovery"]).any()


@pytest.mark.parametrize("program", [[COMMAND], [sys.executable, "-m", "olmo_sparsity"]])
def test_help_and_version(program: list[str], work: Path) -> None:
    assert "explain" in run(*program, "--help", cwd=work).stdout
    assert run(*program, "--version", cwd=work).stdout.endswith(f"{olmo_sparsity.__version__}\n")


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        *(((name, "quick.yaml"), "train") for name in ("prepare", "experiment")),
        (("explain", "checkpoint", "--text", "texts/1.txt"), "train"),
        (("measure", "llama", "--text", "owner/name", "--out", "results"), "data"),
        (("measure", "llama", "--text", "embedded", "--out", "results"), "train"),
        (("explain", "llama", "--text", "texts/1.txt", "-k", "1", "--check"), "train"),
    ],
)
def test_what_needs_an_extra_names_it(folder: Path, words: tuple[str, ...], extra: str) -> None:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    for name in ("config.yaml", "model.safetensors", "tokenizer.json"):
        (checkpoint / name).touch()
    lines = "model: {vocab_size: 128}\ndata: {tokenizer: {name: tokenizer.json}}\n"
    (checkpoint / "config.yaml").write_text(lines)
    write_manifest(checkpoint)
    done = run(COMMAND, *words, cwd=folder, code=2)
    said = [line for line in done.stderr.splitlines() if line.startswith("olmo-sparsity: ")]
    assert len(said) == 1
    assert said[0].endswith(f"pip install 'olmo-sparsity[{extra}]'")
    assert "Traceback" not in done.stderr


@pytest.mark.filterwarnings("ignore")  # those of OLMo-core
def test_the_callback_of_olmo_core_records_the_loss_of_its_own_forward_pass(tmp_path: Path) -> None:
    train = pytest.importorskip("olmo_core.train")
    from olmo_core.config import DType
    from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
    from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig
    from olmo_core.optim import AdamWConfig
    from olmo_core.train.callbacks import Callback
    from olmo_core.train.train_module import TransformerTrainModuleConfig

    words = [f"w{number}" for number in range(60)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    rng = np.random.default_rng(0)
    texts = [" ".join(np.tile(rng.choice(words, 32), 4)) for _ in range(8)]
    tokens = np.concatenate([np.tile(rng.integers(0, 60, 32), 4) for _ in range(40)])
    tokens.astype(np.uint16).tofile(tmp_path / "tokens.npy")
    logged = dict[int, dict[str, float]]()

    class Keep(Callback):
        def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
            logged[step] = metrics

    train.prepare_training_environment(seed=1, backend="gloo")
    try:
        model = TransformerConfig.llama_like(
            d_model=64, vocab_size=60, n_layers=2, n_heads=4, qk_norm=True, layer_norm_eps=1e-6,
            block_name=TransformerBlockType.reordered_norm, dtype=DType.float32,
        ).build(init_device="cpu")  # fmt: skip
        module = TransformerTrainModuleConfig(512, 128, AdamWConfig(lr=1e-2)).build(model)
        data = NumpyFSLDatasetConfig(
            paths=[str(tmp_path / "tokens.npy")], sequence_length=128, work_dir=str(tmp_path / "w"),
            tokenizer=TokenizerConfig(vocab_size=60, eos_token_id=0, pad_token_id=0),
        ).build()  # fmt: skip
        loader = NumpyDataLoaderConfig(512, 0, str(tmp_path / "w")).build(
            data, dp_process_group=module.dp_process_group
        )
        losses = olmo_sparsity.OLMoCoreLosses(2, tokenizer, texts, length=96, documents=8)
        train.TrainerConfig(
            save_folder=str(tmp_path / "s"), max_duration=train.Duration.steps(4),
            no_checkpoints=True, no_evals=True, callbacks={"losses": losses, "keep": Keep()},
        ).build(module, loader).fit()  # fmt: skip
        assert [step for step, row in logged.items() if "loss_by_place/48-96" in row] == [2, 4]
        ids = torch.tensor([tokenizer.encode(text).ids[:96] for text in texts])
        with torch.no_grad():
            log_p = module.model(ids)[:, :-1].float().log_softmax(-1)
        expected = -log_p.gather(2, ids[:, 1:, None])[:, 47:].mean()
        assert logged[4]["loss_by_place/48-96"] == pytest.approx(expected.item(), abs=1e-4)
    finally:
        train.teardown_training_environment()
