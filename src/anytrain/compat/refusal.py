"""What a name becomes that another library has and anytrain does not.

A script that only imports such a name, or asks `isinstance` of it, runs. Using it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from anytrain.core.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Family:
    """Names that are refused for one reason, by the module that their library keeps them in."""

    why: str
    fix: str
    names: dict[str, str]


class Refusal(type):
    """The type of a name that is there and cannot be used."""

    family: Family

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: this is not done here."""
        raise refusal(cls.__name__, cls.family)

    def __getitem__(cls, key: Any) -> NoReturn:
        """Refuse: some of these names are tables."""
        raise refusal(cls.__name__, cls.family)


def refusal(name: str, family: Family) -> Unsupported:
    """Return the error for a name of a family."""
    return Unsupported(f"anytrain does not support {name}.", why=family.why, fix=family.fix)


def placeholder(name: str, room: str, family: Family) -> Refusal:
    """Return the class without instances that stands for a refused name."""
    body = {"__module__": room, "__doc__": f"Refused: {family.why}", "family": family}
    return Refusal(name, (), body)
