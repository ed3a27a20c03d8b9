"""Declare the options of `explain`, `measure` and `losses`: their types, defaults and ranges.

Options form groups, each a frozen dataclass:

    ModelOptions      how a model is loaded and run    all three
    TextOptions       how text is read                 `measure`
    Settings          what is measured                 `measure`
    ExplainSettings   what is explained                `explain`
    LossSettings      what is read                     `losses`

    Settings(long=64).short       # 16: a default that depends on another option
    Settings(long=0).check()      # ConfigError: long=0 must be at least 1

    measure(model, text, dtype="bf16", long=64)
        ─ request.py ─>  ModelOptions(dtype="bf16"), TextOptions(), Settings(long=64)

The command line is derived from these classes, too. Its help is the text of `option`, or, where
there is none, the docstring of the function in api.py. This module imports nothing large, as
`--help` reads it.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, fields
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

from olmo_sparsity.analysis.interpretation import (
    Interpretation,
    InterpretationName,
    interpretation_of,
)
from olmo_sparsity.base.errors import ConfigError, check_unset
from olmo_sparsity.config.build import validate
from olmo_sparsity.config.schema import option
from olmo_sparsity.config.text import Control, SplitAt
from olmo_sparsity.config.windows import LOCAL_OF_DOCUMENTS, Long, default_local, long_window

if TYPE_CHECKING:
    from olmo_sparsity.text.windows import Windows

Dtype = Literal["auto", "fp32", "bf16", "fp16"]

TargetSet = Literal["gap", "bigram", "every"]
"""How targets are chosen. `gap`: by the gap. The other two are by the text alone. `bigram`: the
token and the one before it occur together among the distant tokens, and not in the local window.
`every`: drawn evenly from all tokens."""

KS = (1, 2, 4, 8, 16)
"""Default of `ks`, the numbers of units for which recovery is measured."""

MIN_GAP = 0.1
"""Default of `min_gap`, in nats: a target with a smaller gap has nothing to recover."""

MIN_HALVES = 4
"""Smallest value of `halves`, the number of random halves of the units, besides 0. A rank
correlation over fewer says nothing."""

TARGETS_OF_DOCUMENT = 4
"""Default of `max_targets` where targets are expensive: targets of each set in a document.
Intervals are over documents, so more documents help more than more targets of each. All targets of
the top 10% of 60 articles would cost 100 times as much."""

SELECTION_SETTINGS = ("sets", "max_targets", "share", "min_gap", "sample", "blocks")
"""Settings by which targets are chosen. They are refused where another option, or another
measurement, chooses the targets."""

SELECTORS_OF_STATES = ("add_one_screened", "random")
"""Default selectors, for any window, where distant tokens keep states: a rule and a control. With
`add_one` in place of the rule a target costs a row for each of its distant units, which may be
thousands."""


def is_whole_number(value: Any) -> bool:
    """Return whether a value is a whole number of any library's type; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def parse_share(text: str) -> float:
    """Return the fraction of tokens that the option `share` names: 1.0 for `all`, 0.1 for `top10%`
    and for `0.1`, which is how help prints the default."""
    if text == "all":
        return 1.0
    percent = re.fullmatch(r"top(.+)%", text)
    with contextlib.suppress(ValueError):  # of `float`, for a text that is not a number
        share = float(text) if percent is None else float(percent[1]) / 100
        if 0 < share <= 1:
            return share
    raise ConfigError(f"share={text} must be all, or a share such as top10% or 0.1")


def parse_sample(text: str) -> float:
    """Return the fraction of blocks that the option `sample` names: 0.05 for `5%`."""
    try:
        return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ConfigError(f"sample={text} must be a share of all blocks, such as 5%") from None


def parse_prefix(text: str) -> str:
    r"""Return the prefix with each \n as a line break, which a shell passes as two characters."""
    return text.replace(r"\n", "\n")


