"""A model of time: how many clocks a captured Blackwell kernel would take, and which unit bounds it.

    from ptxsim import model

    with model.recording("sm_100a") as recorder, torch.no_grad():
        out = attn(q, k, v)
    prediction = model.predict(recorder.traces[-1])
    print(model.explain(prediction))

docs/model.md says what is modelled, from which numbers, and how far to trust it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptxsim.model.chip import B200, Chip
    from ptxsim.model.prediction import Attention, Prediction, predict, sensitivity
    from ptxsim.model.recorder import Trace, record, recording
    from ptxsim.model.show import explain, timeline

__all__ = ["B200", "Attention", "Chip", "Prediction", "Trace", "predict", "record", "recording"]
__all__ += ["explain", "sensitivity", "timeline"]

_HOME = {"B200": "chip", "Chip": "chip", "Attention": "prediction"}
_HOME |= {"Prediction": "prediction", "predict": "prediction", "sensitivity": "prediction"}
_HOME |= {"Trace": "recorder", "record": "recorder", "recording": "recorder"}
_HOME |= {"explain": "show", "timeline": "show"}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"ptxsim.model.{_HOME[name]}"), name)
