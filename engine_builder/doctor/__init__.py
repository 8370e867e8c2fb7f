"""The report for support: what runs here, what does not and why, without anything personal."""

from .facts import Place, report
from .kept_warnings import KeptWarnings
from .words import as_text

__all__ = ["KeptWarnings", "Place", "as_text", "report"]
