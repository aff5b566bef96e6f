"""Certificates in use, in Prometheus' terms: when they end, and whether newer files could not be taken."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dgr.cluster.certificates import CertificateSource, report_of

__all__ = ["CertificateCollector"]


class CertificateCollector(Collector):
    """Reads the files when it is asked; tells nothing where there are no certificates."""

    def __init__(self, sources: tuple[CertificateSource, ...]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        if not self._sources:
            return
        report = report_of(self._sources)
        ends = GaugeMetricFamily(
            "dgr_certificate_expiry_timestamp_seconds",
            "When a certificate in use ends, seconds since 1970.",
            labels=["certificate"],
        )
        for name, end in report.expiries.items():
            ends.add_metric([name], end)
        yield ends
        text = "1 while newer files of certificates cannot be used; those before them are."
        yield GaugeMetricFamily("dgr_certificate_reload_failed", text, value=int(bool(report.problems)))
