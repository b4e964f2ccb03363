"""Forgets ids: deletes their rows on disk and on servers, and names the places that still hold them."""

from recstore_ops.forgetting.forget import forget
from recstore_ops.forgetting.report import ForgetReport, Held, PlaceReport

__all__ = ["ForgetReport", "Held", "PlaceReport", "forget"]
