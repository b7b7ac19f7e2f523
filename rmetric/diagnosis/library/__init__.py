"""The fault library: YAML signatures of known faults, and their search in a log."""

from rmetric.diagnosis.library.load import SignatureError, SignatureLibrary, form_of

__all__ = ["SignatureError", "SignatureLibrary", "form_of"]
