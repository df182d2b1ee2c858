"""Reliability of label probabilities as a picture: how often an answer is right, by how sure the model was."""

from __future__ import annotations

import io

from sgl_prefill.api.calibration_store import StoredCalibration
from sgl_prefill.core.label_calibration import N_BINS
from sgl_prefill.errors import BadRequestError


def reliability_png(stored: StoredCalibration) -> bytes:
    """Draws accuracy against confidence before and after, and how many examples each bin holds. Raises BadRequestError where
    nothing was measured, or where matplotlib is not there."""
    if stored.measured is None:
        raise BadRequestError(
            f"calibration {stored.name!r} was made without labelled examples, so that nothing was measured: make it again with"
            " some in evaluate_on"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BadRequestError(
            "plots need matplotlib, which is not installed on this server: pip install matplotlib (the numbers are in"
            f" /v1/calibrations/{stored.name})"
        ) from error
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name, quality in zip(
        figure.subplots(1, 2, sharey=True), ("before", "after"), stored.measured[1:], strict=True
    ):
        places = [(index + 0.5) / N_BINS for index in range(N_BINS)]
        axes.bar(places, [one.n_examples / quality.n_examples for one in quality.bins], 1 / N_BINS, alpha=0.2)
        used = [one for one in quality.bins if one.n_examples]
        axes.plot([0, 1], [0, 1], linestyle="--", linewidth=1, color="gray")
        axes.plot([one.confidence for one in used], [one.accuracy for one in used], marker="o")
        axes.set(
            xlim=(0, 1),
            ylim=(0, 1),
            xlabel="confidence (bars: share of the examples)",
            title=f"{name}: ECE {quality.expected_calibration_error:.3f}, accuracy {quality.accuracy:.3f}",
        )
        axes.grid(alpha=0.3)
        if name == "before":
            axes.set_ylabel("accuracy")
    figure.suptitle(f"{stored.name} ({stored.method}), {quality.n_examples} examples, {stored.measured.how}")
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=100)
    return written.getvalue()
