"""Packages that offer objects of their modules and import a module only when it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

#: Extra -> the modules that it brings, by the names under which they are imported.
EXTRAS = {
    "plot": "matplotlib",
    "study": "scipy pandas seaborn graphviz",
    "diagnosis": "sklearn dtaidistance drain3 regex yaml",
    "live": "torch transformers",
    "guard": "psutil prometheus_client pynvml",
    "lightning": "lightning",
}


def install_hint(module: str | None) -> str:
    """Command that installs the package of a missing module; empty if the module is of no extra."""
    name = (module or "").partition(".")[0]
    extra = next((extra for extra, names in EXTRAS.items() if name in names.split()), "")
    return extra and f'pip install "rmetric[{extra}]"'


def needed(module: str) -> Any:
    """Import a module that the base installation lacks.

    Raises:
        ModuleNotFoundError: it is not installed; the message names the command to install it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        hint = install_hint(error.name)
        if not hint:
            raise
        name = (error.name or module).split(".")[0]
        raise ModuleNotFoundError(f"{name} is not installed: {hint}", name=name) from error


def read_yaml(path: Path) -> Any:
    """The content of a YAML file, by the fast loader where the package has it.

    Raises OSError, ValueError and yaml.YAMLError; ModuleNotFoundError as `needed` does.
    """
    yaml = needed("yaml")
    return yaml.load(path.read_text("utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def check_installed(*packages: str) -> None:
    """Raise ModuleNotFoundError as `needed` does, without the time that an import takes."""
    for package in packages:
        if find_spec(package) is None:
            needed(package)


def lazy(
    package: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__getattr__` and `__dir__` of a package (PEP 562).

    `exports` maps a dotted module to the names that the package offers from it, with spaces
    between. A module is imported when a name is first asked for. AttributeError: a name that is not
    offered; ModuleNotFoundError, which names the command to install it: an optional package is
    missing.
    """
    module_of = {name: module for module, names in exports.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(module_of[name]), name)
        except ModuleNotFoundError as error:
            hint = install_hint(error.name)
            if not hint:
                raise
            raise ModuleNotFoundError(
                f"{package}.{name} needs {error.name}, which is not installed: {hint}",
                name=error.name,
            ) from error
        setattr(sys.modules[package], name, value)
        return value

    def offered() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return get, offered
