"""What to write instead of an operation that mps has no kernel for."""

from __future__ import annotations

_INSTEAD = {
    "_adaptive_avg_pool3d": "avg_pool3d with a fixed window, or mean over the three dimensions "
    "where the output is one",
    "adaptive_max_pool3d": "max_pool3d with a fixed window",
    "channel_shuffle": "x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)",
    "_ctc_loss": "the loss on the CPU: ctc_loss(log_probs.cpu(), targets.cpu(), ...)",
    "fractional_max_pool2d": "max_pool2d or adaptive_max_pool2d",
    "fractional_max_pool3d": "max_pool3d",
    "frexp": "exponent = x.abs().log2().floor() + 1; mantissa = x * 2 ** -exponent",
    "geqrf": "linalg.qr",
    "ormqr": "linalg.qr, and a product with its Q",
    "_linalg_eigh": "the decomposition on the CPU: torch.linalg.eigh(x.cpu())",
    "_linalg_eigvals": "the eigenvalues on the CPU: torch.linalg.eigvals(x.cpu())",
    "linalg_eig": "the decomposition on the CPU: torch.linalg.eig(x.cpu())",
    "_linalg_svd": "the decomposition on the CPU: torch.linalg.svd(x.cpu())",
    "linalg_svd": "linalg.qr where it is enough, or decompose every so many steps",
    "linalg_lstsq": "the normal equations: torch.linalg.solve(a.mT @ a, a.mT @ b)",
    "linalg_ldl_factor_ex": "linalg.lu_factor",
    "logspace": "base ** torch.linspace(start, end, steps)",
    "mode": "one_hot counts and argmax, for few distinct values",
    "multi_margin_loss": "(margin - x.gather(1, y[:, None]) + x).clamp(min=0), without y's column",
    "multilabel_margin_loss_forward": "binary_cross_entropy_with_logits, if the task allows it",
    "_pdist_forward": "torch.cdist(x, x)[torch.triu_indices(n, n, 1).unbind()]",
    "put": "index_put on the flattened tensor",
    "rrelu_with_noise": "leaky_relu",
    "segment_reduce": "scatter_reduce with an index per element",
    "embedding_renorm_": "scaling the weight after each update, outside of forward (max_norm=None)",
}


def advice(name: str) -> str:
    """Return what to write instead, as a sentence.

    >>> advice("geqrf.a")
    'Use linalg.qr.'
    """
    stem = name.partition(".")[0]
    known = _INSTEAD.get(stem) or _INSTEAD.get(stem.removesuffix("_"))
    if known:
        return f"Use {known}."
    if "backward" in stem:
        return "Use another operation in forward, or run that part of the model on the CPU."
    return "Use another operation, or run it on the CPU: f(x.cpu()).to(x.device)."
