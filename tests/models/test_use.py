"""A model in a notebook: trained on, edited, hooked, shared by threads, left as it was."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from olmo_sparsity import attribute, explain, load_model, losses_by_place, measure
from olmo_sparsity.base.errors import ConfigError, DataError
from olmo_sparsity.models.huggingface import model as huggingface
from olmo_sparsity.models.huggingface.attention_names import OWN_SDPA
from olmo_sparsity.models.identity import checksums, known_identities, replaced_code, use
from olmo_sparsity.models.identity.model_identity import read_identity
from olmo_sparsity.models.load import wrap_model
from tests.support.explanations import SHORT, TEXT, WORDS, asked, make_model, make_tokenizer
from tests.support.families import SUPPORTED, build, find
from tests.support.sources import GIVEN

WHERE = re.compile("w7 w8")
TEXTS = [" ".join(np.random.default_rng(i).choice(WORDS, 80).tolist()) for i in range(10, 14)]
EIGHT_TEXTS = TEXTS + [" ".join(reversed(text.split())) for text in TEXTS]
MEASURED: dict[str, Any] = {
    "long": 32, "short": 8, "stride": 16, "selectors": "add_one_screened", "ks": (1,), "draws": 1,
    "halves": 0, "min_gap": 0.0, "share": 0.5, "max_targets": 2,
}  # fmt: skip


@pytest.fixture
def model() -> Any:
    return make_model()


def loss_of(model: Any) -> float:
    """Of "w7 w8" with everything before it, by plain transformers."""
    ids = make_tokenizer()([TEXT], return_tensors="pt").input_ids
    with torch.no_grad():
        log_p = model(input_ids=ids).logits.float().log_softmax(-1)[0]
    return -sum(float(log_p[i - 1, ids[0, i]]) for i in (-3, -2))


def long_loss(model: Any, **changed: Any) -> float:
    return float(asked(model, at=WHERE, **changed).targets.loss_long.iloc[-1])


def train(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ids = make_tokenizer()([TEXT], return_tensors="pt").input_ids
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def test_a_notebook_that_trains_explains_trains_on_generates_and_measures(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # %% train and explain
    model.train()
    train(model)
    found = asked(model, at=WHERE)
    assert found.targets.loss_long.iloc[-1] == pytest.approx(loss_of(model), abs=1e-4)
    # %% train on: the explanation is of the model before, and says so
    train(model)
    with pytest.raises(DataError, match="has changed since explain"):
        found.check(draws=2)
    again = asked(model, at=WHERE)
    assert again.targets.loss_long.iloc[-1] == pytest.approx(loss_of(model), abs=1e-4)
    again.check(draws=2)
    # %% measure, train on, measure again into the same folder
    kept = wrap_model(model, make_tokenizer())
    first = measure(kept, TEXTS, out=tmp_path / "out", **MEASURED)
    train(model)
    with pytest.raises(ConfigError, match="holds work with model"):
        measure(kept, TEXTS, out=tmp_path / "out", **MEASURED)
    with pytest.raises(DataError, match="are of another model"):
        measure(kept, TEXTS, losses=first, **MEASURED)
    assert "has changed since its last use" in capsys.readouterr().err
    second = measure(kept, TEXTS, **MEASURED)
    fresh = measure(wrap_model(model, make_tokenizer()), TEXTS, **MEASURED)
    np.testing.assert_array_equal(second.losses.loss_long, fresh.losses.loss_long)
    assert float((second.losses.loss_long - first.losses.loss_long).abs().max()) > 0.1
    assert model.training


def make_model_with_adapter() -> Any:
    from peft import LoraConfig, inject_adapter_in_model

    model = make_model()
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["up_proj"], init_lora_weights=False)
    return inject_adapter_in_model(config, model)


# --- identity -------------------------------------------------------------------------------------


def edits(model: Any) -> dict[str, Callable[[], Any]]:
    """One change of a model with an adapter for each kind of it."""
    config, (first, second) = model.config, model.model.layers
    lora, matrix = second.mlp.up_proj, first.self_attn.k_proj.weight

    def exchange() -> None:
        matrix[0, [3, 5]] = matrix[0, [5, 3]]

    return {
        "one number": lambda: matrix[1, 2].add_(0.1),
        "through data": lambda: first.input_layernorm.weight.data.mul_(1.1),
        "two numbers": exchange,
        "rows": lambda: matrix.set_(matrix.roll(1, 0)),
        "columns": lambda: matrix.set_(matrix.roll(1, 1)),
        "angles": lambda: model.model.rotary_emb.inv_freq[1:2].mul_(1.5),
        "config": lambda: setattr(config, "hidden_act", "relu"),
        "base": lambda: config.rope_parameters.update(rope_theta=5.0),
        "epsilon": lambda: setattr(first.input_layernorm, "variance_epsilon", 0.1),
        "scale": lambda: setattr(first.self_attn, "scaling", 2.0),
        "activation": lambda: setattr(first.mlp, "act_fn", nn.GELU()),
        "adapter off": lambda: lora.enable_adapters(False),
        "strength": lambda: lora.scaling.update(default=9.0),
        "merged": lambda: lora.merge(),
        "dtype": lambda: second.self_attn.v_proj.to(torch.float64),
    }


@torch.no_grad()
@pytest.mark.parametrize("width", [509, 3])  # of the matrices whose sums identify tensors
def test_each_edit_is_noticed(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "WORDS_PER_ROW", width)
    first = read_identity(make_model_with_adapter())
    for kind in edits(make_model_with_adapter()):
        model = make_model_with_adapter()
        state = read_identity(model)
        assert state == read_identity(model)
        assert state.sha256 == first.sha256
        edits(model)[kind]()
        now = read_identity(model)
        assert state.differences(now), kind
        assert now.sha256 != state.sha256, kind


def test_a_model_in_memory_is_read_once_a_call_and_tried_once(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            if name == "tried" or given[0] is model:  # and not the one that counts the cost
                done.append(name)
            return function(*given, **named)

        return counted

    monkeypatch.setattr(
        known_identities, "read_identity", counting("read", known_identities.read_identity)
    )
    monkeypatch.setattr(huggingface, "try_model", counting("tried", huggingface.try_model))
    first = long_loss(model)
    assert sorted(done) == ["read", "tried"]
    done.clear()
    assert long_loss(model) == first
    assert done == ["read"]
    model.lm_head.weight.data[0, 0] += 1  # which no version of the tensor counts
    done.clear()
    assert long_loss(model) != first
    assert sorted(done) == ["read", "tried"]


@pytest.mark.parametrize("of", ["model.layers.1.mlp", "lm_head", "all modules"])
def test_hooks_of_others_are_refused_until_they_are_removed(model: Any, of: str) -> None:
    kept = wrap_model(model, make_tokenizer())
    if of == "all modules":
        handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    else:
        handle = model.get_submodule(of).register_forward_pre_hook(lambda *given: None)
    with handle:
        for use_it in (lambda: kept.fingerprint, lambda: wrap_model(model)):
            with pytest.raises(ConfigError, match=f"model: the hook .* on {of}"):
                use_it()
    assert kept.fingerprint


# --- threads --------------------------------------------------------------------------------------


def test_threads_take_turns_and_do_not_disturb_generation(model: Any) -> None:
    selectors = ["attention", "gradient", "add_one_nested"] * 2
    alone = [asked(model, selector=selector).distant for selector in selectors]
    prompt = make_tokenizer()(["w1 w2 w3"], return_tensors="pt").input_ids
    generate = partial(model.generate, prompt, max_new_tokens=24, do_sample=False)
    expected, ended, wrong = generate(), threading.Event(), list[Tensor]()

    def generating() -> None:
        while not ended.is_set():
            found = generate()
            if not torch.equal(found, expected):
                wrong.append(found)

    other = threading.Thread(target=generating)
    other.start()
    try:
        with ThreadPoolExecutor(4) as pool:  # each of them also wraps the model, which probes it
            found = list(pool.map(lambda one: asked(model, selector=one).distant, selectors))
    finally:
        ended.set()
        other.join()
    assert not wrong
    for ours, theirs in zip(found, alone, strict=True):
        assert ours.text.tolist() == theirs.text.tolist()
        np.testing.assert_allclose(ours.nats, theirs.nats, atol=1e-5)


@pytest.mark.parametrize("wrapper", [partial(torch.compile, backend="eager"), nn.DataParallel])
def test_what_is_around_a_model_is_taken_off(model: Any, wrapper: Callable[..., Any]) -> None:
    assert long_loss(wrapper(model)) == long_loss(model)


# --- nothing stays --------------------------------------------------------------------------------


def about(model: Any) -> dict[str, Any]:
    """What a call must leave as it was."""
    modules = dict(model.named_modules())
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    registries = (transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS, masks)
    return {
        "weights": {n: (w.data_ptr(), w._version, w.clone()) for n, w in model.named_parameters()},
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "wanting": [(p.requires_grad, p.grad) for p in model.parameters()],
        "config": model.config.to_dict() | {"kernel": model.config._attn_implementation},
        "modes": {n: m.training for n, m in modules.items()},
        "hooks": [(*m._forward_hooks, *m._forward_pre_hooks) for m in modules.values()],
        "attributes": {n: set(vars(m)) for n, m in modules.items()},
        "registry": [dict(one._global_mapping) for one in registries],
        "random": (torch.get_rng_state(), random.getstate(), str(np.random.get_state())),
        "gradient": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "filters": list(warnings.filters),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@contextmanager
def raising_at(step: int) -> Iterator[list[int]]:
    """KeyboardInterrupt at the n-th call of torch from Python. Yields the number of calls."""
    calls = [0]

    class Counting(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls[0] += 1
            if calls[0] == step:
                raise KeyboardInterrupt
            return func(*args, **kwargs or {})

    with Counting():
        yield calls


CALLS: dict[str, Callable[[Any, Path], Any]] = {
    **{
        name: partial(lambda model, path, name: asked(model, selector=name).check(2), name=name)
        for name in ("add_one_nested", "gradient", "attention")
    },
    "attribute": lambda model, path: attribute(model, make_tokenizer(), **GIVEN, draws=4),
    "measure": lambda model, path: measure(
        wrap_model(model, make_tokenizer()), TEXTS, **MEASURED | {"max_targets": 1}
    ),
    "load": lambda model, path: load_model(path, device="cpu"),
}


@pytest.mark.parametrize("call", CALLS)
def test_after_any_call_everything_is_as_before(model: Any, call: str, tmp_path: Path) -> None:
    """Also after one that is interrupted at a random point."""
    make_tokenizer().save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    CALLS[call](model, tmp_path)  # registers our name, once
    model.train()
    model.model.layers[1].eval()  # as its owner has it
    model.lm_head.weight.requires_grad_(False)
    before = about(model)
    with raising_at(0) as calls:
        CALLS[call](model, tmp_path)
    generator = random.Random(call)
    for step in (0, *(generator.randrange(1, calls[0]) for _ in range(3))):
        if step:
            with pytest.raises(KeyboardInterrupt), raising_at(step):
                CALLS[call](model, tmp_path)
        after = about(model)
        assert not [name for name in before if not same(before[name], after[name])], step
    assert OWN_SDPA in transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS


@pytest.mark.parametrize(
    "losses_of",
    [
        lambda model: asked(model, at=WHERE).targets.loss_long,
        lambda model: asked(model, at=WHERE).check(2).table,
        lambda model: attribute(model, make_tokenizer(), **GIVEN, draws=4).statements,
        lambda model: measure(model, TEXTS, tokenizer=make_tokenizer(), **MEASURED).losses,
        lambda model: losses_by_place(model, make_tokenizer(), text=EIGHT_TEXTS, length=32).table,
    ],
    ids=["explain", "check", "attribute", "measure", "losses_by_place"],
)
def test_autocast_around_a_call_changes_no_number(
    model: Any, losses_of: Callable[[Any], pd.DataFrame | pd.Series]
) -> None:
    expected = losses_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert losses_of(model).equals(expected)
        assert torch.is_autocast_enabled("cpu")


def test_autocast_inside_a_use_changes_no_number(model: Any) -> None:
    expected = long_loss(model)
    with use.in_use(model), torch.autocast("cpu", torch.bfloat16):
        assert long_loss(model) == expected


def test_no_answer_holds_weights(model: Any) -> None:
    big = build(SUPPORTED[find("Llama 1, 2, 3")], vocab_size=60_000, bos_token_id=1, eos_token_id=2)
    size = len(pickle.dumps(big.state_dict()))
    found = explain(big, make_tokenizer(), text=TEXT, at=WHERE, short=SHORT, long=40, k=2)
    attributed = attribute(big, make_tokenizer(), **GIVEN, draws=4)
    for answer in (found, attributed):
        assert len(pickle.dumps(answer)) < size / 20
        assert str(pickle.loads(pickle.dumps(answer))) == str(answer)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def ends_when_forked(function: Callable[[], Any]) -> bool:
    with warnings.catch_warnings():
        # Python 3.12 warns of what is tested here.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = multiprocessing.get_context("fork").Process(target=function)
        process.start()
    process.join(60)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode == 0


def test_a_forked_process_uses_a_model_that_a_thread_of_its_parent_uses(model: Any) -> None:
    is_used, may_end = threading.Event(), threading.Event()

    def use_it() -> None:
        with use.in_use(model):
            is_used.set()
            may_end.wait()

    thread = threading.Thread(target=use_it)
    thread.start()
    is_used.wait()
    try:
        assert ends_when_forked(lambda: asked(model, at=WHERE))
    finally:
        may_end.set()
        thread.join()


def test_a_forked_process_does_not_wait_for_threads_of_openmp(two_threads: None) -> None:
    torch.ones(2**20).add(1)  # starts the second thread

    def use_it() -> None:
        with use.in_use(nn.Linear(512, 512)):
            torch.ones(2**20).add(1)

    assert ends_when_forked(use_it)


# --- code in place of a method --------------------------------------------------------------------


def louder(mlp: Any, strength: float) -> None:
    """Replace the forward of one module by one that multiplies its output."""
    original = mlp.forward
    mlp.forward = lambda hidden: original(hidden) * strength


def test_a_forward_that_was_replaced_on_a_module_is_another_model(model: Any) -> None:
    plain = read_identity(model)
    louder(model.model.layers[0].mlp, 1.5)
    assert read_identity(model).differences(plain) == "the code of model.layers.0.mlp.forward"
    assert read_identity(model).sha256 != plain.sha256


def test_a_replaced_forward_is_known_again_by_its_code_and_its_values() -> None:
    hashes = []
    for strength in (1.5, 1.5, 2.0):
        patched = make_model()
        louder(patched.model.layers[0].mlp, strength)
        hashes.append(read_identity(patched).sha256)
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_forward_of_another_module_is_another_model(model: Any) -> None:
    plain = read_identity(model)
    first, second = model.model.layers
    second.mlp.forward = first.mlp.forward
    assert read_identity(model).differences(plain) == "the code of model.layers.1.mlp.forward"


def test_a_mapping_by_objects_changes_no_identity(model: Any) -> None:
    """The repr of these keys holds their address, which differs in each process."""
    identity = read_identity(model)
    model.order_of_modules = {model.lm_head: 0}
    assert read_identity(model) == identity


def test_a_value_that_no_process_can_compare_makes_another_model_of_each(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    strength = object()
    model.model.layers[0].mlp.forward = lambda hidden: strength
    state = read_identity(model)
    assert read_identity(model) == state
    monkeypatch.setattr(replaced_code, "_THIS_PROCESS", "another")
    assert read_identity(model).sha256 != state.sha256


@pytest.mark.parametrize("keeps_name", [False, True])
def test_a_patched_class_continues_no_results_of_the_files(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_name: bool
) -> None:
    make_tokenizer().save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    measure(load_model(tmp_path / "model"), TEXTS, out=tmp_path / "out", **MEASURED)
    kind = type(model.model.layers[0].mlp)
    original = kind.forward

    def patched(mlp: Any, hidden: Tensor) -> Tensor:
        return original(mlp, hidden) * 1.5

    monkeypatch.setattr(kind, "forward", wraps(original)(patched) if keeps_name else patched)
    with pytest.raises(ConfigError, match="holds work with model"):
        measure(load_model(tmp_path / "model"), TEXTS, out=tmp_path / "out", **MEASURED)


def test_a_replaced_forward_is_said_once(model: Any, capsys: pytest.CaptureFixture) -> None:
    louder(model.model.layers[0].mlp, 1.5)
    long_loss(model)
    long_loss(model)
    assert capsys.readouterr().err.count("model.layers.0.mlp.forward was replaced") == 1


def test_what_trusted_packages_put_around_a_method_changes_no_identity(model: Any) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    plain = read_identity(model)
    add_hook_to_module(model.model.layers[0].mlp, AlignDevicesHook())
    model.forward = torch.compile(model.forward, backend="eager")
    assert read_identity(model) == plain


# --- weights that cannot be used ------------------------------------------------------------------


@pytest.mark.parametrize("whole_prompts", [False, True])
def test_a_model_without_weights_says_how_to_load_them(model: Any, whole_prompts: bool) -> None:
    message = r"has no weights: .* is on the meta device; load them with from_pretrained"
    with pytest.raises(ConfigError, match=message):
        wrap_model(model.to("meta"), whole_prompts=whole_prompts)


def test_float64_weights_are_refused_with_the_remedy(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"its weights are float64.*call model\.float\(\)"):
        wrap_model(model.double())
    assert wrap_model(model.float()).fingerprint
