"""The paper's case study, behind run_case_study.py."""

IGNORED = -100  # the label of a token that is read and not learnt, as torch has it


class CaseStudyError(ValueError):
    """Something that the user has to change; one message, no traceback."""
