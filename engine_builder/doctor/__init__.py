"""The report for support: what runs here, what does not and why, without personal data."""

from .facts import ReportContext, report
from .kept_warnings import KeptWarnings
from .words import as_text

__all__ = ["KeptWarnings", "ReportContext", "as_text", "report"]
