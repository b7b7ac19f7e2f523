import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# No verdict may hang on how busy the machine is.
COMMON = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("rmetric", max_examples=50, **COMMON)
#: HYPOTHESIS_PROFILE=thorough looks ten times as long.
settings.register_profile("thorough", max_examples=500, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "rmetric"))

# Programs that tests start find the studies, which are not installed.
ROOT = str(Path(__file__).resolve().parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
