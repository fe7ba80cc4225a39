"""`anytrain verify-resume`: kill a training at random and prove that it resumes exactly."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import typer

from anytrain.cli.launch import flag, option

SCRIPT = typer.Argument(help="Python file that trains, saves, and resumes when started again.")
ARGS = typer.Argument(None, help="Its own options; {project} in them becomes its folder.")
KILLS = typer.Option(3, "--kills", min=1, help="How often to kill it.")
SEED = typer.Option(0, "--seed", help="Seed that the random moments of the kills are drawn from.")
PROJECT = option("project_dir", "The folder where the script always saves, seen from here.")
WORK = option("work_dir", "Where to run it; by default a temporary folder.")
PROCESSES = option("num_processes", "Start it with `anytrain launch` in so many processes.", "-n")
CPU = flag("cpu", "With --num_processes: use the CPU.")


def verify_resume(  # noqa: PLR0913  a command has one parameter for each option
    script: str = SCRIPT,
    args: list[str] = ARGS,
    kills: int = KILLS,
    seed: int = SEED,
    project_dir: str | None = PROJECT,
    work_dir: str | None = WORK,
    num_processes: int | None = PROCESSES,
    cpu: bool = CPU,
) -> None:
    """Kill your training at random and prove that it resumes exactly.

    The script runs once undisturbed, then again with SIGKILLs at random moments until it has
    finished. Its last checkpoints, and tensor files beside them, are compared to the last bit.
    Exits with 0 where they are the same, with 1 and the first difference where not.

    The script must save with save_state() now and then and once at its end, and call resume()
    or load_state(). Say where: `anytrain verify-resume train.py --output_dir {project}` for a
    script that takes its folder as an option, `anytrain verify-resume --project-dir runs/mine
    train.py` for one with a folder of its own: it then runs in a folder of links to this one.
    Your own checkpoints are not touched.
    """
    from anytrain.insight.proofs.restarts import TrainingScript
    from anytrain.insight.proofs.verify_resume import verify_resume as verify

    own = None if project_dir is None else Path(project_dir)
    job = TrainingScript(script, tuple(args or ()), own, num_processes, cpu)
    job.check()
    if work_dir is not None:
        Path(work_dir).mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="anytrain-verify-", dir=work_dir)).absolute()
    keep = True
    try:
        verdict = verify(job, work, kills=kills, seed=seed, say=_say)
        keep = not verdict.is_equal
    except KeyboardInterrupt:
        keep = False
        raise
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
    typer.echo(str(verdict))
    if keep:
        typer.echo(f"  look: both runs are in {work}")
        raise typer.Exit(1)


# The first word that is no option is the script; everything after it belongs to the script.
verify_resume.context_settings = {  # type: ignore[attr-defined]  # read by main
    "allow_interspersed_args": False,
}


def _say(text: str) -> None:
    typer.echo(f"anytrain: {text}", err=True)
