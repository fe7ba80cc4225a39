"""Make sentence pairs that mean the same, or only look as if they did, and turn them into tensors.

A small grammar of ours: a scene (who did what to whom, how many, when, and whether it happened
at all) is written out twice. Half of the pairs tell one scene in two ways: other synonyms,
passive for active, digits for words. The other half differ in one thing: the roles are swapped,
a number, a person, a deed or a time is another one, or the deed did not happen. Both halves
share about as many words, so counting common words does not tell them apart.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils.data import Dataset

# Each row is one meaning; the words in it are interchangeable.
_PEOPLE = (
    ("doctor", "physician"),
    ("lawyer", "attorney"),
    ("kid", "youngster"),
    ("robber", "burglar"),
    ("writer", "author"),
    ("sailor", "mariner"),
    ("cook", "chef"),
    ("teacher", "tutor"),
)
_DEEDS = (
    (("call", "called"), ("phone", "phoned")),
    (("help", "helped"), ("aid", "aided")),
    (("hire", "hired"), ("employ", "employed")),
    (("chase", "chased"), ("pursue", "pursued")),
    (("notice", "noticed"), ("spot", "spotted")),
    (("praise", "praised"), ("laud", "lauded")),
)
_COUNTS = (("one", "1"), ("two", "2"), ("three", "3"), ("four", "4"))
_TIMES = (("at dawn", "at sunrise"), ("at dusk", "at sunset"), ("at noon", "at midday"))
_DENIALS = ("not", "never")

# Word counts see every difference but swapped roles: those are common, so that order matters.
_DIFFERENCES = {"roles": 4, "denial": 2, "count": 1, "person": 1, "deed": 1, "time": 1}


@dataclass(frozen=True, slots=True)
class Scene:
    """Who did what to whom; each number is a row of a table above."""

    agent: tuple[int, int]
    deed: int
    patient: tuple[int, int]
    time: int
    happened: bool


@dataclass(frozen=True, slots=True)
class Pair:
    """Two sentences, whether they mean the same, and what sets them apart if not."""

    first: str
    second: str
    same: bool
    difference: str


def make_pairs(count: int, seed: int) -> list[Pair]:
    """Return `count` pairs, every second one a paraphrase; a seed always gives the same pairs.

    >>> [pair.same for pair in make_pairs(4, seed=0)]
    [True, False, True, False]
    """
    rng = random.Random(seed)
    return [_pair(rng, same=index % 2 == 0) for index in range(count)]


def vocabulary() -> tuple[str, ...]:
    """Return every word that a sentence can hold, in a fixed order."""
    people = [name + ending for row in _PEOPLE for name in row for ending in ("", "s")]
    deeds = [form for row in _DEEDS for deed in row for form in deed]
    others = [word for table in (_COUNTS, _TIMES) for row in table for word in row]
    glue = [*_DENIALS, "did", "was", "were", "by"]
    return tuple(sorted({word for text in people + deeds + others + glue for word in text.split()}))


def write(scene: Scene, rng: random.Random) -> str:
    """Return one of the sentences that tell the scene."""
    agent, patient = _someone(scene.agent, rng), _someone(scene.patient, rng)
    base, past = rng.choice(_DEEDS[scene.deed])
    time = rng.choice(_TIMES[scene.time])
    if rng.random() < 0.5:
        was = "was" if scene.patient[1] == 0 else "were"
        deed = f"{was} {past}" if scene.happened else f"{was} {rng.choice(_DENIALS)} {past}"
        clause = f"{patient} {deed} by {agent}"
    else:
        denied = f"did not {base}" if rng.random() < 0.5 else f"never {past}"
        clause = f"{agent} {past if scene.happened else denied} {patient}"
    return f"{time} {clause}" if rng.random() < 0.5 else f"{clause} {time}"


def _someone(who: tuple[int, int], rng: random.Random) -> str:
    person, count = who
    name = rng.choice(_PEOPLE[person])
    return f"{rng.choice(_COUNTS[count])} {name if count == 0 else name + 's'}"


def _pair(rng: random.Random, same: bool) -> Pair:
    scene = _scene(rng)
    if same:
        return Pair(write(scene, rng), write(scene, rng), same, "none")
    kinds, weights = zip(*_DIFFERENCES.items(), strict=True)
    difference = rng.choices(kinds, weights)[0]
    return Pair(write(scene, rng), write(_nearly(scene, difference, rng), rng), same, difference)


def _scene(rng: random.Random) -> Scene:
    one, other = rng.sample(range(len(_PEOPLE)), 2)
    return Scene(
        agent=(one, rng.randrange(len(_COUNTS))),
        deed=rng.randrange(len(_DEEDS)),
        patient=(other, rng.randrange(len(_COUNTS))),
        time=rng.randrange(len(_TIMES)),
        happened=rng.random() < 0.5,
    )


def _nearly(scene: Scene, difference: str, rng: random.Random) -> Scene:
    person, count = scene.patient
    if difference == "roles":
        return replace(scene, agent=scene.patient, patient=scene.agent)
    if difference == "denial":
        return replace(scene, happened=not scene.happened)
    if difference == "count":
        return replace(scene, patient=(person, _another(count, len(_COUNTS), rng)))
    if difference == "person":
        stranger = _another(person, len(_PEOPLE), rng, but=scene.agent[0])
        return replace(scene, patient=(stranger, count))
    if difference == "deed":
        return replace(scene, deed=_another(scene.deed, len(_DEEDS), rng))
    return replace(scene, time=_another(scene.time, len(_TIMES), rng))


def _another(row: int, rows: int, rng: random.Random, but: int | None = None) -> int:
    return rng.choice([other for other in range(rows) if other not in (row, but)])


LONGEST = 10  # words in the longest sentence of the grammar
PADDING, START = 0, 1
NUM_PLACES = 1 + LONGEST
NUM_TOKENS = 2 + len(vocabulary())


class PairSet(Dataset[dict[str, torch.Tensor]]):
    """Sentence pairs as rows of word numbers, each after a start mark, padded to one length."""

    class_names = ("different", "same")

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = pairs
        number = {word: index for index, word in enumerate(vocabulary(), start=START + 1)}
        self.first = _rows([pair.first for pair in pairs], number)
        self.second = _rows([pair.second for pair in pairs], number)
        self.labels = torch.tensor([int(pair.same) for pair in pairs])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "first": self.first[index],
            "second": self.second[index],
            "labels": self.labels[index],
        }

    def in_words(self, index: int) -> dict[str, str]:
        """Return the two sentences of a pair."""
        pair = self.pairs[index]
        return {"sentence1": pair.first, "sentence2": pair.second}


def _rows(sentences: Sequence[str], number: dict[str, int]) -> torch.Tensor:
    rows = torch.full((len(sentences), NUM_PLACES), PADDING)
    for row, sentence in zip(rows, sentences, strict=True):
        words = [START, *(number[word] for word in sentence.split())]
        row[: len(words)] = torch.tensor(words)
    return rows
