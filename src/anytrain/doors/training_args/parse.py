"""Fill dataclasses from a command line, a dict, JSON or YAML: HF's `HfArgumentParser`, our own.

It needs neither torch nor transformers, and serves any dataclass.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import (
    ArgumentDefaultsHelpFormatter,
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
)
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, field as make_field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from anytrain.core import documents
from anytrain.core.errors import AnytrainError, BadInput, BadType
from anytrain.core.nearest import nearest
from anytrain.doors.training_args import legacy
from anytrain.doors.training_args.arguments import TrainingArguments
from anytrain.doors.training_args.convert import (
    Unreadable,
    converted,
    to_bool,
    to_type,
    union_members,
)

_PASSED_ON = ("help", "nargs", "const", "metavar")
_NOT_GIVEN = object()
_FILES = (".json", ".yaml", ".yml")


def HfArg(  # noqa: N802 -- HF's name
    *,
    aliases: str | list[str] | None = None,
    help: str | None = None,
    default: Any = MISSING,
    default_factory: Any = MISSING,
    metadata: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Return a dataclass field with its help and further names for the command line."""
    merged = dict(metadata or {})
    if aliases is not None:
        merged["aliases"] = aliases
    if help is not None:
        merged["help"] = help
    return make_field(metadata=merged, default=default, default_factory=default_factory, **kwargs)


