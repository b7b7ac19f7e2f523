"""rmetric: who notices first that a language-model training run is failing?"""

from rmetric.metric import RMetric, RMetricConfig
from rmetric.records import HardwareEvent, Record, Run, Truth

__version__ = "0.1.0"
__all__ = ["HardwareEvent", "RMetric", "RMetricConfig", "Record", "Run", "Truth"]
