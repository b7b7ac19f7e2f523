"""The paper's tables and figures: the published study and the two on our simulator."""

from importlib.util import find_spec

for _module in ("matplotlib", "pandas", "scipy", "sklearn", "seaborn", "graphviz"):
    if find_spec(_module) is None:
        raise SystemExit(
            f"error: the tables and figures need {_module}, of the extra study: "
            'in a clone of rmetric pip install -e ".[study]"'
        )
