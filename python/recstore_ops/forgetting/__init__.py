"""Forgets ids: deletes their rows on disk and on servers, and names the places that still hold them."""

from recstore_ops.forgetting.forget import forget
from recstore_ops.forgetting.report import ForgetReport, Occurrence, PlaceReport

__all__ = ["ForgetReport", "Occurrence", "PlaceReport", "forget"]
