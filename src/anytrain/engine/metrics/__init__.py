"""What an evaluation keeps: the rows that count, their losses, and scores that grow by batches.

`Collected` holds predictions for whoever wants them all; a `Metric` needs none of them later.
"""

from __future__ import annotations

from anytrain.engine.metrics.collected import Collected as Collected
from anytrain.engine.metrics.rows import (
    LossMean as LossMean,
    gather_rows as gather_rows,
    num_own_rows as num_own_rows,
    own_rows as own_rows,
)
from anytrain.engine.metrics.scores import (
    F1 as F1,
    Accuracy as Accuracy,
    Matthews as Matthews,
    MeanSquaredError as MeanSquaredError,
    Metric as Metric,
    Pearson as Pearson,
    Spearman as Spearman,
    Together as Together,
)
