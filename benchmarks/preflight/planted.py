"""Score preflight on planted defects: 30 small trainings with one each, and 30 without any.

A defect counts as found where its question names its line, on the target that it is a defect of.
A clean training is asked for mps, cuda and tpu; any finding of severity "error" is a false alarm.

    python benchmarks/preflight/planted.py
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "models"))

import clean  # noqa: E402, F401  counts its trainings
import defects  # noqa: E402, F401
from cases import CLEAN, DEFECTS, Case  # noqa: E402

from anytrain.insight.preflight import checks  # noqa: E402
from anytrain.insight.preflight.findings import Finding  # noqa: E402
from anytrain.insight.preflight.targets import parse_target  # noqa: E402
from anytrain.insight.preflight.trace_process import trace_call  # noqa: E402


@dataclass(frozen=True)
class Seen:
    """What was found in one training on one target."""

    case: str
    target: str
    failure: str
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What would end the run or spoil it."""
        return tuple(each for each in self.findings if each.severity == "error")


def look(case: Case, word: str) -> Seen:
    """Trace a training on a target, and ask all questions."""
    began = time.perf_counter()
    target = parse_target(word)
    trace = trace_call(target, case.train)
    trace = replace(trace, job=replace(trace.job, world_size=case.num_processes))
    found = tuple(checks.ask_all(trace, target))
    return Seen(case.name, word, trace.failure, found, time.perf_counter() - began)


def is_found(case: Case, seen: Seen) -> bool:
    """Whether the defect was named at its line."""
    return any(
        each.kind == case.kind
        and each.severity != "note"
        and (
            not case.line or (each.place is not None and _at(each.place) == (case.file, case.line))
        )
        for each in seen.findings
    )


def _at(place: object) -> tuple[str, int]:
    return str(getattr(place, "file", "")), int(getattr(place, "line", 0))


def main() -> None:
    """Print every defect and whether it was found, and every false alarm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    began = time.perf_counter()
    missed, alarms, failed = [], [], []
    for case in DEFECTS:
        seen = look(case, case.target)
        ok = is_found(case, seen)
        print(f"{'found ' if ok else 'MISSED'}  {case.target:10}{case.kind:12}{case.name}")
        if not ok:
            missed.append(case.name)
            print(f"        {seen.failure or [(f.kind, str(f.place)) for f in seen.findings]}")
    for case in CLEAN:
        for word in case.targets:
            seen = look(case, word)
            if seen.failure:
                failed.append(case.name)
                print(f"FAILED  {word:10}{case.name}: {seen.failure}")
            for each in seen.errors:
                alarms.append(case.name)
                print(f"ALARM   {word:10}{each.kind:12}{case.name}: {each.what}")
    told = {
        "defects": len(DEFECTS),
        "found": len(DEFECTS) - len(missed),
        "clean": len(CLEAN),
        "false_alarms": len(alarms),
        "failed": len(failed),
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(told)
    if args.json:
        Path(args.json).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    sys.exit(bool(missed or alarms or failed))


if __name__ == "__main__":
    main()
