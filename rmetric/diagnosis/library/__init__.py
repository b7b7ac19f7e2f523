"""The fault library: signatures of known faults in YAML files, and how they are found in a log."""

from rmetric.diagnosis.library.files import SignatureError
from rmetric.diagnosis.library.load import Library, form_of

__all__ = ["Library", "SignatureError", "form_of"]
