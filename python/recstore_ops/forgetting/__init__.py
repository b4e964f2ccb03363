"""Ids that are to be forgotten: deleted wherever their rows lie on disk or on servers, and named where they stay."""

from recstore_ops.forgetting.forget import forget
from recstore_ops.forgetting.report import ForgetReport, Held, PlaceReport

__all__ = ["ForgetReport", "Held", "PlaceReport", "forget"]
