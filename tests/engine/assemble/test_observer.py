from __future__ import annotations

from anytrain.core.observer import NoObserver
from anytrain.core.plan import Wishes
from anytrain.engine.assemble import session as sessions


class Looks(NoObserver):
    is_watching = True


def test_nobody_looks_on_at_a_real_run() -> None:
    found = sessions.session(Wishes()).observer
    assert not found.is_watching
    assert not found.begin()
    assert not found.skips_save()


def test_a_session_keeps_the_observer_that_it_was_made_with() -> None:
    own = Looks()
    with sessions.observed_by(own):
        inside = sessions.session(Wishes())
    assert inside.observer is own
    assert not sessions.session(Wishes()).observer.is_watching
