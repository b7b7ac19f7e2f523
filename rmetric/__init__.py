"""rmetric: who notices first that a language-model training run is failing?"""

from rmetric._util.version import __version__
from rmetric.metric import RMetric, RMetricConfig
from rmetric.records import HardwareEvent, Record, Run, Truth

__all__ = ["HardwareEvent", "RMetric", "RMetricConfig", "Record", "Run", "Truth", "__version__"]
