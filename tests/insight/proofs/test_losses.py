from __future__ import annotations

from pathlib import Path

from anytrain.insight.proofs.verify_resume import first_divergence, read_losses


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(lines) + "\n")
    return path.parent


def test_the_first_step_at_which_a_loss_differs_is_found(tmp_path: Path) -> None:
    one = write(
        tmp_path / "one" / "log" / "metrics.jsonl",
        '{"_step": 1, "_timestamp": 5.0, "loss": 0.5, "lr": 1.0}',
        '{"_step": 2, "_timestamp": 6.0, "loss": 0.25, "lr": 0.9}',
        '{"_step": 3, "_timestamp": 7.0, "loss": 0.125, "lr": 0.8}',
    )
    other = write(
        tmp_path / "other" / "log" / "metrics.jsonl",
        '{"_step": 1, "_timestamp": 9.0, "loss": 0.5, "lr": 2.0}',
        '{"_step": 2, "_timestamp": 9.0, "lo',  # torn by a kill
        '{"_step": 2, "_timestamp": 9.0, "loss": 0.25}',
        '{"_step": 2, "_timestamp": 9.5, "loss": 0.26}',  # redone after a resume
        '{"_step": 3, "_timestamp": 9.7, "loss": 0.2}',
    )
    curves = read_losses(one.parent), read_losses(other.parent)
    assert first_divergence(curves[0], curves[0]) is None
    assert str(first_divergence(*curves)) == "loss parts at step 2: 0.25 and 0.26"


def test_a_table_is_read_too(tmp_path: Path) -> None:
    one = write(tmp_path / "a" / "metrics.csv", "_step,train_loss", "1,0.5", "2,0.25")
    other = write(tmp_path / "b" / "metrics.csv", "_step,train_loss", "1,0.5", "2,nan")
    curves = read_losses(one), read_losses(other)
    assert str(first_divergence(*curves)) == "train_loss parts at step 2: 0.25 and nan"
    assert first_divergence(curves[1], curves[1]) is None
