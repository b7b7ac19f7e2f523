"""The fault library: signatures of known faults in YAML files, and how they are found in a log."""

from rmetric.diagnosis.library.files import SignatureError, form_of
from rmetric.diagnosis.library.load import Library

__all__ = ["Library", "SignatureError", "form_of"]