class HfArgumentParser(ArgumentParser):
    """A parser whose arguments are the fields of dataclasses.

    On the command line a file with arguments may come first, as in
    `train.py run.yaml --learning_rate 1e-3`: what follows it wins over what it holds.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Job:
    ...     rate: float = 0.1
    ...     quick: bool = False
    >>> HfArgumentParser(Job).parse_args_into_dataclasses(["--rate", "1e-3", "--quick"])[0]
    Job(rate=0.001, quick=True)
    """

    dataclass_types: list[Any]

    def __init__(self, dataclass_types: Any = None, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", ArgumentDefaultsHelpFormatter)
        super().__init__(**kwargs)
        given = [] if dataclass_types is None else dataclass_types
        self.dataclass_types = [given] if is_dataclass(given) else list(given)
        for kind in self.dataclass_types:
            self._add_dataclass(kind)

    def _add_dataclass(self, kind: Any) -> None:
        group = getattr(kind, "_argument_group_name", None)
        target: Any = self.add_argument_group(group) if group else self
        hints = _hints(kind)
        for field in fields(kind):
            if field.init:
                _add(target, field, hints[field.name])

    def error(self, message: str) -> NoReturn:
        """End the program with the message; the usage of a hundred options would bury it."""
        fix = "--help lists every argument."
        self.exit(2, f"{self.prog}: error: {self._in_words(message)}\n  fix: {fix}\n")

    def _in_words(self, message: str) -> str:
        """Return argparse's message; of an option cut short that may be several, with a guess.

        Args:
            message: What argparse says.
        """
        found = re.match(r"ambiguous option: --(\S+) could match", message)
        near = nearest(found[1].split("=")[0], self._names()) if found else None
        return (
            f"unknown argument --{found[1]}; did you mean --{near}?" if found and near else message
        )

    def _what_there_is(self, wrong: Iterable[str]) -> str:
        if all(word.startswith("-") for word in wrong):
            return "leave it out; --help lists every argument."
        return f"--help lists every argument; a file of them ends in {' or '.join(_FILES)}."

    def _names(self) -> list[str]:
        """Return the names that options go by today."""
        return [a.dest for a in self._actions if a.option_strings and a.dest not in legacy.RULES]

    def parse_args_into_dataclasses(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | os.PathLike[str] | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[Any, ...]:
        """Return the dataclasses filled from the command line, in their order.

        Arguments that were added to the parser by hand follow as a namespace. What nobody knows
        is refused with the nearest known name, or returned last where `return_remaining_strings`
        asks for it.

        The command line wins over files. A first word that ends in .json, .yaml or .yml is a file
        of names with their values (not where the parser has positional arguments, nor with
        `return_remaining_strings`: such a word may be the caller's). It wins over files of words
        as they would be typed: `args_filename`, one named after the script, or those that
        `args_file_flag` names.
        """
        given = list(sys.argv[1:] if args is None else args)
        files = _files_of_arguments(look_for_args_file, args_filename)
        if args_file_flag is not None:
            more, given = _files_by_flag(args_file_flag, given)
            files += more
        words = [word for file in files if file.exists() for word in file.read_text().split()]
        below: dict[str, Any] = {}
        if not return_remaining_strings and self._begins_with_a_file(given):
            below, unknown = self._said(words)
            below, words = {**below, **self._in_file(given.pop(0))}, unknown
        words += given
        with self._optional(below):
            namespace, remaining = self.parse_known_args(words, Namespace(**below))
            named, _ = self._said(words)
        if remaining and not return_remaining_strings:
            raise self._unknown(remaining, "argument")
        filled = self._filled(vars(namespace), {*below, *named})
        return (*filled, remaining) if return_remaining_strings else tuple(filled)

    def _filled(self, values: dict[str, Any], given: set[str]) -> list[Any]:
        """Return the dataclasses, and a namespace of what belongs to none of them."""
        filled: list[Any] = []
        for kind in self.dataclass_types:
            names = [f.name for f in fields(kind) if f.init]
            filled.append(kind(**{name: values.pop(name) for name in names}))
            if isinstance(filled[-1], TrainingArguments):
                filled[-1].forget_untold(given)
        return [*filled, Namespace(**values)] if values else filled

    def _said(self, words: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Return what these words alone say, by name, and the words that say nothing known.

        A parser leaves alone what it finds filled in.
        """
        marks = {
            f.name: _NOT_GIVEN for kind in self.dataclass_types for f in fields(kind) if f.init
        }
        with self._optional(action.dest for action in self._actions):
            found, unknown = self.parse_known_args(words, Namespace(**marks))
        silent = {name: marks.get(name, self.get_default(name)) for name in vars(found)}
        return {n: v for n, v in vars(found).items() if v is not silent[n]}, unknown

    @contextmanager
    def _optional(self, names: Iterable[str]) -> Iterator[None]:
        """Ask for none of these on the command line while the block runs."""
        known = {*names}
        met = [each for each in self._actions if each.required and each.dest in known]
        for each in met:
            each.required = False
        try:
            yield
        finally:
            for each in met:
                each.required = True

    def _begins_with_a_file(self, words: list[str]) -> bool:
        return (
            bool(words)
            and words[0].endswith(_FILES)
            and all(action.option_strings for action in self._actions)
        )

    def _in_file(self, name: str) -> dict[str, Any]:
        """Return the values that a file holds, by argument."""
        if not Path(name).is_file():
            raise BadInput(
                f"Cannot read the arguments in {name!r}.",
                why="there is no such file.",
                fix="give the path of a JSON or YAML file, or the arguments themselves.",
            )
        load = documents.from_json if name.endswith(".json") else documents.from_yaml
        found = _read(name, load)
        known = {action.dest for action in self._actions}
        unknown = sorted(str(key) for key in found if key not in known)
        if unknown:
            raise self._unknown(unknown, "key")
        hints = {n: h for kind in self.dataclass_types for n, h in _hints(kind).items()}
        return {n: _from_text(n, v, hints[n]) if n in hints else v for n, v in found.items()}

    def parse_dict(self, args: dict[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Return the dataclasses filled from a dict."""
        known = {f.name for kind in self.dataclass_types for f in fields(kind) if f.init}
        unused = sorted(set(args) - known)
        if unused and not allow_extra_keys:
            raise self._unknown(unused, "key")
        filled = []
        for kind in self.dataclass_types:
            hints = _hints(kind)
            names = [f.name for f in fields(kind) if f.init and f.name in args]
            filled.append(kind(**{n: _from_text(n, args[n], hints[n]) for n in names}))
        return tuple(filled)

    def parse_json_file(
        self, json_file: str | os.PathLike[str], allow_extra_keys: bool = False
    ) -> tuple[Any, ...]:
        """Return the dataclasses filled from a JSON file."""
        return self.parse_dict(_read(json_file, documents.from_json), allow_extra_keys)

    def parse_yaml_file(
        self, yaml_file: str | os.PathLike[str], allow_extra_keys: bool = False
    ) -> tuple[Any, ...]:
        """Return the dataclasses filled from a YAML file."""
        return self.parse_dict(_read(yaml_file, documents.from_yaml), allow_extra_keys)

    def _unknown(self, words: Sequence[str], what: str) -> BadInput:
        flags = [word for word in words if word.startswith("--")] or list(words)
        known, sign = self._names(), "--" if what == "argument" else ""
        near = {}
        for flag in flags:
            found = nearest(flag.lstrip("-").split("=")[0], known)
            if flag.endswith(_FILES):
                near[flag] = "a file of arguments comes first, before what is to win over it."
            elif found is not None:
                near[flag] = f"did you mean {sign}{found}?"
        guesses = "; ".join(f"{flag}: {guess}" for flag, guess in near.items())
        return BadInput(
            f"Unknown {what}{'s' * (len(flags) > 1)} {', '.join(map(str, flags))}.",
            why=f"there is no {what} of that name.",
            fix=f"{guesses}" if guesses else self._what_there_is(flags),
        )


def _hints(kind: Any) -> dict[str, Any]:
    try:
        return get_type_hints(kind)
    except NameError as error:
        raise BadType(
            f"Cannot read the types of {kind.__name__}.",
            why=f"{error}: its annotations are text, and name what is not known in its module.",
            fix="define the dataclass at the top of a module, or drop "
            "`from __future__ import annotations` there.",
        ) from None


def _add(parser: Any, field: Field[Any], hint: Any) -> None:
    """Give the parser the flags of one field."""
    aliases = field.metadata.get("aliases", [])
    flags = [f"--{field.name}", *([aliases] if isinstance(aliases, str) else aliases)]
    if "_" in field.name:
        flags.insert(1, f"--{field.name.replace('_', '-')}")
    more = {name: field.metadata[name] for name in _PASSED_ON if name in field.metadata}
    settings = {**_shape(field, hint), **more, "type": _reader(field, hint)}
    parser.add_argument(*flags, **settings)
    if field.default is True and union_members(hint) == (bool,):
        no = [f"--no_{field.name}", f"--no-{field.name.replace('_', '-')}"]
        note = more.get("help")
        parser.add_argument(*no, action="store_false", dest=field.name, help=note, default=True)


def _shape(field: Field[Any], hint: Any) -> dict[str, Any]:
    """Return how many words a field takes, and what it is without any."""
    kinds = union_members(hint)
    shape: dict[str, Any] = {}
    if kinds == (bool,):
        shape |= {"nargs": "?", "const": True}
    elif any(_is_list(kind) for kind in kinds):
        shape["nargs"] = "+"
    if field.default is not MISSING:
        shape["default"] = field.default
    elif field.default_factory is not MISSING:
        shape["default"] = field.default_factory()
    elif hint is bool:
        shape["default"] = False
    else:
        shape["required"] = True
    return shape


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (list, tuple, set) or kind in (list, tuple, set)


def _reader(field: Field[Any], hint: Any) -> Callable[[str], Any]:
    """Return what turns one word of the command line into a field's value."""
    words = field.metadata.get("choices")
    kinds = union_members(hint)
    lists = [kind for kind in kinds if _is_list(kind)]
    if lists:
        kinds = tuple(get_args(lists[0])[:1]) or (str,)

    def read(text: str) -> Any:
        if text == field.default:  # argparse reads defaults that are text, too
            return text
        value = _read_word(text, kinds)
        if words is not None and value not in words:
            raise ArgumentTypeError(f"{text!r}: expected {_not_among(text, words)}")
        return value

    return read


def _read_word(text: str, kinds: tuple[Any, ...]) -> Any:
    """Return the word in the first type that holds it; text, which holds all, comes last."""
    wanted = []
    for kind in sorted(kinds, key=lambda kind: kind is str):
        try:
            return _read_as(text, kind)
        except (Unreadable, ValueError, TypeError) as problem:
            wanted.append(problem.what if isinstance(problem, AnytrainError) else str(problem))
            if _is_words(kind):  # an enum or text is an enum: its values are all there are
                break
    raise ArgumentTypeError(f"{text!r}: expected {' or '.join(wanted)}")


def _read_as(text: str, kind: Any) -> Any:
    if kind is bool:
        return to_bool(text)
    if kind is Any:
        return text
    if _is_words(kind):
        return _known_word(text, kind)
    if get_origin(kind) is not None or kind in (int, float, str, dict):
        return to_type(text, kind)
    return kind(text)


def _is_words(kind: Any) -> bool:
    return get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, Enum))


def _known_word(text: str, kind: Any) -> Any:
    """Return the value, of a Literal or an enum, that the text spells; HF gives values too."""
    values = get_args(kind) if get_origin(kind) is Literal else [each.value for each in kind]
    for value in values:
        if str(value) == text:
            return value
    # An enum may know words of HF's that are refused by name.
    accepted = kind.accepted() if hasattr(kind, "accepted") else values
    raise Unreadable(_not_among(text, accepted))


def _not_among(text: str, values: Iterable[Any]) -> str:
    words = [str(value) for value in values]
    near = nearest(text, words)
    guess = f"; did you mean {near!r}?" if near else ""
    return f"one of {', '.join(words)}{guess}"


def _from_text(name: str, value: Any, hint: Any) -> Any:
    """Return a file's value: text becomes the number or truth that its field declares."""
    if isinstance(value, str) and {*union_members(hint)} <= {int, float, bool}:
        return converted(name, value, hint)
    return value


def _files_of_arguments(look: bool, name: str | os.PathLike[str] | None) -> list[Path]:
    if name is not None:
        return [Path(name)]
    return [Path(sys.argv[0]).with_suffix(".args")] if look and sys.argv and sys.argv[0] else []


def _files_by_flag(flag: str, given: list[str]) -> tuple[list[Path], list[str]]:
    finder = ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(flag, dest="files", action="append", default=[])
    found, rest = finder.parse_known_args(given)
    return [Path(name) for name in found.files], rest


def _read(name: str | os.PathLike[str], load: Callable[[str], Any]) -> dict[str, Any]:
    """Return the mapping that a file holds."""
    try:
        found = load(Path(name).read_text(encoding="utf-8"))
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 -- each format has its own error
        raise BadInput(
            f"Cannot read {os.fspath(name)}.", why=f"{error}", fix="correct the file."
        ) from None
    if not isinstance(found, dict):
        raise BadInput(
            f"Cannot read {os.fspath(name)}.",
            why=f"it holds a {type(found).__name__}, not names with their values.",
            fix="write one `name: value` for each argument.",
        )
    return found
