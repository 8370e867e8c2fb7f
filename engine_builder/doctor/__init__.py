"""The report for support: what runs here, what does not and why, without anything personal."""

from .facts import Place, as_text, report
from .kept_warnings import KeptWarnings

__all__ = ["KeptWarnings", "Place", "as_text", "report"]
