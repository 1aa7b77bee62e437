"""Proof that a packed batch does not leak: four checks, each returning a report.

- ``check_attention(fn)``: which keys influence which query rows of an attention function, in the forward and in the
  backward, against the mask it should have
- ``check_positions(position_ids, packing)``: positions restart in every document
- ``check_model(model)``: a transformers model, for every way of calling it and several implementations
- ``probe(model, documents)``: a whole model: packed against unpacked logits, and what replacing one document does to
  every other one

A report is a frozen dataclass with ``passed``, a text table (``str(report)``), ``to_dict()`` for JSON and
``raise_if_failed()``, which raises ``LeakError``. A report that could not observe anything does not pass, and input from
which nothing could be learnt (fewer than two documents with tokens) is a ValueError.
"""

from .attention import check_attention
from .attention_report import AttentionReport, Check, Fault, ValueCheck
from .model import check_model
from .model_report import KeyInfluence, ModelReport, WayReport
from .positions import PositionFault, PositionReport, check_positions
from .probe import probe
from .probe_report import ProbeLeak, ProbeReport
from .report import LeakError, Report
from .ways import WAYS, Way

__all__ = [
    "WAYS",
    "AttentionReport",
    "Check",
    "Fault",
    "KeyInfluence",
    "LeakError",
    "ModelReport",
    "PositionFault",
    "PositionReport",
    "ProbeLeak",
    "ProbeReport",
    "Report",
    "ValueCheck",
    "Way",
    "WayReport",
    "check_attention",
    "check_model",
    "check_positions",
    "probe",
]
