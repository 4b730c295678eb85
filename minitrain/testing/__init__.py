"""Equality with one device, the measure of every technique.

:func:`check_equal` trains a :class:`Problem` under a technique, on real processes, and
compares what every rank computed with one process that runs the plain model. The
problems in :data:`PROBLEMS` are uneven on purpose: what is wrong in a technique shows
where ranks differ and sizes do not divide.
"""

from minitrain.testing.compare import (
    TOLERANCE,
    assert_all_close,
    assert_close,
    assert_same_gradients,
    gradients,
    relative_error,
    same_bits,
    weights,
)
from minitrain.testing.equality import Report, check_equal
from minitrain.testing.problems import PROBLEMS, Problem
from minitrain.testing.steps import (
    Parts,
    data_share,
    plain_optimizer,
    whole,
    whole_gradients,
    whole_weights,
)

__all__ = [
    "PROBLEMS",
    "TOLERANCE",
    "Parts",
    "Problem",
    "Report",
    "assert_all_close",
    "assert_close",
    "assert_same_gradients",
    "check_equal",
    "data_share",
    "gradients",
    "plain_optimizer",
    "relative_error",
    "same_bits",
    "weights",
    "whole",
    "whole_gradients",
    "whole_weights",
]
