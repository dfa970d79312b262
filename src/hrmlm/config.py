"""Validated settings: unknown keys are errors that name the nearest valid key, and every error is one line."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hrmlm.errors import UserError


def _no_bool(value: Any) -> Any:
    """Refuse true and false, which pydantic takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


Number = Annotated[float, BeforeValidator(_no_bool)]
Positive = Annotated[int, Field(gt=0, lt=1 << 40, strict=True)]  # strict: neither true nor "3" is a number of steps


def nearest(name: str, choices: Iterable[str]) -> str:
    """A hint for an unknown name: the closest of `choices`, or all of them when none is close."""
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(choices)}"


class StrictConfig(BaseModel):
    """Base of every configuration: immutable, no unknown keys, defaults validated too."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())

    @classmethod
    def parse(cls, settings: Mapping[str, Any], where: str) -> Self:
        """Validate `settings`. `where` names their place in messages ("model", a file name).

        Raises: UserError with all mistakes in one line.
        """
        if not isinstance(settings, Mapping):
            raise UserError(f"{where}: expected a mapping of keys to values, got {settings!r}")
        try:
            return cls.model_validate(dict(settings))
        except ValidationError as error:
            raise UserError("; ".join(_explain(cls, item, where) for item in _causes(error.errors()))) from None

    @classmethod
    def hint(cls, key: str) -> str:
        """What to say of an unknown key."""
        return nearest(key, cls.model_fields)

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some values changed."""
        return self.parse({**self.model_dump(), **changes}, type(self).__name__)


def _causes(items: list[Any]) -> list[Any]:
    """Without what only follows: a list is too short for pydantic when all of its items are wrong."""
    wrong = {item["loc"][:-1] for item in items}
    return [item for item in items if item["type"] != "too_short" or item["loc"] not in wrong]


def _explain(cls: type[StrictConfig], item: Any, where: str) -> str:
    """One line for one pydantic error."""
    path = [str(part) for part in item["loc"]]
    name = ".".join([where, *path])
    if item["type"] == "extra_forbidden":
        section = _section_at(cls, path[:-1])
        return f"{name}: unknown key" + ("" if section is None else f", {section.hint(path[-1])}")
    message = item["msg"].removeprefix("Value error, ")
    if not path:  # a check of several fields, which names them itself
        return message if message.startswith(f"{where}.") else f"{where}: {message}"
    message = message[0].lower() + message[1:]
    if item["type"] == "tuple_type":  # YAML has lists only
        message = "input should be a list, such as [1, 2]"
    elif item["type"] == "too_short":
        message = f"list should have at least {item['ctx']['min_length']} item"
    return f"{name}: {message}" if item["type"] == "missing" else f"{name}: {message} (got {_short(item['input'])})"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _section_at(cls: type[StrictConfig], path: list[str]) -> type[StrictConfig] | None:
    """The sub-configuration at `path`; None where there is none."""
    for part in path:
        if part.isdigit():  # a place in a list of sections, whose kind was found one step before
            continue
        field = cls.model_fields.get(part)
        kinds = () if field is None else get_args(field.annotation) or (field.annotation,)  # a section may be optional
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, StrictConfig)]
        if not sections:
            return None
        cls = sections[0]
    return cls
