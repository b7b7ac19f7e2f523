"""Packages that offer objects of their modules and import a module only when it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

#: Packages that are not required -> the extra that installs them.
EXTRAS = {
    "torch": "live",
    "transformers": "live",
    "lightning": "live,dev",
    "pynvml": "live",
    "psutil": "guard",
    "prometheus_client": "guard",
}


def lazy(
    package: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__getattr__` and `__dir__` of a package (PEP 562).

    Args:
        package: its `__name__`.
        exports: dotted module -> the names that the package offers from it, with spaces between.

    Returns:
        The two functions. The first imports the module of a name and keeps the object in the
        package, so that it runs once for each name. It raises AttributeError for a name that is
        not offered, and ModuleNotFoundError that names the extra where an optional package
        is not installed.
    """
    module_of = {name: module for module, names in exports.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(module_of[name]), name)
        except ModuleNotFoundError as error:
            extra = EXTRAS.get((error.name or "").split(".")[0])
            if extra is None:
                raise
            raise ModuleNotFoundError(
                f"{package}.{name} needs {error.name}, which is not installed: "
                f'pip install "rmetric[{extra}]"',
                name=error.name,
            ) from error
        setattr(sys.modules[package], name, value)
        return value

    def offered() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return get, offered