# --- models and texts -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options that say how a model is loaded and run."""

    device: str = option("auto", "a GPU if there is one")
    dtype: Dtype = option(
        "auto",
        "of the weights; auto: the checkpoint's own, fp32 on a CPU that is slow in it, for runs on "
        "a GPU bf16",
    )
    device_map: str | None = option(
        None, "`auto` spreads a Hugging Face model over several GPUs", metavar="MAP"
    )
    prefix: str = option(
        "auto",
        "prefix of every window: auto (what the tokenizer puts before a text), bos, none, or a "
        r"text, in which \n is a line break",
        metavar="WHAT",
        parse=parse_prefix,
        blank=True,
    )
    batch_tokens: int | None = option(
        None, "tokens of a forward; 4096 on CPU, 16384 to 131072 on a GPU", least=1
    )

    @property
    def loading(self) -> dict[str, Any]:
        """Return these options as keyword arguments of `load_model`."""
        return {"device": self.device, "dtype": self.dtype, "device_map": self.device_map}

    def check_unset_for_loaded(self) -> None:
        """Raise ConfigError if an option says how to load a model that is in memory already."""
        check_unset("a model in memory has its own", **self.loading)


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The options that say how the text of a measurement is read."""

    field: str = option("text", "the field of a record that holds the text")
    group_field: str | None = option(
        None,
        "the field that names a document's author, title or site: unrelated texts are of others",
    )
    prompt_field: str | None = option(
        None, "in records of a prompt and a target: the field of the prompt"
    )
    target_field: str | None = option(None, "the field of the target: its tokens are the targets")
    split_at: SplitAt = option(
        "whole", "a file of plain text is one document, or each part between blank lines"
    )
    split_long: bool = option(
        False,
        "with --long all, split documents longer than the model's limit into consecutive parts, at "
        "the border of a paragraph or sentence; their ends are left out otherwise",
    )
    max_documents: int | None = option(
        None, "read no more than this many; of a prepared folder, spread over it", least=1
    )
    min_tokens: int | None = option(
        None,
        "leave out documents of fewer tokens, and read on until `max_documents` are there: with "
        "more than the longest --long, each length measures the same documents",
        least=1,
    )
    control_tokens: bool = option(
        False, "names of control tokens in a text, such as <|im_end|>, are these tokens, not text"
    )


# --- `measure` ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a measurement. Processes with equal settings, model and text share one. The
    docstring of `measure` in api.py explains each.

        settings = Settings(long=64)
        settings.short             # 16, the default for this length
        settings.changed_options   # {"long": 64}
    """

    long: Long = option("all", metavar="N", least=1)
    short: int = option(None, metavar="N", least=1)
    stride: int = option(None, metavar="N", least=1)
    sample: float = option(1.0, metavar="SHARE", parse=parse_sample, least=1e-06, most=1)
    blocks: int | None = option(None, metavar="N", least=1)
    prefix_ids: tuple[int, ...] = option((), hidden=True)
    units: tuple[str, ...] = option(("tokens",), nonempty=True, distinct=True)
    selectors: tuple[str, ...] = option((), distinct=True)
    ks: tuple[int, ...] = option(KS, least=1, nonempty=True, distinct=True)
    share: float = option(0.1, metavar="SHARE", parse=parse_share, least=1e-06, most=1)
    min_gap: float = option(MIN_GAP, least=0, most=1000000.0)
    sets: tuple[TargetSet, ...] = option((), distinct=True)
    max_targets: int | Literal["all"] = option(None, metavar="N", least=1)
    distant_states: InterpretationName = "contextual"
    control: Control = "unrelated"
    replacements: int | None = option(None, least=1, only_if=("distant_states", "replaced"))
    draws: int = option(None, metavar="N", least=1)
    halves: int = option(None, metavar="N", least=0)
    seed: int = option(0, least=0)

    def __post_init__(self) -> None:
        """Remember which options were set, and fill in defaults that depend on others."""
        changed = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value != item.default:
                changed[item.name] = value
        # Not a field, as `asdict(settings)` identifies a measurement: a default that is written out
        # must not make another one.
        object.__setattr__(self, "_changed", changed)

        for name, default in self._dependent_defaults().items():
            is_unset = getattr(self, name) in (None, (), [])
            if is_unset:
                # The dataclass is frozen.
                object.__setattr__(self, name, default)

    def _dependent_defaults(self) -> dict[str, Any]:
        """Return the defaults that depend on the long window or on the distant states, by name."""
        window = long_window(self.long)
        # A target with thousands of distant tokens, or with prompts in place of masks, takes long,
        # so that fewer targets, draws and halves are evaluated.
        is_expensive = window.is_all or self.interpretation.replaces
        num_tokens = self.long if isinstance(self.long, Integral) else None

        if self.interpretation.replaces:
            selectors: tuple[str, ...] = (self.interpretation.default_selector,)
        else:
            selectors = SELECTORS_OF_STATES

        return {
            "short": default_local(LOCAL_OF_DOCUMENTS, num_tokens),
            "stride": LOCAL_OF_DOCUMENTS // 2 if window.is_all else 1,
            "max_targets": TARGETS_OF_DOCUMENT if is_expensive else "all",
            "selectors": selectors,
            "replacements": self.interpretation.default_replacements,
            "sets": ("gap",),
            "draws": 1 if is_expensive else 3,
            "halves": 0 if is_expensive else 16,
        }

    @property
    def interpretation(self) -> Interpretation:
        """Return what `distant_states` means."""
        return interpretation_of(self.distant_states)

    @property
    def changed_options(self) -> dict[str, Any]:
        """Return the options that were set to another value than the default."""
        changed: dict[str, Any] = getattr(self, "_changed")  # noqa: B009 # no field, for mypy
        return changed

    @property
    def max_targets_of_set(self) -> float:
        """Return `max_targets` as a number; "all" is infinite."""
        return float("inf") if self.max_targets == "all" else self.max_targets

    @property
    def windows(self) -> Windows:
        """Return the windows of a target. With long="all", the first target of a document is where
        as many tokens are distant as are local."""
        from olmo_sparsity.text.windows import Windows

        min_distant = self.short if long_window(self.long).is_all else 1
        return Windows(self.long, self.short, self.stride, self.prefix_ids, min_distant=min_distant)

    @property
    def uses_min_gap(self) -> bool:
        """Return whether `min_gap` has an effect: whether some targets must have a large gap. With
        share=1 every token is a target, and the other sets ignore gaps."""
        return "gap" in self.sets and self.share != 1

    def check(self) -> None:
        """Raise ConfigError if a value is out of range, or two options exclude each other."""
        validate(self)
        self.windows.check()
        self._check_sample()
        if self.halves != 0 and self.halves < MIN_HALVES:
            raise ConfigError(f"halves={self.halves} must be 0 or at least {MIN_HALVES}")
        self._check_ks()

    def _check_sample(self) -> None:
        """Raise ConfigError if the number of blocks is set twice."""
        if self.sample != 1 and self.blocks is not None:
            raise ConfigError("sample and blocks both set the number of blocks; pass one of them")

    def _check_ks(self) -> None:
        """Raise ConfigError if the first target of a document has fewer distant units than the
        largest k."""
        from olmo_sparsity.text.units import span_width

        for units in self.units:
            width = span_width(units)  # 1 for tokens, 8 for spans of 8 tokens
            num_distant = self.windows.least_distant
            # Words and sentences have no fixed width. There are at most as many as tokens.
            num_units = num_distant if width is None else num_distant - width + 1
            if max(self.ks) > num_units:
                raise ConfigError(
                    f"ks: {max(self.ks)} is more than the {max(num_units, 0)} distant units "
                    f"({units}) of the first target; lower ks, or raise long"
                )


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The settings of `losses`, which has no local and no long window."""

    length: int = option(1024, "tokens that are read of each document", metavar="N", least=16)
    documents: int = option(
        64,
        "documents of this length that are read, at most",
        metavar="N",
        least=8,
    )

    def check(self) -> None:
        """Raise ConfigError if a value is out of range."""
        validate(self)


QUICK: dict[str, Any] = {"draws": 1, "max_documents": 30}
"""What `--quick` sets, unless an option is set by the user."""

QUICK_BLOCKS: dict[str, Any] = {"stride": 16, "blocks": 4}
"""What `--quick` sets as well if targets are chosen here: with named targets, only the blocks of
these are measured anyway."""


@dataclass(frozen=True, kw_only=True)
class ExplainSettings:
    """The settings of `explain`."""

    k: int = option(8, least=1)
    units: str = "tokens"
    selector: str = option(None)
    long: Long = option("all", metavar="N", least=1)
    short: int | None = option(None, metavar="N", least=1)
    distant_states: InterpretationName = "contextual"
    replacements: int | None = option(None, least=1, only_if=("distant_states", "replaced"))
    chat: bool = False
    max_new_tokens: int | None = option(None, metavar="N", least=1)
    seed: int = option(0, least=0)

    def __post_init__(self) -> None:
        """Fill in defaults that depend on the distant states."""
        interpretation = self.interpretation
        if self.selector is None:
            object.__setattr__(self, "selector", interpretation.default_selector)
        if self.replacements is None:
            object.__setattr__(self, "replacements", interpretation.default_replacements)

    @property
    def interpretation(self) -> Interpretation:
        """Return what `distant_states` means."""
        return interpretation_of(self.distant_states)

    def check(self) -> None:
        """Raise ConfigError if a value is out of range."""
        from olmo_sparsity.text.units import span_width

        validate(self)
        span_width(self.units)  # raises ConfigError for an unknown kind
