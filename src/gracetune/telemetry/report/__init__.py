"""`report.html` and `report.json`, made from the event log alone, so that a crashed run has a report too."""

from gracetune.telemetry.report.write import WrittenReport, write_report

__all__ = ["WrittenReport", "write_report"]
