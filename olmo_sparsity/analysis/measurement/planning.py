"""Make a plan of a request: read model and text, and settle what is measured.

    MeasureRequest(model="runs/mine", documents="text.txt", short=64)
        │ read      model with 1,024 positions; 3 documents of 900, 2,000 and 400 tokens
        │ settle    long="all", short=64, stride=64, prefix=(50256,)
        │ fit       documents of 900, 1,023 and 400 tokens, as the prefix takes a position
        ▼
    Plan

`make_plan` is the entry point. It reads nothing but the model, the text and other measurements, and
computes no losses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from olmo_sparsity.analysis.interpretation import interpretation_of
from olmo_sparsity.analysis.measurement.at import At
from olmo_sparsity.analysis.measurement.enough_text import warn_of_few_units
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
from olmo_sparsity.analysis.measurement.reuse import read_other
from olmo_sparsity.analysis.measurement.reused_settings import (
    settings_of_choices,
    with_settings_of_targets,
)
from olmo_sparsity.analysis.options import Settings
from olmo_sparsity.analysis.results.results import Results
from olmo_sparsity.models.loaded import LoadedModel
from olmo_sparsity.text.documents import Documents
from olmo_sparsity.text.inputs import cut_to_targets


class _OtherMeasurements(NamedTuple):
    """Other measurements that this one reuses; None for those that were not passed."""

    targets: Results | None
    """Its targets are evaluated."""

    choices: Results | None
    """Its targets are evaluated, with the units that its model ranked for them."""

    losses: Results | None
    """Its losses are taken, so that they need not be computed."""


def make_plan(request: MeasureRequest) -> Plan:
    """Read the model and the text of a request, settle what is measured, and return it as a plan.

    The order of the steps matters. Windows depend on the model's limit, the prefix on the text, the
    blocks of `--quick` on the prefix, and the length that documents may have on all of these.
    """
    others = _OtherMeasurements(
        targets=read_other("targets", request.targets),
        choices=read_other("choices", request.choices),
        losses=read_other("losses", request.losses),
    )
    choices = others.choices
    selection = _selection_of_targets(request, others)
    model, documents = _read_model_and_text(request, choices)

    # Windows are counted in tokens, so they cannot be taken from a model with other tokens.
    has_other_tokenizer = choices is not None and is_other_tokenizer(choices, documents)
    settings = _settings_of_request(request, others, documents, has_other_tokenizer)
    settings = fit_to_limit(settings, model.max_positions)
    # Once more: a local window that had to be shortened leaves fewer distant units for `ks`.
    settings.check()
    if documents.have_targets:
        documents = cut_to_targets(documents, settings.windows)

    prefix_ids = prefix_of(documents, model, request.loading.prefix)
    if choices is not None and not has_other_tokenizer:
        check_same_prefix(settings.prefix_ids, prefix_ids, model)
    check_room_after_prefix(len(prefix_ids), settings.short, model)

    # `--quick` draws blocks only if no targets are named, whose blocks are measured anyway.
    has_named_targets = selection is not None or documents.have_targets
    if request.quick and not has_named_targets:
        settings = with_quick_blocks(settings, model.max_positions, len(prefix_ids))
    if settings.windows.has_all:
        documents = within_limit(documents, model, len(prefix_ids))
    settings = replace(settings, prefix_ids=settings.prefix_ids or prefix_ids)

    plan = Plan.of(
        model,
        documents,
        settings,
        selection,
        batch_tokens=request.loading.batch_tokens,
        reuse_units=choices is not None,
    )
    if others.losses is not None:
        plan = plan.with_losses(others.losses)
    warn_of_few_units(plan.measured_documents, plan.settings)
    return plan


def _selection_of_targets(
    request: MeasureRequest, others: _OtherMeasurements
) -> Results | At | None:
    """Return the measurement whose targets are evaluated, or the names of targets. Return None if
    targets are chosen by their losses."""
    # A checked request has one of these at most.
    for selection in (others.choices, others.targets, request.at):
        if selection is not None:
            return selection
    return None


def _read_model_and_text(
    request: MeasureRequest, choices: Results | None
) -> tuple[LoadedModel, Documents]:
    """Read the model, and the text in its tokens.

    Args:
        choices: The measurement whose ranked units are evaluated, if there is one.
    """
    # How the model is loaded depends on the distant states, which `choices` determines.
    interpretation = request.settings.interpretation
    if choices is not None:
        interpretation = interpretation_of(choices.meta.windows["distant_states"])
    loading = request.loading
    model = load(request.model, request.tokenizer, loading, whole_prompts=interpretation.replaces)

    documents = open_text(request.documents, model, request.reading)
    if request.reading.split_long:
        documents = split_to_limit(documents, model, loading.prefix)
    return model, documents


def _settings_of_request(
    request: MeasureRequest,
    others: _OtherMeasurements,
    documents: Documents,
    has_other_tokenizer: bool,
) -> Settings:
    """Return the settings that follow from the options and from other measurements.

    Args:
        documents: The text in the tokens of this model.
        has_other_tokenizer: Whether choices were made in other tokens.
    """
    if others.choices is not None:
        # The other measurement determines most settings, as units were ranked under them.
        passed = {name: getattr(request.settings, name) for name in request.passed_settings}
        return settings_of_choices(others.choices, passed, has_other_tokenizer)

    settings = request.settings
    targets = others.targets
    if targets is not None and not is_other_tokenizer(targets, documents):
        prefix = request.loading.prefix
        settings = with_settings_of_targets(targets, settings, request.typed, prefix)
    say_defaults_of_length(settings)
    return settings
