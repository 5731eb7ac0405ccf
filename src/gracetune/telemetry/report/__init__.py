"""`report.html` and `report.json`: a run told from its event log alone, so that a crashed one has a report too."""

from gracetune.telemetry.report.write import WrittenReport, write_report

__all__ = ["WrittenReport", "write_report"]
