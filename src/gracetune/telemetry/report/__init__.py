"""`report.html` and `report.json`, made from the event log and files of the run's folder. A crashed run has one too."""

from gracetune.telemetry.report.write import WrittenReport, write_report

__all__ = ["WrittenReport", "write_report"]
