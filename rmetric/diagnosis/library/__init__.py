"""The fault library: YAML signatures of known faults, and their search in a log."""

from rmetric.diagnosis.library.files import SignatureError, form_of
from rmetric.diagnosis.library.load import SignatureLibrary

__all__ = ["SignatureError", "SignatureLibrary", "form_of"]
