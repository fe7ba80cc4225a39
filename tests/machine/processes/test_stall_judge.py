from __future__ import annotations

from dataclasses import replace

import pytest

from anytrain.machine.processes.heartbeat import Beat
from anytrain.machine.processes.stalls import Frozen, Lagging, PeerBeat, StallJudge, describe_lag

STALL = 10.0


def beat(rank, step=5, doing="backward", waiting=False, moves=0, line=""):
    return Beat(rank, 100 + rank, "here", step, doing, waiting, moves, 0.0, line)


class Listener:
    """A judge that hears a world tick by tick; ranks in `silent` repeat their last message."""

    def __init__(self, rank=0, size=2, store_rank=None):
        self.judge = StallJudge(rank, size, STALL, store_rank)
        self.rank, self.size, self.ticks = rank, size, 0
        self.heard = {r: PeerBeat(1, beat(r)) for r in range(size) if r != rank}

    def tick(self, seconds=1.0, silent=(), answered=True, moves=None, **own):
        self.ticks += 1
        for rank, last in self.heard.items():
            if rank not in silent and answered:
                step = self.ticks if moves is None else moves
                self.heard[rank] = PeerBeat(last.count + 1, beat(rank, moves=step))
        mine = beat(self.rank, moves=self.ticks if moves is None else moves)
        return self.judge.tick(seconds, dict(self.heard), mine, answered)

    def run(self, ticks, **how):
        return [v for v in (self.tick(**how) for _ in range(ticks)) if v is not None]


def test_ranks_that_beat_are_left_alone():
    assert Listener().run(100) == []


def test_a_silent_rank_is_frozen_after_the_stall_time():
    listener = Listener()
    listener.run(3)
    assert listener.run(9, silent={1}) == []
    verdict = listener.tick(silent={1})
    assert isinstance(verdict, Frozen)
    assert (verdict.rank, verdict.silent_s, verdict.beat.step) == (1, STALL, 5)


def test_only_the_lowest_living_rank_speaks():
    third = Listener(rank=2, size=3)
    third.run(3)
    assert third.run(30, silent={0}) == [], "rank 1 lives and speaks"
    assert any(isinstance(v, Frozen) for v in third.run(30, silent={0, 1}))


def test_a_suspended_job_that_wakes_up_is_not_frozen():
    listener = Listener()
    listener.run(3)
    assert listener.tick(seconds=7200, silent={1}) is None
    assert listener.run(20) == []


def test_a_suspended_job_that_wakes_up_is_not_frozen_however_short_the_stall_time():
    listener = Listener()
    listener.judge.stall_s = 1.5
    listener.run(3)
    assert listener.tick(3600.0, silent={1}) is None


def test_a_rank_that_said_goodbye_may_be_silent():
    listener = Listener()
    listener.run(2)
    listener.heard[1] = PeerBeat(99, beat(1), left=True)
    assert listener.run(50, silent={1}) == []


def test_a_rank_that_was_never_heard_gets_more_time():
    listener = Listener()
    listener.heard = {}
    assert listener.run(30) == []
    assert isinstance(listener.run(20)[0], Frozen)


def test_a_forgiven_rank_is_counted_from_the_start():
    listener = Listener()
    listener.run(3)
    listener.run(9, silent={1})
    listener.judge.forgive(1)
    assert listener.run(9, silent={1}) == []


def test_a_store_that_does_not_answer_means_its_rank_is_frozen():
    listener = Listener(rank=1, size=3, store_rank=0)
    listener.run(3)
    verdicts = listener.run(10, answered=False)
    assert [(v.rank, v.silent_s) for v in verdicts] == [(0, STALL)]


def test_a_launcher_that_is_suspended_ends_nobody():
    listener = Listener(rank=1, size=2, store_rank=None)
    listener.run(3)
    assert listener.run(100, answered=False) == []


def test_other_ranks_listen_to_rank_zero_until_it_falls_silent():
    listener = Listener(rank=3, size=5)
    assert listener.judge.ranks_to_hear() == [0]
    listener.run(2)
    listener.run(6, silent={0})
    assert listener.judge.ranks_to_hear() == [0, 1, 2, 4]
    assert StallJudge(0, 3, STALL).ranks_to_hear() == [1, 2]


def test_ranks_in_different_places_that_do_not_move_are_named_once():
    judge = StallJudge(0, 2, STALL)
    said = []
    for count in range(30):
        other = beat(1, doing="barrier 'download'", waiting=True)
        verdict = judge.tick(1.0, {1: PeerBeat(count, other)}, beat(0, step=0, doing=""), True)
        said += [verdict] if verdict else []
    assert len(said) == 1
    assert isinstance(said[0], Lagging)


def test_ranks_that_move_are_not_called_slow():
    assert Listener().run(40, moves=None) == []
    assert Listener().run(40, moves=7) == [], "standing still at one place is nobody's fault"


@pytest.mark.parametrize(
    ("beats", "sentence"),
    [
        (
            [beat(0, step=0, doing=""), beat(1, doing="barrier 'x'", waiting=True)],
            "nothing has moved for 60 s: rank 0 is before the first step; "
            "rank 1 waits at step 5 (barrier 'x').",
        ),
        (
            [beat(0, step=5), beat(1, step=4, doing="loading"), beat(2, step=5)],
            "nothing has moved for 60 s: rank 1 is at step 4 (loading); "
            "ranks 0, 2 are at step 5 (backward).",
        ),
        (
            [beat(0, line="a.py line 3"), beat(1, line="a.py line 9")],
            "nothing has moved for 60 s: rank 0 is at step 5 (backward), in a.py line 3; "
            "rank 1 is at step 5 (backward), in a.py line 9.",
        ),
        ([beat(0), beat(1)], None),
    ],
)
def test_the_sentence_says_who_is_where(beats, sentence):
    assert describe_lag(beats, 60.0) == sentence


def test_the_rank_that_the_others_wait_for_is_shown_with_its_stack():
    listener = Listener()
    late = replace(beat(1, step=4), stack="    train.py line 3, in f")
    own = beat(0, waiting=True)
    told = [listener.judge.tick(1.0, {1: PeerBeat(n, late)}, own, True) for n in range(2, 30)]
    [verdict] = [each for each in told if each is not None]
    assert verdict.stack == " Rank 1's Python stack:\n    train.py line 3, in f"
