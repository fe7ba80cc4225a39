"""Processes that are started once, and live one life after the other, in worlds of any size.

As a script: `crew.py SIZE` reads lives from its standard input, a line each, and answers likewise.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from launching import child_environment, free_port


class Crew:
    """So many processes, waiting for a life; they begin as copies of one that has imported all."""

    def __init__(self, size: int) -> None:
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(size)],
            env=child_environment({"PYTHONPATH": path}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def live(self, size: int, kind: str, **given: Any) -> list[Any]:
        """Let so many of them live a life together; return what each has to tell."""
        assert self._server.stdin is not None and self._server.stdout is not None
        life = {"size": size, "port": free_port(), "kind": kind, "given": given}
        self._server.stdin.write(json.dumps(life) + "\n")
        self._server.stdin.flush()
        told = json.loads(self._server.stdout.readline())
        errors = [each["error"] for each in told if "error" in each]
        assert not errors, "\n".join(errors)
        return [each["told"] for each in told]

    def close(self) -> None:
        """Let them go."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(240)


def trainer(
    folder: str, samples: int, batch_size: int, accumulation: int, stop: int | None, **given: Any
) -> dict[str, Any]:
    """Train one life; tell which samples came at which step, and the rates."""
    import torch

    from anytrain import Trainer, TrainerCallback, TrainingArguments

    rates: list[float] = []
    seen: list[list[int]] = []

    class Numbered(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, number: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            seen.append(number.tolist())
            return {"loss": (self.weight * number.float()).mean()}

    class Watches(TrainerCallback):
        steps = 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            rates.append(known["lr_scheduler"].get_last_lr()[0])

        def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            self.steps += 1
            if self.steps == stop:
                control.should_save = control.should_training_stop = True

    begun = any(Path(folder).glob("checkpoint-*"))
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        learning_rate=1e-3,
        **given,
    )
    data = [{"number": n, "labels": n} for n in range(samples)]
    run = Trainer(Numbered(), args, train_dataset=data, callbacks=[Watches()])
    run.train(resume_from_checkpoint=begun or None)
    state = run.state
    run.end()
    length = {"step": state.global_step, "max_steps": state.max_steps, "epoch": state.epoch}
    return {"seen": seen, "rates": rates, **length}


def own_loop(
    folder: str, samples: int, batch_size: int, accumulation: int, stop: int | None, alone: bool
) -> dict[str, Any]:
    """Walk an epoch in a loop of one's own; tell by how much each sample has moved its weight."""
    import torch
    from torch.utils.data import DataLoader

    from anytrain import Accelerator, ProjectConfiguration, set_seed

    set_seed(3)
    naming = ProjectConfiguration(automatic_checkpoint_naming=True)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulation,
        project_dir=folder,
        project_config=naming,
    )
    model = torch.nn.Embedding(samples, 1)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(torch.arange(samples), batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()
    for number, batch in enumerate(loader, start=1):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
        if number == stop:
            if not alone or accelerator.is_main_process:
                accelerator.save_state()
            accelerator.wait_for_everyone()
            break
    moved = accelerator.unwrap_model(model).weight.detach().flatten().tolist()
    updates = accelerator._run.session.cursor.updates
    accelerator.end_training()
    return {"moved": moved, "updates": updates}


def _rank(rank: int, lives: Any) -> None:
    """Live what comes through the pipe, as this rank."""
    import torch

    while (life := lives.recv()) is not None:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": life["size"]}
        place |= {"LOCAL_WORLD_SIZE": life["size"], "MASTER_PORT": life["port"]}
        for name, value in {**place, "MASTER_ADDR": "127.0.0.1"}.items():
            os.environ.pop(name, None)
            if life["size"] > 1:
                os.environ[name] = str(value)
        own = {"trainer": trainer, "own_loop": own_loop}[life["kind"]]
        try:
            lives.send({"told": own(**life["given"])})
        except Exception:
            lives.send({"error": traceback.format_exc()})
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _serve(size: int) -> None:
    import anytrain

    assert anytrain.Trainer and anytrain.Accelerator  # they are imported when they are asked for
    answers, sys.stdout = sys.stdout, sys.stderr
    fork, pipes = multiprocessing.get_context("fork"), []
    for rank in range(size):
        here, there = fork.Pipe()
        fork.Process(target=_rank, args=(rank, there), daemon=True).start()
        pipes.append(here)
    for line in sys.stdin:
        life = json.loads(line)
        for pipe in pipes[: life["size"]]:
            pipe.send(life)
        print(json.dumps([pipe.recv() for pipe in pipes[: life["size"]]]), file=answers, flush=True)
    for pipe in pipes:
        pipe.send(None)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
