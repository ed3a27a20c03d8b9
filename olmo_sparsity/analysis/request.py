"""Hold one call of a function or command, built from flat keywords and checked once.

    measure("runs/mine", "text.txt", long=64, field="body", dtype="fp32")
        → MeasureRequest.of(model="runs/mine", documents="text.txt", long=64, field="body", …)
        → MeasureRequest(model="runs/mine", documents="text.txt",
                         settings=Settings(long=64), reading=TextOptions(field="body"),
                         loading=ModelOptions(dtype="fp32"))

A request has fields of its own, and groups of options (options.py), which several requests share:

    MeasureRequest     model, text, …  +  Settings         +  TextOptions  +  ModelOptions
    ExplainRequest     model, text, …  +  ExplainSettings  +                  ModelOptions
    LossesRequest      models, text …  +  LossSettings     +                  ModelOptions
    AttributeRequest   is in sources/request.py

This module imports nothing large, as `--help` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

from olmo_sparsity.config.build import Schema, build
from olmo_sparsity.config.schema import schema_fields


@dataclass(frozen=True)
class Request:
    """One call of a function or command: built and checked once, then handed on unchanged.

    A subclass is a frozen dataclass. It has fields of its own, and groups of options, which are
    fields with an options class as `default_factory`:

        class LossesRequest(Request):
            models: tuple[Any, ...]
            loading: ModelOptions = field(default_factory=ModelOptions)

        LossesRequest.of(models=("runs/mine",), dtype="fp32").loading.dtype  # "fp32"
    """

    @classmethod
    def group_classes(cls) -> dict[str, type]:
        """Return the options class of each group, by the group's name."""
        classes: dict[str, type] = {}
        # Groups are the fields whose default factory is a dataclass; other factories, such as
        # `list`, are not.
        for item in fields(cls):
            factory: Any = item.default_factory
            if isinstance(factory, type) and is_dataclass(factory):
                classes[item.name] = factory
        return classes

    @classmethod
    def accepted_keywords(cls) -> set[str]:
        """Return the keywords that `of` accepts: its own fields, and all options of its groups."""
        classes = cls.group_classes()
        keywords = {item.name for item in fields(cls)} - classes.keys()
        return keywords.union(*map(schema_fields, classes.values()))

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Build a request from flat keywords: sort them into fields and groups, and check them."""
        unknown = options.keys() - cls.accepted_keywords()
        if unknown:
            raise TypeError(f"{cls.__name__} has no option {', '.join(sorted(unknown))}")
        built_groups: dict[str, Any] = {}
        grouped: set[str] = set()
        for name, group_class in cls.group_classes().items():
            built_groups[name] = build_group(group_class, options)
            grouped.update(schema_fields(group_class))
        ungrouped = {name: value for name, value in options.items() if name not in grouped}
        return cls(**ungrouped, **built_groups).checked()

    def checked(self) -> Self:
        """Return the request. Raise ConfigError if options are wrong or exclude each other. A
        subclass adds its checks, and may fill in defaults that depend on several options."""
        return self


def build_group(schema: type[Schema], options: Mapping[str, Any]) -> Schema:
    """Build an options class from keywords. Keywords that it does not have are ignored, as they
    belong to other groups."""
    # mypy does not know that `Schema` is a dataclass.
    names = set[str](schema_fields(schema))
    return build(schema, {name: value for name, value in options.items() if name in names})
