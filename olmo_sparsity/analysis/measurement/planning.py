"""Make a plan of a request: read model and text, and settle what is measured.

    MeasureRequest → other measurements, model, documents
                   → settings: from the options, or from another measurement
                   → fitted to the model's limit and the text → Plan

`plan` is the entry point. It reads nothing but the model, the text and other measurements, and
computes no losses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.analysis.measurement.at import At
from olmo_sparsity.analysis.measurement.fitting import (
    check_room_after_prefix,
    check_same_prefix,
    fit_to_limit,
    say_defaults_of_length,
    with_quick_blocks,
)
from olmo_sparsity.analysis.measurement.matching import is_other_tokenizer
from olmo_sparsity.analysis.measurement.plan import Plan
from olmo_sparsity.analysis.measurement.reading import (
    load,
    open_text,
    prefix_of,
    split_to_limit,
    within_limit,
)
from olmo_sparsity.analysis.measurement.request import MeasureRequest
from olmo_sparsity.analysis.measurement.reuse import (
    read_other,
    settings_of,
    with_settings_of_targets,
)
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.inputs import cut_to_targets


class _Others(NamedTuple):
    """Other measurements that this one reuses; None for those that were not passed."""

    targets: Results | None
    """Its targets are evaluated."""

    choices: Results | None
    """Its targets are evaluated, with the units that its model ranked for them."""

    losses: Results | None
    """Its losses are taken, so that they need not be computed."""


def plan(request: MeasureRequest) -> Plan:
    """Read the model and the text of a request, and settle what is measured. The order of the steps
    matters: windows depend on the model's limit, the prefix on the text, and the length that
    documents may have on both."""
    others = _Others(
        targets=read_other("targets", request.targets),
        choices=read_other("choices", request.choices),
        losses=read_other("losses", request.losses),
    )
    model, documents = _read(request, others.choices)
    choices = others.choices
    # Windows are counted in tokens, so they cannot be taken from a model with other tokens.
    has_other_tokenizer = choices is not None and is_other_tokenizer(choices, documents)
    settings = _settings_by_options(request, others, documents, has_other_tokenizer)
    settings = fit_to_limit(settings, model.max_positions)
    if documents.have_targets:
        documents = cut_to_targets(documents, settings.windows)
    prefix_ids = prefix_of(documents, model, request.loading.prefix)

    # `--quick` draws blocks only if no targets are named, whose blocks are measured anyway.
    selection = _selection(request, others)
    if request.quick and selection is None and not documents.have_targets:
        settings = with_quick_blocks(settings, model.max_positions, len(prefix_ids))
    check_room_after_prefix(len(prefix_ids), settings.short, model)
    if settings.windows.has_all:
        documents = within_limit(documents, model, len(prefix_ids))
    if choices is not None and not has_other_tokenizer:
        check_same_prefix(settings.prefix_ids, prefix_ids, model)
    settings = replace(settings, prefix_ids=settings.prefix_ids or prefix_ids)

    planned = Plan.of(
        model,
        documents,
        settings,
        selection,
        batch_tokens=request.loading.batch_tokens,
        transfers=choices is not None,
    )
    planned.warn_of_few_units()
    return planned if others.losses is None else planned.with_losses(others.losses)


def _read(request: MeasureRequest, choices: Results | None) -> tuple[LoadedModel, Documents]:
    """Read the model, and the text in its tokens."""
    interpretation = request.settings.interpretation
    if choices is not None:
        interpretation = interpretation_of(choices.meta.windows["distant_states"])
    loading = request.loading
    model = load(request.model, request.tokenizer, loading, whole_prompts=interpretation.replaces)
    documents = open_text(request.documents, model, request.reading)
    if request.reading.split_long:
        documents = split_to_limit(documents, model, loading.prefix)
    return model, documents


def _settings_by_options(
    request: MeasureRequest, others: _Others, documents: Documents, has_other_tokenizer: bool
) -> Settings:
    """Return the settings that follow from the options and from other measurements.
    `has_other_tokenizer`: whether choices were made in other tokens."""
    if others.choices is not None:
        # The other measurement determines most settings, as units were ranked under them.
        passed = {name: getattr(request.settings, name) for name in request.passed_settings}
        return settings_of(others.choices, passed, has_other_tokenizer)
    settings = request.settings
    targets = others.targets
    if targets is not None and not is_other_tokenizer(targets, documents):
        prefix = request.loading.prefix
        settings = with_settings_of_targets(targets, settings, request.typed, prefix)
    say_defaults_of_length(settings)
    return settings


def _selection(request: MeasureRequest, others: _Others) -> Results | At | None:
    """Return the measurement whose targets are evaluated, or the names of targets. Return None if
    targets are chosen by their losses."""
    # A checked request has one of these at most.
    for selection in (others.choices, others.targets, request.at):
        if selection is not None:
            return selection
    return None
