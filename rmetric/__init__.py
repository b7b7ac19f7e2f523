"""Early detection of failing language-model training runs.

The names below are the public interface. Each is imported when it is first used, so that
`import rmetric` is quick and loads neither torch nor pandas; `docs/api.md` documents them.

>>> import rmetric
>>> spec = rmetric.RunSpec(
...     experiment_id="a", architecture="Llama-3-8B", fault="LR_SPIKE", evaluate_every=10
... )
>>> [run] = rmetric.simulate([spec])
>>> run.truth.onset_step
2500
>>> detector = rmetric.CalibratedDetector()
>>> next(record.step for record in run.records if detector.update(record).alarm)
2510
"""

from typing import TYPE_CHECKING

from rmetric._util import __version__
from rmetric._util.lazy import lazy

if TYPE_CHECKING:
    from rmetric.detectors import DETECTORS, CalibratedDetector, make_detector
    from rmetric.diagnosis import diagnose
    from rmetric.evaluation import evaluate
    from rmetric.guard import Guard
    from rmetric.integrations.hugging_face import GuardCallback, HuggingFaceCallback
    from rmetric.integrations.lightning import LightningCallback
    from rmetric.metric import RMetric, RMetricConfig
    from rmetric.monitor import Monitor, MonitorConfig
    from rmetric.readers import read_log
    from rmetric.records import HardwareEvent, Record, Run, Truth
    from rmetric.rescue import Rescue
    from rmetric.simulation import RunSpec, simulate
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "rmetric.detectors": "DETECTORS CalibratedDetector make_detector",
            "rmetric.diagnosis": "diagnose",
            "rmetric.evaluation": "evaluate",
            "rmetric.guard": "Guard",
            "rmetric.integrations.hugging_face": "GuardCallback HuggingFaceCallback",
            "rmetric.integrations.lightning": "LightningCallback",
            "rmetric.metric": "RMetric RMetricConfig",
            "rmetric.monitor": "Monitor MonitorConfig",
            "rmetric.readers": "read_log",
            "rmetric.records": "HardwareEvent Record Run Truth",
            "rmetric.rescue": "Rescue",
            "rmetric.simulation": "RunSpec simulate",
        },
    )

__all__ = [
    "DETECTORS",
    "CalibratedDetector",
    "Guard",
    "GuardCallback",
    "HardwareEvent",
    "HuggingFaceCallback",
    "LightningCallback",
    "Monitor",
    "MonitorConfig",
    "RMetric",
    "RMetricConfig",
    "Record",
    "Rescue",
    "Run",
    "RunSpec",
    "Truth",
    "__version__",
    "diagnose",
    "evaluate",
    "make_detector",
    "read_log",
    "simulate",
]
